"""The replayed engine against a naive simulation that goes token by token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import make_cost, make_trace

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import parse_policy
from sim.arrivals import request_order
from sim.engine import STEADY, Engine, Run
from sim.results import figures, tables
from traces.schema import DECISIONS, REQUESTS, STEPS, Trace

SPECS = ("off", "full", "fixed:0", "fixed:2", "ratio:0.5", "dcut", "dcut:form=paper,bonus=true")


def replay(
    trace: Trace, spec: str, batch_size: int, num_requests: int, seed: int = 0, cost: CostTable | None = None
) -> Run:
    """A run with its decisions, on the trace's own cost table unless another is given."""
    cost = cost or trace.cost
    assert cost is not None
    order = request_order(trace, num_requests, seed)
    return Engine(trace, parse_policy(spec), cost, batch_size, order, record_decisions=True).run()


def naive(trace: Trace, spec: str, cost: CostTable, batch_size: int, order: np.ndarray) -> dict[str, Any]:
    """The closed loop in plain Python: tokens leave one by one, prices come straight from the table."""
    policy = parse_policy(spec)
    anchors = {
        (row["request_id"], row["position"]): (row["num_accepted"], row["confidences"])
        for row in trace.anchors.iter_rows(named=True)
    }
    sources = [trace.requests.row(int(at), named=True) for at in order]
    waiting, now = list(range(len(order))), 0.0
    tokens = [1] * len(order)  # the prefill's token
    steps, decisions, spans = [], [], {}

    def refill(seats: Sequence[int | None]) -> list[int]:
        """Keep who still emits, seat the next in place of who does not, close up what stays empty."""
        kept = []
        for request in seats:
            while request is None or tokens[request] == sources[request]["output_tokens"]:
                if not waiting:
                    break
                request = waiting.pop(0)
                spans[request] = [now, now]
            else:
                kept.append(request)
        return kept

    active = refill([None] * batch_size)
    while active:
        here = [(sources[r]["request_id"], tokens[r] - 1) for r in active]
        batch = len(active)
        width = policy.draft_length(batch, trace.draft_length)
        confidences = np.array([anchors[at][1][:width] for at in here], np.float32).reshape(batch, width)
        context = sum(sources[r]["prompt_tokens"] + tokens[r] for r in active)
        selection = policy.select(confidences, cost, context)
        tail = batch < batch_size
        if width:
            num_tokens = sum(int(depth) + 1 for depth in selection.keep_depth)
            draft_s = cost.draft_seconds(batch, context, extrapolate=tail)
            verify_s = cost.seconds(batch, num_tokens, context, extrapolate=tail)
        else:
            num_tokens, draft_s = batch, 0.0
            verify_s = cost.plain_seconds(batch, context, extrapolate=tail)
        emitted = 0
        end = now + (draft_s + verify_s)
        for request, at, depth in zip(active, here, selection.keep_depth, strict=True):
            accepted = 0
            while accepted < depth and accepted < anchors[at][0]:
                accepted += 1
            decisions.append((len(steps), request, at[1], int(depth), accepted))
            for _ in range(accepted + 1):
                if tokens[request] < sources[request]["output_tokens"]:
                    tokens[request] += 1
                    emitted += 1
            spans[request][1] = end
        steps.append((now, batch, num_tokens, context, draft_s, verify_s, emitted))
        now = end
        active = refill(active)
    return {"steps": steps, "decisions": decisions, "tokens": tokens, "spans": spans}


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Trace, CostTable, int, np.ndarray]:
    """A small trace, a cost table, a batch size and the order in which requests come."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    draft_length = draw(st.integers(1, 5))
    trace = make_trace(lengths, draft_length, draw(st.integers(0, 99)), draw(st.integers(0, 2)))
    cost = make_cost(draft_length + 1, context_token_s=draw(st.sampled_from([0.0, 1e-5])))
    batch_size = draw(st.integers(2, 8))
    order = request_order(trace, draw(st.integers(batch_size, 16)), draw(st.integers(0, 9)))
    return trace, cost, batch_size, order


@given(scenes(), st.sampled_from(SPECS))
@settings(max_examples=150)
def test_replay_equals_a_simulation_that_goes_token_by_token(
    scene: tuple[Trace, CostTable, int, np.ndarray], spec: str
) -> None:
    trace, cost, batch_size, order = scene
    want = naive(trace, spec, cost, batch_size, order)
    engine = Engine(trace, parse_policy(spec), cost, batch_size, order, record_decisions=True)
    if not any(step[1] >= STEADY * batch_size for step in want["steps"]):
        with pytest.raises(InputError, match=f"batch size {batch_size}"):
            engine.run()
        return
    run = engine.run()
    names = [
        "start_s",
        "batch_size",
        "num_verify_tokens",
        "context_tokens",
        "draft_s",
        "verify_s",
        "num_emitted",
    ]
    assert run.steps[names].tolist() == want["steps"]
    assert run.decisions is not None
    assert run.decisions.tolist() == want["decisions"]
    assert run.spans.tolist() == [tuple(want["spans"][request]) for request in range(len(order))]
    steady = {step for step, row in enumerate(want["steps"]) if row[1] >= STEADY * batch_size}
    seen = [row for row in want["decisions"] if row[0] in steady]
    got = figures(run)
    emitted = sum(want["steps"][step][6] for step in steady)
    seconds = sum(want["steps"][step][4] + want["steps"][step][5] for step in steady)
    assert got["throughput_tps"] == pytest.approx(emitted / seconds)
    verified = sum(want["steps"][step][2] for step in steady)
    assert got["keep_ratio"] == pytest.approx(verified / (len(seen) * (trace.draft_length + 1)))
    assert got["mean_acceptance_length"] == pytest.approx(np.mean([row[4] + 1 for row in seen]))
    assert got["wasted_verify_ratio"] == pytest.approx(sum(row[3] - row[4] for row in seen) / verified)
    for k in range(trace.draft_length):
        assert got["verified_by_position"][k] == sum(row[3] > k for row in seen)
        assert got["accepted_by_position"][k] == sum(row[4] > k for row in seen)


@given(scenes(), st.sampled_from(SPECS))
def test_every_request_emits_the_tokens_it_asked_for(
    scene: tuple[Trace, CostTable, int, np.ndarray], spec: str
) -> None:
    trace, _, batch_size, _ = scene
    trace = make_trace([length + 1 for length in trace.arrays.output_tokens], trace.draft_length)
    run = replay(trace, spec, batch_size, 2 * batch_size)
    assert run.decisions is not None
    asked = trace.arrays.output_tokens[run.order] - 1
    assert run.steps["num_emitted"].sum() == asked.sum()
    last = {row["request"]: row for row in run.decisions}  # the last decision of each request
    for request, tokens in enumerate(asked):
        assert (
            last[request]["position"]
            < tokens
            <= last[request]["position"] + last[request]["num_accepted"] + 1
        )


@pytest.mark.parametrize("spec", SPECS)
def test_simulated_time_is_the_sum_of_the_step_costs(spec: str) -> None:
    run = replay(make_trace([40, 25, 60], 4), spec, 4, 12)
    ends = np.cumsum(run.steps["step_s"])
    assert (run.steps["start_s"] == np.concatenate(([0.0], ends[:-1]))).all()
    assert figures(run)["simulated_s"] == ends[-1]
    assert (run.steps["step_s"] == run.steps["draft_s"] + run.steps["verify_s"]).all()


def test_plain_decoding_runs_at_the_batch_over_the_plain_step() -> None:
    trace = make_trace([30] * 8, 4)
    run = replay(trace, "off", 8, 16)
    assert trace.cost is not None
    got = figures(run)
    assert got["throughput_tps"] == pytest.approx(8 / trace.cost.plain_seconds(8))
    assert got["keep_ratio"] == 1 / 5
    assert got["wasted_verify_ratio"] == 0
    assert got["bucket_share"] == {"off": 1.0}


def test_fixed_at_the_draft_length_is_full_verification() -> None:
    trace = make_trace([30, 20, 50], 4)
    full, fixed = (replay(trace, spec, 4, 12) for spec in ("full", "fixed:4"))
    assert full.steps.tobytes() == fixed.steps.tobytes()
    assert full.decisions is not None
    assert fixed.decisions is not None
    assert full.decisions.tobytes() == fixed.decisions.tobytes()


def test_a_larger_depth_never_accepts_less_at_an_anchor() -> None:
    trace = make_trace([60, 45, 80], 5)
    seen = []
    for depth in range(6):
        run = replay(trace, f"fixed:{depth}", 3, 3)
        assert run.decisions is not None
        seen.append({(row["request"], row["position"]): row["num_accepted"] for row in run.decisions})
    for less, more in pairwise(seen):
        assert less.keys() & more.keys()
        assert all(less[anchor] <= more[anchor] for anchor in less.keys() & more.keys())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_order() -> None:
    trace = make_trace(list(range(5, 35)), 4)
    first, second, other = (replay(trace, "dcut", 4, 40, seed) for seed in (1, 1, 2))
    assert first.steps.tobytes() == second.steps.tobytes()
    assert first.spans.tobytes() == second.spans.tobytes()
    assert figures(first) == figures(second)
    assert first.order.tolist() != other.order.tolist()


def test_any_stretch_of_the_order_holds_the_domains_in_their_shares() -> None:
    trace = make_trace([5] * 30, 2)
    order = request_order(trace, 90, 3)
    for start in range(0, 90, 30):
        assert sorted(order[start : start + 30]) == list(range(30))  # a pass serves each request once
    domains = trace.requests["domain"].to_numpy()[order]
    for start in range(0, 90, 3):
        assert len(set(domains[start : start + 3])) == 3


def test_tables_come_in_the_trace_s_columns_with_unique_request_ids() -> None:
    trace = make_trace([9, 12, 7], 3)
    run = replay(trace, "dcut", 2, 7)
    found = tables(run, trace)
    assert dict(found["steps"].schema) == STEPS
    assert dict(found["decisions"].schema) == DECISIONS
    assert dict(found["requests"].schema) == REQUESTS | {"finish_s": pl.Float64}
    requests = found["requests"]
    assert requests["request_id"].n_unique() == 7
    assert set(requests["request_id"][:3]) == {10, 13, 16}  # the first pass keeps the trace's ids
    assert (requests["request_id"] % 17 == trace.arrays.request_id[run.order]).all()
    first = found["decisions"].group_by("request_id").agg(pl.col("position").first())
    assert first["position"].to_list() == [0] * 7
    assert set(found["steps"]["bucket"]) <= set(parse_policy("dcut").labels)


def test_a_batch_size_outside_the_measured_range_is_refused_with_the_range() -> None:
    trace = make_trace([9, 12, 7], 3)
    with pytest.raises(InputError, match=r"batch size 9 is outside the measured range 2\.\.8"):
        replay(trace, "dcut", 9, 20)


def test_verified_tokens_outside_the_measured_range_are_refused_with_the_range() -> None:
    trace = make_trace([9, 12, 7], 3)
    samples = [Sample("verify", 2, tokens, 0.01) for tokens in (4, 6)]
    with pytest.raises(InputError, match=r"8 verified tokens at batch size 2 .* 4\.\.6"):
        replay(trace, "full", 2, 4, cost=CostTable.from_samples(samples))
