# pyright: reportMissingImports=false
"""vLLM's worker with a budget policy: it follows the drafter, and hands the scheduler ragged drafts."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import vllm._custom_ops as ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models import qwen3_dflash
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from dcut.cost import CostTable
from dcut.policies import Full, parse_policy
from runtime.engine import Step
from runtime.metrics import StepMetrics
from runtime.profiler import cache_directory
from runtime.vllm import adaptive
from runtime.vllm.options import CONFIDENT, Options
from runtime.vllm.pruner import Anchored, Decoded, Prefilled, Pruner

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker


logger = init_logger("vllm.dcut")

AT_ONCE = 256  # rows of logits that are turned into float32 probabilities: they need memory of their own


class AdaptiveWorker(_Worker):
    """The platform's worker of the V2 runner: our policy sets the budgets of its adaptive verification."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        adaptive.install(Options.read(self.vllm_config.additional_config).parsed, self.vllm_config)


class _Before(NamedTuple):
    """A request as an engine step found it."""

    num_tokens: int  # of the prompt and the output
    num_outputs: int
    num_scheduled: int  # rows of the step
    num_drafts: int  # among them
    decodes: bool  # only its newest token and drafts were left to run


class Worker(_Worker):
    """The platform's worker of the V1 runner under synchronous scheduling, and `dcut`, the Pruner.

    Every rank has one, but only the first rank's `take_draft_token_ids` reaches the scheduler: that is where
    depths are decided and steps are logged. How many tokens to draft it tells the other ranks, for the
    drafter's forward pass is theirs too.

    A policy that asks for no drafts lets the drafter rest as far as its context allows: of dflash remain the
    keys and values of the new tokens, of the others one pass over them instead of one for each draft.
    A block drafter that is asked for fewer drafts than its block drafts the whole block, and is cut.
    """

    dcut: Pruner

    def load_model(self, **named: Any) -> None:
        """As vLLM's, then follow the drafter."""
        super().load_model(**named)
        if current_platform.is_cpu():
            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
            qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize_context_k
        speculative = self.vllm_config.speculative_config
        self.dcut = Pruner(Full(), speculative.num_speculative_tokens)  # until costs are known, see start
        self._method = speculative.method
        self._block = speculative.method == "dflash" or speculative.parallel_drafting
        self._decides = get_tp_group().rank_in_group == 0
        self._before: dict[str, _Before] = {}
        self._batch: list[Anchored] = []
        self._began_s = self._drafting_s = self._collect_s = 0.0
        self._logits: list[torch.Tensor] = []
        self._reported = False
        runner, drafter = self.model_runner, self.model_runner.drafter
        self._propose, self._draft = runner.propose_draft_token_ids, drafter.propose
        runner.propose_draft_token_ids, drafter.propose = self._proposing, self._drafting
        if self._method in CONFIDENT:
            self._compute_logits = drafter.model.compute_logits
            drafter.model.compute_logits = self._listening

    # ---- what is asked from outside, on every rank ------------------------------------------------------

    def dcut_metrics(self) -> None:
        """Tell Prometheus of every step from now on, where its processes share a directory."""
        if self.is_driver_worker and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self.dcut.metrics = StepMetrics(None)

    def dcut_policy(self, spec: str) -> None:
        """Change the policy, forgetting what the old one learnt. Raises InputError as Pruner.policy does."""
        self.dcut.policy = parse_policy(spec)

    def dcut_cost(self, cost: dict[str, Any]) -> None:
        """Set what steps cost, from CostTable.to_dict."""
        self.dcut.cost = CostTable.from_dict(cost)

    def dcut_steps(self) -> list[Step]:
        """`Pruner.take_steps`; nothing on ranks other than the first."""
        return self.dcut.take_steps()

    # ---- one engine step --------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """The target's pass over the batch."""
        self._began_s = self.dcut.clock()
        output = super().execute_model(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.dcut.forget(request_id)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._before = {}
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self.model_runner.requests[request_id]
            num_outputs = len(state.output_token_ids)
            self._before[request_id] = _Before(
                state.num_tokens,
                num_outputs,
                num_scheduled,
                len(drafts.get(request_id, ())),
                num_outputs > 0 and state.num_computed_tokens == state.num_tokens - 1,
            )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Acceptance, then the drafts of the next step."""
        self._drafting_s = 0.0
        output = super().sample_tokens(grammar_output)
        if not self._drafting_s and self._before:  # there was no room to draft, so nobody has looked yet
            self._take_in(output.req_ids, output.sampled_token_ids, self.dcut.clock())
            self.dcut.proposal = None
        return output

    def take_draft_token_ids(self) -> Any:
        """The drafts that the policy keeps, a list of any length for each request."""
        drafts = super().take_draft_token_ids()
        if drafts is None or not self._decides:
            return drafts
        depths = self.dcut.decide()
        kept = [
            tokens[: depths.get(request_id, 0)]
            for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return dataclasses.replace(drafts, draft_token_ids=kept)

    # ---- the drafter, followed --------------------------------------------------------------------------

    def _proposing(self, scheduler_output: Any, sampled: Any, *rest: Any) -> Any:
        """In place of the runner's propose_draft_token_ids: a policy hears of a step before the next."""
        rows = sampled.tolist() if isinstance(sampled, torch.Tensor) else sampled
        self._drafting_s = self.dcut.clock()
        discarded = self.model_runner.discard_request_mask.np
        rows = [[] if discarded[i] else [token for token in row if token >= 0] for i, row in enumerate(rows)]
        self._take_in(self.model_runner.input_batch.req_ids, rows, self._drafting_s)
        return self._propose(scheduler_output, sampled, *rest)

    def _drafting(self, *given: Any, **named: Any) -> Any:
        """In place of the drafter's propose."""
        pruner, batch, began_s = self.dcut, self._batch, self.dcut.clock()
        width = self._agreed(pruner.width(len(batch)))
        self._logits = []
        drafts = self._drafts(width, *given, **named)
        torch.accelerator.synchronize()
        drafted_s = pruner.clock()
        if not self._decides:
            return drafts
        rows = [request.row for request in batch]
        if self._logits:
            confidences = _confidences(self._logits, len(drafts))[rows, :width]
        else:
            confidences = np.zeros((len(batch), width), np.float32)
        collect_s = self._collect_s + pruner.clock() - drafted_s
        pruner.proposed(self._drafting_s, drafted_s - began_s, collect_s, batch, confidences)
        if pruner.collect is not None and self._logits:
            for request, row in zip(batch, confidences, strict=True):
                tokens = drafts[request.row, :width].cpu().numpy().astype(np.int64)
                pruner.collect[request.request_id] = tokens, row
        return drafts

    def _drafts(self, width: int, *given: Any, **named: Any) -> Any:
        """What the drafter proposes where `width` drafts are wanted: that many, or all that it can."""
        if self._method == "ngram":
            return self._draft(*given, **named) if width else [[] for _ in given[1]]
        if not width and self._method == "dflash":
            return self._only_context(**named)
        if not self._block or not width:
            named["num_speculative_tokens"] = width
        return self._draft(*given, **named)

    def _only_context(
        self,
        num_speculative_tokens: int,
        target_hidden_states: torch.Tensor,
        common_attn_metadata: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Give dflash the keys and values of the new tokens, as its propose does before the forward pass."""
        drafter = self.model_runner.drafter
        inputs = (
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "token_indices_to_sample",
            "num_rejected_tokens_gpu",
        )
        num_tokens, _, _ = drafter.set_inputs_first_pass(
            target_hidden_states=drafter.model.combine_hidden_states(target_hidden_states),
            cad=common_attn_metadata,
            **{name: named[name] for name in inputs},
        )
        drafter.build_model_inputs_first_pass(num_tokens, num_tokens, None)
        return target_hidden_states.new_empty((common_attn_metadata.batch_size(), 0), dtype=torch.int64)

    def _listening(self, *given: Any, **named: Any) -> torch.Tensor:
        """In place of the drafter's compute_logits."""
        logits = self._compute_logits(*given, **named)
        if self._decides:
            self._logits.append(logits)
        return logits

    def _agreed(self, width: int) -> int:
        """The first rank's width, on every rank."""
        group = get_tp_group()
        return width if group.world_size == 1 else group.broadcast_object(width, src=0)

    # ---- requests ---------------------------------------------------------------------------------------

    def _take_in(self, request_ids: list[str], sampled: list[list[int]], ended_s: float) -> None:
        """Log the step that ended with these tokens, and find the requests that go on to decode."""
        decoded, prefilled, self._batch = [], [], []
        for row, (request_id, tokens) in enumerate(zip(request_ids, sampled, strict=True)):
            before = self._before[request_id]
            num_kept, finish_reason = self._ends(request_id, before, tokens)
            position = before.num_outputs - 1
            if tokens and finish_reason is None:
                anchored = Anchored(request_id, row, position + num_kept, before.num_tokens + num_kept)
                self._batch.append(anchored)
            if before.decodes:
                given = before.num_tokens, before.num_drafts, tokens, num_kept, finish_reason
                decoded.append(Decoded(request_id, position, *given))
            else:
                prefilled.append(Prefilled(request_id, before.num_scheduled, tokens, finish_reason))
        self._collect_s = self.dcut.clock() - ended_s
        if self._decides:
            self.dcut.verified(self._began_s, ended_s, self.dcut.proposal, decoded, prefilled)
            self._report()

    def _report(self) -> None:
        """Say it once where recent steps take another time than the profile says."""
        drift = self.dcut.drift
        if drift and not self._reported and len(drift.ratios) == drift.ratios.maxlen and str(drift):
            logger.warning("dcut: %s; delete %s to measure anew", drift, cache_directory())
            self._reported = True

    def _ends(self, request_id: str, before: _Before, tokens: list[int]) -> tuple[int, str | None]:
        """How many of the tokens become output, and how the request ends with them, as vLLM decides it."""
        params = self.model_runner.requests[request_id].sampling_params
        most = self.model_config.max_model_len - before.num_tokens
        if params.max_tokens is not None:
            most = min(most, params.max_tokens - before.num_outputs)
        stop, stops = params.eos_token_id, params.stop_token_ids
        for count, token in enumerate(tokens, 1):
            if token == stop or (stops and token in stops):
                return count, "stop"
            if count >= most:
                return count, "length"
        return len(tokens), None


def _confidences(logits: list[torch.Tensor], batch_size: int) -> np.ndarray:
    """The largest probability of each draft distribution, float32 [batch, drafts].

    logits: of a block drafter, one [batch * drafts, vocab]; else [batch, vocab] for each draft.
    """
    columns = []
    for part in logits:
        some = [rows.float().softmax(-1).amax(-1) for rows in part.split(AT_ONCE)]
        columns.append(torch.cat(some).view(batch_size, -1))
    return torch.cat(columns, 1).clamp_(max=1).cpu().numpy()


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """vLLM's function of this name, [batch] to [num_tokens], without its kernel for CPUs.

    That kernel (vLLM 0.32, utils/cpu_triton_utils.py) writes into an integer copy of the output and never
    copies back: for temperatures, top-k and top-p it returns uninitialized memory.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def normalize_context_k(drafter: Any, keys: torch.Tensor) -> torch.Tensor:
    """The DFlash drafter's method of this name, keys [layers, tokens, heads, dim], each layer by its weights.

    vLLM 0.32 norms all layers in one call, whose kernel for CPUs takes the first layer's weights for all.
    """
    normed = torch.empty_like(keys)
    for out, layer, weight in zip(normed, keys, drafter._k_norm_weights, strict=True):
        ops.rms_norm(out, layer, weight, drafter._rms_norm_eps)
    return normed
