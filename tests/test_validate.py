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
from sim.validate import compare, plot, read_live, table
from traces.schema import Trace
from traces.store import open_trace

COST = CostTable.from_samples(
    [Sample("verify", b, b * n, 0.002 + 0.001 * b * n) for b in (1, 4) for n in (1, 5)]
    + [Sample("draft", b, None, 0.002) for b in (1, 4)],
    context_token_s=1e-6,
    context_per_request=20.0,
)
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
