"""The serve command as a process: what it refuses, and a small real pair behind an OpenAI client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.serve import served
from dcut.errors import guard
from dcut.runtime.serve import main
from traces.store import load

ROOT = Path(__file__).resolve().parents[1]
KEY = "sesame"


def call(*options: str, hidden: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in an environment where the modules in `hidden` cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden}));"
        f"sys.argv[1:] = {list(options)}; runpy.run_module('dcut.runtime.serve', run_name='__main__')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def test_help_needs_no_runtime_extra() -> None:
    shown = call("--help", hidden=("torch", "fastapi", "uvicorn"))
    assert shown.returncode == 0
    assert "--policy" in shown.stdout


def test_a_missing_extra_is_named_in_one_line() -> None:
    refused = call(hidden=("torch", "fastapi", "uvicorn"))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "pip install -e '.[runtime]'" in refused.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--max-batch-size", "0"], "--max-batch-size 0"),
        (["--max-context", "-3"], "--max-context -3"),
        (["--profile-s", "nan"], "--profile-s nan"),
        (["--target", "nowhere"], "--target nowhere needs a --drafter"),
        (["--policy", "dcat"], "did you mean 'dcut'"),
        (["--target", "nowhere", "--drafter", "ngram"], "nowhere/tokenizer.json is missing"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", ["serve", *options])
    assert guard(main) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: ")
    assert refused.count("\n") == 1
    assert says in refused


def test_a_port_that_is_taken_and_a_place_that_is_not_empty_are_refused(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--target", str(pair / "target"), "--drafter", "ngram"]
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, says in (
            (["--port", port], f"cannot listen on port {port}"),
            (["--host", "192.0.2.1", "--port", "0"], "192.0.2.1"),
            (["--record", str(tmp_path)], "is not empty"),
        ):
            monkeypatch.setattr(sys, "argv", ["serve", *models, *options])
            assert guard(main) == 2
            assert says in capsys.readouterr().err


# ---- a real pair ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of random weights whose tokens are bytes, and a DFlash drafter for it."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from runtime.models import CausalLM, DFlash, ModelConfig, save_model

    directory = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    block = {"block_size": 8, "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 0}}
    torch.manual_seed(0)
    target, drafter = CausalLM(ModelConfig.from_dict(shape)), DFlash(ModelConfig.from_dict(shape | block))
    save_model(target, directory / "target", shape | {"architectures": ["Qwen3ForCausalLM"]})
    save_model(drafter, directory / "drafter", shape | block | {"architectures": ["DFlashDraftModel"]})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "target" / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "target" / "chat_template.jinja").write_text(template)
    return directory


def options(pair: Path) -> list[str]:
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    return [*models, "--max-batch-size", "4", "--max-context", "400", "--profile-s", "0.5"]


@pytest.fixture(scope="module")
def url(pair: Path) -> Iterator[str]:
    """The address of a server with a key, ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("XDG_CACHE_HOME", str(pair / "cache"))
        with served(*options(pair), "--api-key", KEY) as (address, _):
            yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=KEY,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        max_retries=0,
    ) as found:
        yield found


def test_the_openai_client_completes_and_streams_the_same(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    asked: dict[str, Any] = {"model": model.id, "prompt": "hello", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 40)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"


def test_the_openai_client_chats_and_goes_on_with_the_answer(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    first = client.chat.completions.create(
        model="target", messages=messages, max_completion_tokens=20, temperature=0
    )
    messages += [first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    stream = client.chat.completions.create(model="target", messages=messages, max_tokens=9, stream=True)
    deltas = [chunk.choices[0] for chunk in stream]
    assert deltas[0].delta.role == "assistant"
    assert deltas[-1].finish_reason == "length"


def test_a_seed_makes_a_sampled_answer_repeat(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model="target", prompt="hello", max_tokens=40, temperature=1, seed=seed
        )
        return answer.choices[0].text

    assert text(1) == text(1) != text(2)


def test_every_policy_says_the_same_greedily(client: openai.OpenAI, url: str) -> None:
    def texts() -> list[str]:
        prompts = ("hello", "good morning", "漢字")
        asked: dict[str, Any] = {"model": "target", "max_tokens": 60, "temperature": 0}
        return [client.completions.create(prompt=p, **asked).choices[0].text for p in prompts]

    def follow(policy: str) -> int:
        right = {"Authorization": f"Bearer {KEY}"}
        body = {"policy": policy}
        with httpx.Client(trust_env=False, timeout=60) as http:
            return http.post(f"{url}/v1/policy", json=body, headers=right).status_code

    assert follow("off") == 200
    plain = texts()
    for policy in ("full", "fixed:3", "ratio:0.5", "dcut", "dcut-plus", "smartspec"):
        assert follow(policy) == 200
        assert texts() == plain
    assert follow("oracle") == 400


def test_the_openai_client_understands_the_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="target", prompt="x" * 500)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="target", prompt="x", top_p=0.5)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_sigterm_finishes_what_runs_writes_the_trace_and_ends_with_zero(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pair / "cache"))
    place = tmp_path / "trace"
    with served(*options(pair), "--record", str(place)) as (address, process):
        body = {"model": "target", "prompt": "hello", "max_tokens": 200, "temperature": 0, "stream": True}
        asked = httpx.Client(base_url=address, trust_env=False, timeout=60)
        with asked, asked.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert said[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait() == 0
    trace = load(place)
    assert trace.requests["output_tokens"].to_list() == [200]
    assert trace.requests["finish_reason"].to_list() == ["length"]
    assert not trace.meta["partial"]
    assert trace.meta["contradicted_decisions"] == 0
    assert trace.steps["num_emitted"].sum() == 199  # the first comes from the prefill


@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "stopped\n")]
)
def test_a_signal_while_the_engine_is_built_ends_the_server_at_once(
    pair: Path, tmp_path: Path, number: signal.Signals, line: str
) -> None:
    command = [sys.executable, "-m", "dcut.runtime.serve", *options(pair), "--profile-s", "60", "--port", "0"]
    place = {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **place},
    ) as process:
        assert process.stdout is not None
        assert "starting" in process.stdout.readline()
        time.sleep(1.0)  # into the loading, the compiling or the profile
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (128 + number, "", line)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text((pair / "target" / name).read_text())
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    monkeypatch.setattr(
        sys, "argv", ["serve", "--target", str(tmp_path), "--drafter", "ngram", "--port", "0"]
    )
    assert guard(main) == 2
    assert capsys.readouterr().err.startswith(f"error: target {tmp_path}")
