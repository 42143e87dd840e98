"""The open loop: requests arrive, a router hands them to replicas, each an engine that schedules."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simpy

from dcut.cost import CostTable
from dcut.jit import compiled
from dcut.policies import BudgetPolicy
from dcut.selector import Selection
from sim.arrivals import Traffic
from sim.engine import SLOT, SPAN, STEP, Engine
from sim.kv import Rows, num_blocks_of, take
from sim.scheduler import CHUNK, DECODE, DONE, Ledger, Limits, Scheduler, gap_bin
from traces.schema import Trace

Router = Literal["round-robin", "least-loaded"]

LOAD = np.dtype(
    [
        ("prefill_tokens", np.int64),  # of prompts, those computed again among them
        ("num_prompts", np.int64),  # that end in the step, each with a token
        ("num_running", np.int64),
        ("num_waiting", np.int64),
        ("kv_blocks", np.int64),  # in use
        ("num_preempted", np.int64),  # when the step was scheduled
    ]
)
_BUFFER = 65_536  # steps kept before they are handed on


@dataclass(frozen=True, eq=False)
class Service:
    """What one policy did with the traffic: every request, and counts over all steps."""

    limits: Limits
    draft_length: int
    labels: tuple[str, ...]
    ledger: Ledger
    kept: np.ndarray  # int64 [D], request-steps by keep depth
    accepted: np.ndarray  # int64 [D], request-steps by accepted drafts
    gaps: np.ndarray  # int64, times between a request's tokens; see scheduler.gap_quantile


class Replica(Engine):
    """An engine whose requests come when they come, as a scheduler lets them in."""

    def __init__(
        self,
        number: int,
        trace: Trace,
        policy: BudgetPolicy,
        cost: CostTable,
        limits: Limits,
        ledger: Ledger,
        slots: np.ndarray,
        spans: np.ndarray,
        on_steps: Callable[[int, np.ndarray, np.ndarray], object],
        on_done: Callable[[np.ndarray], object],
        decision_lag: int,
    ) -> None:
        """slots, spans: SLOT and SPAN of every request. on_steps is told of steps and their LOAD.

        Raises InputError as Engine and Scheduler do.
        """
        super().__init__(trace, policy, cost, limits.max_num_seqs, np.zeros(0, np.int64), False, decision_lag)
        self.number, self.limits, self.ledger = number, limits, ledger
        self.waiting, self.spans = slots, spans
        lag = len(self.history)
        self.history = np.ones((lag, len(ledger) if lag else 0, self.draft_length), np.float32)
        self.scheduler = Scheduler(limits, ledger)
        self.steps = np.zeros(_BUFFER, STEP)
        self.loads = np.zeros(_BUFFER, LOAD)
        self.on_steps, self.on_done = on_steps, on_done
        self.idle: simpy.Event | None = None
        self.env: simpy.Environment | None = None
        self.now_s = 0.0  # ahead of simpy's clock after plain steps that were taken together
        self.took_s = 0.0, 0.0  # the drafter and the target in this step

    def process(self, env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        """Serve whenever there is something to serve."""
        self.env = env
        while True:
            yield from self._serve(env, lambda num_admitted: None)
            self.idle = env.event()
            yield self.idle
            self.now_s = env.now

    def submit(self, request: int) -> None:
        """Take a request, and wake where nothing was to do."""
        self.ledger.books[request]["replica"] = self.number
        self.scheduler.submit(request)
        if self.idle is not None and not self.idle.triggered:
            self.idle.succeed()

    @property
    def load(self) -> int:
        """What the router compares, as vLLM's does: who waits counts four times."""
        return 4 * self.scheduler.num_waiting + self.scheduler.num_running

    def admit(self, now_s: float) -> int:
        """Schedule, as many steps ahead as the engine does; whether there is a step to take."""
        scheduler = self.scheduler
        batch = scheduler.num_running
        drafts = super().width(max(1, batch))
        if batch and not (drafts or self.limits.asynchronous or self.policy.learns):
            self._coast(batch, now_s)
        now_s = self.now_s
        while not self.limits.prefill:
            self._report(done := scheduler.enter(now_s))
            if len(done) < self.limits.max_num_seqs:
                break
        while len(scheduler.ahead) < self.limits.depth:
            work = scheduler.hold(drafts)
            if work and self.limits.asynchronous:
                work = scheduler.fill(scheduler.ahead[-1].rows, now_s)
            if not work:
                scheduler.ahead.pop()
                break
        if not scheduler.ahead:
            return 0
        books, at = self.ledger.books, scheduler.oldest
        num = _gather(scheduler.plans, scheduler.entries, at, books, self.waiting, self.slots)
        self.batch = self.slots[:num]
        return 1

    def _coast(self, batch: int, now_s: float) -> None:
        """Take plain steps together up to the next event, while nobody comes, goes, or runs out of blocks."""
        assert self.env is not None
        if self.num_steps == _BUFFER:
            self.flush()
        price = self._prices.get((batch, batch, 0)) or self._price(batch, batch, 0)
        cost, scheduler = self.cost, self.scheduler
        self.num_steps, self.now_s = _coast(
            scheduler.queue,
            self.ledger.books,
            scheduler.running,
            *scheduler.kv[:2],
            self.ledger.first_row,
            self.ledger.num_rows,
            self.waiting,
            self.steps,
            self.loads,
            self.tally,
            scheduler.gaps,
            self.num_steps,
            self.now_s,
            self.now_s + (self.env.peek() - now_s),
            price[1],
            self.limits.host_s,
            cost.context_token_s + cost.context_pair_s,  # a row a request
            cost.context_per_request,
        )

    def width(self, batch_size: int) -> int:
        """How many drafts to ask of the drafter: no more than slots were scheduled for."""
        return min(super().width(batch_size), self.scheduler.ahead[0].drafts) if batch_size else 0

    def select(self, confidences: np.ndarray, context_tokens: int) -> Selection:
        """The policy's choice; none where only prompts are computed, or where no draft finds room."""
        batch, width = confidences.shape
        if batch and (width or not super().width(batch)):
            return super().select(confidences, context_tokens)
        return Selection(np.zeros(batch, np.int64), batch, -1, float(batch))

    def verify(
        self, confidences: np.ndarray, selection: Selection, context_tokens: int
    ) -> tuple[float, float]:
        """Seconds of the drafter and of the target, prompts and the scheduling that shows among them."""
        scheduler = self.scheduler
        if not self.limits.asynchronous and not scheduler.fill(selection.num_verify_tokens, self.now_s):
            raise AssertionError("nothing to do for requests that wait")
        prefill = scheduler.ahead[0].prefill
        if prefill[0]:
            batch, width = confidences.shape
            step = batch, selection.num_verify_tokens, width
            draft_s, verify_s = self._at_context(self._price(*step, *prefill), *step, context_tokens)
        else:
            draft_s, verify_s = super().verify(confidences, selection, context_tokens)
        if self.limits.asynchronous:
            verify_s = max(verify_s, self.limits.host_s - draft_s)
        else:
            verify_s += self.limits.host_s
        self.took_s = draft_s, verify_s
        assert self.env is not None
        return draft_s, verify_s + (self.now_s - self.env.now)

    def emit(
        self, selection: Selection, start_s: float, draft_s: float, verify_s: float, context_tokens: int
    ) -> None:
        """Move every request to its next anchor, and let go of those that are done."""
        if self.num_steps == _BUFFER:
            self.flush()
        step, start_s, (draft_s, verify_s) = self.num_steps, self.now_s, self.took_s
        super().emit(selection, start_s, draft_s, verify_s, context_tokens)
        scheduler = self.scheduler
        _advance(
            scheduler.plans,
            scheduler.entries,
            scheduler.oldest,
            self.ledger.books,
            self.ledger.first_row,
            self.ledger.num_rows,
            self.waiting,
            self.batch,
            scheduler.queue,
            scheduler.kv[0],
            self.loads,
            step,
        )
        self.now_s = start_s + (draft_s + verify_s)
        self._report(scheduler.settle(self.accepted, self.now_s))

    def flush(self) -> None:
        """Hand on the steps taken since the last time."""
        self.on_steps(self.number, self.steps[: self.num_steps], self.loads[: self.num_steps])
        self.num_steps = 0

    def _report(self, done: np.ndarray) -> None:
        if len(done):
            self.on_done(done)


def serve(
    traffic: Traffic,
    policy: BudgetPolicy,
    cost: CostTable,
    limits: Limits,
    replicas: int = 1,
    router: Router = "round-robin",
    decision_lag: int = 0,
    on_steps: Callable[[int, np.ndarray, np.ndarray], object] = lambda replica, steps, loads: None,
    progress: Callable[[int], object] = lambda num_done: None,
) -> Service:
    """Serve all of `traffic`.

    on_steps(replica, steps, loads): told of every step, some at a time; the arrays are used again after it.
    progress is told now and then how many more requests are done. Requests that ask for one token finish
    with their prompts. Raises InputError, before any work, for a request that outgrows the KV memory, and
    where the cost table does not hold `max_num_seqs`.
    """
    ledger = Ledger(traffic.chunks())
    slots = np.zeros(len(ledger), SLOT)
    slots["request"] = np.arange(len(ledger))
    slots["row"] = ledger.first_row
    slots["left"] = ledger.books["output_tokens"] - 1
    slots["context"] = ledger.books["prompt_tokens"] + 1
    spans = np.zeros(len(ledger), SPAN)
    env = simpy.Environment()
    reported, num_done, upcoming = 0, 0, traffic.users or len(ledger)
    stride = max(1, len(ledger) // 100)

    def route(request: int) -> None:
        if router == "round-robin":
            to = engines[request % replicas]
        else:
            to = min(engines, key=lambda engine: engine.load)
        to.submit(request)

    def arrive(first: int, last: int) -> Generator[simpy.Event, None, None]:
        for request in range(first, last):
            wait_s = float(ledger.books[request]["arrival_s"]) - env.now
            if wait_s > 0:
                yield env.timeout(wait_s)
            route(request)

    def done(requests: np.ndarray) -> None:
        nonlocal reported, num_done, upcoming
        for _ in requests if traffic.users else ():  # a user reads, thinks, and sends the next
            if upcoming < len(ledger):
                book = ledger.books[upcoming]
                book["arrival_s"] = env.now + book["think_s"]
                env.process(arrive(upcoming, upcoming + 1))
                upcoming += 1
        num_done += len(requests)
        if num_done - reported >= stride:
            progress(num_done - reported)
            reported = num_done

    engines = [
        Replica(
            number, traffic.trace, policy, cost, limits, ledger, slots, spans, on_steps, done, decision_lag
        )
        for number in range(replicas)
    ]
    for engine in engines:
        env.process(engine.process(env))
    env.process(arrive(0, upcoming))
    env.run()
    progress(num_done - reported)
    for engine in engines:
        engine.flush()
    kept, accepted = sum((engine.tally for engine in engines), np.zeros_like(engines[0].tally)).sum(axis=0)
    gaps = sum((engine.scheduler.gaps for engine in engines), np.zeros_like(engines[0].scheduler.gaps))
    return Service(limits, traffic.trace.draft_length, engines[0].policy.labels, ledger, kept, accepted, gaps)


@compiled
def _gather(
    plans: Rows,
    entries: Rows,
    at: int,
    books: Rows,
    waiting: Rows,
    slots: Rows,
) -> int:
    """Fill slots with those who decode in plans[at] and are not done by now; how many."""
    num = 0
    for k in range(plans[at].num):
        entry = entries[at, k]
        if entry.kind == DECODE and books[entry.request].status != DONE:
            slots[num] = waiting[entry.request]
            num += 1
    return num


@compiled
def _advance(
    plans: Rows,
    entries: Rows,
    at: int,
    books: Rows,
    first_row: Rows,
    num_rows: Rows,
    waiting: Rows,
    slots: Rows,
    queue: Rows,
    memory: Rows,
    loads: Rows,
    step: int,
) -> None:
    """Write back where the requests of plans[at] are, anchors being a ring, and loads[step]."""
    plan, q, m, load = plans[at], queue[0], memory[0], loads[step]
    num, num_prompts = 0, 0
    for k in range(plan.num):
        r = entries[at, k].request
        if entries[at, k].kind == CHUNK or books[r].status == DONE:
            continue
        slot = waiting[r]
        if entries[at, k].kind == DECODE:
            waiting[r] = slots[num]
            num += 1
        else:
            num_prompts += 1
            if books[r].tokens > books[r].prompt_tokens:  # it was computed again
                slot.row += 1
                slot.position += 1
                slot.context += 1
                slot.left -= 1
        if num_rows[r] > 0:
            slot.row = first_row[r] + (slot.row - first_row[r]) % num_rows[r]
    load.prefill_tokens = plan.prefill_tokens
    load.num_prompts = num_prompts
    load.num_running = q.num_running
    load.num_waiting = q.tail - q.head + q.num_front
    load.kv_blocks = m.num_blocks - m.num_free
    load.num_preempted = plan.preempted


@compiled
def _coast(
    queue: Rows,
    books: Rows,
    running: Rows,
    memory: Rows,
    stretches: Rows,
    first_row: Rows,
    num_rows: Rows,
    waiting: Rows,
    steps: Rows,
    loads: Rows,
    tally: Rows,
    gaps: Rows,
    num_steps: int,
    now_s: float,
    until_s: float,
    plain_s: float,
    host_s: float,
    context_token_s: float,
    context_per_request: float,
) -> tuple[int, float]:
    """Plain steps of all who run, each as the loop would take it; the steps taken so far, and their end.

    None where anybody computes a prompt, or waits while a seat is free. The step in which a request ends,
    blocks run out or something happens (at until_s) is left to the loop.
    """
    q, m = queue[0], memory[0]
    batch, most, context_tokens = q.num_running, len(steps) - num_steps, 0
    num_waiting = q.tail - q.head + q.num_front
    if (num_waiting > 0 and batch < q.max_seqs) or batch > q.max_tokens:
        return num_steps, now_s
    for i in range(batch):
        book = books[running[i]]
        if book.computed != book.tokens - 1 or book.tokens == book.prompt_tokens:
            return num_steps, now_s
        most = min(most, book.prompt_tokens + book.output_tokens - book.tokens - 1)
        context_tokens += book.tokens
    taken = 0
    while taken < most:
        verify_s = plain_s + context_token_s * (context_tokens - context_per_request * batch) + host_s
        end_s = now_s + (0.0 + verify_s)
        if end_s >= until_s:
            break
        need = 0
        for i in range(batch):
            book = books[running[i]]
            need += num_blocks_of(book.tokens + taken, m.block_size) > book.shared + book.blocks
        if need > m.num_free:
            break
        if need > 0:
            take(memory, stretches, need)
            for i in range(batch):
                book = books[running[i]]
                book.blocks += num_blocks_of(book.tokens + taken, m.block_size) > book.shared + book.blocks
        step, load = steps[num_steps], loads[num_steps]
        step.start_s = now_s
        step.batch_size = batch
        step.num_verify_tokens = batch
        step.context_tokens = context_tokens
        step.draft_s = 0.0
        step.verify_s = verify_s
        step.step_s = verify_s
        step.num_emitted = batch
        step.bucket = 0
        step.expected_tokens = batch
        load.prefill_tokens = 0
        load.num_prompts = 0
        load.num_running = batch
        load.num_waiting = num_waiting
        load.kv_blocks = m.num_blocks - m.num_free
        load.num_preempted = 0
        for i in range(batch):  # the first step may end a longer wait
            gaps[gap_bin(end_s - (now_s if taken else books[running[i]].token_s))] += 1
        num_steps += 1
        taken += 1
        context_tokens += batch
        now_s = end_s
    tally[1, :, 0] += taken * batch
    for i in range(batch if taken else 0):
        r = running[i]
        book, slot = books[r], waiting[r]
        book.tokens += taken
        book.computed += taken
        book.token_s = now_s
        slot.position += taken
        slot.context += taken
        slot.left -= taken
        slot.row = first_row[r] + (slot.row + taken - first_row[r]) % num_rows[r]
    return num_steps, now_s
