"""The compiled scheduler against vLLM V1's rules in plain Python, with every block of memory by name."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import make_cost, make_trace
from test_serving import make_traffic, run

from dcut.cost import CostTable
from dcut.errors import InputError
from sim.scheduler import Ledger, Limits, Scheduler
from traces.schema import Trace


@dataclass(eq=False)
class Request:
    """A request, as the plain scheduler sees it."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    tokens: int = 0
    computed: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    preempted: int = 0
    first_s: float = 0.0
    finish_s: float | None = None


class Plain:
    """One engine: lists of requests, a queue of free blocks, and what each block holds."""

    def __init__(self, requests: list[Request], limits: Limits, trace: Trace, cost: CostTable, drafts: int):
        self.limits, self.trace, self.cost, self.drafts = limits, trace, cost, drafts
        self.coming = deque(requests)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free = deque(range(limits.usable_blocks if limits.kv_blocks else 4000))
        self.holds: dict[int, tuple[int, int]] = {}  # block: request and place

    def serve(self) -> None:
        now, ahead = 0.0, deque()
        while self.coming or self.waiting or self.running or ahead:
            if not (self.waiting or self.running or ahead):
                now = max(now, self.coming[0].arrival_s)
            while self.coming and self.coming[0].arrival_s <= now:
                self.waiting.append(self.coming.popleft())
            while len(ahead) < self.limits.depth and (plan := self.schedule()):
                ahead.append(plan)
            now = self.step(ahead.popleft(), now)

    def blocks_for(self, request: Request, tokens: int) -> int:
        return -(-tokens // self.limits.block_size) - len(request.blocks)

    def take(self, request: Request, num: int) -> None:
        for _ in range(num):
            block = self.free.popleft()
            self.holds.pop(block, None)
            request.blocks.append(block)

    def release(self, request: Request, full: int) -> None:
        """Free its blocks, the last first; of those, `full` keep what they hold."""
        for place, block in reversed(list(enumerate(request.blocks))):
            self.free.append(block)
            if place < full and self.limits.prefix_caching:
                self.holds[block] = (request.number, place)
        request.blocks = []

    def schedule(self) -> list[tuple[Request, int, str]]:
        plan, budget, evicted = [], self.limits.max_num_batched_tokens, False
        drafts = max(0, min(self.drafts, budget // max(1, len(self.running)) - 1))
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            at += 1
            last, known = request.prompt + request.output, request.tokens + request.in_flight
            if request.in_flight and request.computed + 2 - request.in_flight >= last:
                continue  # its last token is on the way
            new = known - request.computed
            decodes = new == 1 and known > request.prompt
            new = min(new + (drafts if decodes else 0), budget)
            upto = min(request.computed + new, last)
            while self.blocks_for(request, upto) > len(self.free):
                victim = self.running.pop()
                self.release(victim, (victim.computed - victim.in_flight) // self.limits.block_size)
                victim.computed = 0
                victim.preempted += 1
                self.waiting.appendleft(victim)
                evicted = True
                if victim is request:
                    break
            if request not in self.running:
                break
            self.take(request, max(0, self.blocks_for(request, upto)))
            plan.append(self.add(request, new, decodes))
            budget -= new
        while self.waiting and not evicted and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            kept = {place: block for block, (owner, place) in self.holds.items() if owner == request.number}
            hits = 0
            while hits in kept and hits < (request.tokens - 1) // self.limits.block_size:
                hits += 1
            computed = hits * self.limits.block_size
            new = min(request.tokens - computed, budget)
            whole = request.tokens if self.limits.reserve_prompt else computed + new
            if self.blocks_for(request, whole) > len(self.free):
                break
            self.waiting.popleft()
            for place in range(hits):
                self.free.remove(kept[place])
                del self.holds[kept[place]]
                request.blocks.append(kept[place])
            for block in kept.values():
                self.holds.pop(block, None)
            request.computed = computed
            request.cached += computed
            self.take(request, self.blocks_for(request, computed + new))
            self.running.append(request)
            plan.append(self.add(request, new, False))
            budget -= new
        return plan

    def add(self, request: Request, new: int, decodes: bool) -> tuple[Request, int, str]:
        request.computed += new
        if decodes:
            request.in_flight += new
            return request, new, "decode"
        ends = request.computed == request.tokens + request.in_flight
        request.in_flight += ends
        return request, new, "prompt" if ends else "chunk"

    def step(self, plan: list[tuple[Request, int, str]], now: float) -> float:
        live = [request for request, _, kind in plan if kind == "decode" and request.finish_s is None]
        rows = [new for request, new, kind in plan if kind == "decode" and request.finish_s is None]
        prompts = sum(new for _, new, kind in plan if kind != "decode")
        batch, context = len(live), sum(request.tokens for request in live)
        if self.drafts and any(row > 1 for row in rows):
            seconds = self.cost.draft_seconds(batch, context, extrapolate=True)
            tail = self.cost.seconds(batch, sum(rows), context, prompts, extrapolate=True)
        else:
            seconds, tail = 0.0, self.cost.plain_seconds(batch, context, prompts, extrapolate=True)
        now += seconds + tail
        for request, new, kind in plan:
            if kind == "chunk" or request.finish_s is not None:
                continue
            accepted = 0
            if kind == "decode":
                accepted = min(new - 1, self.acceptable(request))
            request.in_flight -= new if kind == "decode" else 1
            if request in self.running:
                request.computed -= (new if kind == "decode" else 1) - 1 - accepted
            if request.tokens == request.prompt:
                request.first_s = now
            last = request.prompt + request.output
            request.tokens = min(request.tokens + accepted + 1, last)
            if request.tokens == last:
                request.finish_s = now
                if request in self.running:
                    self.release(request, 0)
                    self.running.remove(request)
                else:
                    self.waiting.remove(request)
        return now

    def acceptable(self, request: Request) -> int:
        """What the one recorded request of the trace accepts at this output position."""
        arrays = self.trace.arrays
        return int(arrays.num_accepted[(request.tokens - request.prompt - 1) % arrays.num_rows[0]])


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20),
    st.integers(2, 8),
    st.sampled_from([1, 2, 5, 16, 64, 2048]),
    st.sampled_from([1, 2, 8]),
    st.one_of(st.none(), st.integers(0, 60)),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["off", "full"]),
    st.integers(1, 5),
)
@settings(max_examples=80)
def test_every_token_leaves_when_plain_rules_say_so(
    rows: list[tuple[int, int, int]],
    seats: int,
    budget: int,
    block_size: int,
    spare: int | None,
    flags: tuple[bool, bool, bool],
    spec: str,
    draft_length: int,
) -> None:
    asynchronous, caching, reserve = flags
    least = max(-(-(prompt + output) // block_size) for _, prompt, output in rows)
    limits = Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        kv_blocks=None if spare is None else max(2, 1 + least + spare),
        block_size=block_size,
        prefix_caching=caching,
        asynchronous=asynchronous,
        reserve_prompt=reserve,
    )
    trace = make_trace([9], draft_length)
    cost = replace(make_cost(draft_length + 1, context_token_s=1e-5), prefill_token_s=1e-4)
    arrival = np.cumsum([gap * 1.1e-3 for gap, _, _ in rows])
    arrival -= arrival[0]
    prompts, outputs = ([row[k] for row in rows] for k in (1, 2))
    requests = [
        Request(at, float(arrival[at]), prompts[at], outputs[at], prompts[at]) for at in range(len(rows))
    ]
    Plain(list(requests), limits, trace, cost, draft_length if spec == "full" else 0).serve()
    service, _ = run(make_traffic(trace, arrival, prompts, outputs), spec, limits, cost)
    books = service.ledger.books
    assert books["first_token_s"] == pytest.approx([request.first_s for request in requests])
    assert books["finish_s"] == pytest.approx([request.finish_s for request in requests])
    assert books["num_preempted"].tolist() == [request.preempted for request in requests]
    assert books["cached_tokens"].tolist() == [request.cached for request in requests]


HALF = 256  # tokens of a block, two to a hash


def served(starts: list[float], hashes: list[list[int]], blocks: int | None) -> list[int]:
    """Tokens of each prompt found in memory; a prompt's last hash stands for 100 tokens."""
    prompts = [512 * (len(each) - 1) + 100 for each in hashes]
    limits = Limits(8, 8192, blocks, block_size=HALF)
    traffic = make_traffic(make_trace([30], 2), starts, prompts, [4] * len(prompts), hashes)
    return run(traffic, "off", limits)[0].ledger.books["cached_tokens"].tolist()


def test_prompts_that_begin_alike_are_computed_once() -> None:
    alike = [[0, 1, 2, 7], [0, 1, 2, 8], [0, 1, 9], [5, 1, 2]]
    assert served([0, 5, 10, 15], alike, None) == [0, 1536, 1024, 0]
    assert served([0, 0.001, 0.002, 0.003], alike, None) == [0, 1536, 1024, 0]  # while the first still runs
    assert served([0, 0, 0, 0], alike, None) == [0, 1536, 1024, 0]


def test_what_other_requests_needed_since_is_computed_again() -> None:
    first, other = [0, 1, 2, 7], [10, 11, 12, 13]
    assert served([0, 5, 10], [first, other, first], 1 + 7 + 7) == [0, 0, 1536]
    assert served([0, 5, 10], [first, other, first], 1 + 7) == [0, 0, 0]
    assert served([0, 5, 10], [first, other, first], 1 + 7 + 4) == [0, 0, 1024]  # the end went first


def test_a_prompt_that_is_in_memory_whole_still_computes_its_last_token() -> None:
    limits = Limits(8, 8192, None, block_size=HALF)
    traffic = make_traffic(make_trace([30], 2), [0, 5], [1024, 1024], [4, 4], [[0, 1], [0, 1]])
    assert run(traffic, "off", limits)[0].ledger.books["cached_tokens"].tolist() == [0, 512]


def test_blocks_that_do_not_divide_a_hash_are_refused() -> None:
    traffic = make_traffic(make_trace([30], 2), [0], [600], [4], [[0, 1]])
    with pytest.raises(InputError, match="block_size 48 does not divide the 512 tokens"):
        Scheduler(Limits(block_size=48), Ledger(traffic.chunks()))


def test_a_request_that_outgrows_the_memory_is_named() -> None:
    traffic = make_traffic(make_trace([30], 2), [0, 1], [10, 60], [4, 5])
    with pytest.raises(InputError, match=r"request 1: 60 prompt and 5 output tokens outgrow .* 64 tokens"):
        Scheduler(Limits(kv_blocks=5), Ledger(traffic.chunks()))
