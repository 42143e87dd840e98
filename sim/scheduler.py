"""The scheduler, compiled: which requests share the next step, as vLLM V1 decides it, on numpy rows.

A request waits, runs (its prompt in chunks, then token by token), and is done. First come, first served; who
runs goes first. Where blocks run out, the one that came last gives its own back, waits in front of all others
and is computed again. A step that takes blocks away lets nobody in.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcut.errors import InputError
from dcut.jit import compiled
from sim import kv
from sim.arrivals import Requests
from sim.kv import Rows
from traces.workloads import BLOCK_TOKENS

WAITING, RUNNING, PREEMPTED, DONE = range(4)
CHUNK, PROMPT, DECODE = range(3)  # what a request does in a step: part of a prompt, its end, or drafts
UNLIMITED = 10**9  # blocks

BOOK = np.dtype(
    [
        ("arrival_s", np.float64),
        ("think_s", np.float64),  # of a closed loop: from another request's finish to this one's arrival
        ("scheduled_s", np.float64),
        ("first_token_s", np.float64),
        ("token_s", np.float64),  # the newest
        ("finish_s", np.float64),
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("tokens", np.int64),  # of prompt and output so far
        ("computed", np.int64),  # of those and of drafts, that are in memory once all steps in flight are
        ("in_flight", np.int64),  # rows of steps in flight that yield tokens
        ("blocks", np.int64),  # its own
        ("shared", np.int64),  # leading blocks that are in memory anyway, for others
        ("stretch", np.int64),  # where the blocks lie that were taken from it
        ("left_tokens", np.int64),  # that it had computed then
        ("left_units", np.int64),  # and the units that it held
        ("first_unit", np.int64),  # of its prompt, in Ledger.hashes
        ("num_units", np.int64),
        ("units", np.int64),  # leading ones that it holds
        ("cached_tokens", np.int64),  # found in memory, all times that it was let in together
        ("num_preempted", np.int64),
        ("replica", np.int64),
        ("status", np.int64),
    ]
)
_QUEUE = np.dtype(
    [
        ("num_running", np.int64),
        ("num_front", np.int64),  # pre-empted: a stack, the next to be let in at the end
        ("head", np.int64),  # of the waiting
        ("tail", np.int64),
        ("max_seqs", np.int64),
        ("max_tokens", np.int64),
        ("reserve", np.int64),
        ("caching", np.int64),
        ("num_preempted", np.int64),
    ]
)
_PLAN = np.dtype(
    [
        ("num", np.int64),  # requests in the step
        ("num_decodes", np.int64),
        ("rows", np.int64),  # all tokens, drafts as if all were verified
        ("prefill_tokens", np.int64),
        ("prefill_pairs", np.float64),  # of a prompt's token and one it attends to
        ("preempted", np.int64),
    ]
)
_ENTRY = np.dtype([("request", np.int64), ("rows", np.int64), ("kind", np.int64)])


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server is configured to, in vLLM's words and with its defaults."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int | None = None  # None: never runs out
    block_size: int = 16
    prefix_caching: bool = True  # a pre-empted request's own blocks, and those that hashes share
    asynchronous: bool = False  # schedule a step while the one before runs
    reserve_prompt: bool = True  # let in only whose whole sequence fits
    prefill: bool = True  # False: prompts are computed elsewhere, requests come with their first token
    host_s: float = 0.0  # of scheduling; asynchronous, it shows only where it outlasts the step

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} is not a whole number of at least 1")
        if self.kv_blocks is not None and self.kv_blocks < 2:
            raise InputError(f"kv_blocks {self.kv_blocks}: a memory has 2 or more, one of them for padding")
        if not 0 <= self.host_s < np.inf:
            raise InputError(f"host_s {self.host_s:g}: scheduling takes 0 s or more")

    @property
    def usable_blocks(self) -> int:
        """Blocks for requests: vLLM keeps one for padding."""
        return UNLIMITED if self.kv_blocks is None else self.kv_blocks - 1

    @property
    def depth(self) -> int:
        """Steps that are scheduled when one starts, itself among them."""
        return 2 if self.asynchronous else 1


class Ledger:
    """All requests of a run, whichever replica serves them: a row each, about 250 bytes with its slot."""

    def __init__(self, pieces: Iterable[Requests]) -> None:
        """pieces: the requests in order of arrival."""
        parts = list(pieces)
        self.source = np.concatenate([part.source for part in parts])
        self.first_row = np.concatenate([part.first_row for part in parts])
        self.num_rows = np.concatenate([part.num_rows for part in parts])
        self.books = np.zeros(len(self.source), BOOK)
        for name in ("arrival_s", "think_s", "prompt_tokens", "output_tokens"):
            self.books[name] = np.concatenate([getattr(part, name) for part in parts])
        for name in ("scheduled_s", "first_token_s", "token_s", "finish_s"):
            self.books[name] = np.nan
        self.books["tokens"] = self.books["prompt_tokens"]
        self.books["stretch"] = -1
        self.hashes = np.zeros(0, np.int64)
        found = [
            (part.blocks, np.diff(part.block_starts))
            for part in parts
            if part.blocks is not None and part.block_starts is not None
        ]
        if found:
            self.hashes = np.concatenate([blocks for blocks, _ in found]).astype(np.int64)
            num = np.concatenate([num for _, num in found])
            self.books["first_unit"] = np.cumsum(num) - num
            self.books["num_units"] = (
                self.books["prompt_tokens"] // BLOCK_TOKENS
            )  # a part of one is not shared

    def __len__(self) -> int:
        return len(self.books)


class Plan(NamedTuple):
    """A step that is scheduled."""

    drafts: int  # slots beside the anchor's, of each request that decodes
    rows: int  # of those who decode, as if every draft were verified
    prompts: bool  # whether one is in work or waits
    prefill: tuple[int, float] = (0, 0.0)  # prompt tokens, and the pairs that their attention sees


class Scheduler:
    """The queues and the memory of one replica, and the steps it has scheduled ahead."""

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        """Raises InputError, naming it, for a request that outgrows the memory alone."""
        self.limits, self.ledger = limits, ledger
        books, needed = ledger.books, ledger.books["prompt_tokens"] + ledger.books["output_tokens"]
        room = limits.usable_blocks * limits.block_size
        if len(books) and (at := int(np.argmax(needed))) >= 0 and needed[at] > room:
            raise InputError(
                f"request {at}: {books[at]['prompt_tokens']} prompt and {books[at]['output_tokens']} output "
                f"tokens outgrow the KV memory of {room} tokens: give more --kv-blocks or drop the row"
            )
        units = 0
        if limits.prefix_caching and limits.prefill and len(ledger.hashes):
            if BLOCK_TOKENS % limits.block_size:
                raise InputError(
                    f"block_size {limits.block_size} does not divide the {BLOCK_TOKENS} tokens behind each "
                    "of the workload's hashes: give one that does, or turn prefix caching off"
                )
            units = int(ledger.hashes.max()) + 1
        self.kv = kv.new_memory(limits.usable_blocks, limits.block_size, units, BLOCK_TOKENS)
        self.queue, self.running, self.front, self.waiting = new_queues(
            len(ledger),
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.reserve_prompt,
            limits.prefix_caching,
        )
        self.plans, self.entries = new_plans(limits.depth, limits.max_num_seqs)
        self.oldest = 0  # the step to take next, or in flight
        self.ahead: deque[Plan] = deque()
        self.gaps = np.zeros(GAP_BINS, np.int64)
        self.finished = np.zeros(limits.max_num_seqs, np.int64)

    @property
    def num_running(self) -> int:
        """Requests that have a seat."""
        return int(self.queue[0]["num_running"])

    @property
    def num_waiting(self) -> int:
        """Requests that wait, the pre-empted among them."""
        queue = self.queue[0]
        return int(queue["tail"] - queue["head"] + queue["num_front"])

    def submit(self, request: int) -> None:
        """Let a request wait behind the others."""
        tail = self.queue[0]["tail"]
        self.waiting[tail % len(self.waiting)] = request
        self.queue[0]["tail"] = tail + 1

    def enter(self, now_s: float) -> np.ndarray:
        """Let in requests whose prompts were computed elsewhere; those that ask for no more, int64."""
        num = enter(self.queue, self.ledger.books, self.running, self.front, self.waiting, *self.kv, now_s,
                    self.finished)  # fmt: skip
        return self.finished[:num]

    def hold(self, drafts: int) -> bool:
        """Schedule who decodes in one step more, with slots for so many drafts; whether there is work."""
        at = (self.oldest + len(self.ahead)) % len(self.plans)
        num, rows, prompts = hold(
            self.queue, self.ledger.books, self.running, self.front, *self.kv, self.ledger.hashes, self.plans,
            self.entries, at, drafts)  # fmt: skip
        self.ahead.append(Plan(rows // num - 1 if num else 0, rows, prompts))
        return num > 0 or (prompts and self.limits.prefill)

    def fill(self, num_rows: int, now_s: float) -> bool:
        """Share with prompts what `num_rows` leave of the newest step; whether anybody takes part in it."""
        plan = self.ahead[-1]
        if plan.prompts and self.limits.prefill:
            at = (self.oldest + len(self.ahead) - 1) % len(self.plans)
            num, *prefill = fill(
                self.queue, self.ledger.books, self.running, self.front, self.waiting, *self.kv,
                self.ledger.hashes, self.plans, self.entries, at, num_rows, now_s)  # fmt: skip
            self.ahead[-1] = plan._replace(prefill=tuple(prefill))
            return num > 0
        return plan.rows > 0

    def settle(self, num_accepted: np.ndarray, now_s: float) -> np.ndarray:
        """Count the tokens of the step that ends now; the requests that are done, int64."""
        num = settle(self.queue, self.ledger.books, self.running, self.front, *self.kv, self.ledger.hashes,
                     self.plans, self.entries, self.oldest, num_accepted, now_s, self.gaps,
                     self.finished)  # fmt: skip
        self.oldest = (self.oldest + 1) % len(self.plans)
        self.ahead.popleft()
        return self.finished[:num]


# Token gaps are counted in bins of equal ratio, 0.5 % wide, from 10 us up.
GAP_BINS = 4096
_GAP_S, _GAP_RATIO = 1e-5, 1.005


@compiled
def gap_bin(gap_s: float) -> int:
    """Where a gap is counted."""
    return min(int(np.log(max(gap_s, _GAP_S) / _GAP_S) / np.log(_GAP_RATIO)), GAP_BINS - 1)


def gap_quantile(gaps: np.ndarray, share: float) -> float:
    """The gap, in seconds, that this share of those counted in `gaps` does not exceed (within 0.5 %)."""
    at = int(np.searchsorted(np.cumsum(gaps), share * gaps.sum()))
    return _GAP_S * _GAP_RATIO ** (at + 0.5)


def new_queues(
    num_requests: int, max_seqs: int, max_tokens: int, reserve: bool, caching: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Empty ones: the counters, and the requests that run, were pre-empted, and wait."""
    queue = np.zeros(1, _QUEUE)
    queue["max_seqs"], queue["max_tokens"] = max_seqs, max_tokens
    queue["reserve"], queue["caching"] = reserve, caching
    return queue, np.zeros(max_seqs, np.int64), np.zeros(max_seqs, np.int64), np.zeros(num_requests, np.int64)


def new_plans(depth: int, max_seqs: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps to schedule: their sums, and who takes part, [depth, max_seqs]."""
    return np.zeros(depth, _PLAN), np.zeros((depth, max_seqs), _ENTRY)


@compiled
def hold(
    queue: Rows,
    books: Rows,
    running: Rows,
    front: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
    plans: Rows,
    entries: Rows,
    at: int,
    drafts: int,
) -> tuple[int, int, bool]:
    """Start plans[at]: everyone who decodes, in order, with blocks for the anchor and the drafts.

    A slot past the request's last token is never asked for. Of a request whose last token is in flight
    nothing is left to schedule. Returns how many decode, their rows, and whether prompts are in work or wait.
    """
    q, plan = queue[0], plans[at]
    drafts = max(0, min(drafts, q.max_tokens // max(q.num_running, 1) - 1))
    plan.num = 0
    plan.num_decodes = 0
    plan.rows = 0
    plan.prefill_tokens = 0
    plan.prefill_pairs = 0.0
    plan.preempted = 0
    i, in_work = 0, False
    while i < q.num_running and plan.rows < q.max_tokens:
        r = running[i]
        book = books[r]
        last = book.prompt_tokens + book.output_tokens
        ends = book.in_flight > 0 and book.computed + 2 - book.in_flight >= last
        if ends or not _decodes(book):
            in_work |= not ends
            i += 1
            continue
        upto = min(book.computed + 1 + drafts, last)
        need = kv.num_blocks_of(upto, memory[0].block_size) - book.shared - book.blocks
        while need > memory[0].num_free:
            victim = running[q.num_running - 1]
            _preempt(queue, books, running, front, memory, stretches, units, hashes)
            plan.preempted += 1
            if victim == r:
                return plan.num, plan.rows, True
        if need > 0:
            kv.take(memory, stretches, need)
            book.blocks += need
        entry = entries[at, plan.num]
        entry.request = r
        entry.rows = 1 + drafts
        entry.kind = DECODE
        book.computed += 1 + drafts
        book.in_flight += 1 + drafts
        plan.num += 1
        plan.num_decodes += 1
        plan.rows += 1 + drafts
        i += 1
    return plan.num, plan.rows, in_work or i < q.num_running or _anyone_waits(queue)


@compiled
def fill(
    queue: Rows,
    books: Rows,
    running: Rows,
    front: Rows,
    waiting: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
    plans: Rows,
    entries: Rows,
    at: int,
    num_rows: int,
    now_s: float,
) -> tuple[int, int, float]:
    """Share what `num_rows` leave of the token budget: first with the prompt in work, then with who waits.

    Only the last of the running can be a prompt in work: nobody is let in while the budget is short of it.
    Returns how many take part in the step, its prompt tokens, and their pairs.
    """
    q, plan, block_size = queue[0], plans[at], memory[0].block_size
    budget = q.max_tokens - num_rows
    if q.num_running > 0 and budget > 0:
        r = running[q.num_running - 1]
        book = books[r]
        new = min(book.tokens + book.in_flight - book.computed, budget)
        if new > 0 and not _decodes(book):
            need = kv.num_blocks_of(book.computed + new, block_size) - book.shared - book.blocks
            if need > memory[0].num_free:
                _preempt(queue, books, running, front, memory, stretches, units, hashes)
                plan.preempted += 1
            else:
                kv.take(memory, stretches, max(need, 0))
                book.blocks += max(need, 0)
                budget -= _compute(queue, books, memory, stretches, units, hashes, plan, entries[at], r, new)
    while budget > 0 and plan.preempted == 0 and q.num_running < q.max_seqs and _anyone_waits(queue):
        r = _next_in_line(queue, front, waiting)
        book = books[r]
        held, found = _hits(books, r, memory, stretches, units, hashes)
        unused = 0  # of the units found, those that nobody uses
        for j in range(held):
            unused += units[hashes[book.first_unit + j]].num_users == 0
        shared = book.shared + held * memory[0].unit_blocks
        computed = (shared + found) * block_size
        new = min(book.tokens - computed, budget)
        reserved = book.tokens if q.reserve else computed + new
        free = memory[0].num_free - unused * memory[0].unit_blocks
        if kv.num_blocks_of(reserved, block_size) - shared > free:
            break
        _leave_line(queue)
        for j in range(held):
            kv.use_unit(memory, stretches, units, hashes[book.first_unit + j])
        if found > 0:
            kv.withdraw(memory, stretches, book.stretch, found)
        book.stretch = -1
        book.units = held
        book.shared = shared
        book.blocks = kv.num_blocks_of(computed + new, block_size) - shared
        kv.take(memory, stretches, book.blocks - found)
        book.computed = computed
        book.cached_tokens += computed
        if book.status == WAITING:
            book.scheduled_s = now_s
        book.status = RUNNING
        running[q.num_running] = r
        q.num_running += 1
        budget -= _compute(queue, books, memory, stretches, units, hashes, plan, entries[at], r, new)
    return plan.num, plan.prefill_tokens, plan.prefill_pairs


@compiled
def enter(
    queue: Rows,
    books: Rows,
    running: Rows,
    front: Rows,
    waiting: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    now_s: float,
    finished: Rows,
) -> int:
    """Let in, while seats and blocks last, requests with their prompts and first tokens computed."""
    q, num_finished = queue[0], 0
    while q.num_running < q.max_seqs and num_finished < len(finished) and _anyone_waits(queue):
        r = _next_in_line(queue, front, waiting)
        book = books[r]
        tokens = max(book.tokens, book.prompt_tokens + 1)
        need = kv.num_blocks_of(tokens, memory[0].block_size)
        if need > memory[0].num_free:
            break
        _leave_line(queue)
        if book.status == WAITING:
            book.scheduled_s = now_s
            book.first_token_s = now_s
            book.token_s = now_s
        book.tokens = tokens
        if book.output_tokens == 1:
            book.status = DONE
            book.finish_s = now_s
            finished[num_finished] = r
            num_finished += 1
            continue
        kv.take(memory, stretches, need)
        book.blocks = need
        book.computed = tokens - 1
        book.status = RUNNING
        running[q.num_running] = r
        q.num_running += 1
    return num_finished


@compiled
def settle(
    queue: Rows,
    books: Rows,
    running: Rows,
    front: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
    plans: Rows,
    entries: Rows,
    at: int,
    num_accepted: Rows,
    now_s: float,
    gaps: Rows,
    finished: Rows,
) -> int:
    """End plans[at]: hand out its tokens; fill `finished`, and return how many there are.

    num_accepted: of each request that decoded and was not done before, in the plan's order. Rejected drafts
    leave their slots to the next step's. A done request's blocks and seat are free at once, so a step that
    was scheduled meanwhile has gone without them.
    """
    q, num_finished, decode = queue[0], 0, 0
    for k in range(plans[at].num):
        entry = entries[at, k]
        book = books[entry.request]
        if entry.kind == CHUNK or book.status == DONE:
            continue
        accepted, rows = 0, 1
        if entry.kind == DECODE:
            accepted, rows = num_accepted[decode], entry.rows
            decode += 1
        book.in_flight -= rows
        if book.status == RUNNING:
            book.computed -= rows - 1 - accepted
        last = book.prompt_tokens + book.output_tokens
        book.tokens = min(book.tokens + accepted + 1, last)
        if np.isnan(book.first_token_s):
            book.first_token_s = now_s
        elif len(gaps) > 0:
            gaps[gap_bin(now_s - book.token_s)] += 1
        book.token_s = now_s
        if book.tokens == last:
            book.finish_s = now_s
            if book.status == PREEMPTED:
                _remove(front, q.num_front, entry.request)
                q.num_front -= 1
            else:
                _free(books, entry.request, memory, stretches, units, hashes, False)
                _remove(running, q.num_running, entry.request)
                q.num_running -= 1
            book.status = DONE
            finished[num_finished] = entry.request
            num_finished += 1
    return num_finished


@compiled
def _anyone_waits(queue: Rows) -> bool:
    return queue[0].num_front > 0 or queue[0].head < queue[0].tail


@compiled
def _next_in_line(queue: Rows, front: Rows, waiting: Rows) -> int:
    """Who is let in next: the last that was pre-empted, else the first to have come."""
    q = queue[0]
    return front[q.num_front - 1] if q.num_front > 0 else waiting[q.head % len(waiting)]


@compiled
def _leave_line(queue: Rows) -> None:
    """The next in line is let in."""
    if queue[0].num_front > 0:
        queue[0].num_front -= 1
    else:
        queue[0].head += 1


@compiled
def _decodes(book: Rows) -> bool:
    """Whether all but the newest token is in memory, or will be once the steps in flight are."""
    return (
        book.tokens + book.in_flight - book.computed == 1
        and book.tokens + book.in_flight > book.prompt_tokens
    )


@compiled
def _hits(
    books: Rows,
    r: int,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
) -> tuple[int, int]:
    """Of a waiting request: leading units in memory, and blocks of its own behind them that survived."""
    book, m = books[r], memory[0]
    held, most = 0, (book.tokens - 1) // m.block_size  # the last token is always computed
    if len(units) > 0:
        while (
            held < book.num_units
            and (held + 1) * m.unit_blocks <= most
            and kv.is_cached(memory, stretches, units, hashes[book.first_unit + held])
        ):
            held += 1
    shared = book.shared + held * m.unit_blocks
    own = kv.surviving(memory, stretches, book.stretch, len(units) + r)
    if own > 0 and book.left_units != held:
        own = 0
    return held, max(0, min(own, book.left_tokens // m.block_size - shared, most - shared))


@compiled
def _compute(
    queue: Rows,
    books: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
    plan: Rows,
    entries: Rows,
    r: int,
    new: int,
) -> int:
    """Put `new` tokens of a prompt (or of what is computed again) into the plan; returns them."""
    book, m = books[r], memory[0]
    ends = book.computed + new == book.tokens + book.in_flight
    entry = entries[plan.num]
    entry.request = r
    entry.rows = new
    entry.kind = PROMPT if ends else CHUNK
    plan.num += 1
    plan.rows += new
    plan.prefill_tokens += new
    plan.prefill_pairs += new * (book.computed + 0.5 * new)
    book.computed += new
    if ends:
        book.in_flight += 1
    if len(units) > 0:  # whole units become everyone's, unless another request brought in the same
        while (
            book.units < book.num_units
            and (book.units + 1) * m.unit_blocks * m.block_size <= book.computed
            and not kv.is_cached(memory, stretches, units, hashes[book.first_unit + book.units])
        ):
            units[hashes[book.first_unit + book.units]].num_users = 1
            book.units += 1
            book.blocks -= m.unit_blocks
            book.shared += m.unit_blocks
    return new


@compiled
def _preempt(
    queue: Rows,
    books: Rows,
    running: Rows,
    front: Rows,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
) -> None:
    """Take the blocks of the request that runs last, and let it wait in front of all others."""
    q = queue[0]
    q.num_running -= 1
    q.num_preempted += 1
    r = running[q.num_running]
    book = books[r]
    book.left_tokens = book.computed - book.in_flight
    _free(books, r, memory, stretches, units, hashes, q.caching > 0)
    book.computed = 0
    book.status = PREEMPTED
    book.num_preempted += 1
    front[q.num_front] = r
    q.num_front += 1


@compiled
def _free(
    books: Rows,
    r: int,
    memory: Rows,
    stretches: Rows,
    units: Rows,
    hashes: Rows,
    again: bool,
) -> None:
    """Free a request's blocks, the last first; again: it may come back for what they hold."""
    book = books[r]
    book.stretch = -1
    book.left_units = book.units
    if book.blocks > 0:
        book.stretch = kv.release(memory, stretches, len(units) + r if again else kv.NOBODY, book.blocks)
    book.blocks = 0
    for j in range(book.units - 1, -1, -1):
        kv.leave_unit(memory, stretches, units, hashes[book.first_unit + j])
    book.shared -= book.units * memory[0].unit_blocks
    book.units = 0


@compiled
def _remove(requests: Rows, num: int, request: int) -> None:
    """Take a request out of the first `num`, the others keeping their order."""
    kept = 0
    for k in range(num):
        requests[kept] = requests[k]
        kept += requests[k] != request
