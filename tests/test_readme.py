"""The README tells the truth: its map says of every file what the file says of itself, its commands exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("dcut", "traces", "sim", "runtime", "analysis", "bench")


def test_the_map_says_of_every_file_what_its_first_line_says() -> None:
    lines = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py":
                says = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
                lines.append(f"| `{path.relative_to(ROOT).as_posix()}` | {says} |")
    shown = [line for line in README.splitlines() if re.match(r"\| `\w+/.*\.py` \|", line)]
    assert shown == lines, "the map should be:\n" + "\n".join(lines)


COMMANDS = sorted(
    set(re.findall(r"python -m ([a-z_.]+[a-z])", README)) - {"vllm.entrypoints.openai.api_server"}
)


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_of_the_readme_explains_itself(module: str) -> None:
    shown = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: ")


@pytest.mark.parametrize("picture", re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README))
def test_every_picture_of_the_readme_is_there(picture: str) -> None:
    assert (ROOT / picture).stat().st_size > 10_000
