"""dcut-plus: the budget that brings the most tokens over time, drafting or not, learnt as it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from dcut.calibration import OnlineCalibration, cell
from dcut.cost import CostTable
from dcut.jit import compiled
from dcut.protocol import BANDS, BudgetPolicy, Sees, band
from dcut.scores import check_confidences
from dcut.selector import Selection

_MOST_BUDGETS = 512
_NUM_BINS = 24
_NEAR = np.exp(-0.5 * np.subtract.outer(np.arange(_NUM_BINS), np.arange(_NUM_BINS)) ** 2.0)
_PROBE_SHARE = 0.002  # of the tokens, what looking again at an alternative may cost
_FIRST_SHARE = 0.03  # the same for the first look at what the cost table holds out little hope for
_HOPE = 0.8  # the gain that the cost table must let expect for drafting from the start
FIRST_GAIN = 1.25  # what drafting is thought to bring until it is known
_MIN_GAIN = 0.005  # an alternative must look better by this share before it is taken up

# As in dcut.selector, survival is sorted into bins by its floating-point bits, 32 an octave. What survives
# with less than 1 in 128 shares the last bin and counts nothing.
_SHIFT = 47
_TOP = 0x3FF0000000000000 >> _SHIFT
_LAST = 7 * 32
_FLOOR = 2.0**-7


class Budgets(NamedTuple):
    """The numbers of drafts to choose among at one batch size, what each costs, and its bin in a `_Clock`."""

    drafts: np.ndarray  # int64, rising
    seconds: np.ndarray  # drafter and target together, at the context as measured
    bins: np.ndarray  # int64


@lru_cache(maxsize=1024)
def budgets_on(cost: CostTable, batch_size: int, drafts: int) -> Budgets:
    """All budgets that the hardware tells apart, of 0..batch_size * drafts.

    On a staircase these are its edges: the most drafts that each captured graph holds. Where the time rises
    with every token, every number is one, thinned evenly to a few hundred.
    """
    most = batch_size * drafts
    seconds = cost.curve(batch_size, batch_size + most, extrapolate=True)[batch_size:]
    edges = np.flatnonzero(np.append(seconds[1:] != seconds[:-1], True))
    if len(edges) > _MOST_BUDGETS:
        edges = edges[np.unique(np.linspace(0, len(edges) - 1, _MOST_BUDGETS).astype(np.int64))]
    total = seconds[edges] + cost.draft_seconds(batch_size, extrapolate=True, drafts=drafts)
    return Budgets(edges, total, (_NUM_BINS * np.sqrt(edges / (most + 1))).astype(np.int64))


class Thought(NamedTuple):
    """What asking for a number of drafts may bring, before any was seen."""

    gain: float  # tokens over those of plain decoding in the same time
    spent: float  # that time, in plain tokens a request


@lru_cache(maxsize=1024)
def _thought(cost: CostTable, batch_size: int, drafts: int) -> Thought:
    """By the cost table alone, where each draft is accepted with 0.75 after those before it."""
    seconds = cost.draft_seconds(batch_size, extrapolate=True, drafts=drafts)
    curve = cost.curve(batch_size, batch_size * (1 + drafts), extrapolate=True)
    steps = (seconds + curve[batch_size::batch_size]) / _plain_seconds(cost, batch_size)
    gains = np.cumsum(0.75 ** np.arange(drafts + 1)) / steps
    best = int(np.argmax(gains))
    return Thought(float(gains[best]), float(steps[best]))


@lru_cache(maxsize=1024)
def _plain_seconds(cost: CostTable, batch_size: int) -> float:
    return cost.plain_seconds(batch_size, extrapolate=True)


class _Clock:
    """By which factor steps take longer than the cost table says, by the share of drafts verified.

    A bin's factor leans on its neighbours, and where nothing near was measured on the mean of all. To learn
    the slope where it matters, a step now and then takes a little less or more than the best budget: every
    16 steps while that surprises, every 256 once it does not.
    """

    def __init__(self) -> None:
        self.factor = np.ones(_NUM_BINS)
        self.version = 0  # counts the changes of factor
        self._steps = np.zeros(_NUM_BINS)  # measured, fading
        self._excess = np.zeros(_NUM_BINS)  # sum of measured / believed - 1
        self._due, self._since = 1, 0  # of the next change
        self._patience, self._waited, self._longer = 16, 0, False  # of the next look around

    def stretch(self) -> float:
        """By which factor to change the best budget in this step, 1 most of the time."""
        self._waited += 1
        if self._waited < self._patience:
            return 1.0
        self._waited, self._longer = 0, not self._longer
        return 1.4 if self._longer else 0.7

    def add(self, at: int, measured_over_believed: float) -> None:
        """Count one step in bin `at`; a hiccup of the machine counts as twice the time at most."""
        ratio = min(max(measured_over_believed, 0.5), 2.0)
        if self._waited == 0:  # that was a look around
            surprise = abs(ratio / self.factor[at] - 1.0)
            self._patience = min(2 * self._patience, 256) if surprise < 0.02 else 16
        self._steps[at] += 1.0
        self._excess[at] += ratio - 1.0
        self._since += 1
        if self._since < self._due:
            return
        self._since, self._due = 0, min(2 * self._due, 32)
        everywhere = self._excess.sum() / (self._steps.sum() + 4.0)
        factor = 1.0 + (_NEAR @ self._excess + 2.0 * everywhere) / (_NEAR @ self._steps + 2.0)
        if np.abs(factor - self.factor).max() > 0.002:
            self.factor = factor
            self.version += 1
        self._steps *= 0.9
        self._excess *= 0.9


class _Length:
    """What asking the drafter for one number of drafts has brought lately, against plain decoding."""

    def __init__(self, gain: float, batch_size: int) -> None:
        self.clock = _Clock()
        self.idle = 0  # steps since it was last asked for
        # A request's tokens, fading: those that came, and those of plain decoding in the same time. Requests
        # differ more than steps do, so a small batch holds on to what is thought at first.
        self._plain_tokens = 64.0 / batch_size**1.5
        self._tokens = gain * self._plain_tokens
        self._last = 1.0  # what its newest step cost, in plain tokens a request
        self.steps = 0
        self.new = True  # promising, and tried too little to be judged

    def think(self, thought: Thought, batch_size: int) -> None:
        """Begin from what the cost table lets expect."""
        self._plain_tokens = 64.0 / batch_size**1.5
        self._tokens = thought.gain * self._plain_tokens
        self._last = thought.spent

    @property
    def gain(self) -> float:
        """Tokens that it brought over those of plain decoding in the same time."""
        return self._tokens / self._plain_tokens

    def add(self, tokens: float, plain_tokens: float, spent: float, batch_size: int) -> None:
        """Count one step: its tokens a request, those of plain decoding meanwhile, and what it cost to take.

        Older ones fade over 32 steps or more; steps elsewhere count as an eighth of one, so that a lucky
        look does not stand alone.
        """
        fade = math.exp(-(1 + self.idle / 8) / (32 + 512 / batch_size))
        self._tokens = fade * self._tokens + tokens
        self._plain_tokens = fade * self._plain_tokens + plain_tokens
        self._last, self.idle = spent, 0
        self.steps += 1
        self.new &= self.steps < max(2, 16 / batch_size)

    @property
    def settling(self) -> bool:
        """Whether its next step tells no time: the first may compile, and after a pause drafters catch up."""
        return self.steps < 2 or self.idle > 0

    def due(self, best: float) -> bool:
        """Whether one more look costs little enough by now, where gaining `best` is given up for it."""
        self.idle += 1
        share = _PROBE_SHARE if self.steps else _FIRST_SHARE
        return self.new or self.idle * share >= max(best - self.gain, _MIN_GAIN) * self._last


class _Size:
    """What was learnt at about one batch size: how long plain steps take, and what each length brings."""

    def __init__(self, gain: float, batch_size: int) -> None:
        self.batch_size = batch_size
        self.plain_factor = 1.0  # by which plain steps take longer than the cost table says
        self.lengths: dict[int, _Length] = {}
        self.best = max(gain, 1.0)  # gain of the present choice
        self._gain = gain
        self._chosen = 0  # length; 0 is plain decoding
        self._plain_steps, self._plain_idle = 0, 0

    def add_plain(self, measured_over_believed: float) -> None:
        """Count one plain step."""
        self._plain_steps += 1
        self._plain_idle = 0
        weight = max(0.1, 1.0 / self._plain_steps)
        self.plain_factor += weight * (min(max(measured_over_believed, 0.5), 2.0) - self.plain_factor)

    def begin(self, thoughts: dict[int, Thought]) -> None:
        """Start with the most promising length, or with none where the cost table holds out little hope."""
        for drafts, thought in thoughts.items():
            length = self.length(drafts)
            length.new = thought.gain >= _HOPE
            if not length.new:
                length.think(thought, self.batch_size)
        best = max(thoughts, key=lambda drafts: thoughts[drafts].gain)
        self._chosen = best if thoughts[best].gain >= _HOPE else 0

    def _plain_due(self) -> bool:
        """Whether to time a plain step: twice early on, then for its share of the tokens."""
        self._plain_idle += 1
        early = self._plain_steps < 2 and self._plain_idle >= 8
        return early or self._plain_idle * _PROBE_SHARE >= max(self.best - 1.0, _MIN_GAIN)

    def length(self, drafts: int) -> _Length:
        """What is known of that many drafts; at first that they gain like the nearest batch size's."""
        found = self.lengths.get(drafts)
        if found is None:
            found = self.lengths[drafts] = _Length(self._gain, self.batch_size)
        return found

    def choose(self, lengths: Sequence[int]) -> int:
        """The number of drafts to ask for: what brought most lately, now and then another for a look."""
        if len(lengths) == 1:
            return self._one(lengths[0])
        gains = {0: 1.0} | {drafts: self.length(drafts).gain for drafts in lengths}
        better = max(gains, key=gains.__getitem__)
        if gains[better] > gains.get(self._chosen, 0.0) + _MIN_GAIN:
            self._chosen = better
        self.best = max(gains[better], 1.0)
        for drafts in lengths:
            if drafts != self._chosen and self.lengths[drafts].due(self.best):
                return drafts
        return 0 if self._chosen and self._plain_due() else self._chosen

    def _one(self, drafts: int) -> int:
        """`choose` where there is one length or none at all to ask for."""
        length = self.length(drafts)
        gain = length.gain
        self.best = max(gain, 1.0)
        if self._chosen:
            self._chosen = drafts if length.new or gain >= 1.0 - _MIN_GAIN else 0
        elif gain > 1.0 + _MIN_GAIN:
            self._chosen = drafts
        if self._chosen:
            return 0 if self._plain_due() else drafts
        return drafts if length.due(1.0) else 0


@dataclass
class Plus(BudgetPolicy):
    """The best budget of all that the hardware distinguishes, for the most tokens per second over time.

    - A draft's worth is its calibrated survival (dcut.calibration, learnt while serving).
    - A step's worth is its tokens, bonus included, less what its seconds would bring at the rate reached
      lately. The best of each step at that price is the best rate over time (fractional programming,
      Dinkelbach 1967), which the best ratio of each single step is not.
    - Step times start from the cost table and are corrected by those measured while serving, plain ones too.
    - Not drafting saves the drafter as well, and a drafter with several lengths (`cost.draft_lengths`) may be
      asked for fewer. The choice is what brought most tokens for its time lately; the others are tried again
      now and then, each for at most 0.2 % of the tokens.
    - Where decisions lag, the budget follows the last 4 steps, or 64 request-steps if those are fewer, rather
      than one old step.
    Without a cost table it verifies everything.
    """

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        # Corrected seconds of all budgets, by batch size and drafts; of which table and version of the clock.
        self._prices: dict[tuple[int, int], tuple[CostTable | None, int, np.ndarray]] = {}
        self._calibrations: dict[int, OnlineCalibration] = {}  # by number of drafts
        self._recent: np.ndarray | None = None  # histogram of survival of recent steps, where decisions lag
        self._came, self._promised = 512.0, 512.0  # tokens that came, and that were expected; they fade
        # The step under way:
        self._drafted: np.ndarray | None = None  # its confidences; None: a plain one
        self._expected = 0.0  # its tokens
        self._plain_s = 0.0  # time of a plain step in its place, as the cost table says; 0: no table
        self._believed_s = 0.0  # its time, as the cost table says
        self._bin = 0  # of the clock
        self._turn = 0  # counts drafted steps

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def start(self) -> "Plus":
        return type(self)()

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        if cost is None:
            return longest
        size, lengths = self._size(batch_size), _lengths(cost, longest)
        if not size.lengths:
            size.begin({drafts: _thought(cost, batch_size, drafts) for drafts in lengths})
        return size.choose(lengths)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        return self._choose(confidences, None, cost, context_tokens)

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        blind = self.sees == "confidences"
        return self._choose(confidences, stale if blind else None, cost, context_tokens)

    def _choose(
        self,
        confidences: np.ndarray,
        stale: np.ndarray | None,
        cost: CostTable | None,
        context_tokens: float | None,
    ) -> Selection:
        batch, drafts = confidences.shape
        keep_depth = np.zeros(batch, np.int64)
        if cost is not None:
            context_s = cost.context_seconds(batch, context_tokens, batch)
            self._plain_s = _plain_seconds(cost, batch) + context_s
        if not drafts:
            self._drafted = None
            return Selection(keep_depth, batch, 0, float(batch))
        if not (confidences.dtype == np.float32 and confidences.flags.c_contiguous):
            confidences = check_confidences(confidences)
        calibration = self._calibrations.get(drafts)
        if calibration is None:
            calibration = self._calibrations[drafts] = OnlineCalibration(drafts)
        if cost is None:
            budgets, seconds, price, stretch = _everything(confidences.size), _ONE, 0.0, 1.0
        else:
            budgets, size = budgets_on(cost, batch, drafts), self._size(batch)
            clock = size.length(drafts).clock
            table, version, seconds = self._prices.get((batch, drafts), (None, 0, budgets.seconds))
            if table is not cost or version != clock.version:
                seconds = budgets.seconds * clock.factor[budgets.bins]
                self._prices[batch, drafts] = cost, clock.version, seconds
            if cost.context_pair_s:
                seconds = seconds + cost.context_seconds(batch, context_tokens, batch + budgets.drafts)
            price = size.best * batch / (self._plain_s * size.plain_factor)
            stretch = clock.stretch()
        recent = _NOTHING if stale is None else self._remembered(stale, calibration)
        chosen, worth = _admit(
            confidences,
            calibration.odds,
            calibration.tilt,
            budgets.drafts,
            seconds,
            price,
            stretch,
            recent,
            keep_depth,
        )
        if chosen < 0:
            check_confidences(confidences)
        kept = int(budgets.drafts[chosen])
        self._drafted, self._expected = confidences, batch + worth
        self._believed_s = float(budgets.seconds[chosen])
        if cost is not None:
            self._believed_s += cost.context_seconds(batch, context_tokens, batch + kept)
            self._believed_s += cost.draft_context_seconds(batch, context_tokens, drafts)
        self._bin = int(budgets.bins[chosen])
        return Selection(keep_depth, batch + kept, band(kept, batch, drafts), self._expected)

    def _remembered(self, stale: np.ndarray, calibration: OnlineCalibration) -> np.ndarray:
        """The histogram of recent survivals, with these; at first that of drafts with confidence 0.7."""
        if self._recent is None:
            self._recent = np.zeros((2, _LAST + 1))
            start = np.full((16, stale.shape[1]), 0.7, np.float32)
            _remember(start, calibration.odds, calibration.tilt, self._recent)
        _remember(check_confidences(stale), calibration.odds, calibration.tilt, self._recent)
        return self._recent

    def drafted(self, confidences: np.ndarray) -> None:
        self._drafted = confidences

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        if not self._plain_s:
            return
        batch = len(keep_depth)
        size = self._size(batch)
        if self._drafted is None:
            size.add_plain(seconds / self._plain_s)
            return
        length = size.length(self._drafted.shape[1])
        usual_s = self._believed_s * float(length.clock.factor[self._bin])
        if not length.settling:
            length.clock.add(self._bin, seconds / self._believed_s)
        self._came += batch + int(num_accepted.sum())
        self._promised += self._expected
        honest = self._came / self._promised
        fade = math.exp(-batch / 8192)
        self._came, self._promised = self._came * fade, self._promised * fade
        fair_s = min(seconds, usual_s if length.settling else 2.0 * usual_s)
        plain_s = self._plain_s * size.plain_factor
        length.add(
            honest * self._expected / batch, fair_s / plain_s, min(seconds, 8 * usual_s) / plain_s, batch
        )
        self._learn(keep_depth, num_accepted)

    def _learn(self, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        assert self._drafted is not None
        calibration = self._calibrations[self._drafted.shape[1]]
        self._turn += 1
        if calibration.settled and self._turn % (1 + len(keep_depth) // 32):
            return  # a large batch has labels enough in every few steps
        calibration.observe(self._drafted, keep_depth, num_accepted)

    def _size(self, batch_size: int) -> _Size:
        """What was learnt at about this batch size, two sizes an octave; a new one gains like the nearest."""
        at = _octave_halves(batch_size)
        size = self._sizes.get(at)
        if size is None:
            nearest = min(self._sizes, key=lambda other: abs(other - at), default=None)
            gain = FIRST_GAIN if nearest is None else self._sizes[nearest].best
            size = self._sizes[at] = _Size(gain, batch_size)
        return size


class OracleSurvival(Plus):
    """dcut-plus that is told the true probability of each draft: no causal policy can do better by more than
    chance. Only for traces that hold them."""

    sees: ClassVar[Sees] = "accept_probs"

    def _learn(self, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        """There is nothing to learn about what is true."""


class Oracle(OracleSurvival):
    """dcut-plus that is told which drafts will be accepted: an upper bound for every policy."""

    sees: ClassVar[Sees] = "num_accepted"


@lru_cache(maxsize=256)
def _lengths(cost: CostTable, longest: int) -> tuple[int, ...]:
    """The numbers of drafts that the drafter can be asked for, rising."""
    return (*(length for length, _ in cost.draft_lengths if length < longest), longest)


@lru_cache(maxsize=4096)
def _octave_halves(batch_size: int) -> int:
    return round(2 * math.log2(batch_size))


@lru_cache(maxsize=64)
def _everything(num_drafts: int) -> Budgets:
    return Budgets(np.array([num_drafts]), _ONE, np.zeros(1, np.int64))


_ONE = np.ones(1)
_NOTHING = np.zeros((2, 0))


@compiled
def _bin(
    confidences: np.ndarray,
    odds: np.ndarray,
    tilt: np.ndarray,
    survival: np.ndarray,
    bins: np.ndarray,
    histogram: np.ndarray,
) -> bool:
    """Fill survival and bins [batch, drafts], add them to histogram [count and sum, bins]; False: refused."""
    batch, drafts = confidences.shape
    bits = survival.view(np.int64)
    outside = 0
    for i in range(batch):
        for k in range(drafts):
            confidence = confidences[i, k]
            outside += not (confidence >= np.float32(0.0) and confidence <= np.float32(1.0))
    if outside:
        return False
    for i in range(batch):
        product = 1.0
        for k in range(drafts):
            product /= 1.0 + tilt[k] * odds[cell(confidences[i, k])]
            if product < _FLOOR:
                histogram[0, _LAST] += drafts - k
                for rest in range(k, drafts):
                    survival[i, rest] = 0.0
                    bins[i, rest] = _LAST
                break
            survival[i, k] = product
            slot = _TOP - (bits[i, k] >> _SHIFT)
            bins[i, k] = slot
            histogram[0, slot] += 1.0
            histogram[1, slot] += product
    return True


@compiled
def _best(histogram: np.ndarray, budgets: np.ndarray, seconds: np.ndarray, price: float) -> int:
    """The budget with the largest sum of its best survivals less price * seconds; the first of equals."""
    best, most = 0, -np.inf
    at, before, total = 0, 0.0, 0.0  # all bins before `at` are in; they hold `before` drafts
    for q in range(len(budgets)):
        while at < _LAST and before + histogram[0, at] <= budgets[q]:
            before += histogram[0, at]
            total += histogram[1, at]
            at += 1
        value = total - price * seconds[q]
        if histogram[0, at] > 0.0:
            value += (budgets[q] - before) * histogram[1, at] / histogram[0, at]
        if value > most:
            best, most = q, value
    return best


@compiled
def _admit(
    confidences: np.ndarray,
    odds: np.ndarray,
    tilt: np.ndarray,
    budgets: np.ndarray,
    seconds: np.ndarray,
    price: float,
    stretch: float,
    recent: np.ndarray,
    keep_depth: np.ndarray,
) -> tuple[int, float]:
    """Fill keep_depth; which budget and its survival, or (-1, 0) where a confidence is no probability.

    recent: a histogram for the whole batch that settles the budget instead of the batch's own, if any.
    """
    batch, drafts = confidences.shape
    survival = np.empty((batch, drafts))
    bins = np.empty((batch, drafts), np.int16)
    histogram = np.zeros((2, _LAST + 1))
    if not _bin(confidences, odds, tilt, survival, bins, histogram):
        return -1, 0.0
    if recent.shape[1]:
        held = recent[0].sum()
        chosen = _best(recent * (batch * drafts / held), budgets, seconds, price)
    else:
        chosen = _best(histogram, budgets, seconds, price)
    if stretch != 1.0:
        beside = min(int(np.searchsorted(budgets, budgets[chosen] * stretch)), len(budgets) - 1)
        if beside == chosen:
            beside += 1 if stretch > 1.0 else -1
        chosen = min(max(beside, 0), len(budgets) - 1)
    edge, left, total = 0, budgets[chosen], 0.0
    while edge < _LAST and histogram[0, edge] <= left:
        left -= int(histogram[0, edge])
        total += histogram[1, edge]
        edge += 1
    for i in range(batch):
        depth = 0
        while depth < drafts and bins[i, depth] < edge:
            depth += 1
        keep_depth[i] = depth
    if left > 0 and edge < _LAST:
        size = int(histogram[0, edge])
        values = np.empty(size)
        requests = np.empty(size, np.int64)
        n = 0
        for k in range(drafts):
            for i in range(batch):
                if bins[i, k] == edge:
                    values[n] = -survival[i, k]
                    requests[n] = i
                    n += 1
        order = np.argsort(values, kind="mergesort")  # stable: the earlier position, then the lower request
        for at in order[:left]:
            keep_depth[requests[at]] += 1
            total -= float(values[at])
    elif left > 0:  # worthless drafts, by position
        for k in range(drafts):
            for i in range(batch):
                if left > 0 and keep_depth[i] == k:
                    keep_depth[i] += 1
                    left -= 1
    return chosen, total


@compiled
def _remember(stale: np.ndarray, odds: np.ndarray, tilt: np.ndarray, recent: np.ndarray) -> None:
    """Add what is known of a batch's survival to a histogram that fades over 4 steps, or 64 request-steps."""
    known = np.empty(len(stale), np.bool_)
    for i in range(len(stale)):
        known[i] = stale[i].min() < 1.0  # else the request was too new to have confidences
    rows = stale[known]
    recent *= np.exp(-len(rows) / min(64.0, 4.0 * len(stale)))
    _bin(rows, odds, tilt, np.empty(rows.shape), np.empty(rows.shape, np.int16), recent)
