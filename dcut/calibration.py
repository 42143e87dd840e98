"""Honest probabilities: raw draft confidences turned into what verification really accepts.

A draft at position k counts only if all before it were accepted, so what is calibrated is the conditional
probability P(draft k accepted | drafts before it accepted) from its confidence; survival is their product.
A position after the first rejection, or deeper than was verified, is unobserved and never a label
(censoring); as the depth verified depends on the confidences alone, what is observed is unbiased.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dcut.errors import InputError
from dcut.jit import compiled
from dcut.scores import check_confidences

FORMAT = 1

# A confidence is looked up by its floating-point bits: 32 cells an octave of c below one half and of 1 - c
# above it, over 24 octaves each. Half a cell is 1.1 % of the odds, at most 0.3 % of a probability.
_OCTAVES = 24
_CELLS = 32 * _OCTAVES
_HALF = 0x3F000000 >> 18  # top bits of 0.5 as float32
NUM_CELLS = 2 * _CELLS


@compiled(inline="always")
def cell(confidence: np.float32) -> int:
    """The look-up cell of a confidence in [0, 1], 0..NUM_CELLS - 1, rising with it."""
    if confidence < np.float32(0.5):
        return _near(confidence)
    return NUM_CELLS - 1 - _near(np.float32(1.0) - confidence)


@compiled(inline="always")
def _near(x: np.float32) -> int:
    """The cell of x in [0, 0.5], counted from 0 for everything below 2**-25."""
    return min(max(int(np.float32(x).view(np.int32) >> 18) - (_HALF - _CELLS), 0), _CELLS - 1)


def _log_odds() -> np.ndarray:
    """log(c / (1 - c)) in the middle of every cell, float64 [NUM_CELLS], even around one half."""
    bits = (np.arange(_CELLS, dtype=np.int32) + (_HALF - _CELLS) << 18) + (1 << 17)
    below = np.log(bits.view(np.float32).astype(np.float64))
    below -= np.log1p(-np.exp(below))
    return np.clip(np.concatenate((below, -below[::-1])), -MAX_LOG_ODDS, MAX_LOG_ODDS)


MAX_LOG_ODDS = 12.0  # surer than 0.999994 is no surer: float32 ends there, and drafters saturate
LOG_ODDS = _log_odds()


class OnlineCalibration:
    """Learns, while serving, P(accepted | before accepted) = sigmoid(slope * log_odds(c) + bias[k]).

    One slope and one bias for all positions and an offset for each, drawn to zero where a position is
    seldom verified; at first the raw confidence itself (slope 1, bias 0). Learning is a damped Newton step
    for every few hundred labels, with the curvature of the last `MEMORY` labels or so as its memory, so it
    converges within some tens of steps and follows a change of domain.
    Same model as the acceptance estimator of vLLM 0.30 (pull request 52228), which refits every 100 steps
    without memory of the rounds before.
    """

    MEMORY = 8192  # labels
    ROUND = 1024  # labels between two refits, once it has converged

    def __init__(self, drafts: int) -> None:
        self.slope, self.bias, self.offset = 1.0, 0.0, np.zeros(drafts)
        self.odds = np.exp(-self.slope * LOG_ODDS)  # [NUM_CELLS], odds against acceptance at bias 0
        self.tilt = np.exp(-self.bias - self.offset)  # [drafts], factor on them
        self._known = np.zeros((drafts, 3))  # curvature of the labels remembered: xx, x, 1
        self._pending = np.zeros((drafts, 6))  # of those since the last refit, with gradients and count
        self._due = 32

    @property
    def settled(self) -> bool:
        """Whether it has seen labels enough to learn slowly from now on."""
        return self._due == self.ROUND

    def probabilities(self, confidences: np.ndarray) -> np.ndarray:
        """P(draft k accepted | those before it accepted), float64 [batch, drafts]."""
        return _probabilities(check_confidences(confidences), self.odds, self.tilt)

    def observe(self, confidences: np.ndarray, keep_depth: np.ndarray, num_accepted: np.ndarray) -> None:
        """Learn from one verification: confidences float32 [batch, drafts], verified and accepted drafts."""
        num_labels = _accumulate(
            confidences, keep_depth, num_accepted, self.odds, self.tilt, LOG_ODDS, self._pending
        )
        if num_labels >= self._due:
            self._due = min(2 * self._due, self.ROUND)
            memory = np.exp(-num_labels / self.MEMORY)
            self.slope, self.bias = _refit(
                self.slope, self.bias, self.offset, self._known, self._pending, memory
            )
            self.odds = np.exp(-self.slope * LOG_ODDS)
            self.tilt = np.exp(-self.bias - self.offset)


@compiled
def _probabilities(confidences: np.ndarray, odds: np.ndarray, tilt: np.ndarray) -> np.ndarray:
    values = np.empty(confidences.shape)
    for i in range(confidences.shape[0]):
        for k in range(confidences.shape[1]):
            values[i, k] = 1.0 / (1.0 + tilt[k] * odds[cell(confidences[i, k])])
    return values


@compiled
def _accumulate(
    confidences: np.ndarray,
    keep_depth: np.ndarray,
    num_accepted: np.ndarray,
    odds: np.ndarray,
    tilt: np.ndarray,
    log_odds: np.ndarray,
    pending: np.ndarray,
) -> float:
    """Add the verification's labels to `pending` [drafts, xx x 1 rx r count]; how many there are now."""
    for i in range(len(keep_depth)):
        accepted = num_accepted[i]
        for k in range(min(accepted + 1, keep_depth[i])):  # the accepted and the first rejected
            at = cell(confidences[i, k])
            x = log_odds[at]
            p = 1.0 / (1.0 + tilt[k] * odds[at])
            weight = p * (1.0 - p)
            residual = (1.0 if k < accepted else 0.0) - p
            pending[k, 0] += weight * x * x
            pending[k, 1] += weight * x
            pending[k, 2] += weight
            pending[k, 3] += residual * x
            pending[k, 4] += residual
            pending[k, 5] += 1.0
    return pending[:, 5].sum()


_TRUST = np.array([32.0, 4.0, 8.0])  # curvature of the prior: slope around 1, bias and offsets around 0


@compiled
def _refit(
    slope: float,
    bias: float,
    offset: np.ndarray,
    known: np.ndarray,
    pending: np.ndarray,
    memory: float,
) -> tuple[float, float]:
    """One Newton step on what is pending; updates offset, known and pending, returns slope and bias.

    The curvature is an arrowhead (slope and bias against one offset a position), solved by elimination.
    """
    new = 1.0 - memory
    a, b, c = _TRUST[0], 0.0, _TRUST[1]
    g, h = -new * _TRUST[0] * (slope - 1.0), -new * _TRUST[1] * bias
    for k in range(len(offset)):
        for j in range(3):
            known[k, j] = memory * known[k, j] + pending[k, j]
        xx, x, one = known[k]
        own = one + _TRUST[2]
        pull = pending[k, 4] - new * _TRUST[2] * offset[k]
        a += xx - x * x / own
        b += x - x * one / own
        c += one - one * one / own
        g += pending[k, 3] - x * pull / own
        h += pending[k, 4] - one * pull / own
    determinant = a * c - b * b
    by_slope = (c * g - b * h) / determinant
    by_bias = (a * h - b * g) / determinant
    by_slope = max(by_slope, 0.05 - slope)  # acceptance never falls as confidence rises
    for k in range(len(offset)):
        pull = pending[k, 4] - new * _TRUST[2] * offset[k]
        own = known[k, 2] + _TRUST[2]
        offset[k] += (pull - known[k, 1] * by_slope - known[k, 2] * by_bias) / own
    pending[:] = 0.0
    return slope + by_slope, bias + by_bias


# ---- fitted beforehand, from a trace -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Calibration:
    """A curve for each draft position: P(accepted | before accepted) by the log-odds of the confidence.

    curves[k] is (log-odds rising, probabilities), interpolated in between and level beyond.
    """

    kind: str  # isotonic | temperature
    curves: tuple[tuple[np.ndarray, np.ndarray], ...]

    def probabilities(self, confidences: np.ndarray) -> np.ndarray:
        """P(draft k accepted | those before it accepted), float64 [batch, drafts].

        Raises InputError where there are more drafts than curves.
        """
        x = _clipped_log_odds(check_confidences(confidences))
        if x.shape[1] > len(self.curves):
            raise InputError(f"{x.shape[1]} drafts, but the calibration was fitted to {len(self.curves)}")
        return np.stack([np.interp(x[:, k], *self.curves[k]) for k in range(x.shape[1])], axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads back."""
        curves = [[np.round(x, 6).tolist(), np.round(p, 6).tolist()] for x, p in self.curves]
        return {"format": FORMAT, "kind": self.kind, "curves": curves}

    @classmethod
    def from_dict(cls, data: Any) -> "Calibration":
        """Rebuild what `to_dict` gave. Raises InputError where it is something else or of another format."""
        try:
            if data["format"] != FORMAT:
                raise InputError(f"calibration format {data['format']}; this version reads format {FORMAT}")
            curves = tuple((np.array(x, float), np.array(p, float)) for x, p in data["curves"])
            sound = all(len(x) == len(p) > 0 and (np.diff(x) > 0).all() for x, p in curves)
            if not sound or not all(((p >= 0) & (p <= 1)).all() for _, p in curves):
                raise ValueError
            return cls(str(data["kind"]), curves)
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("not a calibration: its curves are missing or malformed") from error


def fit_isotonic(
    confidences: np.ndarray, num_accepted: np.ndarray, keep_depth: np.ndarray | None = None
) -> Calibration:
    """Of each position the best rising curve (pool adjacent violators), which makes survival up to it honest.

    A block drafter's later confidences also tell of its earlier drafts: behind a high one more drafts were
    reached than the confidences before it promised. So what is accepted at a confidence is divided by the
    survival that the curves before it promise, not by how many drafts were reached.

    confidences [rows, drafts], num_accepted [rows]; keep_depth [rows] where not all drafts were verified.
    Neighbouring positions share a curve until it rests on `FEWEST_LABELS` labels; all but the first of them
    count what was reached. Every pooled block counts one label more, of the curve's own mean, so that no
    probability is 0 or 1 for want of data.
    """
    x = _clipped_log_odds(check_confidences(confidences))
    k = np.arange(x.shape[1])
    verified = np.full(x.shape, True) if keep_depth is None else k < keep_depth[:, None]
    reached = verified & (k <= num_accepted[:, None])
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    first, before = 0, np.ones(len(x))
    for last in k:
        enough = reached[:, first : last + 1].sum() >= FEWEST_LABELS
        if not enough and (last < k[-1]):
            continue
        if not enough and curves:  # the rest is too thin for a curve of its own
            curves += curves[-1:] * (last + 1 - first)
            break
        weight = reached[:, first : last + 1].astype(np.float64)
        weight[:, 0] = before * verified[:, first]
        rows, position = np.nonzero(weight)
        labels = position + first < num_accepted[rows]
        curve = _rising(x[rows, position + first], labels, weight[rows, position])
        curves += [curve] * (last + 1 - first)
        before *= np.interp(x[:, first : last + 1], *curve).prod(axis=1)
        first = last + 1
    return Calibration("isotonic", tuple(curves))


FEWEST_LABELS = 400


def fit_temperatures(confidences: np.ndarray, num_accepted: np.ndarray) -> Calibration:
    """Sequential temperature scaling: from the first position on, the temperature t[k] for which the product
    of sigmoid(log_odds(c) / t) up to k is calibrated best (least ECE), those before it staying.

    All drafts must have been verified. Source: DSpark (arXiv 2607.05147), STS: a grid search a position.
    """
    x = _clipped_log_odds(check_confidences(confidences))
    grid = np.arange(-MAX_LOG_ODDS, MAX_LOG_ODDS + 0.25, 0.25)
    before, curves = np.ones(len(x)), []
    for k in range(x.shape[1]):
        candidates = [
            before / (1.0 + np.exp(-x[:, k] / temperature)) for temperature in np.geomspace(0.25, 4.0, 65)
        ]
        errors = [expected_calibration_error(p, num_accepted > k) for p in candidates]
        best = int(np.argmin(errors))
        before = candidates[best]
        curves.append((grid, 1.0 / (1.0 + np.exp(-grid / np.geomspace(0.25, 4.0, 65)[best]))))
    return Calibration("temperature", tuple(curves))


def expected_calibration_error(probability: np.ndarray, label: np.ndarray, bins: int = 20) -> float:
    """Mean gap between the probability and the share of true labels, over equal-width bins by their size."""
    at = np.minimum((probability.ravel() * bins).astype(np.int64), bins - 1)
    gap = np.bincount(at, probability.ravel() - label.ravel(), minlength=bins)
    return float(np.abs(gap).sum() / at.size)


def area_under_curve(score: np.ndarray, label: np.ndarray) -> float:
    """Probability that a true label scores above a false one, ties counting half; NaN if one is missing."""
    values, at = np.unique(score.ravel(), return_inverse=True)
    true = np.bincount(at, label.ravel(), minlength=len(values))
    false = np.bincount(at, minlength=len(values)) - true
    pairs = true.sum() * false.sum()
    below = np.cumsum(false) - false
    return float((true * (below + false / 2)).sum() / pairs) if pairs else float("nan")


def _clipped_log_odds(confidences: np.ndarray) -> np.ndarray:
    c = confidences.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.clip(np.log(c) - np.log1p(-c), -MAX_LOG_ODDS, MAX_LOG_ODDS)


def _rising(x: np.ndarray, label: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rising step curve of label / weight by x with the least squared error, as its blocks' middles."""
    order = np.argsort(x, kind="stable")
    mean = min(label.sum() + 0.5, weight.sum() + 0.5) / (weight.sum() + 1.0)
    middle, share = _pool(x[order], label[order].astype(np.float64), weight[order], mean)
    keep = np.append(np.diff(middle) > 1e-9, True)
    return middle[keep], np.maximum.accumulate(share)[keep]


@compiled
def _pool(x: np.ndarray, label: np.ndarray, weight: np.ndarray, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Pool adjacent violators: mean x and share of each block, drawn to `mean` by one label, at most all."""
    size, sum_x, sum_label = np.empty(len(x)), np.empty(len(x)), np.empty(len(x))
    blocks = 0
    for i in range(len(x)):
        size[blocks], sum_x[blocks], sum_label[blocks] = weight[i], weight[i] * x[i], label[i]
        blocks += 1
        while blocks > 1 and (
            sum_label[blocks - 2] * size[blocks - 1] >= sum_label[blocks - 1] * size[blocks - 2]
            or sum_x[blocks - 1] * size[blocks - 2] <= sum_x[blocks - 2] * size[blocks - 1]
        ):
            blocks -= 1
            size[blocks - 1] += size[blocks]
            sum_x[blocks - 1] += sum_x[blocks]
            sum_label[blocks - 1] += sum_label[blocks]
    share = (np.minimum(sum_label[:blocks], size[:blocks]) + mean) / (size[:blocks] + 1.0)
    return sum_x[:blocks] / size[:blocks], share
