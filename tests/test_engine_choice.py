"""The commands that take --engine: what they say where vLLM is not installed, and what it is asked to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dcut.errors import InputError
from runtime.pair import weights
from runtime.vllm.speculation import speculation

ROOT = Path(__file__).resolve().parents[1]


def without_vllm(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end where vLLM cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules['vllm'] = None;"
        f"sys.argv[1:] = {list(options)}; runpy.run_module({module!r}, run_name='__main__')"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.mark.parametrize(
    ("module", "options"), [("dcut.record", ["--out", "out/x"]), ("dcut.runtime.serve", [])]
)
def test_a_missing_vllm_is_named_with_its_extra(module: str, options: list[str]) -> None:
    refused = without_vllm(module, "--engine", "vllm", *options)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "needs vllm: install the vllm extra, pip install -e '.[vllm]'" in refused.stderr


def test_help_of_serving_through_vllm_needs_no_vllm() -> None:
    shown = without_vllm("dcut.runtime.serve", "--engine", "vllm", "--help")
    assert shown.returncode == 0
    assert "vllm serve" in shown.stdout
    assert "--max-waiting" not in shown.stdout  # our own engine's


@pytest.mark.parametrize(
    ("name", "method", "drafts"),
    [
        ("dflash16", "dflash", 15),
        ("dflash8", "dflash", 7),
        ("eagle3", "eagle3", 7),
        ("draft", "draft_model", 7),
    ],
)
def test_a_drafter_is_driven_by_the_method_that_its_configuration_tells(
    name: str, method: str, drafts: int
) -> None:
    found = speculation(weights.path(name))
    assert (found["method"], found["num_speculative_tokens"]) == (method, drafts)
    assert found["model"] == str(weights.path(name))


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"architectures": ["DFlashDraftModel"]})])
def test_a_configuration_that_is_none_of_a_drafter_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="is not the configuration of a drafter"):
        speculation(tmp_path)
    with pytest.raises(InputError, match="give the directory of a drafter"):
        speculation(tmp_path / "nowhere")
