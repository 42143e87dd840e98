# pyright: reportMissingImports=false
"""Records a run of vLLM's engine as a trace: its steps, and a draft from every output position."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm
from vllm.version import __version__ as VERSION

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import Fixed, Full
from dcut.record import Config
from runtime.engine import Request, Step
from runtime.pair import weights
from runtime.profiler import device_name
from runtime.recorder import (
    PROFILED,
    Recorded,
    Recorder,
    asked_for,
    carry_out,
    free_place,
    remaining,
    run_closed,
    settings,
)
from runtime.vllm.session import Session
from traces.schema import Trace, anchors_schema


@dataclass(slots=True)
class Piece:
    """A part of a text that the engine says once more, one token a step, drafting behind each."""

    text: int  # its number
    start: int  # output position of the piece's first token
    alone: bool = False  # whether it is that one token, which the engine by itself would not say


class DensePass:
    """The dense pass through vLLM's engine: finished texts are said again, drafts are made and not verified.

    The engine says a text again by itself, greedily, a token a step; after each it drafts as it would live.
    Where it would go on otherwise than it did (rounding may differ with the batch), the recorded token is
    forced upon it and counted in `num_forced`. Behind the end it goes on, stop token or not, for the drafts
    that reach beyond it to be compared with.
    """

    temperature = 0.0

    def __init__(self, session: Session, progress: bool = False) -> None:
        """session: idle whenever `anchors` is called; its policy and costs are put back afterwards."""
        self.session, self.progress = session, progress
        self.draft_length = session.draft_length
        self.num_forced = 0
        self._numbers = itertools.count(1 << 40)  # of the pieces, apart from the requests

    def anchors(self, texts: Sequence[Recorded]) -> list[pl.DataFrame]:
        """The rows of anchors.parquet of each text: one for each output position."""
        session, pruner, before = self.session, self.session.pruner, self.session.policy
        width = self.draft_length
        drafts = [np.zeros((len(text.output), width), np.int64) for text in texts]
        confidences = [np.zeros((len(text.output), width), np.float32) for text in texts]
        truths = [list(text.output) for text in texts]
        pieces: dict[int, Piece] = {}

        def say(piece: Piece) -> None:
            number, text = next(self._numbers), texts[piece.text]
            prompt = [*text.request.prompt, *text.output[: piece.start]]
            # Forced once, the token may come again: the engine drafts only behind what goes on.
            length = 2 if piece.alone else len(text.output) - piece.start + width
            only = text.output[piece.start] if piece.alone else None
            session.add(Request(number, prompt, length, stop_token_ids=()), only)
            pieces[number] = piece

        session.policy, pruner.collect = Fixed(0), {}
        total = sum(len(text.output) for text in texts)
        with tqdm(
            total=total, desc="drafting", unit=" tokens", disable=None if self.progress else True
        ) as bar:
            for number in range(len(texts)):
                say(Piece(number, 0))
            while step := session.step():
                for emission in step.emissions:
                    (token,) = emission.tokens  # without drafts to verify a step brings one
                    piece = pieces[emission.request_id]
                    output, at = texts[piece.text].output, piece.start
                    if at >= len(output):
                        truths[piece.text].append(token)
                    elif token != output[at]:
                        self.num_forced += 1
                        session.cancel(emission.request_id)
                        say(Piece(piece.text, at, alone=True))
                        continue
                    else:
                        name = session.names[emission.request_id]
                        drafts[piece.text][at], confidences[piece.text][at] = pruner.collect[name]
                        bar.update()
                    piece.start += 1
                    if piece.alone:
                        session.cancel(emission.request_id)
                        say(Piece(piece.text, piece.start))
                pruner.collect.clear()
        session.policy, pruner.collect = before, None
        return [self._table(*columns) for columns in zip(texts, truths, drafts, confidences, strict=True)]

    def _table(
        self, text: Recorded, truth: list[int], drafts: np.ndarray, confidences: np.ndarray
    ) -> pl.DataFrame:
        position = np.arange(len(text.output))
        right = drafts == np.array(truth)[position[:, None] + 1 + np.arange(self.draft_length)]
        columns = {
            "request_id": np.full(len(position), text.request.request_id),
            "position": position,
            "token_id": text.output,
            "num_accepted": np.cumprod(right, axis=1).sum(axis=1),
            "confidences": confidences,
        }
        return pl.DataFrame(columns, schema=anchors_schema(self.draft_length, sampled=False))


def describe(session: Session, target: Path, drafter_name: str) -> dict[str, Any]:
    """What a trace's meta.json says of models and machine."""
    config = session.engine.model_config.hf_text_config
    return {
        "engine": "vllm",
        "own_batches": True,
        "target": f"{target.name}: {config.model_type}, {config.num_hidden_layers} layers",
        "drafter": drafter_name,
        "draft_length": session.draft_length,
        "dtype": str(session.engine.model_config.dtype).removeprefix("torch."),
        "device": device_name(session.worker.device),
        "versions": {name: version(name) for name in ("dcut", "torch", "numba")} | {"vllm": VERSION},
    }


def check(config: Config) -> None:
    """Raise InputError where `config` asks for what vLLM's engine cannot record."""
    if config.temperature:
        raise InputError(
            f"--temperature {config.temperature:g}: --engine vllm records greedy runs, where one recording "
            "answers every policy; leave it out, or record with --engine torch"
        )
    if config.device != Config(out="").device:
        raise InputError(f"--device {config.device}: vLLM runs where it was built for; leave it out")
    if config.drafter == "ngram":
        raise InputError("--drafter ngram: vLLM's n-gram drafter has no confidences to record")


def record(config: Config, progress: bool = False) -> Trace:
    """Run `config`'s prompts through vLLM with full verification and write the trace.

    An interrupt leaves it partial, with the requests that had finished. Raises InputError on models, prompts
    or a place that cannot be used, before the run wherever possible.
    """
    check(config)
    out = free_place(config)
    directory = Path(config.target or weights.path("target"))
    prompts, longest = asked_for(config, directory)
    spec = Path(config.drafter or weights.path("dflash16"))
    session = Session(directory, spec, config.concurrency, longest, config.dtype, PROFILED, config.seed)
    session.clock = time.thread_time if config.cpu_time else time.perf_counter
    measured = session.profile(config.profile_s)
    print(measured.warning or measured, file=sys.stderr)
    dense = DensePass(session, progress)
    meta = describe(session, directory, spec.name) | settings(config)
    recorder = Recorder(out, dense, meta, measured.cost, every=None)
    asked = remaining(config, prompts, recorder)

    def serve() -> None:
        session.policy = Full()
        try:
            run_closed(session, asked, recorder, progress=progress)
        finally:
            session.clear()  # the engine's next requests are the dense pass's
            recorder.cost = calibrated(measured.cost, [step for step, _ in recorder.steps])

    trace = carry_out(recorder, serve, len(prompts))
    if dense.num_forced:
        print(f"the dense pass forced {dense.num_forced} tokens that rounding had changed", file=sys.stderr)
    return trace


def calibrated(cost: CostTable, steps: Sequence[Step]) -> CostTable:
    """The table of vLLM's scheduler and workers, with what the engine around them adds to each step.

    steps: of a run with drafts. A request adds the median of what steps without prompts took longer than the
    table says; a prompt token adds the median of what steps with some took longer than that. The drafter, to
    whom accepted tokens and prompts are new, takes the median of its times over those in the table.
    """
    beyond = [
        (step, step.step_s - step.draft_s - cost.seconds(*_verified(step), extrapolate=True))
        for step in steps
        if len(step.request_id) and step.draft_s
    ]
    bare = [extra / len(step.request_id) for step, extra in beyond if not step.prefill_tokens]
    request_s = max(0.0, median(bare)) if bare else 0.0
    prompted = [
        (extra - request_s * len(step.request_id)) / step.prefill_tokens
        for step, extra in beyond
        if step.prefill_tokens
    ]
    drafts = [
        step.draft_s / cost.draft_seconds(len(step.request_id), step.context_tokens, extrapolate=True)
        for step, _ in beyond
    ]
    pace = median(drafts) if drafts else 1.0
    sizes = cost.batch_sizes
    assert sizes is not None, "a profile counts requests"
    plain = cost.plain.copy()
    plain[:, 1] += request_s * plain[:, 0]
    return replace(
        cost,
        verify_s=cost.verify_s + request_s * sizes[:, None],
        plain=plain,
        draft=cost.draft * (1.0, pace),
        draft_context_token_s=cost.draft_context_token_s * pace,
        prefill_token_s=max(0.0, median(prompted)) if prompted else cost.prefill_token_s,
    )


def _verified(step: Step) -> tuple[int, int, int]:
    return len(step.request_id), step.selection.num_verify_tokens, step.context_tokens
