"""A policy at work in an engine: started, asked step by step, given older confidences where it lags."""

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import BudgetPolicy
from dcut.selector import Selection


class Chooser:
    """One run of a policy, with the confidences of earlier steps that a lagging one is shown."""

    def __init__(self, policy: BudgetPolicy) -> None:
        """Raises InputError for an oracle, which nobody can feed."""
        if policy.sees != "confidences":
            raise InputError(f"{type(policy).__name__} must know the future: only a replay can run it")
        self.policy = policy.start()
        # Of the last steps that drafted, a ring: the confidences of each request.
        self.history: deque[dict[Hashable, np.ndarray]] = deque({} for _ in range(policy.lag))

    def select(
        self,
        confidences: np.ndarray,
        requests: Sequence[Hashable],
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        """The policy's choice for confidences float32 [batch, drafts], `requests` naming the rows."""
        width = confidences.shape[1]
        if not self.history or not width:
            return self.policy.select(confidences, cost, context_tokens)
        seen = self.history[0]
        self.history.rotate(-1)
        stale = np.ones_like(confidences)
        for i, request in enumerate(requests):
            if request in seen:
                before = seen[request][:width]
                stale[i, : len(before)] = before
            seen[request] = confidences[i]
        return self.policy.select_lagged(confidences, stale, cost, context_tokens)

    def forget(self, request: Hashable) -> None:
        """Drop a request that ended."""
        for seen in self.history:
            seen.pop(request, None)


def rehearse(policy: BudgetPolicy, draft_length: int, cost: CostTable | None) -> None:
    """Take a policy through some steps, which compiles its code. Raises InputError where it could not run."""
    policy.check_drafts(draft_length)
    chooser = Chooser(policy)
    confidences = np.full((2, draft_length), 0.9, np.float32)
    for _ in range(32 if policy.learns else 1):  # enough to have learnt something
        chooser.policy.draft_length(2, draft_length, cost)
        depth = chooser.select(confidences, range(2), cost).keep_depth
        if policy.learns:
            chooser.policy.observe(depth, depth, 0.01)
