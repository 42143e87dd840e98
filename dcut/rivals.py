"""Rival policies by their published rules: thresholds, fixed capacity, cost models, acceptance history."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.protocol import BANDS, BudgetPolicy, UniformPolicy, band
from dcut.scores import check_confidences, survival
from dcut.selector import Selection, select


def keep_best(confidences: np.ndarray, num_drafts: int) -> Selection:
    """The `num_drafts` drafts of the whole batch that most likely survive, wherever they are."""
    chosen = select(confidences, np.array([num_drafts]), np.ones(1))
    return chosen._replace(bucket=band(num_drafts, *confidences.shape))


@lru_cache(maxsize=1024)
def step_seconds(cost: CostTable, batch_size: int, drafts: int) -> np.ndarray:
    """Drafter and target together for 0..batch_size * drafts verified drafts, float64; it never falls.

    As vLLM 0.32 builds its tables (build_cost_tables_from_curves in adaptive_verification.py): the drafter's
    time by requests plus the target's by tokens, a staircase up to the largest captured graph, interpolated
    among the sizes beyond it, extended by the last slope, and made monotone.
    """
    tokens = batch_size * (1 + drafts)
    verify_s = _monotone(cost).curve(batch_size, tokens, extrapolate=True)[batch_size:]
    return verify_s + cost.draft_seconds(batch_size, extrapolate=True)


def seconds_at(cost: CostTable, batch_size: int, drafts: int, context_tokens: float | None) -> np.ndarray:
    """`step_seconds` at contexts of another length than the measured ones."""
    seconds = step_seconds(cost, batch_size, drafts)
    if context_tokens is None:
        return seconds
    tokens = np.arange(batch_size, batch_size + len(seconds))
    context_s = cost.context_seconds(batch_size, context_tokens, tokens)
    return seconds + context_s + cost.draft_context_seconds(batch_size, context_tokens)


@lru_cache(maxsize=64)
def _monotone(cost: CostTable) -> CostTable:
    """The table with no measurement below one of fewer tokens."""
    return replace(cost, verify_s=np.maximum.accumulate(cost.verify_s, axis=1))


def expected_tokens(confidences: np.ndarray) -> np.ndarray:
    """Bonus tokens plus the sum of the K best survivals, for K = 0..batch * drafts, float64."""
    ranked = np.sort(survival(confidences), axis=None)[::-1]
    return len(confidences) + np.concatenate(([0.0], np.cumsum(ranked)))


def pays(
    tokens: float,
    seconds: float,
    cost: CostTable,
    batch_size: int,
    context_tokens: float | None,
    min_gain: float,
) -> bool:
    """Whether a step beats plain decoding by the share `min_gain`; 0 asks for nothing."""
    if not min_gain:
        return True
    plain_s = cost.plain_seconds(batch_size, context_tokens, extrapolate=True)
    return tokens / seconds >= (1.0 + min_gain) * batch_size / plain_s


def _profiled(cost: CostTable | None, name: str) -> CostTable:
    if cost is None:
        raise InputError(f"policy {name} weighs measured step times: give it a cost table")
    return cost


def check_share(name: str, value: float, most: float = 1.0) -> None:
    """Raise InputError unless `value` lies in 0..most (NaN does not)."""
    if not 0 <= value <= most:
        raise InputError(f"{name}={value:g} is outside 0..{most:g}")


@dataclass
class Threshold(BudgetPolicy):
    """Keep a draft while its survival is at least `threshold`.

    refresh 0: every request by its own survival, every step. The static threshold on confidences of
    TensorRT-LLM (pull request 15808) and vLLM (48204), applied to the prefix product.
    refresh N: vLLM-Ascend's dynamic verification (pull requests 13216 and 13819; its N is 16): every N steps
    the batch's mean number of such drafts, rounded up, becomes the budget of each request, `initial` before
    the first time and never less than 1; each request gets its first draft, the rest goes to the batch's
    best. Left out: rounding to odd budgets, which suits one NPU's kernels.
    """

    threshold: float
    refresh: int = 0
    initial: int = 5

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        if self.refresh < 0 or self.initial < 1:
            raise InputError(
                f"threshold: refresh={self.refresh} counts steps, initial={self.initial} drafts from 1"
            )
        self._budget, self._age = self.initial, 0

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def start(self) -> "Threshold":
        return Threshold(self.threshold, self.refresh, self.initial)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        batch, drafts = confidences.shape
        worth = survival(confidences)
        depths = (worth >= self.threshold).sum(axis=1)
        if self.refresh:
            self._age += 1
            if self._age == self.refresh:
                self._budget, self._age = max(1, math.ceil(depths.mean())), 0
            budget = min(self._budget, drafts)
            depths = 1 + _best_behind_first(worth, batch * (budget - 1))
        kept = int(depths.sum())
        tokens = batch + float(worth[np.arange(drafts) < depths[:, None]].sum())
        return Selection(depths.astype(np.int64), batch + kept, band(kept, batch, drafts), tokens)


def _best_behind_first(worth: np.ndarray, num_drafts: int) -> np.ndarray:
    """How many of the `num_drafts` best drafts behind the first fall to each request, int64 [batch]."""
    batch = len(worth)
    order = np.argsort(-worth[:, 1:].T, axis=None, kind="stable")[:num_drafts]  # position before request
    return np.bincount(order % batch, minlength=batch)


@dataclass(frozen=True, slots=True)
class Tetris(BudgetPolicy):
    """The batch's most likely drafts under a fixed capacity of `capacity` drafts a request.

    Source: TETRIS (Wu et al., ACL 2025, arXiv 2502.15197) and its repository ZhaoxuanWu/Tetris: the top-K
    of all cumulative log-probabilities, K the server's capacity in draft tokens. Its experiments give the
    capacity as speculative tokens a request times the batch, and let the drafter propose more.
    """

    capacity: float

    def __post_init__(self) -> None:
        if not 0 <= self.capacity < math.inf:
            raise InputError(f"tetris:{self.capacity:g}: a capacity counts drafts a request, 0 or more")

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        return keep_best(confidences, min(round(self.capacity * len(confidences)), confidences.size))


def _budget(
    confidences: np.ndarray,
    cost: CostTable,
    context_tokens: float | None,
    min_gain: float,
    pick: Callable[[np.ndarray], Any],
) -> int:
    """The number of drafts that `pick` takes by tokens per second, its argument; 0 where it does not pay."""
    batch, drafts = confidences.shape
    seconds = seconds_at(cost, batch, drafts, context_tokens)
    tokens = expected_tokens(confidences)
    best = int(pick(tokens / seconds))
    return best if pays(tokens[best], seconds[best], cost, batch, context_tokens, min_gain) else 0


def _first_peak(rates: np.ndarray) -> int:
    falls = rates[1:] <= rates[:-1]
    return int(np.argmax(falls)) if falls.any() else len(falls)


@dataclass(frozen=True, slots=True)
class DSpark(BudgetPolicy):
    """Admit the batch's drafts from the likeliest down while tokens per second rise; stop when they do not.

    Source: DSpark (DeepSeek and Peking University 2026, arXiv 2607.05147), algorithm 1, the hardware-aware
    prefix scheduler: maximise (requests + sum of admitted survivals) * steps_per_second(tokens), greedily,
    with the early stop that keeps sampling lossless. So the first flat stretch of the rate ends it.
    min_gain: verify nothing unless the rate beats plain decoding by this share (not in the paper).
    """

    min_gain: float = 0.0

    def __post_init__(self) -> None:
        check_share("dspark:min_gain", self.min_gain, 10.0)

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        cost = _profiled(cost, "dspark")
        return keep_best(confidences, _budget(confidences, cost, context_tokens, self.min_gain, _first_peak))


@dataclass
class VllmAdaptive(BudgetPolicy):
    """vLLM's adaptive verification: of all budgets the one with the most tokens per second of this step.

    Source: vLLM 0.32, v1/worker/gpu/spec_decode/adaptive_verification.py (pull requests 47808 and 52228).
    The budget comes from confidences one step old (`lag`), the allocation from fresh ones; the rate is
    (requests + sum of survivals) / (draft_cost[requests] + verify_cost[tokens]), the first of equals.
    estimator: confidences go through its online acceptance estimator first, see `AcceptanceEstimator`;
    vLLM does so for drafters without a confidence head, as DFlash is.
    min_gain: verify nothing unless the rate beats plain decoding by this share (not in vLLM).
    """

    estimator: bool = False
    min_gain: float = 0.0

    lag: ClassVar[int] = 1
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("vllm-adaptive:min_gain", self.min_gain, 10.0)
        self._estimator: AcceptanceEstimator | None = None
        self._drafted: np.ndarray | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return BANDS

    def start(self) -> "VllmAdaptive":
        return VllmAdaptive(self.estimator, self.min_gain)

    def budget(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> int:
        """Drafts of the whole batch to verify, by confidences [batch, drafts] as they come."""
        cost = _profiled(cost, "vllm-adaptive")
        return _budget(confidences, cost, context_tokens, self.min_gain, np.argmax)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        return self.select_lagged(confidences, confidences, cost, context_tokens)

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        drafts = confidences.shape[1]
        if self.estimator and drafts:
            if self._estimator is None or len(self._estimator.bias) != drafts:
                self._estimator = AcceptanceEstimator(drafts)
            self._drafted = confidences
            confidences, stale = (self._estimator.probabilities(c) for c in (confidences, stale))
        return keep_best(confidences, self.budget(stale, cost, context_tokens) if drafts else 0)

    def drafted(self, confidences: np.ndarray) -> None:
        self._drafted = confidences

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        if self._estimator is not None and self._drafted is not None:
            self._estimator.observe(self._drafted, keep_depth, num_accepted)


class AcceptanceEstimator:
    """vLLM's: P(accepted | before accepted) = sigmoid(slope * log_odds(confidence) + bias[k]).

    Source: vLLM pull request 52228: slope 0.5 and bias -0.2 at the start (medians over its models), labels
    from the accepted drafts and the first rejected one, a Newton step every 100 steps on those of the last
    100 alone, ridge 1e-3, each parameter damped by n / (n + 50) with its number of labels, steps to a
    negative slope dropped.
    """

    def __init__(self, drafts: int) -> None:
        self.slope, self.bias = 0.5, np.full(drafts, -0.2)
        self._sums = np.zeros((drafts, 6))  # weighted xx, x, 1; residuals times x, 1; labels
        self._steps = 0

    def probabilities(self, confidences: np.ndarray) -> np.ndarray:
        """float32 [batch, drafts] from raw confidences."""
        return (1.0 / (1.0 + np.exp(-self.slope * _log_odds(confidences) - self.bias))).astype(np.float32)

    def observe(self, confidences: np.ndarray, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        """Count one verification; every hundredth refits."""
        k = np.arange(confidences.shape[1])
        seen = (k <= num_accepted[:, None]) & (k < keep_depth[:, None])
        x = _log_odds(confidences)
        p = 1.0 / (1.0 + np.exp(-self.slope * x - self.bias))
        weight, residual = seen * p * (1.0 - p), seen * ((k < num_accepted[:, None]) - p)
        terms = (weight * x * x, weight * x, weight, residual * x, residual, seen)
        self._sums += np.stack([term.sum(axis=0) for term in terms], axis=1)
        self._steps += 1
        if self._steps % 100 == 0:
            self._refit()

    def _refit(self) -> None:
        ridge, damping = 1e-3, 50.0
        xx, x, one, by_x, by_one, count = self._sums.T
        one = one + ridge
        step = (by_x.sum() - (x * by_one / one).sum()) / (xx.sum() + ridge - (x * x / one).sum())
        step *= count.sum() / (count.sum() + damping)
        if not self.slope + step >= 0:
            step = 0.0
        self.slope += step
        self.bias = self.bias + (by_one - x * step) / one * count / (count + damping)
        self._sums[:] = 0.0


def _log_odds(confidences: np.ndarray) -> np.ndarray:
    """log(c / (1 - c)) within -40..40, float64."""
    c = check_confidences(confidences).astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.clip(np.log(c) - np.log1p(-c), -40.0, 40.0)


@dataclass
class SmartSpec(UniformPolicy):
    """One length for the whole batch, by the acceptance rate so far and the cost of each length.

    Source: SmartSpec (Liu et al. 2024, arXiv 2406.14066) and its vLLM branch (spec_decode/dsd.py): with a
    moving average a of the token acceptance rate (0.7 at first, weight 0.15 of the newest step), the length
    k with the most goodput (1 - a^(k+1)) / (1 - a) * batch / seconds(batch, k); 0 is plain decoding, which
    observes nothing, so it never comes back by itself.
    min_gain: draft only if the goodput beats plain decoding by this share (not in the paper).
    """

    min_gain: float = 0.0

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("smartspec:min_gain", self.min_gain, 10.0)
        self.rate = 0.7

    @property
    def labels(self) -> tuple[str, ...]:
        return ("one length",)

    def start(self) -> "SmartSpec":
        return SmartSpec(self.min_gain)

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        lengths = np.cumsum(self.rate ** np.arange(longest + 1))
        goodput = lengths / length_seconds(_profiled(cost, "smartspec"), batch_size, longest)
        best = int(np.argmax(goodput))
        return best if goodput[best] >= (1.0 + self.min_gain) * goodput[0] else 0

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return drafts

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        accepted = int(num_accepted.sum())
        tried = accepted + int((num_accepted < keep_depth).sum())  # one rejection ends a request's drafts
        if tried:
            self.rate += 0.15 * (accepted / tried - self.rate)


@lru_cache(maxsize=1024)
def length_seconds(cost: CostTable, batch_size: int, longest: int) -> np.ndarray:
    """A step's seconds with 0..longest drafts verified of every request; 0 is a plain step."""
    every = step_seconds(cost, batch_size, longest)[::batch_size].copy()
    every[0] = cost.plain_seconds(batch_size, extrapolate=True)
    dearest = cost.draft_seconds(batch_size, extrapolate=True)
    for k in range(1, longest):
        every[k] -= dearest - cost.draft_seconds(batch_size, extrapolate=True, drafts=k)
    return every


@dataclass(frozen=True, slots=True)
class Dsd(UniformPolicy):
    """Draft length by batch size, from a table fixed beforehand such as dsd:1x15/16x4/64x0.

    Each entry gives the length from that batch size on; smaller batches take the first. Without a table, a
    replay tunes it to the trace: for each batch size the length with the most tokens per second.
    Source: vLLM's dynamic speculative decoding (pull request 32374, num_speculative_tokens_per_batch_size:
    gaps inherit the length before them, 0 turns drafting off).
    """

    table: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pairs = self.pairs
        if [batch for batch, _ in pairs] != sorted({batch for batch, _ in pairs}):
            raise InputError(f"dsd:{'/'.join(self.table)}: batch sizes must rise")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(from this batch size, this many drafts), batch sizes rising."""
        try:
            pairs = [(int(batch), int(length)) for batch, length in (e.split("x") for e in self.table)]
        except ValueError as error:
            raise InputError(
                f"dsd:{'/'.join(self.table)} is not a table such as dsd:1x15/16x4/64x0 (batch size x drafts)"
            ) from error
        if any(batch < 1 or length < 0 for batch, length in pairs):
            raise InputError(f"dsd:{'/'.join(self.table)}: batch sizes count from 1, drafts from 0")
        return pairs

    @property
    def labels(self) -> tuple[str, ...]:
        return ("/".join(self.table) or "tuned",)

    def check_drafts(self, longest: int) -> None:
        if (most := max((length for _, length in self.pairs), default=0)) > longest:
            raise InputError(
                f"dsd:{'/'.join(self.table)} names {most} drafts, the drafter proposes {longest} at most"
            )

    def tuned(self, lengths: Callable[[], np.ndarray], cost: CostTable) -> BudgetPolicy:
        if self.table:
            return self
        return Dsd(dsd_table(lengths(), cost))

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        if not self.table:
            raise InputError(
                "dsd needs a table, such as dsd:1x15/16x4/64x0; a replay can tune it, and says which"
            )
        pairs = self.pairs
        at = bisect_right(pairs, batch_size, key=lambda pair: pair[0])
        return min(pairs[max(at - 1, 0)][1], longest)

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return drafts


def dsd_table(lengths: np.ndarray, cost: CostTable) -> tuple[str, ...]:
    """The best table for a trace: `lengths[k]` are the tokens a request and step when k drafts are verified.

    One entry for each batch size that the cost table was measured at (1, 2, 4, ... where it has none).
    """
    measured = [1, 2, 4, 8, 16, 32, 64, 128, 256] if cost.batch_sizes is None else cost.batch_sizes
    best = {
        int(batch): int(np.argmax(lengths / length_seconds(cost, int(batch), len(lengths) - 1)))
        for batch in measured
    }
    return tuple(f"{batch}x{length}" for batch, length in best.items())


# SGLang's table: batch size from which on it holds, and the lengths to choose among
_SGLANG = ((1, (1, 3, 5, 7), -0.25), (8, (0, 1, 3), 0.0), (32, (0, 1), 0.0), (64, (0,), 0.0))


@dataclass
class Ema(UniformPolicy):
    """Draft length from a moving average of accepted drafts, with hysteresis.

    Source: SGLang's adaptive speculation (adaptive_spec_params.py; pull requests 21599 and 24055): every 5
    steps after the first 10, with the average e of accepted drafts (weight 0.2 of the newest step), go down
    while e <= the next lower length - 0.5 + `down` (0.5 + `down` for 0), else up while e > the present
    length - 0.5; from 0, try the next. Each range of batch sizes has its own average and lengths.
    lengths: to choose among at every batch size, such as ema:1/3/7; without, SGLang's own table:
    1/3/5/7 from batch 1, 0/1/3 from 8, 0/1 from 32, 0 from 64.
    """

    lengths: tuple[int, ...] = ()
    down: float = -0.25

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted(set(self.lengths)) or min(self.lengths, default=0) < 0:
            raise InputError(f"ema:{'/'.join(map(str, self.lengths))}: lengths must rise from 0 or more")
        own = ((1, self.lengths, self.down),)
        self._ranges = [
            (first, _Average(among, down)) for first, among, down in (own if self.lengths else _SGLANG)
        ]
        self._at = self._ranges[0][1]

    @property
    def labels(self) -> tuple[str, ...]:
        return ("one length",)

    def start(self) -> "Ema":
        return Ema(self.lengths, self.down)

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        self._at = next(average for first, average in reversed(self._ranges) if first <= batch_size)
        return min(self._at.length, longest)

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        return drafts

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self._at.observe(float(num_accepted.mean()))


class _Average:
    """The state of one range of batch sizes."""

    def __init__(self, among: tuple[int, ...], down: float) -> None:
        self.among, self.down = among, down
        self.at = len(among) // 2
        self.accepted = self.length - 1.0
        self.steps = 0

    @property
    def length(self) -> int:
        return self.among[self.at]

    def observe(self, accepted: float) -> None:
        if self.length:
            self.accepted += 0.2 * (accepted - self.accepted)
        self.steps += 1
        if self.steps <= 10 or (self.steps - 10) % 5:
            return
        if self.length == 0:
            self.at = min(self.at + 1, len(self.among) - 1)
            if self.length and self.accepted < 0:  # no history: start neutral
                self.accepted = self.length - 1.0
            return
        before = self.at
        while self.at and self.accepted <= abs(self.among[self.at - 1] - 0.5) + self.down:  # 0.5 for 0
            self.at -= 1
        if self.at < before:
            return
        while self.at < len(self.among) - 1 and self.accepted > self.length - 0.5:
            self.at += 1
