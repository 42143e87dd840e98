"""Where the built-in models lie; needs no torch."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.jsonl"
NAMES = ("target", "dflash16", "dflash8", "eagle3", "mtp", "draft")


def path(name: str) -> Path:
    """Hugging Face directory of a built-in model; ValueError names the choices."""
    if name not in NAMES:
        raise ValueError(f"no built-in model {name!r}: choose from {', '.join(NAMES)}")
    return HERE / "weights" / name
