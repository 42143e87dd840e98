"""What several test files share: the folder of published figures, where it is present."""

from pathlib import Path

import pytest
from hypothesis import settings

# The first call of a kernel compiles it, and these machines are noisy: no test is judged by its time.
settings.register_profile("dcut", deadline=None)
settings.load_profile("dcut")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published figures, workloads and logs beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the checkout")
    return SHARED
