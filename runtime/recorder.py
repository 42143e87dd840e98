"""Records a live run as a trace: its steps, and a draft from every output position of every request."""

import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import Full, Off
from dcut.record import Config
from runtime.drafter import Drafter, Seen, open_drafter
from runtime.engine import Engine, LiveEngine, Request, Step
from runtime.kv_cache import Rows
from runtime.models import CausalLM
from runtime.pair import weights
from runtime.profiler import Drift, cached_profile, device_name
from runtime.text import Codec, read_texts
from runtime.verifier import TorchVerifier, open_pair
from traces.schema import DECISIONS, REQUESTS, STEPS, Trace, anchors_schema
from traces.store import load, save, write_directory

PROFILED = 64  # requests a step at least that the cost table covers
MEASURED = 128  # tokens of context at least that there is room for, so that steps can be measured
SLOTS = 32  # anchors of one text that the dense pass drafts from at once


@dataclass(slots=True)
class Recorded:
    """A request and what it has emitted so far."""

    request: Request
    domain: str | None
    arrival_s: float | None = None  # its admission, on the log's clock
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Log:
    """What an engine did, as tables. `expect` each request before the engine gets it, then `add` every step.

    Its clock is the engine's: admissions and steps count, whatever happens between them does not.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Recorded] = {}
        self.finished: list[Recorded] = []
        self.steps: list[tuple[Step, str]] = []
        self.num_steps, self.now_s = 0, 0.0

    def expect(self, request: Request, domain: str | None = None) -> None:
        """Announce a request that the engine is about to get."""
        self.under_way[request.request_id] = Recorded(request, domain)

    def add(self, step: Step, label: str) -> None:
        """Take in a step and the label of the budget that was chosen."""
        for emission in step.emissions:
            recorded = self.under_way[emission.request_id]
            if recorded.arrival_s is None:
                recorded.arrival_s = self.now_s
            recorded.output += emission.tokens
            if emission.finish_reason:
                recorded.finish_reason = emission.finish_reason
                self.finished.append(self.under_way.pop(emission.request_id))
        self.now_s += step.prefill_s
        if len(step.request_id):
            self.steps.append((step._replace(start_s=self.now_s), label))
            self.now_s += step.step_s

    def end(self, request_id: int, finish_reason: str) -> None:
        """Close a request that the engine was told to drop: with what it has emitted, if that is anything."""
        recorded = self.under_way.pop(request_id, None)
        if recorded and recorded.output:
            recorded.finish_reason = finish_reason
            self.finished.append(recorded)

    def tables(self) -> dict[str, pl.DataFrame]:
        """The requests that finished, and all steps and decisions since the last `clear`."""
        numbered = list(enumerate(self.steps, self.num_steps))
        decisions = [_decision_rows(i, step) for i, (step, _) in numbered]
        return {
            "requests": pl.DataFrame([_request_row(r) for r in self.finished], schema=REQUESTS),
            "steps": pl.DataFrame([_step_row(i, *s) for i, s in numbered], schema=STEPS),
            "decisions": pl.concat([pl.DataFrame(schema=DECISIONS), *decisions]),
        }

    def clear(self) -> None:
        """Forget what `tables` tells."""
        self.num_steps += len(self.steps)
        self.finished, self.steps = [], []


class Dense(Protocol):
    """Drafts from every output position of a finished text, as the live drafter would have there."""

    @property
    def temperature(self) -> float: ...

    @property
    def draft_length(self) -> int: ...

    def anchors(self, texts: Sequence[Recorded]) -> list[pl.DataFrame]:
        """The rows of anchors.parquet of each text: one for each output position."""
        ...


class DensePass:
    """The dense pass with our own models.

    The target runs over the text once; the drafter then drafts from many anchors at a time, each in a slot
    of its own that knows the text up to its anchor: the live drafter's own code and kernels.
    Near the end of an output, where drafts reach beyond it, they are compared with what the target goes on
    to say, stop token or not: `num_accepted` is what full verification accepts there.
    """

    def __init__(
        self, target: CausalLM, drafter: Drafter, max_context: int, temperature: float = 0.0, seed: int = 0
    ) -> None:
        """drafter: one of its own, with SLOTS + 1 slots, that no engine uses."""
        room = max_context + 2 * drafter.draft_length + 1
        self.verifier = TorchVerifier(target, SLOTS + 1, room, drafter.taps, drafter.draft_length)
        self.drafter, self.temperature, self.seed = drafter, temperature, seed
        self.draft_length = drafter.draft_length

    def anchors(self, texts: Sequence[Recorded]) -> list[pl.DataFrame]:
        self._forget()  # what an interrupt may have left
        futures = self._continue(texts) if self.temperature == 0 else [np.zeros(0, np.int64)] * len(texts)
        self._forget()
        return [self._anchors(text, future) for text, future in zip(texts, futures, strict=True)]

    def _continue(self, texts: Sequence[Recorded]) -> list[np.ndarray]:
        """What the target says greedily after each text, int64 [draft_length] each."""
        engine = Engine(self.verifier, self.drafter, Off(), max_batch_size=SLOTS)
        found: list[list[int]] = [[] for _ in texts]
        for i, text in enumerate(texts):
            prompt = [*text.request.prompt, *text.output]
            engine.add(Request(i, prompt, self.draft_length, stop_token_ids=()))
        while step := engine.step():
            for emission in step.emissions:
                found[emission.request_id] += emission.tokens
        return [np.array(tokens) for tokens in found]

    def _forget(self) -> None:
        for slot in range(SLOTS + 1):
            self.drafter.release(slot)

    def _anchors(self, text: Recorded, future: np.ndarray) -> pl.DataFrame:
        prompt, output, width = text.request.prompt, text.output, self.draft_length
        known, num_anchors = np.array([*prompt, *output]), len(output)
        source = SLOTS
        rows = Rows.of(np.array([source]), np.zeros(1, np.int64), np.array([len(known)]))
        hidden, features, _ = self.verifier.forward(known, rows, np.zeros(0, np.int64))
        self.drafter.observe(
            Seen(rows.slots, rows.positions, known, np.append(known[1:], 0), hidden, features)
        )
        random = np.random.default_rng((self.seed, text.request.request_id))
        truth = np.concatenate((known, future))
        tables = []
        for start in range(0, num_anchors, SLOTS):
            position = np.arange(start, min(start + SLOTS, num_anchors))
            slots, lengths = np.arange(len(position)), len(prompt) + position
            self.drafter.fork(source, slots, len(known))
            drafts = self.drafter.draft(slots, lengths, known[lengths], width)
            if self.temperature == 0:
                right = drafts.tokens == truth[lengths[:, None] + 1 + np.arange(width)]
                extra = {}
            else:
                self.verifier.cache.copy(source, slots, len(known))
                chance = self._accept_probs(slots, lengths, known[lengths], drafts.tokens)
                right = random.random(chance.shape) < chance
                extra = {"accept_probs": chance}
            tables.append(
                pl.DataFrame(
                    {
                        "request_id": np.full(len(position), text.request.request_id),
                        "position": position,
                        "token_id": known[lengths],
                        "num_accepted": np.cumprod(right, axis=1).sum(axis=1),
                        "confidences": drafts.confidences,
                        **extra,
                    },
                    schema=anchors_schema(width, self.temperature > 0),
                )
            )
        return pl.concat(tables)

    def _accept_probs(
        self, slots: np.ndarray, lengths: np.ndarray, anchors: np.ndarray, drafts: np.ndarray
    ) -> np.ndarray:
        """The target's probability of each draft given those before it, float32 [anchors, draft_length].

        A draft is the drafter's likeliest token, so this is the probability that it is accepted.
        """
        batch, width = drafts.shape
        rows = Rows.of(slots, lengths, np.full(batch, width + 1))
        logits = self.verifier.forward(np.column_stack((anchors, drafts)).ravel(), rows).logits
        probs = (logits.float() / self.temperature).softmax(-1).unflatten(0, (batch, width + 1))[:, :-1]
        return probs.gather(2, torch.from_numpy(drafts).to(probs.device)[..., None])[..., 0].cpu().numpy()


class Recorder(Log):
    """A log that becomes a trace: every few finished requests, the dense pass runs and the disk is updated.

    The trace on disk is complete at any time, for the requests whose dense pass is done; until `close` its
    meta.json calls it partial.
    """

    def __init__(
        self,
        out: str | Path,
        dense: Dense,
        meta: dict[str, Any],
        cost: CostTable | None,
        every: int | None = 32,
    ) -> None:
        """every: finished requests a flush; None: when asked. A partial trace at `out` is carried on.

        Raises InputError where `out` holds anything else, or a trace that was begun with other models.
        """
        super().__init__()
        self.out, self.dense, self.meta, self.cost, self.every = Path(out), dense, meta, cost, every
        self.ahead: list[pl.DataFrame] = []  # anchors of the first of `finished`
        self.sampled: set[int] = set()  # requests at a temperature
        self.kept = {
            "requests": pl.DataFrame(schema=REQUESTS),
            "anchors": pl.DataFrame(schema=anchors_schema(dense.draft_length, dense.temperature > 0)),
            "steps": pl.DataFrame(schema=STEPS),
            "decisions": pl.DataFrame(schema=DECISIONS),
        }
        if self.out.is_dir() and any(self.out.iterdir()):
            self._carry_on(load(self.out))

    @property
    def done(self) -> set[int]:
        """The requests that the trace on disk holds."""
        return set(self.kept["requests"]["request_id"].to_list())

    def add(self, step: Step, label: str) -> None:
        super().add(step, label)
        if self.every is not None and len(self.finished) >= self.every:
            self.flush()

    @property
    def backlog(self) -> int:
        """Finished requests whose dense pass is still to run."""
        return len(self.finished) - len(self.ahead)

    def advance(self, num_texts: int = 1) -> None:
        """Run the dense pass over the next texts of the backlog, ahead of the `flush` that writes them."""
        start = len(self.ahead)
        self.ahead += self.dense.anchors(self.finished[start : start + num_texts])

    def flush(self) -> None:
        """Run the dense pass over what has finished and bring the trace on disk up to date."""
        if not self.finished:
            return
        self.advance(self.backlog)
        self.sampled |= {r.request.request_id for r in self.finished if r.request.temperature}
        fresh, self.ahead = self.tables() | {"anchors": pl.concat(self.ahead)}, []
        self.clear()
        self.kept = {name: pl.concat((table, fresh[name])) for name, table in self.kept.items()}
        self._write(partial=True)

    def close(self, partial: bool = False) -> Trace:
        """Finish the trace and return it; partial where requests are missing. Raises InputError if empty."""
        self.flush()
        if not len(self.kept["anchors"]):
            raise InputError("nothing was recorded: no request finished")
        return self._write(partial)

    def _write(self, partial: bool) -> Trace:
        tables = self.kept
        known = tables["decisions"].join(
            tables["requests"].select("request_id"), on="request_id", how="semi", maintain_order="left"
        )
        meta = self.meta | {"partial": partial}
        trace = Trace(meta, tables["requests"], tables["anchors"], self.cost, tables["steps"], known)
        if self.dense.temperature == 0:
            meta["contradicted_decisions"] = _num_contradicted(trace, self.sampled)
        save(trace, self.out)
        return trace

    def _carry_on(self, trace: Trace) -> None:
        if not trace.meta.get("partial"):
            raise InputError(f"{self.out} holds a complete trace: give another place")
        for name in ("target", "drafter", "draft_length", "temperature", "max_tokens"):
            if trace.meta.get(name) != self.meta.get(name):
                raise InputError(
                    f"{self.out} was begun with {name} {trace.meta.get(name)!r}, not {self.meta.get(name)!r}"
                )
        self.kept = {name: getattr(trace, name) for name in self.kept}
        self.num_steps = len(trace.steps)
        self.meta = self.meta | {"resumed": True}
        if self.num_steps:
            last = trace.steps.row(-1, named=True)
            self.now_s = last["start_s"] + last["step_s"]


def _num_contradicted(trace: Trace, sampled: set[int]) -> int:
    """Decisions of the live run whose accepted drafts are not those that the dense pass found there.

    Of sampled requests as far as the output goes: how the draw went on behind its end, nobody knows.
    """
    anchors = trace.anchors.select("request_id", "position", dense="num_accepted")
    both = trace.decisions.join(anchors, on=["request_id", "position"], how="inner")
    both = both.join(trace.requests.select("request_id", "output_tokens"), on="request_id")
    left = pl.col("output_tokens") - 1 - pl.col("position")
    known = pl.when(pl.col("request_id").is_in(sorted(sampled))).then(left).otherwise(pl.col("keep_depth"))
    live, dense = pl.min_horizontal("num_accepted", known), pl.min_horizontal("dense", "keep_depth", known)
    return len(both.filter(live != dense))


def _request_row(recorded: Recorded) -> dict[str, Any]:
    return {
        "request_id": recorded.request.request_id,
        "domain": recorded.domain,
        "prompt_tokens": len(recorded.request.prompt),
        "output_tokens": len(recorded.output),
        "arrival_s": recorded.arrival_s,
        "finish_reason": recorded.finish_reason,
    }


def _step_row(number: int, step: Step, label: str) -> dict[str, Any]:
    taken = {name: getattr(step, name) for name in STEPS if name in Step._fields}
    return taken | {
        "step": number,
        "batch_size": len(step.request_id),
        "num_verify_tokens": step.selection.num_verify_tokens,
        "expected_tokens": step.selection.expected_tokens,
        "bucket": label,
    }


def _decision_rows(number: int, step: Step) -> pl.DataFrame:
    columns = {
        "step": np.full(len(step.request_id), number),
        "request_id": step.request_id,
        "position": step.position,
        "keep_depth": step.selection.keep_depth,
        "num_accepted": step.num_accepted,
    }
    return pl.DataFrame(columns, schema=DECISIONS)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request of a recording starts from."""

    tokens: list[int]
    domain: str | None


def read_prompts(file: str | Path, codec: Codec, limit: int | None = None) -> list[Prompt]:
    """Prompts from a file of `read_texts`, the first `limit`, domains in turn.

    Where the model has a chat template a prompt is what the user says. Raises InputError on what is no such
    file, and where it holds fewer than `limit`.
    """
    texts = read_texts(file)
    if limit is not None and limit > len(texts):
        raise InputError(
            f"{limit} requests are more than the {len(texts)} prompts of {file}: ask for fewer, or give more"
        )
    found: dict[str | None, list[Prompt]] = {}
    for text, domain in texts:
        tokens = codec.encode_chat([{"role": "user", "content": text}]) if codec.chats else codec.encode(text)
        found.setdefault(domain, []).append(Prompt(tokens, domain))
    rounds = itertools.zip_longest(*found.values())
    return [prompt for turn in rounds for prompt in turn if prompt][:limit]


def describe(verifier: TorchVerifier, drafter: Drafter, target: Path, drafter_name: str) -> dict[str, Any]:
    """What a trace's meta.json says of models and machine."""
    config = verifier.model.config
    shape = f"{config.model_type}, {config.num_hidden_layers} layers"
    size = sum(p.numel() for p in verifier.model.parameters()) / 1e6
    return {
        "engine": "dcut live",
        "target": f"{target.name}: {shape}, {size:.3g} M parameters",
        "drafter": drafter_name,
        "draft_length": drafter.draft_length,
        "dtype": str(verifier.model.lm_head.weight.dtype).removeprefix("torch."),
        "device": device_name(verifier.device),
        "versions": {name: version(name) for name in ("dcut", "torch", "numba")},
    }


def free_place(config: Config) -> Path:
    """Where the trace goes. Raises InputError where something is there that --resume does not ask for."""
    out = Path(config.out)
    if not empty(out) and not config.resume:
        raise InputError(f"{out} is not empty: give another place, or --resume to carry on with it")
    return out


def empty(out: Path) -> bool:
    """Whether nothing is at `out` yet. Raises InputError where nothing can be, before a long run."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):  # a trace is written beside its place, then renamed
            return not out.exists() or not any(out.iterdir())
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from error


def asked_for(config: Config, directory: Path) -> tuple[list[Prompt], int]:
    """The prompts of a recording, and the tokens of the longest with its output. directory: the target's."""
    prompts = read_prompts(config.prompts or weights.PROMPTS, Codec.load(directory), config.requests)
    return prompts, max(len(prompt.tokens) for prompt in prompts) + config.max_tokens


def remaining(
    config: Config, prompts: Sequence[Prompt], recorder: Recorder
) -> list[tuple[Request, str | None]]:
    """The requests, with their domains, that the trace does not hold yet.

    Raises InputError where those it holds did not start from these prompts.
    """
    kept = dict(recorder.kept["requests"].select("request_id", "prompt_tokens").iter_rows())
    if any(kept.get(i, len(prompt.tokens)) != len(prompt.tokens) for i, prompt in enumerate(prompts)):
        raise InputError(f"{recorder.out} was begun with other prompts: give those, or another place")
    return [
        (Request(i, prompt.tokens, config.max_tokens, config.temperature), prompt.domain)
        for i, prompt in enumerate(prompts)
        if i not in kept
    ]


def check_context(longest: int, config: Config, most: int) -> None:
    """Raise InputError where the longest prompt and its output are more than the target takes."""
    if longest > most:
        raise InputError(
            f"the longest prompt and {config.max_tokens} tokens more are {longest}, the target takes {most}"
        )


def settings(config: Config) -> dict[str, Any]:
    """What a trace's meta.json says of the run."""
    return {
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "batch_size": config.concurrency,
        "policy": "full",
        "seed": config.seed,
        "clock": "cpu" if config.cpu_time else "wall",
    }


def carry_out(recorder: Recorder, serve: Callable[[], None], num_asked: int) -> Trace:
    """Let `serve` run all `num_asked` requests and finish the trace; an interrupt leaves it partial."""
    try:
        serve()
    except KeyboardInterrupt:
        print("interrupted: writing what has finished", file=sys.stderr)
        trace = recorder.close(partial=True)
        kept = f"{len(trace.requests)} of {num_asked} requests are in {recorder.out}"
        print(f"{kept}; carry on with --resume", file=sys.stderr)
        raise
    return recorder.close()


def record(config: Config, progress: bool = False) -> Trace:
    """Run `config`'s prompts live with full verification and write the trace; an interrupt leaves it partial.

    Raises InputError on models, prompts or a place that cannot be used, before the run wherever possible.
    """
    out = free_place(config)
    clock = time.perf_counter
    if config.cpu_time:
        torch.set_num_threads(1)
        clock = time.thread_time
    directory = Path(config.target or weights.path("target"))
    prompts, longest = asked_for(config, directory)
    spec = config.drafter or weights.path("dflash16")
    batch_size = min(config.concurrency, len(prompts))
    num_slots = max(batch_size, PROFILED)
    dtype = config.dtype or ("float32" if config.device == "cpu" else "bfloat16")
    room = max(longest, MEASURED)
    verifier, drafter = open_pair(directory, spec, num_slots, room, config.device, dtype)
    check_context(longest, config, verifier.model.config.max_position_embeddings)
    alone = open_drafter(spec, verifier.model, SLOTS + 1, longest + drafter.draft_length)
    dense = DensePass(verifier.model, alone, longest, config.temperature, config.seed)
    meta = describe(verifier, drafter, directory, Path(spec).name) | settings(config)
    recorder = Recorder(out, dense, meta, None)
    asked = remaining(config, prompts, recorder)
    texts = [prompt.tokens for prompt in prompts]
    context = round(float(np.mean([len(text) for text in texts])) + config.max_tokens / 2)
    measured = cached_profile(
        verifier, drafter, texts, context, budget_s=config.profile_s, clock=clock, progress=progress
    )
    print(measured, file=sys.stderr)
    recorder.cost = measured.cost
    engine = Engine(verifier, drafter, Full(), measured.cost, batch_size, config.seed, clock=clock)

    def serve() -> None:
        drift = Drift(measured.cost)
        run_closed(engine, asked, recorder, drift, progress)
        if warning := str(drift):
            print(warning, file=sys.stderr)

    return carry_out(recorder, serve, len(prompts))


def settle() -> None:
    """Free garbage now and never look through what exists again: that would hold up a step for 0.15 s."""
    gc.collect()
    gc.freeze()


def run_closed(
    engine: LiveEngine,
    asked: Sequence[tuple[Request, str | None]],
    log: Log,
    drift: Drift | None = None,
    progress: bool = False,
) -> None:
    """Serve all requests (with their domains) in a closed loop, each step told to `log` and `drift`."""
    for request, domain in asked:
        log.expect(request, domain)
        engine.add(request)
    settle()
    with tqdm(total=len(asked), desc="serving", unit=" requests", disable=None if progress else True) as bar:
        while step := engine.step():
            log.add(step, engine.policy.labels[step.selection.bucket])
            if drift:
                drift.add(step)
            bar.update(sum(e.finish_reason is not None for e in step.emissions))


def write_live(out: str | Path, log: Log, meta: dict[str, Any], cost: CostTable) -> None:
    """Write a finished run as a directory for `sim.validate`: requests, steps, decisions, tokens, cost table.

    meta: `policy` as it is spelt and `batch_size` among it. cost: the table that the policy decided by.
    """
    finished, tables = log.finished, log.tables()
    lengths = [len(recorded.output) for recorded in finished]
    tables["tokens"] = pl.DataFrame(
        {
            "request_id": np.repeat([recorded.request.request_id for recorded in finished], lengths),
            "position": np.concatenate([np.arange(length) for length in lengths]),
            "token_id": np.concatenate([recorded.output for recorded in finished]),
        }
    )
    write_directory(out, "live", meta, tables, {"cost": cost.to_dict()})


def summary(trace: Trace, out: str) -> str:
    """What was recorded, in a few lines."""
    requests, steps = trace.requests, trace.steps
    decided = trace.decisions
    lines = [
        f"{out}: {len(requests)} requests, {requests['output_tokens'].sum():,} tokens, "
        f"{len(trace.anchors):,} drafts of {trace.draft_length}, {len(steps):,} steps"
    ]
    if len(decided):
        known = decided.join(requests.select("request_id", "domain"), on="request_id")
        means = known.group_by("domain").agg(tokens=pl.col("num_accepted").mean() + 1).sort("tokens")
        rows = ", ".join(f"{domain or 'all'} {mean:.2f}" for domain, mean in means.iter_rows())
        lines.append(f"tokens a step: {np.mean(decided['num_accepted'].to_numpy()) + 1:.2f} ({rows})")
    if (wrong := trace.meta.get("contradicted_decisions")) is not None:
        lines.append(f"the dense pass contradicts {wrong} of {len(decided):,} live decisions")
    return "\n".join(lines)
