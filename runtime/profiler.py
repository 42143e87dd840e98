"""Measures what a step costs at start-up, by running the engine's own steps, and notices when it changed."""

import hashlib
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import BudgetPolicy, Fixed, Full, Off
from runtime.drafter import Drafter
from runtime.engine import Engine, Request, Running, Step
from runtime.graphs import knots, powers_of_two
from runtime.verifier import TorchVerifier, Verifier

LEAST_CONTEXT = 8  # tokens; steps are also measured at a quarter of them
TOLERANCE = 0.2  # a step time this far from the profile, on the median, is worth saying
NOISY = 0.3  # a profile whose times spread so far is not worth keeping


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cost table and how it came about."""

    cost: CostTable
    spread: float  # interquartile range over the median of a point, on the median over the points
    measured_s: float
    cached: bool = False

    def __str__(self) -> str:
        origin = "from the cache" if self.cached else f"measured in {self.measured_s:.0f} s"
        return f"cost profile {origin}, spread {self.spread:.1%}"

    @property
    def warning(self) -> str:
        """One line where the times scatter too much to be relied upon, else nothing."""
        if self.spread <= NOISY:
            return ""
        return (
            f"the cost profile is noisy, its times spread by {self.spread:.0%}: measure on a quiet machine, "
            "or for longer (--profile-s, DCUT_PROFILE_S)"
        )


def profile(
    verifier: Verifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    context: int,
    batch_sizes: Sequence[int] | None = None,
    budget_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = False,
) -> Profile:
    """Time the step of plain decoding, of the drafter and of the target, over (batch, tokens a request).

    Apart from that, what a prompt token costs, and what longer contexts add to the fullest batch.
    A verify time is all of a step but the drafter: the target's pass, acceptance and the engine's own work.
    prompts: texts as the run will see them, repeated or cut to `context` tokens, so that drafts are accepted
    as usual and the drafter has as much to catch up with. batch_sizes: powers of two up to the verifier's
    slots unless given. Every point is measured in turn, round after round, until `budget_s` of real time is
    spent, at least twice each; the table takes medians. A context for which there is no room is cut.
    Raises InputError where there is next to none.
    """
    began = time.perf_counter()
    sizes = list(batch_sizes or powers_of_two(verifier.num_slots))
    depths = [n - 1 for n in knots(drafter.draft_length)[1:]]
    policies = [Off(), *(Fixed(depth) for depth in depths)]
    engine = Engine(verifier, drafter, Full(), max_batch_size=max(sizes), clock=clock)
    times: dict[tuple[str, int, int | None], list[float]] = {}
    contexts: list[float] = []
    max_graph_tokens = 0

    room = engine.max_context - _room(engine)
    if room < LEAST_CONTEXT:
        least = LEAST_CONTEXT + _room(engine)
        raise InputError(
            f"a context of {engine.max_context} tokens is too short to measure steps: {least} do"
        )
    context = min(max(context, LEAST_CONTEXT), room)
    batch, _ = _fill(engine, prompts, -(-context // 4))
    shorter = _at_one_context(engine, batch)
    _empty(engine, batch)
    batch, prefill_s = _fill(engine, prompts, context)
    context_slopes = slopes(shorter, _at_one_context(engine, batch), drafter.draft_length + 1)

    with tqdm(
        total=round(budget_s), desc="profiling", unit="s", leave=False, disable=None if progress else True
    ) as bar:
        num_rounds = 0
        while num_rounds < 2 or (time.perf_counter() - began) * (1 + 1 / num_rounds) < budget_s:
            for size in sizes:
                for policy in policies:
                    if isinstance(policy, Off):
                        plain = _plain(engine, batch[:size])
                        times.setdefault(("plain", size, None), []).extend(s.step_s for s in plain)
                        contexts.extend(s.context_tokens / size for s in plain)
                        continue
                    first, second = _twice(engine, batch[:size], policy)
                    contexts.append(second.context_tokens / size)
                    max_graph_tokens = max(max_graph_tokens, second.graph_tokens or 0)
                    times.setdefault(("draft", size, None), []).append(second.draft_s)
                    verify_s = times.setdefault(("verify", size, second.selection.num_verify_tokens), [])
                    verify_s += [first.step_s - first.draft_s, second.step_s - second.draft_s]
                bar.update(max(0, min(round(time.perf_counter() - began), bar.total) - bar.n))
            num_rounds += 1
    _empty(engine, batch)
    samples = [Sample(*key, median(found)) for key, found in times.items()]
    options = {
        **context_slopes,
        "context_per_request": float(np.mean(contexts)),
        "prefill_token_s": prefill_s / (len(batch) * context),
        "max_graph_tokens": max_graph_tokens,
    }
    spreads = [float(np.subtract(*np.percentile(t, (75, 25)))) / median(t) for t in times.values()]
    cost = tamed(CostTable.from_samples(samples, **options), samples)
    return Profile(cost, median(spreads), time.perf_counter() - began)


def cached_profile(
    verifier: TorchVerifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    context: int,
    directory: Path | None = None,
    **options: Any,
) -> Profile:
    """`profile`, or what it measured before for the same models, device, dtype, versions and context.

    directory: of the cache; the user's own unless given. The context counts in steps of 32 tokens.
    """
    about = {
        "target": repr(verifier.model.config),
        "drafter": [type(drafter).__name__, drafter.draft_length, repr(getattr(drafter, "model", None))],
        "device": device_name(verifier.device),
        "dtype": str(verifier.model.lm_head.weight.dtype),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("dcut", "torch", "numba")},
        "slots": verifier.num_slots,
        "context": round(context / 32),
        "options": repr(sorted((k, v) for k, v in options.items() if k not in ("progress", "budget_s"))),
    }
    return cached(about, lambda: profile(verifier, drafter, prompts, context, **options), directory)


def cached(about: dict[str, Any], measure: Callable[[], Profile], directory: Path | None = None) -> Profile:
    """What was measured before for the same `about`, anything that JSON can hold; else what `measure` finds.

    A noisy profile is used, not kept, and said so on stderr. directory: of the cache; the user's own unless
    given.
    """
    about = about | {"table": [field.name for field in fields(CostTable)]}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    file = (directory or cache_directory()) / f"{digest}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kept = Profile(CostTable.from_dict(found["cost"]), found["spread"], found["measured_s"], cached=True)
        if not kept.warning:
            return kept
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or none that can be read
    fresh = measure()
    if fresh.warning:
        print(f"{fresh.warning}; it is not kept", file=sys.stderr, flush=True)
        return fresh
    document = {
        "about": about,
        "spread": fresh.spread,
        "measured_s": fresh.measured_s,
        "cost": fresh.cost.to_dict(),
    }
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        print(f"the cost profile is not kept: {error}", file=sys.stderr, flush=True)
    return fresh


def cache_directory() -> Path:
    """Where profiles are kept: dcut/profiles in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcut" / "profiles"


class Drift:
    """How far recent steps are from their profile: the median of measured over expected step time."""

    def __init__(self, cost: CostTable, window: int = 64) -> None:
        self.cost = cost
        self.ratios: deque[float] = deque(maxlen=window)

    def add(self, step: Step) -> None:
        """Take one more step into account; empty ones do not count."""
        batch, tokens = len(step.request_id), step.selection.num_verify_tokens
        if not batch:
            return
        if step.draft_s:
            expected_s = self.cost.draft_seconds(batch, step.context_tokens, extrapolate=True)
            expected_s += self.cost.seconds(batch, tokens, step.context_tokens, extrapolate=True)
        else:
            expected_s = self.cost.plain_seconds(batch, step.context_tokens, extrapolate=True)
        self.ratios.append(step.step_s / expected_s)

    @property
    def ratio(self) -> float:
        """Measured over expected; 1 before the first step."""
        return median(self.ratios) if self.ratios else 1.0

    def __str__(self) -> str:
        """One line where the profile no longer fits, else nothing."""
        if abs(self.ratio - 1) <= TOLERANCE:
            return ""
        return f"the cost profile no longer fits: steps take {self.ratio:.2f} times what it says"


class Times(NamedTuple):
    """What steps of one batch take at one context: of each the fastest, for what else runs only adds."""

    plain_s: float
    full_s: float  # without the drafter
    draft_s: float  # with nothing to catch up with
    context_tokens: float


def _at_one_context(engine: Engine, batch: list[Running]) -> Times:
    plain = [step for _ in range(3) for step in _plain(engine, batch)]
    full = [step for _ in range(6) for step in _twice(engine, batch, Full())]
    return Times(
        min(s.step_s for s in plain),
        min(s.step_s - s.draft_s for s in full),
        min(s.draft_s for s in full[::2]),
        median(s.context_tokens for s in plain),
    )


def slopes(shorter: Times, longer: Times, width: int) -> dict[str, float]:
    """Seconds a context token, as CostTable names them, from one batch at two contexts.

    A plain step has a row a request to attend to the context, a full one `width`: what their slopes differ
    by grows with the rows, and what is left does not.
    """
    tokens = longer.context_tokens - shorter.context_tokens
    plain_s, full_s, draft_s = (
        max(0.0, (after - before) / tokens) for before, after in zip(shorter[:3], longer[:3], strict=True)
    )
    pair_s = max(0.0, (full_s - plain_s) / (width - 1))
    token_s = max(0.0, plain_s - pair_s)
    return {"context_token_s": token_s, "context_pair_s": pair_s, "draft_context_token_s": draft_s}


def tamed(cost: CostTable, samples: Sequence[Sample]) -> CostTable:
    """The table, its slopes lowered where noise made a step without context cost next to nothing, or less."""
    saved: dict[bool, list[float]] = {False: [], True: []}  # by such a step, as a share of its time
    for kind, batch_size, tokens, seconds in samples:
        assert batch_size, "a profile counts requests"
        without = batch_size, 0
        if kind == "draft":
            saved[True].append(-cost.draft_context_seconds(*without) / seconds)
        else:
            saved[False].append(-cost.context_seconds(*without, tokens or batch_size) / seconds)
    target, drafter = (min(1.0, 0.9 / max(1e-9, *saved[drafts])) for drafts in (False, True))
    return replace(
        cost,
        context_token_s=target * cost.context_token_s,
        context_pair_s=target * cost.context_pair_s,
        draft_context_token_s=drafter * cost.draft_context_token_s,
    )


def _room(engine: Engine) -> int:
    """Output tokens that two steps cannot exhaust."""
    return 2 * (engine.draft_length + 1) + 2


def _fill(engine: Engine, prompts: Sequence[Sequence[int]], length: int) -> tuple[list[Running], float]:
    """Admit as many requests as fit, with prompts of `length` tokens and room for two steps; and its time."""
    for i in range(engine.max_batch_size):
        prompt = list(prompts[i % len(prompts)])
        prompt = (prompt * -(-length // len(prompt)))[-length:]
        engine.add(Request(i, prompt, _room(engine), stop_token_ids=()))
    began_s = engine.clock()
    engine.admit()
    return list(engine.batch), engine.clock() - began_s


def _empty(engine: Engine, batch: list[Running]) -> None:
    engine.batch = batch
    for running in batch:
        engine.cancel(running.request.request_id)
    engine.admit()


def _twice(engine: Engine, batch: list[Running], policy: BudgetPolicy) -> tuple[Step, Step]:
    """Two steps from the end of the prompts; before the second, the drafter has tokens to catch up with."""
    engine.batch, engine.policy = list(batch), policy
    engine.drafter.catch_up()
    for running in batch:
        del running.output[1:]
    first, second = engine.step(), engine.step()
    assert first, "the batch is not empty"
    assert second, "two steps end no request"
    return first, second


def _plain(engine: Engine, batch: list[Running]) -> list[Step]:
    """Steps amid a run of plain decoding: its first ones find the caches as the drafter left them."""
    return [_twice(engine, batch, Off())[1] for _ in range(4)][2:]


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    """The processor's name where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
