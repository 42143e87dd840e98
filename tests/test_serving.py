"""The open loop: what must hold for any traffic, server and policy, and what it equals where it is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenes import make_cost, make_trace

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import parse_policy
from sim import serving
from sim.arrivals import Traffic
from sim.engine import STEP, Engine
from sim.scheduler import RUNNING, Limits, gap_quantile
from sim.serving import Replica, Service, serve
from traces.schema import Trace
from traces.workloads import BLOCK_TOKENS, Workload

SPECS = ("off", "full", "fixed:2", "ratio:0.5", "dcut", "dcut-plus", "dspark")


@dataclass
class Steps:
    """Every step of a run, by replica, and the replicas."""

    steps: dict[int, np.ndarray]
    loads: dict[int, np.ndarray]
    replicas: list[Replica]


class Watched(Replica):
    """A replica that checks its memory after every step."""

    made: list[Replica]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)

    def emit(self, *args: Any, **named: Any) -> None:
        super().emit(*args, **named)
        scheduler = self.scheduler
        memory, stretches, units = scheduler.kv
        m, mine = memory[0], self.ledger.books[scheduler.running[: scheduler.queue[0]["num_running"]]]
        used = mine["blocks"].sum() + (units["num_users"] > 0).sum() * m["unit_blocks"]
        assert 0 <= m["num_free"] == m["num_blocks"] - used
        at = np.arange(m["head"], m["tail"]) % len(stretches)
        assert stretches[at]["num_blocks"].sum() == m["num_free"]
        assert (mine["status"] == RUNNING).all()
        assert len(mine) <= self.limits.max_num_seqs


@contextmanager
def watched() -> Iterator[list[Replica]]:
    Watched.made = []
    with mock.patch.object(serving, "Replica", Watched):
        yield Watched.made


def run(
    traffic: Traffic, spec: str, limits: Limits, cost: CostTable | None = None, **options: Any
) -> tuple[Service, Steps]:
    """Serve, and keep every step."""
    seen: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def on_steps(replica: int, steps: np.ndarray, loads: np.ndarray) -> None:
        seen.setdefault(replica, []).append((steps.copy(), loads.copy()))

    cost = cost or traffic.trace.cost
    assert cost is not None
    with watched() as replicas:
        service = serve(traffic, parse_policy(spec), cost, limits, on_steps=on_steps, **options)
    steps = {k: np.concatenate([piece[0] for piece in pieces]) for k, pieces in seen.items()}
    loads = {k: np.concatenate([piece[1] for piece in pieces]) for k, pieces in seen.items()}
    return service, Steps(steps, loads, replicas)


def make_traffic(
    trace: Trace, arrival_s: Any, prompts: Any, outputs: Any, hashes: list[list[int]] | None = None
) -> Traffic:
    """A workload of these requests."""
    blocks = starts = None
    if hashes is not None:
        blocks = np.array([h for each in hashes for h in each], np.int32)
        starts = np.concatenate([[0], np.cumsum([len(each) for each in hashes])])
    workload = Workload(
        "here", 1, np.array(arrival_s, float), np.array(prompts), np.array(outputs), None, blocks, starts
    )
    return Traffic(trace, len(workload), workload=workload)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Traffic, Limits, dict[str, Any]]:
    """Traffic, a server that holds each of its requests, and how it is run."""
    trace = make_trace(draw(st.lists(st.integers(2, 12), min_size=1, max_size=5)), draw(st.integers(1, 5)))
    num = draw(st.integers(1, 24))
    some = lambda low, high: draw(st.lists(st.integers(low, high), min_size=num, max_size=num))  # noqa: E731
    gaps = draw(st.sampled_from([0.0, 0.002, 0.02, 0.2])) * np.array(some(0, 5))
    prompts, outputs = some(1, 40), some(1, 20)
    hashes = None
    if draw(st.booleans()):  # long prompts that begin alike
        prompts = [n * 40 for n in prompts]
        hashes = [[at if at < kin else 100 * r + at for at in range(-(-n // BLOCK_TOKENS))]
                  for r, (n, kin) in enumerate(zip(prompts, some(0, 4), strict=True))]  # fmt: skip
    block_size = draw(st.sampled_from([1, 2, 4, 16])) * (16 if hashes else 1)
    blocks = None
    if draw(st.booleans()):
        least = max(-(-(p + o) // block_size) for p, o in zip(prompts, outputs, strict=True))
        blocks = 1 + max(1, least) + draw(st.integers(0, 2 * least))
    limits = Limits(
        max_num_seqs=draw(st.integers(2, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 32, 2048])) * (16 if hashes else 1),
        kv_blocks=blocks,
        block_size=block_size,
        prefix_caching=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        reserve_prompt=draw(st.booleans()),
        prefill=draw(st.sampled_from([True, True, False])),
        host_s=draw(st.sampled_from([0.0, 0.003])),
    )
    options = {
        "replicas": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "router": draw(st.sampled_from(["round-robin", "least-loaded"])),
        "decision_lag": draw(st.integers(0, 2)),
    }
    return make_traffic(trace, np.cumsum(gaps) - gaps[0], prompts, outputs, hashes), limits, options


@given(scenes(), st.sampled_from(SPECS))
@settings(max_examples=60)
def test_every_request_gets_its_tokens_within_the_limits_and_the_memory_is_free_in_the_end(
    scene: tuple[Traffic, Limits, dict[str, Any]], spec: str
) -> None:
    traffic, limits, options = scene
    cost = replace(make_cost(traffic.trace.draft_length + 1), prefill_token_s=1e-5)
    service, seen = run(traffic, spec, limits, cost, **options)
    books = service.ledger.books
    asked = books["output_tokens"]
    assert (books["tokens"] == books["prompt_tokens"] + asked).all()
    for sooner, later in (("arrival", "scheduled"), ("scheduled", "first_token"), ("first_token", "finish")):
        assert (books[f"{sooner}_s"] <= books[f"{later}_s"] + 1e-12).all()
    emitted = sum(steps["num_emitted"].sum() for steps in seen.steps.values())
    prompts = sum(loads["num_prompts"].sum() for loads in seen.loads.values())
    assert emitted + prompts == asked.sum() - (0 if limits.prefill else len(books))
    assert service.gaps.sum() + len(books) == sum(
        (steps["batch_size"].sum()) for steps in seen.steps.values()
    ) + prompts + (0 if limits.prefill else len(books))
    for at, steps in seen.steps.items():
        loads = seen.loads[at]
        assert (steps["batch_size"] <= limits.max_num_seqs).all()
        assert (steps["num_verify_tokens"] + loads["prefill_tokens"] <= limits.max_num_batched_tokens).all()
        assert (loads["kv_blocks"] >= 0).all()
        assert (loads["kv_blocks"] <= limits.usable_blocks).all()
        ends = steps["start_s"] + (steps["draft_s"] + steps["verify_s"])
        assert (steps["start_s"][1:] >= ends[:-1]).all()
        # the clock stands still only where nobody is there
        idle = np.flatnonzero(steps["start_s"][1:] > ends[:-1] + 1e-12)
        mine = books[books["replica"] == at]
        for k in idle:
            there = (mine["arrival_s"] < ends[k] - 1e-9) & (mine["finish_s"] > ends[k] + 1e-9)
            assert not there.any()
    for replica in seen.replicas:
        memory = replica.scheduler.kv[0][0]
        assert memory["num_free"] == memory["num_blocks"]
        assert not replica.scheduler.queue[0]["num_running"]


@given(scenes(), st.sampled_from(SPECS))
@settings(max_examples=20)
def test_the_same_traffic_gives_the_same_bytes(
    scene: tuple[Traffic, Limits, dict[str, Any]], spec: str
) -> None:
    traffic, limits, options = scene
    first, second = (run(traffic, spec, limits, **options) for _ in range(2))
    assert first[0].ledger.books.tobytes() == second[0].ledger.books.tobytes()
    for at, steps in first[1].steps.items():
        assert steps.tobytes() == second[1].steps[at].tobytes()


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(2, 8),
    st.integers(0, 9),
    st.sampled_from(("off", "full", "fixed:2", "ratio:0.5", "dcut")),
)
@example([7, 6], 4, 7, 8, "ratio:0.5")
@settings(max_examples=40)
def test_with_everything_free_and_all_there_at_once_it_equals_the_closed_loop(
    lengths: list[int], draft_length: int, batch_size: int, seed: int, spec: str
) -> None:
    trace = make_trace(lengths, draft_length, seed)
    assert trace.cost is not None
    order = np.random.default_rng(seed).integers(len(lengths), size=3 * batch_size)
    engine = Engine(trace, parse_policy(spec), trace.cost, batch_size, order)
    try:
        closed = engine.run()
    except InputError:  # requests of one token fill no batch
        return
    arrays = trace.arrays
    traffic = make_traffic(
        trace, np.zeros(len(order)), arrays.prompt_tokens[order], arrays.output_tokens[order]
    )
    with mock.patch("sim.arrivals._Recorded.draw", return_value=order):
        limits = Limits(batch_size, max_num_batched_tokens=1000, prefill=False)
        service, seen = run(traffic, spec, limits)
    names = ["start_s", "batch_size", "num_verify_tokens", "context_tokens", "step_s", "num_emitted"]
    assert seen.steps[0][names].tolist() == closed.steps[names].tolist()
    # Requests that replay the same recording tie where they meet: either may be the one that is kept deeper.
    ends = (service.ledger.books["finish_s"].tolist(), closed.spans["finish_s"].tolist())
    by_recording = [sorted(zip(order.tolist(), finish_s, strict=True)) for finish_s in ends]
    assert by_recording[0] == by_recording[1]


@given(scenes())
@settings(max_examples=20)
def test_plain_steps_taken_together_are_those_taken_one_by_one(
    scene: tuple[Traffic, Limits, dict[str, Any]],
) -> None:
    traffic, limits, options = scene
    limits = replace(limits, asynchronous=False)
    together, seen = run(traffic, "off", limits, **options)
    with mock.patch.object(Replica, "_coast", return_value=None):
        single, one_by_one = run(traffic, "off", limits, **options)
    assert together.gaps.sum() == single.gaps.sum()
    for share in (0.1, 0.5, 0.9, 1.0):  # a gap on the edge of two bins, 0.5 % apart, may be counted in either
        assert gap_quantile(together.gaps, share) == pytest.approx(
            gap_quantile(single.gaps, share), rel=0.011
        )
    for name in ("first_token_s", "finish_s"):
        assert together.ledger.books[name] == pytest.approx(single.ledger.books[name])
    for at, steps in one_by_one.steps.items():
        whole = [name for name in STEP.names or () if STEP[name].kind == "i"]
        assert seen.steps[at][whole].tolist() == steps[whole].tolist()
        assert seen.steps[at]["start_s"] == pytest.approx(steps["start_s"])
        assert seen.loads[at].tolist() == one_by_one.loads[at].tolist()
