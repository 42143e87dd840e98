"""dcut-plus: the budget that brings the most tokens over time, drafting or not, learnt as it runs."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numba
import numpy as np

from dcut.calibration import OnlineCalibration, cell
from dcut.cost import CostTable
from dcut.protocol import BANDS, BudgetPolicy, Sees, band
from dcut.scores import check_confidences
from dcut.selector import Selection

_MOST_BUDGETS = 512
_PROBE_SHARE = 0.002  # of the tokens, what looking again at an alternative may cost
_MIN_GAIN = 0.005  # an alternative must look better by this share before it is taken up

# As in dcut.selector, survival is sorted into bins by its floating-point bits, 32 an octave. What survives
# with less than 1 in 128 shares the last bin and counts nothing.
_SHIFT = 47
_TOP = 0x3FF0000000000000 >> _SHIFT
_LAST = 7 * 32
_FLOOR = 2.0**-7


@lru_cache(maxsize=1024)
def budgets_on(cost: CostTable, batch_size: int, drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of drafts that the hardware tells apart, int64 rising, and the target's seconds for each.

    On a staircase these are its edges: the most drafts that each captured graph holds. Where the time rises
    with every token, every number is one, thinned evenly to a few hundred.
    """
    most = batch_size * drafts
    seconds = cost.curve(batch_size, batch_size + most, extrapolate=True)[batch_size:]
    edges = np.flatnonzero(np.append(seconds[1:] != seconds[:-1], True))
    if len(edges) > _MOST_BUDGETS:
        edges = edges[np.unique(np.linspace(0, len(edges) - 1, _MOST_BUDGETS).astype(np.int64))]
    return edges, seconds[edges]


@lru_cache(maxsize=1024)
def _plain_seconds(cost: CostTable, batch_size: int) -> float:
    return cost.plain_seconds(batch_size, extrapolate=True)


class _Outcome:
    """What drafting has brought lately at about one batch size, against plain decoding for the same time."""

    __slots__ = ("idle", "last_plain", "plain_tokens", "tokens")

    def __init__(self, gain: float) -> None:
        self.tokens, self.plain_tokens = gain, 1.0  # sums that fade; in units of one request's step
        self.last_plain = 1.0  # plain tokens a request for the time of the last drafted step
        self.idle = 0  # steps since then

    @property
    def gain(self) -> float:
        return self.tokens / self.plain_tokens

    def add(self, tokens: float, plain_tokens: float, batch_size: int) -> None:
        """Count one drafted step; what is older fades over some 32 steps, more for a small batch."""
        fade = math.exp(-(1 + self.idle) / (32 + 256 / batch_size))
        self.tokens = fade * self.tokens + tokens / batch_size
        self.plain_tokens = fade * self.plain_tokens + plain_tokens / batch_size
        self.last_plain = plain_tokens / batch_size
        self.idle = 0

    def due(self) -> bool:
        """Whether one more try now costs no more than `_PROBE_SHARE` of the tokens since the last."""
        self.idle += 1
        return self.idle * _PROBE_SHARE >= max(1.0 - self.gain, _MIN_GAIN) * self.last_plain


@dataclass
class Plus(BudgetPolicy):
    """The best budget of all that the hardware distinguishes, for the most tokens per second over time.

    - A draft's worth is its calibrated survival (dcut.calibration, learnt while serving).
    - A step's worth is its tokens, bonus included, less what its seconds would bring at the rate reached
      lately. The best of each step at that price is the best rate over time (fractional programming,
      Dinkelbach 1967), which the best ratio of each single step is not.
    - Not drafting saves the drafter as well. It is chosen while drafting brings less than plain decoding in
      the same time; drafting is then tried again now and then, for at most 0.2 % of the tokens.
    - Where decisions lag, the budget follows the last 64 or so request-steps rather than one old step.
    Without a cost table it verifies everything.
    """

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._outcomes: dict[int, _Outcome] = {}  # by size of the batch, see `_size_class`
        self._calibration: OnlineCalibration | None = None  # made when the number of drafts is known
        self._recent: np.ndarray | None = None  # histograms of survival of recent steps, where decisions lag
        self._drafted: np.ndarray | None = None  # confidences of the step under way; None: a plain one
        self._plain_tps = 0.0  # of plain decoding, at the batch and context of that step
        self._expected = 0.0  # tokens of that step
        self._came, self._promised = 512.0, 512.0  # tokens that came, and that were expected; they fade

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def start(self) -> "Plus":
        return type(self)()

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        outcome = self._outcomes.get(_size_class(batch_size))
        if cost is None or outcome is None:
            return longest
        enough = 1.0 + _MIN_GAIN if outcome.idle else 1.0 - _MIN_GAIN
        return longest if outcome.gain >= enough or outcome.due() else 0

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
        return self._choose(confidences, stale, cost, context_tokens)

    def _choose(
        self,
        confidences: np.ndarray,
        stale: np.ndarray | None,
        cost: CostTable | None,
        context_tokens: float | None,
    ) -> Selection:
        batch, drafts = confidences.shape
        keep_depth = np.zeros(batch, np.int64)
        if not drafts:
            self._drafted = None
            return Selection(keep_depth, batch, 0, float(batch))
        if not (confidences.dtype == np.float32 and confidences.flags.c_contiguous):
            confidences = check_confidences(confidences)
        calibration = self._calibration
        if calibration is None or len(calibration.tilt) != drafts:
            calibration = self._calibration = OnlineCalibration(drafts)
        if cost is None:
            budgets, seconds, price = np.array([confidences.size]), np.ones(1), 0.0
        else:
            budgets, seconds = budgets_on(cost, batch, drafts)
            plain_s = _plain_seconds(cost, batch)
            if context_tokens is not None:
                plain_s += cost.context_seconds(batch, context_tokens)
            self._plain_tps = batch / plain_s
            outcome = self._outcomes.get(_size_class(batch))
            price = self._plain_tps * (max(outcome.gain, 1.0) if outcome else 1.0)
        recent = _NOTHING
        if stale is not None:
            if self._recent is None:
                self._recent = np.zeros((2, _LAST + 1))
            recent = self._recent
            _remember(check_confidences(stale), calibration.odds, calibration.tilt, recent)
        kept, worth = _admit(
            confidences, calibration.odds, calibration.tilt, budgets, seconds, price, recent, keep_depth
        )
        if kept < 0:
            check_confidences(confidences)
        self._drafted, self._expected = confidences, batch + worth
        return Selection(keep_depth, batch + kept, band(kept, batch, drafts), self._expected)

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        if self._drafted is None or not self._plain_tps:
            return
        batch = len(keep_depth)
        self._came += batch + int(num_accepted.sum())
        self._promised += self._expected
        tokens = self._expected * self._came / self._promised
        fade = math.exp(-batch / 8192)
        self._came, self._promised = self._came * fade, self._promised * fade
        size = _size_class(batch)
        outcome = self._outcomes.get(size)
        if outcome is None:
            outcome = self._outcomes[size] = _Outcome(self._nearest_gain(size))
        outcome.add(tokens, self._plain_tps * seconds, batch)
        self._learn(keep_depth, num_accepted)

    def _learn(self, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        if self._calibration is not None and self._drafted is not None:
            self._calibration.observe(self._drafted, keep_depth, num_accepted)

    def _nearest_gain(self, size: int) -> float:
        """The gain known at the most similar batch size, 1 at first."""
        known = min(self._outcomes, key=lambda other: abs(other - size), default=None)
        return 1.0 if known is None else self._outcomes[known].gain


class OracleSurvival(Plus):
    """dcut-plus that is told the true probability of each draft: no causal policy can do better by more than
    chance. Only for traces that hold them."""

    sees: ClassVar[Sees] = "accept_probs"

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        return self.select(confidences, cost, context_tokens)

    def _learn(self, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        """There is nothing to learn about what is true."""


class Oracle(OracleSurvival):
    """dcut-plus that is told which drafts will be accepted: an upper bound for every policy."""

    sees: ClassVar[Sees] = "num_accepted"


@lru_cache(maxsize=4096)
def _size_class(batch_size: int) -> int:
    """Batch sizes that share what they learn: two classes an octave."""
    return round(2 * math.log2(batch_size))


_NOTHING = np.zeros((2, 0))


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _admit(
    confidences: np.ndarray,
    odds: np.ndarray,
    tilt: np.ndarray,
    budgets: np.ndarray,
    seconds: np.ndarray,
    price: float,
    recent: np.ndarray,
    keep_depth: np.ndarray,
) -> tuple[int, float]:
    """Fill keep_depth; drafts kept and their survival, or (-1, 0) where a confidence is no probability.

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
        budget = budgets[_best(recent * (batch * drafts / held), budgets, seconds, price)]
    else:
        budget = budgets[_best(histogram, budgets, seconds, price)]
    edge, left, total = 0, budget, 0.0
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
    return budget, total


@numba.njit(cache=True, nogil=True)
def _remember(stale: np.ndarray, odds: np.ndarray, tilt: np.ndarray, recent: np.ndarray) -> None:
    """Add a batch's survival to the fading histogram of about the last 64 request-steps."""
    batch, drafts = stale.shape
    recent *= np.exp(-batch / 64.0)
    _bin(stale, odds, tilt, np.empty((batch, drafts)), np.empty((batch, drafts), np.int16), recent)
