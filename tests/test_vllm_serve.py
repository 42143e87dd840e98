# pyright: reportMissingImports=false
"""vLLM's server with our policy, as clients see it: right texts, all options served, nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import in_vllm
import openai
import pytest
import torch
from scripted import plain_text

from dcut.errors import guard
from dcut.runtime.serve import main
from runtime.pair import weights
from runtime.profiler import cache_directory
from runtime.recorder import read_prompts
from runtime.text import Codec
from runtime.verifier import open_target

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny-pair"
NUM_SEQS, STREAMS, TOKENS = 16, 64, 32
START_S = 600  # at most; half a minute on a machine with nothing else to do


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def launch(place: Path, *options: str, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The command with its caches and temporary files in `place`, in its own process group; and its log."""
    variables = in_vllm.ENVIRONMENT | {"XDG_CACHE_HOME": str(place), "TMPDIR": str(place)} | variables
    command = [sys.executable, "-m", "dcut.runtime.serve", "--engine", "vllm", *options]
    log = place / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=os.environ | variables, start_new_session=True
        )
    return process, log


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the built-in pair under dcut, ready.

    In the end SIGTERM comes amid a stream, which is finished; nothing is left behind.
    """
    port, place = free_port(), tmp_path_factory.mktemp("serve")
    options = "--port", str(port), "--profile-s", "1", "--max-num-seqs", str(NUM_SEQS)
    process, log = launch(place, *options)
    address = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(trust_env=False) as client:
            for _ in range(START_S):
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    if client.get(f"{address}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(1)
        yield address
        long = {"model": MODEL, "prompt": "def ", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(trust_env=False, timeout=60) as client,
            client.stream("POST", f"{address}/v1/completions", json=long) as reply,
        ):
            process.send_signal(signal.SIGTERM)
            assert reply.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0
        assert not list(place.glob("dcut-metrics-*"))
    finally:
        process.kill()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", http_client=http, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.load(weights.path("target"))


@pytest.fixture(scope="module")
def prompts(codec: Codec) -> list[list[int]]:
    return [prompt.tokens for prompt in read_prompts(weights.PROMPTS, codec, STREAMS)]


def figures(url: str) -> dict[str, float]:
    """The sums of all series of /metrics by name, and each series with its labels."""
    with httpx.Client(trust_env=False) as http:
        text = http.get(f"{url}/metrics").text
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"(\w[\w:]*)(\{.*\})? (\S+)$", line):
            name, labels, value = match.groups()
            found[name] = found.get(name, 0.0) + float(value)
            if labels:
                found[name + labels] = found.get(name + labels, 0.0) + float(value)
    return found


def idle(url: str) -> dict[str, float]:
    """The figures once nothing runs or waits any more."""
    for _ in range(100):
        found = figures(url)
        names = "vllm:num_requests_running", "vllm:num_requests_waiting"  # none before the first request
        if not any(found.get(name) for name in names):
            return found
        time.sleep(0.1)
    raise AssertionError("requests are left in the engine")


def complete(client: openai.OpenAI, prompt: list[int], **options: Any) -> Any:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    return client.completions.create(**asked | options).choices[0]


@pytest.fixture(scope="module")
def texts(prompts: list[list[int]], codec: Codec) -> list[str]:
    """The oracle: what the target says by itself, in our own code, without a drafter or a cache."""
    torch.set_num_threads(1)
    target = open_target(weights.path("target"), "cpu", "float32")
    (stop,) = target.config.eos_token_ids
    outputs = [plain_text(target, prompt, TOKENS) for prompt in prompts[:8]]
    return [codec.decode(o[: o.index(stop)] if stop in o else o) for o in outputs]


def test_the_openai_client_gets_the_texts_of_plain_decoding(
    client: openai.OpenAI, prompts: list[list[int]], texts: list[str]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt).text, prompts[:8]))
    assert found == texts


def test_sixty_four_streams_of_all_kinds_are_served_and_leave_nothing_behind(
    url: str, client: openai.OpenAI, prompts: list[list[int]]
) -> None:
    def plain(prompt: list[int]) -> str:
        stream = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    def structured(prompt: list[int]) -> str:
        text = complete(
            client, prompt, extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{5}"}}
        ).text
        assert re.fullmatch("[a-c]{3}-[0-9]{5}", text)
        return text

    def with_logprobs(prompt: list[int]) -> str:
        choice = complete(client, prompt, logprobs=3)
        for own, best in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
            assert own == pytest.approx(max(best.values()), abs=1e-4)  # greedy: the likeliest of all
        return choice.text

    def stopping(prompt: list[int]) -> str:
        choice = complete(client, prompt, stop=["e"])
        assert "e" not in choice.text
        return choice.text

    def sampled(prompt: list[int]) -> str:
        return complete(client, prompt, temperature=1, seed=5).text

    def leaving(prompt: list[int]) -> str:
        stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=400, stream=True)
        next(iter(stream))
        stream.close()
        return ""

    kinds = [plain, structured, with_logprobs, stopping, sampled, leaving]
    before = idle(url)
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [(kinds[i % len(kinds)], prompt) for i, prompt in enumerate(prompts)]
        found = list(pool.map(lambda pair: pair[0](pair[1]), asked))
    after = idle(url)
    key = "vllm:request_success_total"
    num_left = sum(kind is leaving for kind, _ in asked)
    assert after[key] - before[key] >= STREAMS - num_left
    for kind, text, (_, prompt) in zip((k for k, _ in asked), found, asked, strict=True):
        if kind in (plain, with_logprobs):
            assert text == complete(client, prompt).text
        if kind is stopping:
            assert complete(client, prompt).text.partition("e")[0] == text


def test_metrics_tell_of_the_policy_beside_vllms_own(url: str, client: openai.OpenAI) -> None:
    before = idle(url)
    complete(client, [5, 6, 7, 8], max_tokens=TOKENS, extra_body={"ignore_eos": True})
    after = idle(url)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["dcut_emitted_tokens_total"] == grown["vllm:generation_tokens_total"] - 1 == TOKENS - 1
    steps = grown["dcut_step_seconds_count"]
    assert 0 < steps == grown["dcut_batch_size_count"] == grown["dcut_keep_ratio_count"]
    assert steps == grown["dcut_bucket_steps_total"]
    assert grown["dcut_accepted_drafts_total"] <= grown["dcut_verified_drafts_total"]
    assert grown["dcut_verified_drafts_total"] == grown["vllm:spec_decode_num_draft_tokens_total"]
    assert grown["dcut_accepted_drafts_total"] == grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["dcut_prefill_tokens_total"] == 4
    assert grown["dcut_expected_tokens_total"] > steps
    assert 'dcut_accepted_drafts_total{position="0"}' in after
    assert after["dcut_profile_drift"] > 0


def test_vllms_own_bench_finds_no_failure(url: str) -> None:
    code = (
        "import argparse, asyncio; from vllm.benchmarks.serve import add_cli_args, main;"
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    options = ["--base-url", url, "--model", MODEL, "--tokenizer", str(weights.path("target"))]
    options += ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "16"]
    options += ["--num-prompts", "24", "--max-concurrency", "12", "--ignore-eos"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert re.search(r"Successful requests: +24\s", ran.stdout)
    idle(url)


@pytest.mark.parametrize(
    ("number", "amid"),
    [
        (signal.SIGTERM, "init engine"),  # then it profiles
        pytest.param(signal.SIGINT, "init engine", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "Starting to load model", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_vllm_starts_ends_all_its_processes(
    number: signal.Signals, amid: str, tmp_path: Path
) -> None:
    cache = str(cache_directory().parents[1] / "vllm")  # what vLLM knows of models, slow to find out
    options = "--port", str(free_port()), "--profile-s", "120", "--max-num-seqs", "8"
    process, log = launch(tmp_path, *options, VLLM_LOGGING_LEVEL="INFO", VLLM_CACHE_ROOT=cache)
    try:
        wait_for(lambda: amid in log.read_text(), START_S)
        process.send_signal(number)
        assert process.wait(10) == 128 + number
        wait_for(lambda: not processes_of(process.pid), 10)
        assert not list(tmp_path.glob("dcut-metrics-*"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(there: Callable[[], bool], seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.1)


def processes_of(group: int) -> list[str]:
    """Those in a process group that have not ended."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [args for pgid, state, args in rows if int(pgid) == group and not state.startswith("Z")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "dcat"], "did you mean 'dcut'"),
        (["--policy", "oracle"], "must know the future"),
        (["--port", "70000"], "--port 70000"),
        (["--profile-s", "-1"], "-1"),
        (["--no-such-option", "3"], "unrecognized arguments: --no-such-option"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        ([str(weights.path("target"))], "error: dcut policy 'dcut' needs speculative decoding"),
        (["--policy", "fixed:16"], "error: fixed:16 is more than the 15 drafts"),
        ([str(weights.path("target")), "--speculative-config", "{}"], "vLLM refuses this configuration"),
        (["no/such/model"], "no/such/model"),
        (["/no/such/model"], "there is no directory /no/such/model"),
        (["--speculative-config", "{"], "Value { cannot be converted to JSON"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DCUT_POLICY", "DCUT_PROFILE_S", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.setenv(name, "")  # so that what the command sets goes away again
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["serve", "--engine", "vllm", *options])
    assert guard(main) == 2
    (line,) = capfd.readouterr().err.splitlines()  # vLLM keeps quiet
    assert line.startswith("error: ")
    assert says in line


def test_an_engine_that_does_not_start_ends_the_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand

    def fail(*_: Any) -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    monkeypatch.setattr(ServeSubcommand, "cmd", fail)
    monkeypatch.setattr(sys, "argv", ["serve", "--engine", "vllm"])
    assert guard(main) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "EngineCore above say why" in line


def test_a_port_that_is_taken_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["serve", "--engine", "vllm", "--port", port])
        assert guard(main) == 2
    assert port in capfd.readouterr().err.splitlines()[-1]
