"""Draft confidences turned into survival probabilities, the value of keeping each draft."""

import numpy as np

from dcut.errors import InputError
from dcut.jit import compiled


def check_confidences(confidences: np.ndarray) -> np.ndarray:
    """Return `confidences` [batch, draft_length] as C-ordered float32.

    Raises InputError unless the array is two-dimensional, not empty, and every value lies in [0, 1]
    (NaN does not).
    """
    array = np.ascontiguousarray(confidences, dtype=np.float32)
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"confidences must be [batch, draft_length] and not empty, got shape {array.shape}")
    outside = ~((array >= 0) & (array <= 1))
    if outside.any():
        request, position = np.argwhere(outside)[0]
        raise InputError(
            f"confidence {array[request, position]} of request {request} at draft {position} "
            "is not a probability in [0, 1]"
        )
    return array


def survival(confidences: np.ndarray) -> np.ndarray:
    """Estimated probability that draft k and all before it are accepted, float64 [batch, draft_length].

    `survival[i, k] = confidences[i, 0] * ... * confidences[i, k]`; the D-Cut write-up calls it s_{i,k+2},
    with s_{i,1} = 1 for the anchor. Raises InputError as `check_confidences` does.
    """
    return np.cumprod(check_confidences(confidences), axis=1, dtype=np.float64)


def expected_accepted(confidences: np.ndarray, depth: int) -> float:
    """Expected accepted drafts of the batch if the first `depth` of every request are verified.

    Raises InputError as `check_confidences` does, except that there may be no drafts.
    """
    total = _survival_sum(confidences, depth)
    if not total >= 0:
        check_confidences(confidences)
    return total


@compiled
def _survival_sum(confidences: np.ndarray, depth: int) -> float:
    """The sum of the first `depth` survivals of every row; NaN where a confidence is no probability."""
    total, outside = 0.0, 0
    for i in range(confidences.shape[0]):
        product = 1.0
        for k in range(confidences.shape[1]):
            confidence = confidences[i, k]
            outside += not (confidence >= 0.0 and confidence <= 1.0)
            product *= confidence
            if k < depth:
                total += product
    return np.nan if outside else total
