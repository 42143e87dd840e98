"""BudgetPolicy: what an engine asks a policy before and after each verification, and what it may see."""

from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from dcut.cost import CostTable
from dcut.scores import expected_accepted
from dcut.selector import Selection, select

Sees = Literal["confidences", "accept_probs", "num_accepted"]


class BudgetPolicy:
    """Decides, step by step, whether to draft and how deep each request is verified.

    For one run an engine does `policy = policy.start()`, then in every step `draft_length`, the drafter,
    `select` (also in a plain step, with confidences [batch, 0]), the verification, and `observe` where
    `learns` is set. A policy without memory defines `labels` and `select` alone.
    """

    __slots__ = ()

    learns: ClassVar[bool] = False
    """Whether `observe` must be called after every step; engines skip it otherwise."""

    lag: ClassVar[int] = 0
    """How many steps old the confidences behind the budget always are, in an engine that could do better."""

    sees: ClassVar[Sees] = "confidences"
    """What `select` is given as confidences. Anything but "confidences" is an oracle, which only a replay
    can feed: the true probability of each draft given those before it, or 1 for what will be accepted."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the budgets that `Selection.bucket` counts."""
        raise NotImplementedError

    def start(self) -> "BudgetPolicy":
        """A policy with no memory of other runs; this very one where it has no memory at all."""
        return self

    def check_drafts(self, longest: int) -> None:
        """Raise InputError where the policy names more drafts than the `longest` that the drafter proposes.

        For what a user spelt, before a run; an engine gives such a policy what there is.
        """

    def tuned(self, lengths: Callable[[], np.ndarray], cost: CostTable) -> "BudgetPolicy":
        """This policy tuned to a trace, where it is of the kind that is tuned beforehand; else itself.

        lengths(): tokens a request and step when the first k drafts are verified, [draft_length + 1].
        """
        return self

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        """How many drafts to ask of the drafter, at most `longest`; 0 skips it: a plain decoding step."""
        return longest

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        """Choose keep depths for confidences float32 [batch, drafts]; cost None means no profile.

        context_tokens: total length of the batch's contexts; None means as the cost table was measured.
        """
        raise NotImplementedError

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        """`select` in an engine that must settle the budget before it knows this step's confidences.

        stale: the same requests' confidences some steps ago, 1 where a request is too new. The budget
        follows from them alone; its drafts are shared out among the requests by `confidences`.
        """
        settled = self.select(stale, cost, context_tokens)
        budget = np.array([settled.num_verify_tokens - len(confidences)])
        return select(confidences, budget, np.ones(1))._replace(bucket=settled.bucket)

    def drafted(self, confidences: np.ndarray) -> None:
        """Where the engine had only older confidences to select by: those of the drafts verified, before
        `observe`; float32 [batch, drafts] as in `select`, drafts at least 1."""

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        """Learn from the step just selected and its time.

        keep_depth: drafts verified, int64 [batch]. num_accepted: those of them that became output, fewer
        than were accepted where a request ended first; a draft behind the end is worth nothing.
        """


class UniformPolicy(BudgetPolicy):
    """Verifies equally many drafts of every request, without a look at their confidences."""

    __slots__ = ()

    def depth(self, batch_size: int, drafts: int, cost: CostTable | None) -> int:
        """Drafts to verify of each request, of the `drafts` that there are."""
        raise NotImplementedError

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        batch, drafts = confidences.shape
        depth = self.depth(batch, drafts, cost)
        if not depth:
            return _anchors_alone(batch)
        tokens = batch + expected_accepted(confidences, depth)
        return Selection(np.full(batch, depth, np.int64), batch * (depth + 1), 0, tokens)

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        return self.select(confidences, cost, context_tokens)


@lru_cache(maxsize=4096)
def _anchors_alone(batch: int) -> Selection:
    """No draft verified: the same for every batch of this size, so made once."""
    return Selection(np.zeros(batch, np.int64), batch, 0, float(batch))


BANDS = ("off", "0", *(f"{tenth / 10:g}" for tenth in range(1, 11)))
"""Labels where budgets are too many to list: no drafter, no draft kept, up to a tenth of the drafts, ..."""


def band(num_drafts: int, batch_size: int, drafts: int) -> int:
    """The index in BANDS of a step that keeps `num_drafts` of batch_size * drafts."""
    if not drafts:
        return 0
    return 1 + -(-10 * num_drafts // (batch_size * drafts))
