# pyright: reportMissingImports=false
"""vLLM's engine in this process, with the methods of our own: add, step, cancel; and its worker's Pruner."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read as vLLM is imported
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine in this process

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import BudgetPolicy
from runtime.engine import Request, Step
from runtime.models import read_config
from runtime.profiler import Profile
from runtime.vllm.options import KV_CACHE_BYTES
from runtime.vllm.plugin import register
from runtime.vllm.profiler import Profiling
from runtime.vllm.pruner import Pruner
from runtime.vllm.speculation import speculation

ROOM = 1024  # tokens that a context may have at least, where the target allows it: profiles want some


class Session:
    """One vLLM engine, driven step by step; at most `max_batch_size` of its requests are in it at once.

    A request is handed on when another has ended, so batches form as in a closed loop of that many clients;
    which requests share a step, and in which order, is vLLM's own decision.
    """

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None,
        max_batch_size: int,
        max_context: int,
        dtype: str | None = None,
        num_seqs: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """drafter: None for plain decoding, in a worker of vLLM's own, which has no Pruner.

        max_context: tokens of a prompt and its output. dtype: float32 on a CPU, else bfloat16.
        num_seqs: the most requests that `max_batch_size` may be set to. options: further ones of vLLM.
        Raises InputError where the models cannot be loaded or do not fit.
        """
        self.max_batch_size, self.max_context = max_batch_size, max_context
        spec = None if drafter is None else speculation(drafter)
        self.draft_length: int = spec["num_speculative_tokens"] if spec else 0
        needed = max_context + self.draft_length + 1
        longest = read_config(Path(target))["max_position_embeddings"]
        if needed > longest:
            raise InputError(
                f"{max_context} tokens of a prompt and its output and {self.draft_length + 1} drafts "
                f"are more than the {longest} that the target takes"
            )
        on_cpu = current_platform.is_cpu()
        args = EngineArgs(
            model=str(target),
            dtype=dtype or ("float32" if on_cpu else "bfloat16"),
            max_num_seqs=max(num_seqs or 0, max_batch_size),
            max_model_len=min(max(needed, ROOM), longest),
            enforce_eager=on_cpu,
            enable_prefix_caching=False,  # a step costs what its prompts cost, as in a replay
            speculative_config=spec,
            additional_config={"dcut": {"policy": "full", "profile_s": 0}} if spec else {},
            disable_log_stats=True,
            use_tqdm_on_load=False,
            kv_cache_memory_bytes=KV_CACHE_BYTES if on_cpu else None,
            seed=seed,
            **options,
        )
        register()  # whether or not vLLM finds the plugin by its entry point
        try:
            self.engine = LLMEngine.from_engine_args(args)
        except InputError:
            raise
        except (RuntimeError, ValueError) as error:
            raise InputError(f"vLLM does not start: {error}") from error
        executor = self.engine.engine_core.engine_core.model_executor
        self.worker = executor.driver_worker.worker
        self.waiting: deque[tuple[Request, int | None]] = deque()
        self.names: dict[int, str] = {}  # of the requests in the engine, by our number

    @property
    def pruner(self) -> Pruner:
        """What decides in the worker."""
        return self.worker.dcut

    @property
    def policy(self) -> BudgetPolicy:
        """May be set between steps: it decides from the next proposal on."""
        return self.pruner.policy

    @policy.setter
    def policy(self, policy: BudgetPolicy) -> None:
        self.pruner.policy = policy

    @property
    def cost(self) -> CostTable | None:
        """What the policy prices steps by."""
        return self.pruner.cost

    @cost.setter
    def cost(self, cost: CostTable | None) -> None:
        self.pruner.cost = cost

    @property
    def clock(self) -> Callable[[], float]:
        """What steps are timed by."""
        return self.pruner.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.pruner.clock = clock

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.waiting or self.names)

    def profile(self, budget_s: float) -> Profile:
        """Measure what steps cost, by the session's clock, and let the policy price them by that."""
        before, measured = self.policy, Profiling(self.engine.engine_core.engine_core).profile(budget_s)
        self.cost, self.policy = measured.cost, before
        return measured

    def add(self, request: Request, only: int | None = None) -> None:
        """Queue a request. only: a token that every position of its output must be."""
        self.waiting.append((request, only))

    def cancel(self, request_id: int) -> None:
        """Free the request's place; unknown and ended ones are ignored."""
        self.waiting = deque(r for r in self.waiting if r[0].request_id != request_id)
        if name := self.names.pop(request_id, None):
            self.engine.abort_request([name], internal=True)

    def clear(self) -> None:
        """Cancel whatever waits or runs."""
        self.waiting.clear()
        for request_id in list(self.names):
            self.cancel(request_id)

    def step(self) -> Step | None:
        """Run the engine until a step of ours is complete; None where nothing waits or runs."""
        while self.busy:
            self.hand_on()
            self.engine.step()
            for step in self.pruner.take_steps():
                for emission in step.emissions:
                    if emission.finish_reason:
                        self.names.pop(emission.request_id, None)
                return step
        return None

    def hand_on(self) -> None:
        """Give the engine those that wait, as far as there is room."""
        while self.waiting and len(self.names) < self.max_batch_size:
            request, only = self.waiting.popleft()
            stops = request.stop_token_ids
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                seed=request.seed,
                ignore_eos=stops is not None,
                stop_token_ids=list(stops or ()),
                allowed_token_ids=None if only is None else [only],
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": list(request.prompt)}
            name = self.engine.add_request(str(request.request_id), prompt, params)
            self.names[request.request_id] = name
