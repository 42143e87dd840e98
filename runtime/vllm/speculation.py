"""Which of vLLM's speculative methods drives the drafter in a directory."""

import json
from pathlib import Path
from typing import Any

from dcut.errors import InputError

DRAFTS = 7  # of drafters that can go on as long as asked; as many as runtime.drafter asks for


def speculation(drafter: str | Path) -> dict[str, Any]:
    """vLLM's speculative_config for the drafter in a local Hugging Face directory.

    Raises InputError where its config.json is missing or cannot be read.
    """
    file = Path(drafter) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        (kind,) = config["architectures"]
        longest = config["block_size"] - 1 if "DFlash" in kind else DRAFTS
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing: give the directory of a drafter") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not the configuration of a drafter: {error!r}") from error
    method = "dflash" if "DFlash" in kind else "eagle3" if "Eagle3" in kind else "draft_model"
    if "MTP" in kind:
        method = "mtp"
    return {"method": method, "model": str(drafter), "num_speculative_tokens": longest}
