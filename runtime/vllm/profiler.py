# pyright: reportMissingImports=false
"""Measures what a step costs as vLLM starts, by running its own scheduler and workers on made-up prompts."""

from __future__ import annotations

import time
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus
from vllm.version import __version__

from dcut.cost import CostTable, Sample
from dcut.policies import DCut
from runtime.engine import Step
from runtime.graphs import knots, powers_of_two
from runtime.profiler import Profile, Times, cached, device_name, slopes, tamed
from runtime.vllm.options import UNSURE, Options

CONTEXT = 256  # tokens of a prompt, where the model's longest leaves room for four times as many
STEPS = 3  # of one policy in a row
LARGEST = 128  # requests in a measured batch; beyond, the table's last slope goes on

logger = init_logger("vllm.dcut")


def start(core: Any) -> None:
    """Measure costs for as long as the options allow, or take them from the cache; then set the policy.

    core: vLLM's EngineCore, whose scheduler and workers are there and idle. Nothing is measured with n-grams,
    which find no drafts in made-up prompts.
    """
    config, tell = core.vllm_config, core.model_executor.collective_rpc
    options = Options.read(config.additional_config)
    if options.profile_s and config.speculative_config.method not in UNSURE:
        profiling = Profiling(core)

        def measure() -> Profile:
            logger.info("dcut: measuring what steps cost, for %g s", options.profile_s)
            return profiling.profile(options.profile_s, whole=False)

        found = cached(_about(config, profiling), measure)
        sizes = found.cost.batch_sizes
        assert sizes is not None, "a profile counts requests"
        logger.info("dcut: %s, of 1 to %d requests", found, sizes[-1])
        tell("dcut_cost", args=(found.cost.to_dict(),))
    elif isinstance(options.parsed, DCut):
        logger.warning("dcut: no step is measured, so dcut keeps 0.75 of all positions in every step")
    tell("dcut_policy", args=(options.policy,))
    tell("dcut_metrics")


class Profiling:
    """The engine at work on batches of our own, under one policy after the other."""

    def __init__(self, core: Any) -> None:
        """core: vLLM's EngineCore, idle, whose texts may be as long as options.check asks for."""
        config = core.vllm_config
        self.scheduler, self.executor = core.scheduler, core.model_executor
        self.draft_length = config.speculative_config.num_speculative_tokens
        self.vocab_size = config.model_config.get_vocab_size()
        self.policies = ["off", *(f"fixed:{n - 1}" for n in knots(self.draft_length)[1:])]
        longest, width = config.model_config.max_model_len, self.draft_length + 1
        self.context = min(CONTEXT, longest // 4)
        self.at_once = min(len(self.policies), ((longest - self.context) // width - 3) // STEPS)
        self.room = (self.at_once * STEPS + 2) * width  # output tokens, more than those policies can emit
        fits = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        rows = width + config.speculative_config.max_num_new_slots_for_drafting  # of a request, at most
        most = min(
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.max_num_batched_tokens // rows,
            LARGEST,
            fits // (self.context + self.room + 64),
        )
        self.sizes = powers_of_two(max(1, most))
        self.random = np.random.default_rng(0)
        self.hasher = None
        if config.cache_config.enable_prefix_caching:
            function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(function)
            self.hasher = get_request_block_hasher(self.scheduler.hash_block_size, function)

    def profile(self, budget_s: float, whole: bool = True) -> Profile:
        """Time every batch size under every policy, round after round, as `runtime.profiler.profile` does.

        whole: every size at least once, however long it takes; else the larger ones, which take longest, are
        left to the table's last slope where they would take more than half of the time. Leaves the prefix
        cache empty.
        """
        began = time.perf_counter()
        steps: list[Step] = []
        sizes: list[int] = []
        for size in self.sizes:
            size_began = time.perf_counter()
            steps += self.steps(size, self.context, self.policies)
            sizes.append(size)
            ended = time.perf_counter()
            next_s = 2 * (ended - size_began)  # at most, for up to twice the requests
            if not whole and ended - began + next_s > budget_s / 2:
                break
        round_s, largest = time.perf_counter() - began, sizes[-1]
        shorter = _times(
            self.steps(largest, max(1, self.context // 4), [self.policies[0], self.policies[-1]])
        )
        while time.perf_counter() - began + round_s < budget_s:
            for size in sizes:
                steps += self.steps(size, self.context, self.policies)
        prefills = [s.prefill_s / s.prefill_tokens for s in steps if not len(s.request_id)]
        steps = [s for s in steps if len(s.request_id)]
        self.scheduler.reset_prefix_cache()
        times: dict[tuple[str, int, int | None], list[float]] = {}
        for step in steps:
            batch_size = len(step.request_id)
            if not step.draft_s:
                times.setdefault(("plain", batch_size, None), []).append(step.step_s)
                continue
            times.setdefault(("draft", batch_size, None), []).append(step.draft_s)
            tokens = step.selection.num_verify_tokens
            times.setdefault(("verify", batch_size, tokens), []).append(step.step_s - step.draft_s)
        samples = [Sample(*key, median(found)) for key, found in times.items()]
        longer = _times([step for step in steps if len(step.request_id) == largest])
        options: dict[str, Any] = slopes(shorter, longer, self.draft_length + 1) | {
            "context_per_request": float(np.mean([s.context_tokens / len(s.request_id) for s in steps])),
            "prefill_token_s": median(prefills),
        }
        cost = CostTable.from_samples(samples, **options)
        spreads = [float(np.subtract(*np.percentile(t, (75, 25)))) / median(t) for t in times.values()]
        return Profile(tamed(cost, samples), median(spreads), time.perf_counter() - began)

    def steps(self, batch_size: int, context: int, policies: list[str]) -> list[Step]:
        """What the log says of steps in which so many requests decode, under each of the policies.

        And of those before them that run prompts alone. Steps that do both are left out.
        """
        found: list[Step] = []
        for start in range(0, len(policies), self.at_once):
            self._fill(batch_size, context)
            for policy in policies[start : start + self.at_once]:
                self._policy(policy)
                for _ in range(STEPS):
                    self._step()
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self._step()  # tells the workers
            found += self.executor.collective_rpc("dcut_steps")[0]
        return [s for s in found if len(s.request_id) == (0 if s.prefill_tokens else batch_size)]

    def _fill(self, batch_size: int, context: int) -> None:
        """Bring so many requests of so many tokens to where they decode."""
        self._policy("off")
        params = SamplingParams(temperature=0, max_tokens=self.room, ignore_eos=True)
        for i in range(batch_size):
            prompt = self.random.integers(self.vocab_size, size=context).tolist()
            request = Request(f"dcut-profile-{i}", prompt, params, None, block_hasher=self.hasher)
            self.scheduler.add_request(request)
        while not self._decoding():
            self._step()

    def _decoding(self) -> bool:
        return all(request.num_output_tokens for request in self.scheduler.requests.values())

    def _policy(self, spec: str) -> None:
        self.executor.collective_rpc("dcut_policy", args=(spec,))

    def _step(self) -> None:
        """EngineCore.step and post_step, without what they do for clients."""
        scheduled = self.scheduler.schedule()
        output = self.executor.execute_model(scheduled)
        if output is None:
            output = self.executor.sample_tokens(None)
        self.scheduler.update_from_output(scheduled, output)
        if scheduled.total_num_scheduled_tokens:
            drafts = self.executor.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)


def _times(steps: list[Step]) -> Times:
    """Of one batch at one context: of each kind of step the fastest."""
    steps = [s for s in steps if len(s.request_id)]
    plain = [s for s in steps if not s.draft_s]
    deepest = max(s.selection.num_verify_tokens for s in steps)
    full = [s for s in steps if s.selection.num_verify_tokens == deepest]
    return Times(
        min(s.step_s for s in plain),
        min(s.step_s - s.draft_s for s in full),
        min(s.draft_s for s in full),
        median(s.context_tokens for s in plain),
    )


def _about(config: Any, profiling: Profiling) -> dict[str, Any]:
    """What a profile depends on."""
    speculative, device = config.speculative_config, torch.device(config.device_config.device)
    draft = speculative.draft_model_config
    return {
        "engine": "vllm",
        "target": config.model_config.hf_config.to_dict(),
        "drafter": [speculative.method, profiling.draft_length, draft.hf_config.to_dict()],
        "dtype": str(config.model_config.dtype),
        "device": device_name(device),
        "ranks": config.parallel_config.tensor_parallel_size,
        "threads": torch.get_num_threads(),
        "eager": config.model_config.enforce_eager,
        "versions": {"vllm": __version__} | {name: version(name) for name in ("dcut", "torch", "numba")},
        "sizes": profiling.sizes,
        "context": profiling.context,
    }
