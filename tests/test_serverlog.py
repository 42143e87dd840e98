"""Fitting a server's log: the two recorded runs, the engine's own times, and logs that cannot be modelled."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenes import make_trace

from dcut.errors import InputError, guard
from dcut.policies import parse_policy
from sim import serverlog, validate
from sim.arrivals import Traffic
from sim.serving import serve
from traces.workloads import Workload

RUNS = ("RTX4090_Llama-3.1-8B", "RTXPRO6000_Llama-3.1-8B")
META: dict[str, Any] = {
    "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "data_parallel_size": 1},
    "kv_cache": {"num_gpu_blocks": 200, "block_size": 16, "enable_prefix_caching": True},
}


def some_log(num: int = 60, **changed: Any) -> serverlog.ServerLog:
    """A log whose times are yet to be simulated, of a memory that is too small for its requests."""
    rng = np.random.default_rng(3)
    limits, replicas, lockstep, sizes = serverlog._read_server(Path("meta.json"), META)
    nothing = np.zeros(num)
    log = serverlog.ServerLog(
        arrival_s=np.cumsum(rng.exponential(0.05, num)),
        prompt_tokens=rng.integers(10, 400, num),
        output_tokens=rng.integers(1, 200, num),
        queued_s=nothing,
        scheduled_s=nothing,
        first_token_s=nothing,
        last_token_s=nothing,
        limits=limits,
        replicas=replicas,
        lockstep=lockstep,
        graph_sizes=sizes,
    )
    return replace(log, **changed)


PARAMETERS = np.log([0.01, 1e-3, 1e-7, 2e-9, 9e-5, 8e-5, 8e-5, 1e-4, 1e-30])


@pytest.mark.parametrize("run", RUNS)
def test_a_recorded_run_is_predicted_within_the_promised_errors(shared: Path, run: str) -> None:
    log = serverlog.read_log(shared / "serving-logs" / run)
    forecast = serverlog.predict(log, serverlog.fit(log))
    assert serverlog.failures(serverlog.errors(log, forecast)) == []
    # and those that lent nothing to the fit as well
    assert serverlog.failures(serverlog.errors(log, forecast, slice(log.half, None))) == []


def test_later_timestamps_do_not_move_the_fit() -> None:
    log = some_log()
    times = serverlog._simulate(log, PARAMETERS, log.limits)[0]
    log = replace(log, queued_s=times[0], scheduled_s=times[1], first_token_s=times[2], last_token_s=times[3])
    late = np.where(np.arange(len(times[0])) < log.half, 0.0, 1e3)
    other = replace(log, first_token_s=times[2] + late, last_token_s=times[3] + 2 * late)
    one, two = (serverlog._fit_runs(each, each.limits, evaluations=3) for each in (log, other))
    assert one.tolist() == two.tolist()
    one, two = (serverlog._intervals(each, PARAMETERS, each.limits)[0] for each in (log, other))
    assert one.tolist() == two.tolist()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("blocks", [60, None])
def test_the_compiled_run_takes_the_engine_s_own_times(asynchronous: bool, blocks: int | None) -> None:
    log = some_log()
    limits = replace(log.limits, kv_blocks=blocks, asynchronous=asynchronous)
    times, steps = serverlog._simulate(log, PARAMETERS, limits, record=True)
    workload = Workload(
        "here", 1, log.arrival_s - log.arrival_s[0], log.prompt_tokens, log.output_tokens, None, None, None
    )
    traffic = Traffic(make_trace([200] * 3, 2), len(workload), workload=workload)
    taken = []
    service = serve(
        traffic,
        parse_policy("off"),
        serverlog.cost_table(log, PARAMETERS),
        limits,
        on_steps=lambda _, steps, loads: taken.append((steps.copy(), loads.copy())),
    )
    books = service.ledger.books
    assert books["first_token_s"] == pytest.approx(times[2] - log.arrival_s[0])
    assert books["finish_s"] == pytest.approx(times[3] - log.arrival_s[0])
    rows = sum((steps["num_verify_tokens"] + loads["prefill_tokens"]).sum() for steps, loads in taken)
    assert rows == steps["rows"].sum()
    assert (books["num_preempted"].sum() > 0) == (blocks is not None)


def test_a_made_up_server_is_found_again() -> None:
    log = some_log(40, limits=replace(some_log().limits, kv_blocks=None))
    times = serverlog._simulate(log, PARAMETERS, log.limits)[0]
    log = replace(log, queued_s=times[0], scheduled_s=times[1], first_token_s=times[2], last_token_s=times[3])
    errors = serverlog.errors(log, serverlog.predict(log, serverlog.fit(log)))
    assert serverlog.failures(errors) == []


def rows(num: int = 24) -> list[dict[str, Any]]:
    """Lines of requests.jsonl."""
    return [
        {
            "input_toks": 20,
            "output_toks": 4,
            "arrival_time": 1000.0 + at,
            "queued_ts": 5.001 + at,
            "scheduled_ts": 5.002 + at,
            "first_token_ts": 5.1 + at,
            "last_token_ts": 5.4 + at,
        }
        for at in range(num)
    ]


def write(place: Path, meta: Any, requests: list[dict[str, Any]]) -> Path:
    place.mkdir()
    (place / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    lines = [json.dumps(row) for row in requests]
    (place / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def changed(**parts: Any) -> dict[str, Any]:
    """META with resolved settings, or with other engine arguments."""
    meta = json.loads(json.dumps(META))
    for name, value in parts.items():
        if name in ("engine_kwargs", "kv_cache"):
            meta[name] |= value
        else:
            meta.setdefault("resolved_config", {})[name] = value
    return meta


def test_settings_are_read_wherever_a_version_wrote_them(tmp_path: Path) -> None:
    meta = changed(
        engine_kwargs={"max_num_seqs": None, "data_parallel_size": 2, "enable_expert_parallel": True},
        kv_cache={"num_gpu_blocks": None},
        scheduler_config={"max_num_seqs": 32, "async_scheduling": False},
        cache_config={"num_gpu_blocks": 77},
    )
    log = serverlog.read_log(write(tmp_path / "log", meta, rows()))
    assert (log.limits.max_num_seqs, log.limits.kv_blocks, log.limits.asynchronous) == (32, 77, False)
    assert (log.replicas, log.lockstep) == (2, True)
    assert log.graph_sizes.tolist() == [1, 2, 4, *range(8, 65, 8)]
    bare = {"engine_kwargs": META["engine_kwargs"]}
    log = serverlog.read_log(write(tmp_path / "bare", bare, rows()[::-1]))
    assert (log.limits.kv_blocks, log.limits.asynchronous, log.limits.block_size) == (None, True, 16)
    assert log.arrival_s.tolist() == list(range(24))


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (changed(speculative_config={"method": "dflash"}), "speculative decoding"),
        (changed(parallel_config={"pipeline_parallel_size": 2}), "pipeline parallelism"),
        (changed(scheduler_config={"policy": "priority"}), "a queue (priority)"),
        (changed(scheduler_config={"enable_chunked_prefill": False}), "whole prompts"),
        (changed(engine_kwargs={"max_num_seqs": None}), "does not say max_num_seqs"),
        (changed(engine_kwargs={"max_num_batched_tokens": 0}), "max_num_batched_tokens 0"),
        (changed(kv_cache={"num_gpu_blocks": 2}), "does not hold the longest request"),
        ({"model": "x"}, "no engine_kwargs"),
        ([], "no engine_kwargs"),
    ],
)
def test_what_cannot_be_modelled_is_refused_in_one_line(
    tmp_path: Path,
    meta: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = write(tmp_path / "log", meta, rows())
    monkeypatch.setattr(sys, "argv", ["validate", "--server-log", str(place)])
    assert guard(validate.main) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert "meta.json" in err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"output_toks": None}, "line 3 lacks a number"),
        ({"output_toks": 0}, "line 3 has 20 prompt and 0 output tokens"),
        ({"first_token_ts": 1.0}, "line 3: queued, scheduled, first and last token do not follow"),
        ({"last_token_ts": float("nan")}, "line 3: queued"),
    ],
)
def test_a_bad_request_is_named_by_its_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    requests = rows()
    requests[2] |= row
    with pytest.raises(InputError, match=said):
        serverlog.read_log(write(tmp_path / "log", META, requests))


def test_a_log_that_is_not_there_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"meta\.json is missing"):
        serverlog.read_log(tmp_path)
    with pytest.raises(InputError, match="holds 5 requests: a fit needs 20"):
        serverlog.read_log(write(tmp_path / "log", META, rows(5)))
    single = [row | {"output_toks": 1, "last_token_ts": row["first_token_ts"]} for row in rows()]
    with pytest.raises(InputError, match="0 requests of the first half have more than one output token"):
        serverlog.read_log(write(tmp_path / "single", META, single))
