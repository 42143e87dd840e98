"""Live and replayed runs take the same decisions, and where they do not it shows."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

pytest.importorskip("torch")

from scripted import tiny_drafter, tiny_pair, tiny_target

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import parse_policy
from runtime.engine import Engine, Request
from runtime.recorder import SLOTS, DensePass, Log, Recorder, run_closed, write_live
from sim import validate
from sim.validate import LiveRun, compare, plot, read_live, table
from traces.schema import DECISIONS, STEPS, Trace
from traces.store import open_trace, read_directory, write_directory

COST = CostTable.from_samples(
    [Sample("verify", b, b * n, 0.002 + 0.001 * b * n) for b in (1, 4) for n in (1, 5)]
    + [Sample("draft", b, None, 0.002) for b in (1, 4)],
    context_token_s=1e-6,
    context_pair_s=2e-7,
    draft_context_token_s=3e-6,
    context_per_request=20.0,
)
SHARED = replace(COST, prefill_token_s=5e-4)  # of an engine whose prompts share the steps
ASKED = [(Request(i, [1 + i % 13, 4, i % 7], 1 + 7 * i % 31, stop_token_ids=(13,)), None) for i in range(14)]
RUNS = [(policy, batch) for policy in ("off", "full", "ratio:0.5", "dcut") for batch in (1, 4)]


def about(policy: str, batch_size: int) -> dict[str, object]:
    return {
        "target": "t",
        "drafter": "d",
        "draft_length": 4,
        "temperature": 0.0,
        "max_tokens": 40,
        "policy": policy,
        "batch_size": batch_size,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording in `trace`, and live runs of the same requests in `live`."""
    place = tmp_path_factory.mktemp("validate")
    verifier, drafter = tiny_pair()
    target = tiny_target()
    dense = DensePass(target, tiny_drafter("dflash", target, SLOTS + 1, 100), 80)
    log = Recorder(place / "trace", dense, about("full", 3), COST)
    run_closed(Engine(verifier, drafter, parse_policy("full"), COST, 3), ASKED, log)
    log.close()
    for policy, batch_size in RUNS:
        log = Log()
        run_closed(Engine(verifier, drafter, parse_policy(policy), COST, batch_size), ASKED, log)
        name = f"{policy.replace(':', '_')}-{batch_size}"
        write_live(place / "live" / name, log, about(policy, batch_size), COST)
    return place


@pytest.fixture(scope="module")
def trace(place: Path) -> Trace:
    return open_trace(str(place / "trace"))


def test_replay_and_live_engine_decide_alike_in_every_step(place: Path, trace: Trace) -> None:
    runs = read_live(place / "live")
    assert {(run.policy, run.batch_size) for run in runs} == set(RUNS)
    for run in runs:
        found = compare(trace, run)
        assert found.num_equal_tokens == found.num_tokens == trace.requests["output_tokens"].sum()
        assert found.num_equal_decisions == found.num_decisions == len(run.decisions)
        assert found.replay_tps > 0
        steady = run.steps.filter(pl.col("batch_size") >= 0.85 * run.batch_size)
        tokens, seconds = (steady[name].to_numpy().sum() for name in ("num_emitted", "step_s"))
        assert found.live_tps == pytest.approx(tokens / seconds)


def test_depths_of_live_steps_differ_among_policies(place: Path) -> None:
    depths = {run.policy: set(run.decisions["keep_depth"]) for run in read_live(place / "live")}
    assert depths["off"] == {0}
    assert depths["full"] == {4}
    assert len(depths["ratio:0.5"]) > 2


def test_the_run_behind_a_recording_is_a_live_run(place: Path, trace: Trace) -> None:
    (run,) = read_live(place / "trace")
    found = compare(trace, run)
    assert (found.policy, found.batch_size) == ("full", 3)
    assert found.num_equal_decisions == found.num_decisions > 0


def test_what_differs_is_counted(place: Path, trace: Trace) -> None:
    run = next(run for run in read_live(place / "live") if run.policy == "ratio:0.5" and run.batch_size == 4)
    rng = np.random.default_rng(0)
    wrong = rng.choice(len(run.decisions), 3, replace=False)
    depth = run.decisions["keep_depth"].to_numpy().copy()
    depth[wrong] += 1
    token = run.tokens["token_id"].to_numpy().copy()
    token[:2] += 1
    changed = replace(
        run,
        decisions=run.decisions.with_columns(keep_depth=depth),
        tokens=run.tokens.with_columns(token_id=token),
    )
    found = compare(trace, changed)
    assert found.num_decisions - found.num_equal_decisions == 3
    assert found.num_tokens - found.num_equal_tokens == 2


def test_the_error_is_of_the_simulated_throughput() -> None:
    found = validate.Comparison("full", 4, 10, 10, 10, 9, live_tps=100.0, replay_tps=95.0)
    assert found.error == pytest.approx(-0.05)
    text = table([found, validate.Comparison("off", 4, 10, 10, 10, 10, live_tps=100.0, replay_tps=101.0)])
    assert "median error 3.0%, worst 5.0%" in text
    assert "20 of 20 tokens, 19 of 20 decisions" in text


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_the_chart_is_written_where_asked(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "new" / f"chart.{ending}"
    plot([validate.Comparison("full", 4, 10, 10, 10, 9, 100.0, 95.0)], file)
    assert "replayed, tokens a second" in file.read_text(encoding="utf-8")


def test_the_command_prints_and_plots(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        "--trace",
        str(place / "trace"),
        "--live",
        str(place / "live"),
        "--plot",
        str(tmp_path / "v.html"),
    ]
    monkeypatch.setattr(sys, "argv", ["validate", *files])
    validate.main()
    out = capsys.readouterr().out
    assert "median error" in out
    assert (tmp_path / "v.html").exists()


def test_runs_that_cannot_be_compared_are_refused(place: Path, tmp_path: Path, trace: Trace) -> None:
    with pytest.raises(InputError, match="holds no live run"):
        read_live(tmp_path)
    run = read_live(place / "live")[0]
    other = replace(run, requests=run.requests.with_columns(output_tokens=pl.col("output_tokens") + 1))
    with pytest.raises(InputError, match="not a recording of the same requests"):
        compare(trace, other)
    with pytest.raises(InputError, match="in the trace"):
        compare(open_trace("tiny-pair"), other)


# ---- engines that make up their own batches ---------------------------------------------------------------


def another_engine(trace: Trace, policy: str, batch_size: int, slowness: float = 1.0) -> LiveRun:
    """The oracle: an engine in plain words that admits and orders its batch as it likes.

    A newcomer spends a step on its prompt beside the others. Steps take `slowness` times what SHARED says.
    """
    rng = np.random.default_rng(batch_size)
    brain = parse_policy(policy).start()
    anchors = {(r["request_id"], r["position"]): r for r in trace.anchors.iter_rows(named=True)}
    requests = {r["request_id"]: r for r in trace.requests.iter_rows(named=True)}
    waiting, running = list(requests), {}  # request_id: position
    seen: dict[int, np.ndarray] = {}
    steps, decisions = [], []
    while waiting or running:
        new = [waiting.pop(0) for _ in range(min(len(waiting), batch_size - len(running)))]
        prefill_tokens = sum(requests[i]["prompt_tokens"] for i in new)
        if running:
            batch = [int(i) for i in rng.permutation(list(running))]
            width = brain.draft_length(len(batch), trace.draft_length, SHARED)
            rows = [anchors[i, running[i]] for i in batch]
            drawn = np.array([r["confidences"][:width] for r in rows], np.float32).reshape(len(batch), width)
            context = sum(requests[i]["prompt_tokens"] + running[i] + 1 for i in batch)
            if brain.lag:
                older = np.array([seen.get(i, np.ones(trace.draft_length)) for i in batch], np.float32)
                selection = brain.select_lagged(drawn, older, SHARED, context)
                seen |= dict(zip(batch, drawn, strict=True))
            else:
                selection = brain.select(drawn, SHARED, context)
            accepted = np.minimum([r["num_accepted"] for r in rows], selection.keep_depth)
            left = np.array([requests[i]["output_tokens"] - 1 - running[i] for i in batch])
            emitted = np.minimum(accepted + 1, left)
            draft_s = SHARED.draft_seconds(len(batch), context, extrapolate=True) if width else 0.0
            arguments = len(batch), selection.num_verify_tokens, context, prefill_tokens
            plain = len(batch), context, prefill_tokens
            verify_s = (
                SHARED.seconds(*arguments, extrapolate=True)
                if width
                else SHARED.plain_seconds(*plain, extrapolate=True)
            )
            step_s = slowness * (draft_s + verify_s)
            decisions += [
                dict(zip(DECISIONS, (len(steps), i, running[i], int(depth), int(right)), strict=True))
                for i, depth, right in zip(batch, selection.keep_depth, accepted, strict=True)
            ]
            steps.append(
                dict.fromkeys(STEPS)
                | {"step": len(steps), "batch_size": len(batch), "step_s": step_s}
                | {"prefill_tokens": prefill_tokens, "num_emitted": int(emitted.sum())}
            )
            if brain.learns:
                brain.observe(selection.keep_depth, emitted - 1, step_s)
            for i, count in zip(batch, emitted, strict=True):
                running[i] += int(count)
                if running[i] == requests[i]["output_tokens"] - 1:
                    del running[i]
        running |= {i: 0 for i in new if requests[i]["output_tokens"] > 1}
    tables = pl.DataFrame(steps, schema=STEPS), pl.DataFrame(decisions, schema=DECISIONS)
    tokens = trace.anchors.select("request_id", "position", "token_id")
    meta = {"policy": policy, "batch_size": batch_size, "own_batches": True}
    return LiveRun(meta, trace.requests, *tables, tokens, SHARED)


@pytest.mark.parametrize(
    "policy", ["off", "full", "ratio:0.5", "dcut", "dcut-plus", "smartspec", "vllm-adaptive"]
)
def test_an_engine_with_its_own_batches_is_followed_in_every_step(trace: Trace, policy: str) -> None:
    run = another_engine(trace, policy, 4, slowness=1.25)
    found = compare(trace, run)
    assert found.num_equal_decisions == found.num_decisions == len(run.decisions) > 50
    assert found.error == pytest.approx(0.25)


def test_without_following_another_engine_decides_otherwise(trace: Trace) -> None:
    run = another_engine(trace, "ratio:0.5", 4)
    found = compare(trace, replace(run, meta=run.meta | {"own_batches": False}))
    assert found.num_equal_decisions < 0.5 * found.num_decisions


def test_a_wrong_depth_of_a_followed_run_is_counted_alone(trace: Trace) -> None:
    run = another_engine(trace, "dcut", 4)
    depth = run.decisions["keep_depth"].to_numpy().copy()
    depth[[3, 20]] += 1
    found = compare(trace, replace(run, decisions=run.decisions.with_columns(keep_depth=depth)))
    assert found.num_decisions - found.num_equal_decisions == 2


def test_our_own_engine_can_be_followed_too(place: Path, trace: Trace, tmp_path: Path) -> None:
    for file in (place / "live").iterdir():
        meta, tables, documents = read_directory(file, "live")
        write_directory(tmp_path / file.name, "live", meta | {"own_batches": True}, tables, documents)
    runs = read_live(tmp_path)
    assert len(runs) == len(RUNS)
    for run in runs:
        assert run.own_batches
        found = compare(trace, run)
        assert found.num_equal_decisions == found.num_decisions == len(run.decisions)


def test_a_run_that_cannot_be_followed_is_refused(trace: Trace) -> None:
    run = another_engine(trace, "full", 4)
    with pytest.raises(InputError, match="one after the other"):
        compare(trace, replace(run, decisions=run.decisions[1:]))
    late = run.decisions.with_columns(position=pl.col("position") + 1000)
    with pytest.raises(InputError, match="behind its end"):
        compare(trace, replace(run, decisions=late))
