"""The live engine: admit, draft, select, verify, emit, step after step, with a real target and drafter."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import BudgetPolicy
from dcut.selector import Selection
from runtime.chooser import Chooser
from runtime.drafter import Drafter, Drafts, Seen
from runtime.kv_cache import Rows
from runtime.verifier import Output, Verifier, accept

MOST_PREFILL = 2048  # rows of prompts in one forward pass


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for. The output ends at max_tokens or with one of the stop tokens, which it holds."""

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None  # None: follows from the engine's seed and the request_id
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own


@dataclass(slots=True)
class Running:
    """A request in a slot. The newest token of its output is the anchor; `length` tokens come before it."""

    request: Request
    slot: int
    stop_token_ids: tuple[int, ...]
    random: np.random.Generator
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # length | stop | cancelled

    @property
    def length(self) -> int:
        """Tokens whose keys and values the target holds."""
        return len(self.request.prompt) + len(self.output) - 1

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append what still belongs to the output; return it."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.output) + len(taken) == self.request.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.output += taken
        return taken


class Emission(NamedTuple):
    """Tokens of one request that a step brought, and why it ended if it did."""

    request_id: int
    tokens: list[int]
    finish_reason: str | None  # length | stop


class Verified(NamedTuple):
    """The target's pass over a batch and what came of it."""

    tokens: np.ndarray  # int64 [num_verify_tokens]
    rows: Rows
    keep_depth: np.ndarray  # int64 [batch]
    output: Output
    num_accepted: np.ndarray  # int64 [batch]
    bonus_token: np.ndarray  # int64 [batch]


class Step(NamedTuple):
    """What one step did: what traces.schema.STEPS and DECISIONS ask for, and the tokens."""

    start_s: float  # after the admission
    prefill_tokens: int
    prefill_s: float  # of the admission before it; no part of step_s
    context_tokens: int
    draft_s: float
    select_s: float
    verify_s: float  # the target's forward pass and the acceptance
    step_s: float  # draft, select, verify and emit
    graph_tokens: int | None
    request_id: np.ndarray  # int64 [batch]
    position: np.ndarray  # int64 [batch], output position of each anchor
    selection: Selection
    num_accepted: np.ndarray  # int64 [batch], at most keep_depth; the end of an output may cut it short
    num_emitted: int  # tokens that decoding emitted; the prefill's come on top
    emissions: list[Emission]  # first tokens of the admitted, then one entry a request of the batch


class LiveEngine(Protocol):
    """What serves requests step by step; all of it is used by one thread, the one that built it."""

    max_batch_size: int

    @property
    def cost(self) -> CostTable | None:
        """What the policy prices steps by."""
        ...

    @property
    def policy(self) -> BudgetPolicy:
        """May be set between steps."""
        ...

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None: ...

    @property
    def draft_length(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its output at most."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: int) -> None:
        """Free the request's place by the next step; unknown and ended ones are ignored."""
        ...

    def step(self) -> Step | None: ...


class Engine:
    """Continuous batching: a finished request is replaced at once by the next that waits.

    The order within the batch decides ties: a newcomer takes the place of the first request that finished,
    and the places that stay empty close up. An admitted request is prefilled, which yields its first token,
    and decodes in the same step. `policy` may be set between steps; setting it makes it forget.
    `sample_drafts` draws drafts at a request's temperature instead of proposing the likeliest token.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        policy: BudgetPolicy,
        cost: CostTable | None = None,
        max_batch_size: int | None = None,
        seed: int = 0,
        sample_drafts: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """max_batch_size: at most, and unless given, the verifier's slots. Raises InputError otherwise."""
        self.max_batch_size = verifier.num_slots if max_batch_size is None else max_batch_size
        if not 1 <= self.max_batch_size <= verifier.num_slots:
            raise InputError(f"batch size {max_batch_size} is outside 1..{verifier.num_slots}, the slots")
        if sample_drafts and not drafter.parallel:
            raise InputError("drafts can be sampled only from a block drafter: choose the likeliest instead")
        self.verifier, self.drafter, self.cost = verifier, drafter, cost
        self.policy = policy
        self.seed, self.sample_drafts, self.clock = seed, sample_drafts, clock
        self.waiting: deque[Request] = deque()
        self.batch: list[Running] = []
        self.free_slots = list(range(self.max_batch_size))
        self.drafting = False  # whether the last step did; then the drafter reads prompts as they come

    # ---- what a caller does -----------------------------------------------------------------------------

    @property
    def policy(self) -> BudgetPolicy:
        """What decides from the next step on. Raises InputError for an oracle, which nobody can feed."""
        return self.chooser.policy

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None:
        self.chooser = Chooser(policy)

    @property
    def draft_length(self) -> int:
        """Drafts that the drafter can propose for a request and step."""
        return self.drafter.draft_length

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its output at most."""
        return self.verifier.max_tokens - self.draft_length

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or any(not r.finish_reason for r in self.batch)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError where it has no room or asks for nothing."""
        if not request.prompt:
            raise InputError("the prompt is empty: give at least one token")
        if request.max_tokens < 1:
            raise InputError(f"max_tokens {request.max_tokens}: ask for at least 1")
        if request.temperature < 0:
            raise InputError(f"temperature {request.temperature:g} is negative: give 0 or more")
        if len(request.prompt) + request.max_tokens > self.max_context:
            raise InputError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} to come exceed "
                f"the {self.max_context} that fit: shorten the prompt or ask for less"
            )
        self.waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Drop a request, waiting or running; unknown and finished ones are ignored."""
        self.waiting = deque(r for r in self.waiting if r.request_id != request_id)
        for running in self.batch:
            if running.request.request_id == request_id and not running.finish_reason:
                running.finish_reason = "cancelled"

    def step(self) -> Step | None:
        """One step of the batch; None where nothing waits or runs."""
        if not self.busy:
            return None
        began_s = self.clock()
        first_tokens, prefill_tokens = self.admit()
        start_s = self.clock()
        if not self.batch:  # every request ended with its first token
            return empty_step(start_s, prefill_tokens, start_s - began_s, first_tokens)
        slots, lengths, anchors = self.anchors()
        drafts = self.draft(slots, lengths, anchors)
        drafted_s = self.clock()
        context_tokens = int(lengths.sum()) + len(self.batch)
        selection = self.select(drafts.confidences, context_tokens)
        selected_s = self.clock()
        verified = self.verify(slots, lengths, anchors, drafts, selection.keep_depth)
        verified_s = self.clock()
        request_id = np.array([r.request.request_id for r in self.batch])
        position = np.array([len(r.output) - 1 for r in self.batch])
        emissions = self.emit(drafts, verified)
        step_s = self.clock() - start_s
        if self.policy.learns:
            output = np.array([max(len(e.tokens) - 1, 0) for e in emissions])
            self.policy.observe(selection.keep_depth, output, step_s)
        return Step(
            start_s=start_s,
            prefill_tokens=prefill_tokens,
            prefill_s=start_s - began_s,
            context_tokens=context_tokens,
            draft_s=drafted_s - start_s if drafts.tokens.size else 0.0,
            select_s=selected_s - drafted_s,
            verify_s=verified_s - selected_s,
            step_s=step_s,
            graph_tokens=self.verifier.graph_tokens(verified.rows),
            request_id=request_id,
            position=position,
            selection=selection,
            num_accepted=verified.num_accepted,
            num_emitted=sum(len(e.tokens) for e in emissions),
            emissions=first_tokens + emissions,
        )

    # ---- what a step does -------------------------------------------------------------------------------

    def admit(self) -> tuple[list[Emission], int]:
        """Replace each finished request by the next that waits: their first tokens, and tokens prefilled."""
        for running in self.batch:
            if running.finish_reason:
                self._release(running)
        places = [None if r.finish_reason else r for r in self.batch]
        room = self.max_batch_size - len(places) + places.count(None)
        newcomers: list[Running] = []
        emissions: list[Emission] = []
        prefill_tokens = 0
        while self.waiting and len(newcomers) < room:
            some = [self._start() for _ in range(min(room - len(newcomers), len(self.waiting)))]
            prefill_tokens += sum(len(r.request.prompt) for r in some)
            emissions += self._prefill(some)
            for running in some:  # one that its first token ends takes no place
                if running.finish_reason:
                    self._release(running)
                else:
                    newcomers.append(running)
        arriving = iter(newcomers)
        self.batch = [r for r in (r or next(arriving, None) for r in places) if r] + list(arriving)
        return emissions, prefill_tokens

    def anchors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slot, tokens before the anchor, and anchor of every request, int64 [batch] each."""
        rows = [(r.slot, r.length, r.output[-1]) for r in self.batch]
        slots, lengths, anchors = np.array(rows, np.int64).T.copy()
        return slots, lengths, anchors

    def draft(self, slots: np.ndarray, lengths: np.ndarray, anchors: np.ndarray) -> Drafts:
        """As many drafts as the policy asks for; none lets the drafter rest: a plain decoding step."""
        width = self.policy.draft_length(len(slots), self.draft_length, self.cost)
        self.drafting = width > 0
        if width == 0:
            return Drafts.none(len(slots))
        chance = _chance(self.batch, width) if self.sample_drafts else (None, None)
        return self.drafter.draft(slots, lengths, anchors, width, *chance)

    def select(self, confidences: np.ndarray, context_tokens: int) -> Selection:
        """The policy's choice, by this step's confidences or, where its decisions lag, also by older ones."""
        return self.chooser.select(confidences, [r.slot for r in self.batch], self.cost, context_tokens)

    def verify(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        drafts: Drafts,
        keep_depth: np.ndarray,
    ) -> "Verified":
        """Run the target over each anchor and the drafts kept behind it, packed; accept what is right."""
        rows = Rows.of(slots, lengths, keep_depth + 1)
        block = np.column_stack((anchors, drafts.tokens))
        tokens = block[np.arange(block.shape[1]) <= keep_depth[:, None]]
        output = self.verifier.forward(tokens, rows)
        verdict = accept(output.logits, drafts, keep_depth, *_chance(self.batch, block.shape[1]))
        return Verified(tokens, rows, keep_depth, output, *verdict)

    def emit(self, drafts: Drafts, verified: "Verified") -> list[Emission]:
        """Extend every request by its accepted drafts and bonus token; show the drafter what is settled."""
        batch = np.arange(len(self.batch))
        following = np.column_stack((drafts.tokens, np.zeros_like(batch)))  # the token after each row's own
        following[batch, verified.num_accepted] = verified.bonus_token
        emissions = []
        for running, tokens, accepted in zip(
            self.batch, following.tolist(), verified.num_accepted.tolist(), strict=True
        ):
            taken = running.extend(tokens[: accepted + 1])
            emissions.append(Emission(running.request.request_id, taken, running.finish_reason))
        counts = verified.keep_depth + 1
        settled = np.where([r.finish_reason is None for r in self.batch], verified.num_accepted, -1)
        index = np.flatnonzero(verified.rows.columns <= np.repeat(settled, counts))
        next_tokens = following[np.repeat(batch, counts)[index], verified.rows.columns[index]]
        self._settle(verified.tokens, verified.rows, verified.output, index, next_tokens)
        return emissions

    # ---- the rest ---------------------------------------------------------------------------------------

    def _start(self) -> Running:
        request = self.waiting.popleft()
        stop = request.stop_token_ids
        seed = (self.seed, request.request_id) if request.seed is None else request.seed
        return Running(
            request,
            heapq.heappop(self.free_slots),
            self.verifier.eos_token_ids if stop is None else stop,
            np.random.default_rng(seed),
        )

    def _release(self, running: Running) -> None:
        self.drafter.release(running.slot)
        self.chooser.forget(running.slot)
        heapq.heappush(self.free_slots, running.slot)

    def _prefill(self, some: list[Running]) -> list[Emission]:
        """Run the target over the prompts, packed and in pieces of MOST_PREFILL rows; their first tokens."""
        prompts = [np.asarray(r.request.prompt, np.int64) for r in some]
        counts = np.array([len(prompt) for prompt in prompts])
        tokens, ends = np.concatenate(prompts), np.cumsum(counts) - 1
        rows = Rows.of(np.array([r.slot for r in some]), np.zeros_like(counts), counts)
        next_tokens = np.append(tokens[1:], 0)
        emissions = []
        for start in range(0, len(tokens), MOST_PREFILL):
            piece = slice(start, start + MOST_PREFILL)
            ended = np.flatnonzero((ends >= start) & (ends < start + MOST_PREFILL))
            output = self.verifier.forward(tokens[piece], rows[piece], ends[ended] - start)
            running = [some[i] for i in ended]
            nothing = Drafts.none(len(ended)), np.zeros_like(ended)
            first_tokens = accept(output.logits, *nothing, *_chance(running, 1)).bonus_token
            for r, token in zip(running, first_tokens.tolist(), strict=True):
                emissions.append(Emission(r.request.request_id, r.extend([token]), r.finish_reason))
            next_tokens[ends[ended]] = first_tokens
            index = np.arange(len(tokens[piece]))
            self._settle(tokens[piece], rows[piece], output, index, next_tokens[piece], self.drafting)
        return emissions

    def _settle(
        self,
        tokens: np.ndarray,
        rows: Rows,
        output: Output,
        index: np.ndarray,
        next_tokens: np.ndarray,
        at_once: bool = False,
    ) -> None:
        """Show the drafter the rows of a forward pass that stay in the text, and the token after each."""
        hidden, features, _ = output
        self.drafter.observe(
            Seen(
                rows.slots[index],
                rows.positions[index],
                tokens[index],
                next_tokens,
                hidden[index],
                None if features is None else features[index],
            ),
            at_once,
        )


def _chance(batch: list[Running], width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Temperatures [batch] and each request's own uniforms [batch, width]; nothing for a greedy batch."""
    if not any(r.request.temperature for r in batch):
        return None, None
    temperatures = np.array([r.request.temperature for r in batch])
    return temperatures, np.stack([r.random.random(width) for r in batch])


def empty_step(start_s: float, prefill_tokens: int, prefill_s: float, emissions: list[Emission]) -> Step:
    """A step without a batch: every request that was admitted ended with its first token."""
    none = np.zeros(0, np.int64)
    times = 0, 0.0, 0.0, 0.0, 0.0, None
    selection = Selection(none, 0, 0, 0.0)
    return Step(start_s, prefill_tokens, prefill_s, *times, none, none, selection, none, 0, emissions)
