"""The OpenAI-compatible server around the live engine."""

from typing import Any

from dcut.errors import InputError


def run(**options: Any) -> None:
    """Serve until SIGTERM."""
    raise InputError("serving is not part of this version yet")
