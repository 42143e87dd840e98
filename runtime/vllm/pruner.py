"""The policy beside vLLM's engine: what was drafted goes in, keep depths and a log of steps come out."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import BudgetPolicy
from dcut.scores import survival
from dcut.selector import Selection
from runtime.chooser import Chooser, rehearse
from runtime.engine import Emission, Step, empty_step
from runtime.profiler import Drift

if TYPE_CHECKING:  # a server must say where metrics are shared before prometheus_client is imported
    from runtime.metrics import StepMetrics

LOGGED = 4096  # steps that are remembered until somebody takes them


# Tuples rather than dataclasses: one of them is built for each request in every step.


class Anchored(NamedTuple):
    """A request whose next step decodes: the newest token of its output awaits verification."""

    request_id: str  # vLLM's
    row: int  # of the drafts and confidences
    position: int  # of the anchor in the output
    num_tokens: int  # prompt and output, anchor included


class Decoded(NamedTuple):
    """A request that an engine step decoded: the drafts it was given, and the tokens that came of it."""

    request_id: str
    position: int
    num_tokens: int
    num_drafts: int
    tokens: list[int]  # as sampled: accepted drafts and the bonus token
    num_kept: int  # of them that become output; fewer where the request ended before
    finish_reason: str | None = None


class Prefilled(NamedTuple):
    """A request of which an engine step ran (a part of) the prompt; no token yet unless it was the last."""

    request_id: str
    num_tokens: int  # rows of this step
    tokens: list[int]
    finish_reason: str | None = None


@dataclass(slots=True)
class Proposal:
    """What waits between drafting, at the end of an engine step, and verification in the next."""

    began_s: float
    draft_s: float
    confidences: np.ndarray  # float32 [batch, drafts]
    batch: list[Anchored]
    select_s: float  # collecting confidences, and choosing
    selection: Selection | None = None


class Pruner:
    """Holds the policy of one worker, decides after each proposal, and assembles what each step did.

    A step is ours, not vLLM's: it begins when drafts are proposed (at the end of an engine step) and ends
    when the next ones are; draft, select, verify and emit of the same tokens, and the scheduler's and
    detokeniser's work between them. Requests of which a step ran the prompt are not part of its batch.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        draft_length: int,
        cost: CostTable | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """draft_length: the most drafts that the drafter proposes. Raises InputError for an oracle."""
        self.draft_length, self.clock = draft_length, clock
        self.cost = cost
        self.policy = policy
        self.collect: dict[str, tuple[np.ndarray, np.ndarray]] | None = None
        """Where set: the latest drafts int64 and confidences float32, [drafts] each, by vLLM's request id."""
        self.proposal: Proposal | None = None
        self.steps: deque[Step] = deque(maxlen=LOGGED)
        self.metrics: StepMetrics | None = None

    @property
    def policy(self) -> BudgetPolicy:
        """What decides from the next proposal on; setting it makes it forget.

        Raises InputError, and keeps the old one, for an oracle, for one that lacks a cost table and for one
        that names more drafts than there are.
        """
        return self.chooser.policy

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None:
        rehearse(policy, self.draft_length, self.cost)
        self.chooser = Chooser(policy)

    @property
    def cost(self) -> CostTable | None:
        """What steps cost; None before it was measured."""
        return self._cost

    @cost.setter
    def cost(self, cost: CostTable | None) -> None:
        self._cost = cost
        self.drift = None if cost is None else Drift(cost)

    def width(self, batch_size: int) -> int:
        """Drafts to propose for each of so many requests; 0: none, a plain decoding step."""
        if not batch_size:
            return 0
        return self.policy.draft_length(batch_size, self.draft_length, self.cost)

    def proposed(
        self,
        began_s: float,
        draft_s: float,
        collect_s: float,
        batch: list[Anchored],
        confidences: np.ndarray,
    ) -> None:
        """Take in a proposal. confidences: float32 [batch, drafts], a row for each of `batch`, in order.

        began_s: where the step begins. collect_s: what it took to find the batch and the confidences.
        """
        self.proposal = Proposal(began_s, draft_s, confidences, batch, collect_s)

    def decide(self) -> Mapping[str, int]:
        """Keep depths of the latest proposal by request id; requests without an anchor are not in it."""
        proposal = self.proposal
        if proposal is None or not proposal.batch:
            return {}
        began_s = self.clock()
        names = [request.request_id for request in proposal.batch]
        context_tokens = sum(request.num_tokens for request in proposal.batch)
        selection = self.chooser.select(proposal.confidences, names, self.cost, context_tokens)
        proposal.selection = selection
        depths = dict(zip(names, selection.keep_depth.tolist(), strict=True))
        proposal.select_s += self.clock() - began_s
        return depths

    def verified(
        self,
        began_s: float,
        ended_s: float,
        proposal: Proposal | None,
        decoded: Sequence[Decoded],
        prefilled: Sequence[Prefilled],
    ) -> None:
        """Log the engine step that verified `proposal`, from its forward pass to the next drafts.

        began_s, ended_s: of the forward pass and the sampling. Requests of the proposal that were not
        decoded, having been aborted or pre-empted, drop out of the step; others may have come to it.
        """
        emissions = [Emission(number(r.request_id), r.tokens, r.finish_reason) for r in prefilled if r.tokens]
        prefill_tokens = sum(r.num_tokens for r in prefilled)
        if not decoded:
            if prefill_tokens:
                self._remember(empty_step(began_s, prefill_tokens, ended_s - began_s, emissions))
            return
        found = {r.request_id: r for r in decoded}
        known = [] if proposal is None or proposal.selection is None else proposal.batch
        rows = [i for i, request in enumerate(known) if request.request_id in found]
        batch = [found.pop(known[i].request_id) for i in rows] + list(found.values())
        keep_depth = np.array([r.num_drafts for r in batch], np.int64)
        if proposal is not None and proposal.selection is not None and rows:
            selection = proposal.selection
            if not np.array_equal(keep_depth, selection.keep_depth):
                expected = _expected(proposal.confidences[rows], keep_depth[: len(rows)])
                total = int(keep_depth.sum()) + len(batch)
                selection = Selection(keep_depth, total, selection.bucket, expected + len(batch))
            start_s, draft_s, select_s = proposal.began_s, proposal.draft_s, proposal.select_s
            draft_s = draft_s if proposal.confidences.size else 0.0
        else:
            selection = Selection(keep_depth, int(keep_depth.sum()) + len(batch), 0, float(len(batch)))
            start_s, draft_s, select_s = began_s, 0.0, 0.0
        step_s = ended_s - start_s
        num_kept = np.array([r.num_kept for r in batch])
        emissions += [Emission(number(r.request_id), r.tokens[: r.num_kept], r.finish_reason) for r in batch]
        step = Step(
            start_s=start_s,
            prefill_tokens=prefill_tokens,
            prefill_s=0.0,
            context_tokens=sum(r.num_tokens for r in batch),
            draft_s=draft_s,
            select_s=select_s,
            verify_s=ended_s - began_s,
            step_s=step_s,
            graph_tokens=None,
            request_id=np.array([number(r.request_id) for r in batch]),
            position=np.array([r.position for r in batch]),
            selection=selection,
            num_accepted=np.array([len(r.tokens) - 1 for r in batch]),
            num_emitted=int(num_kept.sum()),
            emissions=emissions,
        )
        if self.policy.learns:
            self.policy.observe(keep_depth, np.maximum(num_kept - 1, 0), step_s)
        if self.drift and not prefill_tokens:
            self.drift.add(step)
        self._remember(step)

    def _remember(self, step: Step) -> None:
        self.steps.append(step)
        if self.metrics:
            self.metrics.observe(step, self.policy.labels, self.draft_length)
            self.metrics.profile_drift.set(self.drift.ratio if self.drift else 1.0)

    def forget(self, request_id: str) -> None:
        """Drop a request that ended."""
        self.chooser.forget(request_id)

    def take_steps(self) -> list[Step]:
        """The steps since the last call, oldest first; of more than LOGGED only the latest."""
        steps = list(self.steps)
        self.steps.clear()
        return steps


def overhead(steps: Iterable[Step], batch_size: int) -> float:
    """The share of the time of steps with so many requests that went into confidences and choosing.

    Who goes on to decode is part of it, the log of the step is not. InputError where there is no such step.
    """
    some = [s for s in steps if len(s.request_id) == batch_size and not s.prefill_tokens]
    if not some:
        raise InputError(f"no step without prompts held {batch_size} requests")
    return sum(s.select_s for s in some) / sum(s.step_s for s in some)


def number(request_id: str) -> int:
    """The number that a request was named by; vLLM may append a suffix. -1 where it was not named so."""
    head = request_id.split("-")[0]
    return int(head) if head.isdecimal() else -1


def _expected(confidences: np.ndarray, keep_depth: np.ndarray) -> float:
    if not confidences.size:
        return 0.0
    kept = np.arange(confidences.shape[1]) < keep_depth[:, None]
    return float(survival(confidences)[kept].sum())
