"""One pass over a batch: rank every draft slot, price the budgets, return how deep each request is kept."""

import math
from typing import NamedTuple

import numpy as np

from dcut.errors import InputError
from dcut.jit import compiled
from dcut.scores import check_confidences

# Survival is non-negative, so its bits as an integer order like its value. The top 17 bits, counted down
# from 1.0, give 32 bins an octave; everything below 2**-63 shares the last bin. Only the bin in which a
# budget ends has to be sorted.
_SHIFT = 47
_TOP = 0x3FF0000000000000 >> _SHIFT
_NUM_BINS = 64 * 32


class Selection(NamedTuple):
    """What one step verifies. A tuple rather than a dataclass: one is built in every simulated step."""

    keep_depth: np.ndarray  # int64 [batch], drafts of each request sent to the target
    num_verify_tokens: int  # sum of keep_depth + 1
    bucket: int  # index of the chosen budget, in the order that the policy lists them
    expected_tokens: float  # sum of kept survival + one bonus token a request


def select(
    confidences: np.ndarray, budgets: np.ndarray, seconds: np.ndarray, bonus: bool = False
) -> Selection:
    """Keep the K best drafts of the whole batch, for the budget K with the most expected tokens a second.

    confidences: [batch, draft_length], the drafter's probability of each draft.
    budgets: int [num_budgets], candidate numbers of drafts to keep, each in 0..batch * draft_length.
    seconds: float [num_budgets], measured step time of each candidate; all positive.
    bonus: count the batch's bonus tokens in the numerator (the write-up's formula does not).

    Slots are ranked by survival; ties go to the earlier position, then to the lower request, so exactly K
    are kept and keep depths are prefixes. Equal utilities go to the first candidate.
    Raises InputError on confidences outside [0, 1], an impossible budget or a time that is not positive.
    Source: the D-Cut write-up, U_q = (sum of the K_q best survivals) / C_graph(batch, rho_q).
    """
    array = confidences
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == np.float32
        and array.ndim == 2
        and array.flags.c_contiguous
        and array.size
    ):
        array = check_confidences(confidences)
    keep_depth = np.empty(array.shape[0], np.int64)
    bucket, expected = _select(
        array,
        np.asarray(budgets, np.int64),
        np.asarray(seconds, np.float64),
        float(array.shape[0]) if bonus else 0.0,
        keep_depth,
    )
    if bucket < 0:
        _explain(array, budgets, seconds)
    num_drafts = int(budgets[bucket])
    return Selection(keep_depth, num_drafts + array.shape[0], bucket, expected + array.shape[0])


def _explain(confidences: np.ndarray, budgets: np.ndarray, seconds: np.ndarray) -> None:
    """Raise the InputError that names what the kernel refused."""
    check_confidences(confidences)
    if len(budgets) == 0 or len(budgets) != len(seconds):
        raise InputError(f"{len(budgets)} budgets and {len(seconds)} step times: give one time a budget")
    for budget, step_s in zip(budgets, seconds, strict=True):
        if not 0 <= budget <= confidences.size:
            raise InputError(f"budget of {budget} drafts is outside 0..{confidences.size}")
        if not (0 < step_s < math.inf):
            raise InputError(f"step time {step_s} s of a budget of {budget} drafts is not positive")
    raise AssertionError("the selector refused an input that is valid")


@compiled
def _select(
    confidences: np.ndarray, budgets: np.ndarray, seconds: np.ndarray, bonus: float, keep_depth: np.ndarray
) -> tuple[int, float]:
    """Fill keep_depth; return the chosen budget's index and its sum of survival, or (-1, 0) if refused."""
    batch, width = confidences.shape
    num_slots = batch * width
    if len(budgets) == 0 or len(budgets) != len(seconds):
        return -1, 0.0
    for q in range(len(budgets)):
        if not (0 <= budgets[q] <= num_slots and 0.0 < seconds[q] < np.inf):
            return -1, 0.0
    survival = np.empty((batch, width), np.float64)
    bits = survival.view(np.int64)
    bins = np.empty((batch, width), np.int16)
    count = np.zeros(_NUM_BINS, np.int64)
    mass = np.zeros(_NUM_BINS, np.float64)
    valid = True
    for i in range(batch):
        product = 1.0
        for k in range(width):
            confidence = confidences[i, k]
            valid &= (confidence >= 0.0) & (confidence <= 1.0)
            product *= confidence
            survival[i, k] = product
    if not valid:
        return -1, 0.0
    for i in range(batch):
        for k in range(width):
            slot = min(_TOP - (bits[i, k] >> _SHIFT), _NUM_BINS - 1)
            bins[i, k] = slot
            count[slot] += 1
            mass[slot] += survival[i, k]
    best, best_utility, best_sum = -1, -1.0, 0.0
    edge, kept, total = 0, 0, 0.0  # all slots in the bins before edge, and their survival
    best_edge, best_rest = 0, np.empty(0, np.int64)
    for q in range(len(budgets)):
        if budgets[q] < kept:
            edge, kept, total = 0, 0, 0.0
        while kept < budgets[q] and kept + count[edge] <= budgets[q]:
            kept += count[edge]
            total += mass[edge]
            edge += 1
        expected, rest = total, best_rest[:0]
        if kept < budgets[q]:
            values, rest = _ranked(survival, bins, edge, budgets[q] - kept, count[edge])
            for value in values:
                expected += value
        utility = (expected + bonus) / seconds[q]
        if utility > best_utility:
            best, best_utility, best_sum, best_edge, best_rest = q, utility, expected, edge, rest
    for i in range(batch):
        depth = 0
        while depth < width and bins[i, depth] < best_edge:
            depth += 1
        keep_depth[i] = depth
    for i in best_rest:
        keep_depth[i] += 1
    return best, best_sum


@compiled
def _ranked(
    survival: np.ndarray, bins: np.ndarray, edge: int, num: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Survival and request of the `num` best of the `size` slots of a bin; ties: position, then request."""
    batch, width = survival.shape
    values = np.empty(size, np.float64)
    requests = np.empty(size, np.int64)
    n = 0
    for k in range(width):
        for i in range(batch):
            if bins[i, k] == edge:
                values[n] = survival[i, k]
                requests[n] = i
                n += 1
    order = np.argsort(-values, kind="mergesort")[:num]  # stable: ties stay in (position, request) order
    return values[order], requests[order]
