"""The replayed engine: admit, draft, select, verify, emit, step after step, on a simulated clock."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import simpy

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.jit import compiled
from dcut.policies import BudgetPolicy
from dcut.selector import Selection
from traces.schema import Anchors, Trace

STEADY = 0.85  # a step belongs to the steady state if this share of the configured batch is active

# The engine's state and its records are numpy rows, so that a compiled kernel handles a batch in one call.
SLOT = np.dtype(
    [
        ("request", np.int64),  # number of the request in the run, in order of admission
        ("row", np.int64),  # its anchor: row in the trace's arrays
        ("position", np.int64),  # output position of that anchor
        ("left", np.int64),  # tokens still to emit
        ("context", np.int64),  # tokens of prompt and output so far, the anchor among them
    ]
)
SPAN = np.dtype([("start_s", np.float64), ("finish_s", np.float64)])
STEP = np.dtype(
    [
        ("start_s", np.float64),
        ("batch_size", np.int64),
        ("num_verify_tokens", np.int64),
        ("context_tokens", np.int64),
        ("drafts", np.int64),  # asked of the drafter, a request
        ("draft_s", np.float64),
        ("verify_s", np.float64),
        ("step_s", np.float64),
        ("num_emitted", np.int64),
        ("bucket", np.int64),
        ("expected_tokens", np.float64),
    ]
)
_DECISION = np.dtype(
    [
        ("step", np.int64),
        ("request", np.int64),
        ("position", np.int64),
        ("keep_depth", np.int64),
        ("num_accepted", np.int64),
    ]
)


@dataclass(frozen=True, eq=False)
class Run:
    """What one replay did: records as structured arrays, in simulated time."""

    batch_size: int  # configured; the tail drains below it
    draft_length: int
    labels: tuple[str, ...]  # the policy's budgets, which `steps["bucket"]` counts
    order: np.ndarray  # int64 [requests], index in the trace of each request of the run
    spans: np.ndarray  # [requests] start_s, finish_s
    steps: np.ndarray  # [steps] the columns of traces.schema.STEPS that a replay knows
    decisions: np.ndarray | None  # [request-steps] the columns of traces.schema.DECISIONS
    kept: np.ndarray  # int64 [D], steady request-steps by keep depth
    accepted: np.ndarray  # int64 [D], steady request-steps by accepted drafts
    steps_per_s: float  # simulated steps a second of real time, the first (which compiles) not counted

    @property
    def steady(self) -> np.ndarray:
        """Which steps belong to the steady state, bool [steps]."""
        return self.steps["batch_size"] >= STEADY * self.batch_size


def acceptance_lengths(trace: Trace) -> np.ndarray:
    """Tokens a request and step of the whole trace if k drafts are made and verified, float64 [D].

    k drafts are those of the drafter of that width, else the first k of the widest.
    """
    arrays = trace.arrays
    steps = np.zeros(trace.draft_length + 1, np.int64)
    _count_steps(arrays.first_row, arrays.output_tokens, arrays.num_accepted, 0, steps)
    for width, drafts in arrays.narrower.items():
        _count_steps(arrays.first_row, arrays.output_tokens, drafts.num_accepted, width, steps[: width + 1])
    return (arrays.output_tokens - 1).sum() / np.maximum(steps, 1)


def _visible(anchors: Anchors, width: int, policy: BudgetPolicy) -> np.ndarray:
    """What the policy sees as the confidences of every anchor's `width` drafts, float32 [rows, width up]."""
    drafts = anchors.drafts(width)
    if policy.sees == "num_accepted":
        return (np.arange(drafts.confidences.shape[1]) < drafts.num_accepted[:, None]).astype(np.float32)
    if policy.sees == "accept_probs":
        if anchors.accept_probs is None:
            raise InputError(
                "oracle-survival needs a trace with acceptance probabilities, such as h20-qwen3-8b; "
                "use oracle on this one"
            )
        return anchors.accept_probs
    return drafts.confidences


class Engine:
    """Serves the requests of a trace in a closed loop: a finished one is replaced at once by the next.

    A step at position p that keeps n drafts accepts min(num_accepted[p], n) and emits one token more, as
    many as the request still needs at most. Position 0 is the prefill's token: it costs nothing and is not
    counted. Where a trace holds acceptance probabilities, its recorded num_accepted is the draw that every
    policy sees. Step times come from `cost`: draft_seconds + seconds, or plain_seconds where the policy
    asks for no drafts. As the last requests drain, times below the measured range are extrapolated.
    """

    def __init__(
        self,
        trace: Trace,
        policy: BudgetPolicy,
        cost: CostTable,
        batch_size: int,
        order: np.ndarray,
        record_decisions: bool = False,
        decision_lag: int = 0,
    ) -> None:
        """order: int64 [requests], the trace's requests to serve, as `request_order` gives them.

        decision_lag: how many steps old the confidences are that the budget is settled by.
        Raises InputError, with the measured range, where `cost` does not hold the batch size, and where an
        oracle asks for what the trace does not hold.
        """
        cost.check_batch_size(batch_size)
        arrays = trace.arrays
        policy = policy.tuned(lambda: acceptance_lengths(trace), cost).start()
        self.policy, self.cost, self.batch_size, self.order = policy, cost, batch_size, order
        self.draft_length = trace.draft_length
        # By the drafters' widths: what is accepted (small, so that it stays in the cache), and what is seen
        self.recorded = {
            width: (arrays.drafts(width).num_accepted.astype(np.int16), _visible(arrays, width, policy))
            for width in (trace.draft_length, *arrays.narrower)
        }
        self.acceptable, self.visible = self.recorded[trace.draft_length]  # in this step
        self.drafts = 0  # asked for in this step, a request
        # Of the last steps that drafted, a ring: the confidences of each request of the run
        lag = max(decision_lag, policy.lag)
        self.history = np.ones((lag, len(order) if lag else 0, self.draft_length), np.float32)
        self.num_drafted = 0
        self.waiting = np.zeros(len(order), SLOT)
        self.waiting["request"] = np.arange(len(order))
        self.waiting["row"] = arrays.first_row[order]
        self.waiting["left"] = arrays.output_tokens[order] - 1
        self.waiting["context"] = arrays.prompt_tokens[order] + 1
        self.num_admitted = 0
        self.slots = np.zeros(batch_size, SLOT)
        self.batch = self.slots[:0]  # the active slots
        self.any_finished = True
        self.spans = np.zeros(len(order), SPAN)
        self.steps = np.zeros(4096, STEP)
        self.num_steps = 0
        self.record_decisions = record_decisions
        self.decisions = np.zeros(4096 if record_decisions else 0, _DECISION)
        self.num_decisions = 0
        self.accepted = np.zeros(batch_size, np.int64)  # in the last step, as far as it became output
        self.tally = np.zeros((2, 2, self.draft_length + 1), np.int64)  # steady or not, kept or accepted
        self._drafts: dict[tuple[int, int], np.ndarray] = {}
        self._prices: dict[tuple[int, int, int], tuple[float, float]] = {}

    def run(self, progress: Callable[[int], object] = lambda num_admitted: None) -> Run:
        """Serve every request; `progress` is told now and then how many more were admitted.

        Raises InputError where no step was steady, or where a policy verifies a number of tokens that the
        cost table does not hold.
        """
        env = simpy.Environment()
        env.process(self._serve(env, progress))
        env.step()
        env.step()
        began = time.perf_counter()
        env.run()
        elapsed = time.perf_counter() - began
        run = Run(
            batch_size=self.batch_size,
            draft_length=self.draft_length,
            labels=self.policy.labels,
            order=self.order,
            spans=self.spans,
            steps=self.steps[: self.num_steps],
            decisions=self.decisions[: self.num_decisions] if self.record_decisions else None,
            kept=self.tally[1, 0],
            accepted=self.tally[1, 1],
            steps_per_s=(self.num_steps - 1) / elapsed,
        )
        if not run.steady.any():
            raise InputError(
                f"{len(self.order)} requests never fill {STEADY:.0%} of batch size {self.batch_size}: "
                f"ask for at least {self.batch_size} requests of more than one output token"
            )
        return run

    def _serve(
        self, env: simpy.Environment, progress: Callable[[int], object]
    ) -> Generator[simpy.Event, None, None]:
        reported, stride = 0, max(1, len(self.order) // 100)
        while self.admit(env.now):
            confidences, context_tokens = self.draft()
            selection = self.select(confidences, context_tokens)
            draft_s, verify_s = self.verify(confidences, selection, context_tokens)
            start_s = env.now
            yield env.timeout(draft_s + verify_s)
            self.emit(selection, start_s, draft_s, verify_s, context_tokens)
            if self.num_admitted - reported >= stride:
                progress(self.num_admitted - reported)
                reported = self.num_admitted
        progress(self.num_admitted - reported)

    def admit(self, now_s: float) -> int:
        """Replace every finished request by the next one that waits; return how many are active."""
        if self.any_finished:
            num_active = len(self.batch) if self.num_steps else self.batch_size
            num_active, self.num_admitted = _admit(
                self.slots[:num_active], self.waiting, self.num_admitted, self.spans, now_s
            )
            self.batch = self.slots[:num_active]
        return len(self.batch)

    def draft(self) -> tuple[np.ndarray, int]:
        """The drafter's confidences, float32 [batch, drafts asked for], and the total length of contexts."""
        batch = len(self.batch)
        key = batch, self.width(batch)
        self.drafts = key[1]
        if len(self.recorded) > 1:
            widest = self.recorded[self.draft_length]
            self.acceptable, self.visible = self.recorded.get(self.drafts, widest)
        confidences = self._drafts.get(key)
        if confidences is None:
            confidences = self._drafts[key] = np.empty(key, np.float32)
        return confidences, _draft(self.batch, self.visible, confidences)

    def width(self, batch_size: int) -> int:
        """How many drafts to ask of the drafter."""
        return self.policy.draft_length(batch_size, self.draft_length, self.cost)

    def select(self, confidences: np.ndarray, context_tokens: int) -> Selection:
        """The policy's choice, by this step's confidences or, where decisions lag, also by older ones."""
        lag, width = len(self.history), confidences.shape[1]
        if not lag or not width:
            return self.policy.select(confidences, self.cost, context_tokens)
        seen = self.history[self.num_drafted % lag]
        requests = self.batch["request"]
        stale = seen[requests, :width]
        seen[requests, :width] = confidences
        self.num_drafted += 1
        return self.policy.select_lagged(confidences, stale, self.cost, context_tokens)

    def verify(
        self, confidences: np.ndarray, selection: Selection, context_tokens: int
    ) -> tuple[float, float]:
        """Seconds of the drafter and of the target in this step; no draft asked for is a plain step."""
        batch, width = confidences.shape
        key = batch, selection.num_verify_tokens, width
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._price(*key)
        return self._at_context(price, *key, context_tokens)

    def _at_context(
        self,
        price: tuple[float, float],
        batch: int,
        num_verify_tokens: int,
        drafts: int,
        context_tokens: int,
    ) -> tuple[float, float]:
        """Seconds of drafter and target once the contexts are as long as they are."""
        draft_s, verify_s = price
        if drafts:
            draft_s += self.cost.draft_context_seconds(batch, context_tokens, drafts)
        return draft_s, verify_s + self.cost.context_seconds(batch, context_tokens, num_verify_tokens)

    def _price(
        self,
        batch: int,
        num_verify_tokens: int,
        drafts: int,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
    ) -> tuple[float, float]:
        """Seconds of drafter and target at the context as measured; outside the range only in the tail."""
        tail, prefill = batch < self.batch_size, (prefill_tokens, prefill_pairs)
        if not drafts:
            return 0.0, self.cost.plain_seconds(batch, None, *prefill, extrapolate=tail)
        return (
            self.cost.draft_seconds(batch, None, drafts, extrapolate=tail),
            self.cost.seconds(batch, num_verify_tokens, None, *prefill, extrapolate=tail),
        )

    def emit(
        self, selection: Selection, start_s: float, draft_s: float, verify_s: float, context_tokens: int
    ) -> None:
        """Move every request to its next anchor, and write the step down."""
        batch = len(self.batch)
        if self.num_steps == len(self.steps):
            self.steps = np.resize(self.steps, 2 * len(self.steps))
        if self.record_decisions and self.num_decisions + batch > len(self.decisions):
            self.decisions = np.resize(self.decisions, 2 * (len(self.decisions) + batch))
        self.any_finished = _emit(
            self.batch,
            selection.keep_depth,
            self.acceptable,
            self.tally,
            int(batch >= STEADY * self.batch_size),
            self.spans,
            self.accepted,
            self.decisions,
            self.num_decisions,
            self.steps,
            self.num_steps,
            start_s,
            self.drafts,
            draft_s,
            verify_s,
            context_tokens,
            selection.num_verify_tokens,
            selection.bucket,
            selection.expected_tokens,
        )
        if batch and self.policy.learns:
            self.learn(selection, draft_s + verify_s)
        self.num_steps += 1
        self.num_decisions += batch if self.record_decisions else 0

    def learn(self, selection: Selection, seconds: float) -> None:
        """Tell the policy what became of the step."""
        self.policy.observe(selection.keep_depth, self.accepted[: len(self.batch)], seconds)


@compiled
def _count_steps(
    first_row: np.ndarray, output_tokens: np.ndarray, num_accepted: np.ndarray, fewest: int, steps: np.ndarray
) -> None:
    """Fill steps[k] from k = fewest on: how many the trace's requests take together if k are verified."""
    for k in range(fewest, len(steps)):
        steps[k] = 0
        for r in range(len(first_row)):
            at = 0
            while at < output_tokens[r] - 1:
                at += min(num_accepted[first_row[r] + at], k) + 1
                steps[k] += 1


@compiled
def _admit(
    slots: np.ndarray, waiting: np.ndarray, num_admitted: int, spans: np.ndarray, now_s: float
) -> tuple[int, int]:
    """Refill the slots with nothing left to emit, drop those that stay empty; (active, admitted so far)."""
    num_active = 0
    for i in range(len(slots)):
        slots[num_active] = slots[i]
        while slots[num_active].left == 0 and num_admitted < len(waiting):
            slots[num_active] = waiting[num_admitted]
            spans[num_admitted]["start_s"] = now_s
            spans[num_admitted]["finish_s"] = now_s  # unless it has steps to go
            num_admitted += 1
        num_active += slots[num_active].left > 0
    return num_active, num_admitted


@compiled
def _draft(slots: np.ndarray, recorded: np.ndarray, confidences: np.ndarray) -> int:
    """Fill confidences [batch, width] from the slots' anchors; return the total length of their contexts."""
    batch, width = confidences.shape
    context_tokens = 0
    for i in range(batch):
        context_tokens += slots[i].context
        if width:  # touch both ends of every row first, so that the waits for memory overlap
            row = slots[i].row
            confidences[i, 0] = recorded[row, 0]
            confidences[i, width - 1] = recorded[row, width - 1]
    for i in range(batch):
        row = slots[i].row
        for k in range(width):
            confidences[i, k] = recorded[row, k]
    return context_tokens


@compiled
def _emit(
    slots: np.ndarray,
    keep_depth: np.ndarray,
    acceptable: np.ndarray,
    tally: np.ndarray,
    steady: int,
    spans: np.ndarray,
    num_output: np.ndarray,
    decisions: np.ndarray,
    num_decisions: int,
    steps: np.ndarray,
    step: int,
    start_s: float,
    drafts: int,
    draft_s: float,
    verify_s: float,
    context_tokens: int,
    num_verify_tokens: int,
    bucket: int,
    expected_tokens: float,
) -> bool:
    """Advance every slot by what it accepts, write steps[step]; whether any request finished."""
    step_s = draft_s + verify_s
    total, any_finished = 0, False
    for i in range(len(slots)):
        slot, depth = slots[i], keep_depth[i]
        accepted = min(np.int64(acceptable[slot.row]), depth)
        tally[steady, 0, depth] += 1
        tally[steady, 1, accepted] += 1
        if len(decisions) > 0:
            decision = decisions[num_decisions + i]
            decision.step = step
            decision.request = slot.request
            decision.position = slot.position
            decision.keep_depth = depth
            decision.num_accepted = accepted
        emitted = min(accepted + 1, slot.left)
        num_output[i] = emitted - 1
        slot.row += emitted
        slot.position += emitted
        slot.context += emitted
        slot.left -= emitted
        total += emitted
        if slot.left == 0:
            any_finished = True
            spans[slot.request]["finish_s"] = start_s + step_s
    record = steps[step]
    record.start_s = start_s
    record.batch_size = len(slots)
    record.num_verify_tokens = num_verify_tokens
    record.context_tokens = context_tokens
    record.drafts = drafts
    record.draft_s = draft_s
    record.verify_s = verify_s
    record.step_s = step_s
    record.num_emitted = total
    record.bucket = bucket
    record.expected_tokens = expected_tokens
    return any_finished
