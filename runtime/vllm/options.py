"""What a user asks of the vLLM plugin, and whether the engine as configured can do it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dcut.policies import parse_policy
from dcut.protocol import BudgetPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """Read from the environment (DCUT_POLICY, ...) or from vLLM's additional_config {"dcut": {...}}."""

    policy: str

    @property
    def parsed(self) -> BudgetPolicy:
        """The policy, not started."""
        return parse_policy(self.policy)

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """The options of a running engine."""
        given = (vllm_config.additional_config or {}).get("dcut", {})
        return cls(**{"policy": os.environ.get("DCUT_POLICY", "dcut"), **given})
