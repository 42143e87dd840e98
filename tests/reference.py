"""The selector written plainly in numpy with a full sort: the oracle of the tests, the yardstick of bench."""

import numpy as np

from dcut.scores import survival
from dcut.selector import Selection


def ranked_slots(confidences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Requests [num_slots] and survival [num_slots] of all slots: best, then earlier, then lower request."""
    values = survival(confidences)
    requests, positions = np.indices(values.shape)
    order = np.lexsort((requests.ravel(), positions.ravel(), -values.ravel()))
    return requests.ravel()[order], values.ravel()[order]


def select(
    confidences: np.ndarray, budgets: np.ndarray, seconds: np.ndarray, bonus: bool = False
) -> Selection:
    """What dcut.selector.select must return."""
    batch = len(confidences)
    requests, values = ranked_slots(confidences)
    expected = np.concatenate(([0.0], np.cumsum(values)))[budgets]
    bucket = int(np.argmax((expected + batch * bonus) / seconds))
    kept = requests[: budgets[bucket]]
    return Selection(
        np.bincount(kept, minlength=batch), len(kept) + batch, bucket, float(expected[bucket]) + batch
    )
