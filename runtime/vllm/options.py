"""What a user asks of the vLLM plugin, and whether the engine as configured can do it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.protocol import BudgetPolicy, UniformPolicy
from runtime.chooser import Chooser, rehearse

CONFIDENT = ("dflash", "eagle", "eagle3", "mtp", "draft_model")
"""vLLM's speculative methods whose drafters give a probability for each draft."""

UNSURE = ("ngram",)
"""Those that give none: only policies that do not look at confidences can run with them."""

KV_CACHE_BYTES = 2 << 30
"""Of our own engines on a CPU, where vLLM would claim nearly all of the machine's memory."""


@dataclass(frozen=True, slots=True)
class Options:
    """Each from the environment (DCUT_POLICY, DCUT_PROFILE_S) or vLLM's additional_config, which wins.

    additional_config: {"dcut": {"policy": "dcut", "profile_s": 30}}.
    """

    policy: str
    profile_s: float = 30.0  # time to measure step costs at start-up; 0: none, policies see no costs

    def __post_init__(self) -> None:
        if not 0 <= self.profile_s < math.inf:
            raise InputError(f"dcut profile_s {self.profile_s:g}: give seconds, 0 or more")

    @classmethod
    def read(cls, additional_config: Any, environment: Mapping[str, str] = os.environ) -> Options:
        """What was asked for. Raises InputError where no policy is, and on what cannot be understood."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        given: Any = additional_config.get("dcut", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise InputError(f'additional_config "dcut": {given!r} is no object: give {{"policy": "dcut"}}')
        for key in given:
            if key not in fields:
                close = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise InputError(f"dcut has no option {key!r}{hint}; there are {', '.join(fields)}")
        known = {name: f"DCUT_{name.upper()}" for name in fields}
        found = {name: environment[key] for name, key in known.items() if environment.get(key)} | given
        if "policy" not in found:
            raise InputError(
                'no policy is named: set DCUT_POLICY, or give additional_config {"dcut": {"policy": ...}}'
            )
        policy, given_s = str(found["policy"]), found.get("profile_s")
        if given_s is None:
            return cls(policy)
        try:
            seconds = float(given_s)
        except (TypeError, ValueError) as error:
            raise InputError(f"dcut profile_s {given_s!r} is not a number of seconds") from error
        return cls(policy, seconds)

    @property
    def parsed(self) -> BudgetPolicy:
        """The policy, not started. Raises InputError on an unknown one and on an oracle."""
        policy = parse_policy(self.policy)
        Chooser(policy)
        return policy


def check(options: Options, vllm_config: Any) -> None:
    """Raise InputError, with the remedy, where the V1 runner cannot run the policy as configured.

    vllm_config: vLLM's VllmConfig, complete; no model is needed yet.
    """
    policy, speculative = options.parsed, vllm_config.speculative_config
    if speculative is None:
        raise InputError(
            f"dcut policy {options.policy!r} needs speculative decoding: give vLLM a --speculative-config"
        )
    method = speculative.method
    if method not in CONFIDENT + UNSURE:
        raise InputError(
            f"dcut does not know the speculative method {method!r}: use {', '.join(CONFIDENT + UNSURE)}"
        )
    policy.check_drafts(speculative.num_speculative_tokens)
    if not isinstance(policy, UniformPolicy):
        _check_confidences(options, speculative)
    if not options.profile_s or method in UNSURE:
        try:
            rehearse(policy, speculative.num_speculative_tokens, None)
        except InputError as error:
            why = f"{method} is not profiled" if options.profile_s else "profile_s 0 measures none"
            raise InputError(
                f"dcut policy {options.policy!r} weighs measured step times, and {why}: choose another"
            ) from error
    needed = 8 * (speculative.num_speculative_tokens + 1)  # for what runtime.vllm.profiler does
    if options.profile_s and method not in UNSURE and vllm_config.model_config.max_model_len < needed:
        raise InputError(
            f"max_model_len {vllm_config.model_config.max_model_len} leaves no room to measure steps: "
            f"give {needed} or more, or measure nothing (--profile-s 0, or DCUT_PROFILE_S=0)"
        )
    if speculative.num_speculative_tokens_per_batch_size is not None:
        raise InputError(
            "num_speculative_tokens_per_batch_size is vLLM's own policy: take it out, or unset DCUT_POLICY"
        )
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        size = getattr(vllm_config.parallel_config, name)
        if size > 1:
            raise InputError(
                f"dcut cannot run with {name} {size}: use tensor parallelism, or one server a replica"
            )


def _check_confidences(options: Options, speculative: Any) -> None:
    method = speculative.method
    if method in UNSURE:
        raise InputError(
            f"{method} drafts come without confidences, which dcut policy {options.policy!r} needs: choose "
            "off, full, fixed:K, ema, or dsd with a table"
        )
    if speculative.use_local_argmax_reduction:
        raise InputError(
            f"use_local_argmax_reduction leaves no confidences for dcut policy {options.policy!r}: "
            "set it to false"
        )
    block = method == "dflash" or speculative.parallel_drafting
    if speculative.draft_sample_method != "greedy" and not block:
        raise InputError(
            f"drafts of {method} that are drawn cannot be pruned by their confidences without a bias: "
            'set "draft_sample_method": "greedy"'
        )
