# pyright: reportMissingImports=false
"""vLLM's worker with a budget policy: it listens to the drafter, and hands the scheduler ragged drafts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.platforms import current_platform

from runtime.vllm.options import Options
from runtime.vllm.pruner import Anchored, Decoded, Prefilled, Pruner

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker


@dataclasses.dataclass(frozen=True, slots=True)
class _Before:
    """A request as an engine step found it."""

    num_tokens: int  # of the prompt and the output
    num_outputs: int
    num_scheduled: int  # rows of the step
    num_drafts: int  # among them
    decodes: bool  # only its newest token and drafts were left to run


class Worker(_Worker):
    """The platform's worker of the V1 runner under synchronous scheduling, and `dcut`, the Pruner.

    Only the output rank's `take_draft_token_ids` reaches the scheduler, so depths are decided in one place;
    how many tokens to draft is broadcast among the ranks, for the drafter's own forward pass is theirs too.
    """

    dcut: Pruner

    def load_model(self, **kwargs: Any) -> None:
        """As vLLM's, then follow the drafter's work."""
        super().load_model(**kwargs)
        options = Options.of(self.vllm_config)
        self.dcut = Pruner(options.parsed, self.vllm_config.speculative_config.num_speculative_tokens)
        self._before: dict[str, _Before] = {}
        self._began_s = self._drafting_s = 0.0
        self._logits: list[torch.Tensor] = []
        _follow(self)

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
            num_drafts, num_outputs = len(drafts.get(request_id, ())), len(state.output_token_ids)
            decodes = num_outputs > 0 and state.num_computed_tokens == state.num_tokens - 1
            self._before[request_id] = _Before(
                state.num_tokens, num_outputs, num_scheduled, num_drafts, decodes
            )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Acceptance, then the drafts of the next step; logs the step that ends with the acceptance."""
        proposal, self.dcut.proposal, self._drafting_s = self.dcut.proposal, None, 0.0
        output = super().sample_tokens(grammar_output)
        if self._before and output is not None:
            self._log(output, proposal)
        return output

    def take_draft_token_ids(self) -> Any:
        """The drafts that the policy keeps, a list of any length for each request."""
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        depths = self.dcut.decide()
        kept = [
            tokens[: depths.get(request_id, 0)]
            for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return dataclasses.replace(drafts, draft_token_ids=kept)

    # ---- what the drafter is asked ----------------------------------------------------------------------

    def anchored(self, sampled: torch.Tensor | list[list[int]]) -> list[Anchored]:
        """Requests that go on to decode after the tokens just sampled for each row of the batch."""
        rows = sampled.tolist() if isinstance(sampled, torch.Tensor) else sampled
        runner, batch = self.model_runner, []
        for i, request_id in enumerate(runner.input_batch.req_ids):
            before = self._before.get(request_id)
            if before is None or runner.discard_request_mask.np[i]:
                continue
            tokens = [token for token in rows[i] if token >= 0]
            num_kept, finish_reason = self._ends(request_id, before, tokens)
            if tokens and finish_reason is None:
                batch.append(
                    Anchored(request_id, i, before.num_outputs + num_kept - 1, before.num_tokens + num_kept)
                )
        return batch

    def _ends(self, request_id: str, before: _Before, tokens: list[int]) -> tuple[int, str | None]:
        """How many of the tokens become output, and how the request ends with them, as vLLM decides it."""
        params = self.model_runner.requests[request_id].sampling_params
        stops = {params.eos_token_id, *(params.stop_token_ids or ())}
        most = self.model_config.max_model_len - before.num_tokens
        if params.max_tokens is not None:
            most = min(most, params.max_tokens - before.num_outputs)
        for count, token in enumerate(tokens, 1):
            if token in stops:
                return count, "stop"
            if count >= most:
                return count, "length"
        return len(tokens), None

    def _log(self, output: Any, proposal: Any) -> None:
        decoded, prefilled = [], []
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            before = self._before.get(request_id)
            if before is None:
                continue
            num_kept, finish_reason = self._ends(request_id, before, tokens)
            if before.decodes:
                decoded.append(
                    Decoded(
                        request_id,
                        before.num_outputs - 1,
                        before.num_tokens,
                        before.num_drafts,
                        tokens,
                        num_kept,
                        finish_reason,
                    )
                )
            else:
                prefilled.append(Prefilled(request_id, before.num_scheduled, tokens, finish_reason))
        ended_s = self._drafting_s or self.dcut.clock()
        self.dcut.verified(self._began_s, ended_s, proposal, decoded, prefilled)


def _follow(worker: Worker) -> None:
    """Wrap the drafter of one worker: its logits yield confidences, the policy says how much to draft."""
    runner = worker.model_runner
    drafter, propose = runner.drafter, runner.drafter.propose
    propose_all = runner.propose_draft_token_ids
    model = getattr(drafter, "model", None)
    compute_logits = getattr(model, "compute_logits", None)
    batch: list[Anchored] = []

    def draft_all(scheduler_output: Any, sampled: Any, *args: Any) -> Any:
        worker._drafting_s = worker.dcut.clock()
        batch[:] = worker.anchored(sampled)
        return propose_all(scheduler_output, sampled, *args)

    def draft(**kwargs: Any) -> Any:
        pruner = worker.dcut
        width = pruner.width(len(batch))
        worker._logits = []
        drafts = propose(**kwargs)
        confidences = _confidences(worker._logits, len(runner.input_batch.req_ids))
        rows = [request.row for request in batch]
        found = confidences[rows, :width]
        pruner.proposed(worker._drafting_s, pruner.clock() - worker._drafting_s, list(batch), found)
        if pruner.collect is not None:
            for request, row in zip(batch, found, strict=True):
                tokens = drafts[request.row, :width].cpu().numpy().astype(np.int64)
                pruner.collect[request.request_id] = (tokens, row)
        return drafts

    def listen(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = compute_logits(*args, **kwargs)
        worker._logits.append(logits)
        return logits

    if compute_logits is not None:
        model.compute_logits = listen
    runner.propose_draft_token_ids, drafter.propose = draft_all, draft


def _confidences(logits: list[torch.Tensor], batch_size: int) -> np.ndarray:
    """The largest probability of each draft distribution, float32 [batch, drafts].

    logits: of a block drafter, one [batch * drafts, vocab]; else [batch, vocab] for each draft.
    """
    largest = [(x.amax(-1) - x.logsumexp(-1)).exp() for x in (part.float() for part in logits)]
    columns = [part.view(batch_size, -1) for part in largest]
    return torch.cat(columns, 1).clamp(max=1).cpu().numpy()
