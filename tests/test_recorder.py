"""Recording: the dense pass agrees with the live run, and an interrupted recording loses nothing finished."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch")

import torch
from scripted import plain_text, tiny_drafter, tiny_pair, tiny_target, write_tiny_pair

from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.record import Config, main
from runtime import recorder as recorder_module
from runtime.drafter import Seen
from runtime.engine import Engine, Request, Step
from runtime.models import causal
from runtime.pair import weights
from runtime.recorder import SLOTS, DensePass, Log, Recorder, read_prompts, record, run_closed, summary
from runtime.text import Codec, read_texts
from traces.schema import Trace
from traces.store import load

ROOT = Path(__file__).parents[1]
META = {"target": "t", "drafter": "d", "draft_length": 4, "temperature": 0.0, "max_tokens": 40}


def recorder(out: Path, kind: str = "dflash", temperature: float = 0.0, every: int = 3) -> Recorder:
    target = tiny_target()
    drafter = tiny_drafter(kind, target, SLOTS + 1, 100)
    dense = DensePass(target, drafter, 80, temperature)
    return Recorder(out, dense, META | {"temperature": temperature}, None, every)


def asked(count: int, temperature: float = 0.0, stops: tuple[int, ...] = (13,)) -> list[tuple[Request, str]]:
    rng = np.random.default_rng(8)
    return [
        (
            Request(i, rng.integers(0, 17, 1 + i % 5).tolist(), 1 + 5 * i % 41, temperature, None, stops),
            "even" if i % 2 == 0 else "odd",
        )
        for i in range(count)
    ]


def recorded(out: Path, kind: str = "dflash", temperature: float = 0.0, policy: str = "full") -> Trace:
    verifier, drafter = tiny_pair(kind)
    log = recorder(out, kind, temperature)
    run_closed(Engine(verifier, drafter, parse_policy(policy), max_batch_size=3), asked(9, temperature), log)
    return log.close()


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp", "draft", "ngram"])
def test_the_dense_pass_finds_what_live_steps_accepted(kind: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path, kind)
    assert trace.meta["contradicted_decisions"] == 0
    assert len(trace.decisions) > 25
    assert trace.requests["finish_reason"].value_counts().height == 2  # some stop, some reach their length
    assert load(tmp_path).anchors.equals(trace.anchors)


def test_sampled_and_abandoned_requests_among_greedy_ones_contradict_nothing(tmp_path: Path) -> None:
    log = recorder(tmp_path, "draft")
    verifier, drafter = tiny_pair("draft")
    engine = Engine(verifier, drafter, parse_policy("full"), max_batch_size=3)
    for request, domain in asked(18):
        request = replace(request, temperature=0.7 * (request.request_id % 2))
        log.expect(request, domain)
        engine.add(request)
    num_steps = num_cut = 0
    while step := engine.step():
        log.add(step, "full")
        num_steps += 1
        running = [r.request.request_id for r in engine.batch if not r.finish_reason]
        if num_steps % 6 == 0 and running:
            engine.cancel(running[0])
            log.end(running[0], "cut")
            num_cut += 1
    assert num_cut > 1
    assert log.close().meta["contradicted_decisions"] == 0


def test_a_contradiction_is_counted(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    verifier, drafter = tiny_pair()
    engine = Engine(verifier, drafter, parse_policy("full"), max_batch_size=3)
    for request, domain in asked(6):
        log.expect(request, domain)
        engine.add(request)
    for number in itertools.count():
        if (step := engine.step()) is None:
            break
        wrong = step.num_accepted + (number == 1) * np.array([1, 1, 0])[: len(step.num_accepted)]
        log.add(step._replace(num_accepted=wrong), "full")
    assert log.close().meta["contradicted_decisions"] == 2


def test_every_output_position_holds_the_draft_made_there(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    target = tiny_target()
    for request, _ in asked(9):
        rows = trace.anchors.filter(pl.col("request_id") == request.request_id)
        output = rows["token_id"].to_list()
        future = plain_text(target, [*request.prompt, *output], 4)
        assert output == plain_text(target, request.prompt, len(output))
        for position in {0, len(output) // 2, len(output) - 1}:
            drafts, confidences = plain_block([*request.prompt, *output[: position + 1]])
            truth = [*output, *future][position + 1 : position + 5]
            accepted = 0
            while accepted < 4 and drafts[accepted] == truth[accepted]:
                accepted += 1
            assert rows["num_accepted"][position] == accepted
            np.testing.assert_allclose(rows["confidences"][position], confidences, rtol=1e-4)


@torch.inference_mode()
def plain_block(text: list[int]) -> tuple[list[int], list[float]]:
    """The oracle: a DFlash block after the last token of a text, without a cache."""
    target = tiny_target()
    drafter = tiny_drafter("dflash", target, 1, 100)
    if len(text) > 1:
        known = torch.tensor([text[:-1]])
        hidden, features = target(known, torch.arange(len(text) - 1)[None], causal, drafter.taps)
        assert features is not None
        places = np.arange(len(text) - 1)
        seen = Seen(
            np.zeros_like(places), places, np.array(text[:-1]), np.array(text[1:]), hidden[0], features[0]
        )
        drafter.observe(seen)
    drafts = drafter.draft(np.array([0]), np.array([len(text) - 1]), np.array([text[-1]]), 4)
    return drafts.tokens[0].tolist(), drafts.confidences[0].tolist()


def test_sampled_anchors_hold_the_probability_of_each_draft(tmp_path: Path) -> None:
    trace = recorded(tmp_path, temperature=0.8)
    target = tiny_target()
    for request, _ in asked(9)[2:5]:
        rows = trace.anchors.filter(pl.col("request_id") == request.request_id)
        output = rows["token_id"].to_list()
        position = len(output) // 2
        text = [*request.prompt, *output[: position + 1]]
        drafts, _ = plain_block(text)
        with torch.inference_mode():
            ids = torch.tensor([[*text, *drafts]])
            hidden, _ = target(ids, torch.arange(ids.shape[1])[None], causal)
            probs = (target.logits(hidden)[0] / 0.8).softmax(-1)
        expected = [float(probs[len(text) - 1 + k, token]) for k, token in enumerate(drafts)]
        np.testing.assert_allclose(rows["accept_probs"][position], expected, rtol=1e-3)
    assert trace.arrays.accept_probs is not None
    mean = trace.arrays.accept_probs[:, 0].mean()
    assert (trace.arrays.num_accepted > 0).mean() == pytest.approx(mean, abs=0.15)


def test_a_recording_under_any_policy_has_the_same_anchors(tmp_path: Path) -> None:
    full, off = recorded(tmp_path / "full"), recorded(tmp_path / "off", policy="off")
    order = ["request_id", "position"]
    exact = full.anchors.sort(order).drop("confidences")
    assert exact.equals(off.anchors.sort(order).drop("confidences"))


def test_steps_and_requests_say_when_things_happened(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    steps = trace.steps
    assert steps["step"].to_list() == list(range(len(steps)))
    ends = (steps["start_s"] + steps["step_s"]).to_numpy()
    assert (steps["start_s"].to_numpy()[1:] >= ends[:-1] - 1e-9).all()
    assert steps["bucket"].unique().to_list() == ["full"]
    tokens = trace.requests["output_tokens"].sum()
    assert steps["num_emitted"].sum() == tokens - len(trace.requests)
    assert steps["prefill_tokens"].sum() <= trace.requests["prompt_tokens"].sum()
    assert trace.requests["arrival_s"].min() == 0
    counts = trace.decisions.group_by("step").len().sort("step")["len"]
    assert counts.to_list() == steps["batch_size"].to_list()


def test_an_interrupted_recording_is_partial_and_can_be_carried_on(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole")
    verifier, drafter = tiny_pair()
    log = recorder(tmp_path / "part")
    engine = Engine(verifier, drafter, parse_policy("full"), max_batch_size=3)
    for request, domain in asked(9):
        log.expect(request, domain)
        engine.add(request)
    while len(log.done) < 3:  # as many as a flush
        step = engine.step()
        assert step
        log.add(step, "full")
    on_disk = load(tmp_path / "part")
    assert on_disk.meta["partial"]
    assert set(on_disk.requests["request_id"]) == log.done
    again = recorder(tmp_path / "part")
    rest = [(request, domain) for request, domain in asked(9) if request.request_id not in again.done]
    assert len(rest) == 9 - len(on_disk.requests)
    run_closed(Engine(verifier, drafter, parse_policy("full"), max_batch_size=3), rest, again)
    trace = again.close()
    assert not trace.meta["partial"]
    assert trace.meta["resumed"]
    order = ["request_id", "position"]
    assert trace.anchors.sort(order).drop("confidences").equals(whole.anchors.sort(order).drop("confidences"))
    assert trace.steps["step"].to_list() == list(range(len(trace.steps)))


def test_a_trace_that_was_begun_otherwise_is_not_carried_on(tmp_path: Path) -> None:
    recorded(tmp_path / "done")
    with pytest.raises(InputError, match="complete trace"):
        recorder(tmp_path / "done")
    log = recorder(tmp_path / "part", every=1)
    verifier, drafter = tiny_pair()
    engine = Engine(verifier, drafter, parse_policy("full"))
    request, domain = asked(3)[2]
    log.expect(request, domain)
    engine.add(request)
    while step := engine.step():
        log.add(step, "full")
    with pytest.raises(InputError, match="begun with temperature 0"):
        recorder(tmp_path / "part", temperature=0.5)


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing was recorded"):
        recorder(tmp_path).close()


# ---- the command's work ---------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recorder_module, "PROFILED", 4)
    target, drafter = write_tiny_pair(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abcdefgh"[: 1 + i % 8], "domain": "x" if i < 4 else "y"} for i in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Config(
        str(tmp_path / "out"), str(target), str(drafter), str(prompts), 2, max_tokens=12, profile_s=0.0
    )


def test_record_writes_a_trace_with_its_cost_table(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = record(config)
    assert load(config.out).requests.equals(trace.requests)
    assert trace.cost is not None
    assert trace.cost.plain_seconds(2) > 0
    assert trace.meta["policy"] == "full"
    assert trace.meta["batch_size"] == 2
    assert trace.meta["partial"] is False
    assert str(Path(config.out).parent) not in json.dumps(trace.meta)
    assert set(trace.requests["domain"]) == {"x", "y"}
    assert "cost profile measured" in capsys.readouterr().err
    text = summary(trace, config.out)
    assert "6 requests" in text
    assert "contradicts 0 of" in text
    with pytest.raises(InputError, match="not empty"):
        record(config)


def test_an_interrupt_keeps_what_finished_and_resume_completes_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, calls = Log.add, iter(range(100))

    def interrupted(self: Log, step: Step, label: str) -> None:
        add(self, step, label)
        if next(calls) == 14:
            raise KeyboardInterrupt

    monkeypatch.setattr(Log, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(config)
    assert "carry on with --resume" in capsys.readouterr().err
    assert load(config.out).meta["partial"]
    (other := Path(config.out).with_name("other")).write_text('{"prompt": "abcdefghabcdefgh"}')
    with pytest.raises(InputError, match="begun with other prompts"):
        record(replace(config, resume=True, prompts=str(other)))
    trace = record(replace(config, resume=True))
    assert len(trace.requests) == 6
    assert not load(config.out).meta["partial"]


def test_prompts_take_their_domains_in_turn(config: Config) -> None:
    codec = Codec.load(Path(str(config.target)))
    prompts = read_prompts(str(config.prompts), codec)
    assert [prompt.domain for prompt in prompts] == ["x", "y", "x", "y", "x", "x"]
    assert prompts[2].tokens == [0, 1]
    assert len(read_prompts(str(config.prompts), codec, 3)) == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1 is not a JSON"),
        ('{"text": "a"}', "line 1 is not"),
        ('{"prompt": 3}', "not text"),
        ('{"prompt": "a \\ud800"}', "not text"),
        ('{"prompt": "a", "domain": ["b"]}', "line 1: the domain is not text"),
        ('{"prompt": "\udce9"}', "line 1 is not a JSON"),
        ("", "no prompts"),
    ],
)
def test_prompts_that_are_none_are_named(config: Config, line: str, reason: str) -> None:
    Path(str(config.prompts)).write_text(line, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match=reason):
        record(config)


def test_prompts_may_hold_any_character_and_begin_with_a_byte_order_mark(config: Config) -> None:
    line = json.dumps({"prompt": "ab\u2028cd"}, ensure_ascii=False)
    Path(str(config.prompts)).write_text(line, encoding="utf-8-sig")
    assert read_texts(str(config.prompts)) == [("ab\u2028cd", None)]


def test_missing_models_are_named(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        record(Config(config.out, target=str(tmp_path / "nowhere"), drafter="ngram"))


def test_a_drafter_alone_is_one_for_the_built_in_target(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "path", lambda name: Path(str(config.target)) if name == "target" else None)
    trace = record(replace(config, target=None))
    assert trace.meta["target"].startswith(Path(str(config.target)).name)
    with pytest.raises(InputError, match="needs a --drafter"):
        replace(config, drafter=None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"concurrency": 0}, "--concurrency 0: give at least 1"),
        ({"requests": 0}, "--requests 0"),
        ({"requests": 7}, "7 requests are more than the 6 prompts of .*prompts.jsonl: ask for fewer"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"temperature": -0.5}, "--temperature -0.5: give 0 or more"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"profile_s": float("inf")}, "--profile-s inf"),
        ({"seed": -1}, "--seed -1 is negative"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here"),
        ({"device": "abacus"}, "device 'abacus' is not here"),
        ({"device": "meta"}, "device 'meta' is not here"),
        ({"dtype": "float8"}, "use one of float32"),
        ({"max_tokens": 3000}, "tokens more are 3006, the target takes 2048"),
        ({"drafter": "nowhere"}, "drafter nowhere"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line(
    config: Config, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        record(replace(config, **change))


def test_where_nothing_can_be_written_is_said_before_anything_slow(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="out cannot be written"):
        record(replace(config, out=str(tmp_path / "file" / "out"), drafter="nowhere"))


def test_a_short_prompt_with_a_short_answer_is_recorded(config: Config) -> None:
    Path(str(config.prompts)).write_text('{"prompt": "a"}')
    assert record(replace(config, max_tokens=2)).requests["output_tokens"].to_list() == [2]


def test_more_places_than_requests_cost_nothing(config: Config) -> None:
    trace = record(replace(config, concurrency=10**9))
    assert trace.steps["batch_size"].to_numpy().max() == 6


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False)


NO_TORCH = """import sys
sys.modules["torch"] = None
from dcut import errors, record
sys.exit(errors.guard(record.main))"""


def test_help_needs_no_torch_and_the_missing_extra_names_itself() -> None:
    asked_help = run_command("-c", NO_TORCH, "--help")
    assert asked_help.returncode == 0
    assert "--concurrency" in asked_help.stdout
    refused = run_command("-c", NO_TORCH, "--out", "nowhere")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: recording needs torch: install the runtime extra, pip install -e '.[runtime]'"
    ]


def test_a_runtime_folder_found_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the command is run by its path and dcut/runtime comes before the package runtime."""
    monkeypatch.setitem(sys.modules, "runtime", ModuleType("runtime"))
    monkeypatch.delitem(sys.modules, "runtime.recorder")
    monkeypatch.setattr(sys, "argv", ["record", "--out", "nowhere"])
    with pytest.raises(InputError, match="run it as a module"):
        main()
