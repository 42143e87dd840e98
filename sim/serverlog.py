"""A vLLM server's log: read it, fit the cost of a step to its first half, predict every request of the run.

Only requests of the first half, by arrival, lend their timestamps to the fit; all others give what a
simulator is given anyway: when they arrive and how long they are. The parts, in order:

1. A prior from the calibration half, then least squares on free-running predictions: rough, since
   pre-emptions make the surface chaotic, but it needs nothing to be in step with the log.
2. The clock of a run is set by the logged step ends (every first and last token is one), and the cost of a
   step is fitted to the intervals between them: robust, and all but linear.
3. A simplex on the predictions themselves: the scales of decode and prefill, the first launch, and, where
   memory runs out, how many blocks the server seems to have.
4. A server that caches prefixes seems to have more blocks than it has, for prompts that share a beginning.
   Who shares what is not logged. Patterns of hits are drawn, those that explain the first half best are kept
   and improved; for later requests they are drawn afresh. The prediction is the mean over these worlds.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
from scipy.optimize import least_squares, minimize

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.jit import compiled
from sim import kv
from sim.scheduler import BOOK, DECODE, DONE, Limits, fill, hold, new_plans, new_queues, settle

COLUMNS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "scheduled_ts", "first_token_ts",
           "last_token_ts")  # fmt: skip
LEAST_REQUESTS = 20
KNOTS = np.array([0.0, 32, 128, 512])  # rows of a pass where another slope begins
NAMES = ("base", "prompt", "context", "pair", "slope0", "slope32", "slope128", "slope512", "launch")
_DECODE, _PREFILL, _LAUNCH = [0, 2, 4, 5], [1, 3, 6, 7], 8  # parameters that scale together
_SPREAD = np.array([0.7, 1.5, 0.5, 1.0, 0.7, 0.7, 0.7, 0.5, 2.0])  # how far the prior lets each move, in logs
_SOFT = 0.03  # a relative error beyond this counts less than its square
_SYNC_S = 0.004  # a simulated step end within this of a logged one is the same
_NOISE = np.random.default_rng(7).normal(0, 0.02, (8, 4096))  # of step times, in logs, the same for all fits
_MAX_STEPS = 400_000
_STEP = np.dtype(
    [(name, np.float64) for name in ("rows", "prefill_tokens", "context", "pairs", "start_s", "end_s")]
    + [(name, np.float64) for name in ("num_seen", "spread_s", "running", "waiting")]
)


@dataclass(frozen=True, slots=True, eq=False)
class ServerLog:
    """A run of a server: its requests by arrival, times in seconds since the first one's, and its limits."""

    arrival_s: np.ndarray  # float64 [requests]
    prompt_tokens: np.ndarray  # int64 [requests]
    output_tokens: np.ndarray  # int64 [requests]
    queued_s: np.ndarray
    scheduled_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    limits: Limits  # kv_blocks None: the log does not say
    replicas: int
    lockstep: bool  # replicas wait for each other in every step, as experts make them
    graph_sizes: np.ndarray  # float64, rows that passes are padded up to

    @property
    def half(self) -> int:
        """Requests that lend their timestamps to the fit."""
        return len(self.arrival_s) // 2

    @property
    def reads(self) -> np.ndarray:
        """Requests of the calibration half with more than one token, bool [half]."""
        return self.output_tokens[: self.half] > 1


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """One explanation of a log: what steps cost, what the server has, and which prefixes were cached."""

    parameters: np.ndarray  # float64 [NAMES], logs
    limits: Limits
    noise: int  # row of the step times' noise
    shared: np.ndarray  # int64 [requests], leading blocks found in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """When a run's requests are predicted to be queued and to emit, float64 [requests] each."""

    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray


# ---- reading --------------------------------------------------------------------------------------------


def read_log(path: str | Path) -> ServerLog:
    """Read meta.json and requests.jsonl of a run.

    Raises InputError, naming the file and row, for what is missing or cannot be, and for servers that the
    scheduler does not model: speculation, pipeline parallelism, other queues than first come first served.
    """
    path = Path(path)
    meta = _read_meta(path / "meta.json")
    columns = _read_requests(path / "requests.jsonl")
    arrival, queued = columns["arrival_time"], columns["queued_ts"]
    # Two clocks: the shortest way from arrival to queue among the calibration half takes no time
    offset = float((queued - arrival)[: len(arrival) // 2].min())
    start = arrival[0] + offset
    limits, replicas, lockstep, graph_sizes = _read_server(path / "meta.json", meta)
    log = ServerLog(
        arrival_s=arrival + offset - start,
        prompt_tokens=columns["input_toks"].astype(np.int64),
        output_tokens=columns["output_toks"].astype(np.int64),
        queued_s=queued - start,
        scheduled_s=columns["scheduled_ts"] - start,
        first_token_s=columns["first_token_ts"] - start,
        last_token_s=columns["last_token_ts"] - start,
        limits=limits,
        replicas=replicas,
        lockstep=lockstep,
        graph_sizes=graph_sizes,
    )
    if log.reads.sum() < LEAST_REQUESTS // 2:
        raise InputError(
            f"{path / 'requests.jsonl'}: {log.reads.sum()} requests of the first half have more than one "
            f"output token: a fit needs {LEAST_REQUESTS // 2} or more"
        )
    needed = kv.num_blocks_of(int((log.prompt_tokens + log.output_tokens).max()), limits.block_size)
    if needed > limits.usable_blocks:
        raise InputError(
            f"{path / 'meta.json'}: a memory of {limits.kv_blocks} blocks does not hold the longest request"
        )
    return log


def _read_meta(file: Path) -> dict[str, Any]:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing: give the directory of a server's log") from error
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("engine_kwargs"), dict):
        raise InputError(f"{file} holds no engine_kwargs: not the log of a server")
    return meta


def _read_requests(file: Path) -> dict[str, np.ndarray]:
    """The columns of requests.jsonl in order of arrival, float64 [requests] each."""
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is missing or no text: give the directory of a server's log") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values = [float(row[name]) for name in COLUMNS]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise InputError(
                f"{file}: line {number} lacks a number for one of {', '.join(COLUMNS)}: give finished "
                "requests only"
            ) from error
        prompt, output, _, queued, scheduled, first, last = values
        if not (prompt >= 1 and output >= 1 and prompt % 1 == 0 and output % 1 == 0):
            raise InputError(f"{file}: line {number} has {prompt:g} prompt and {output:g} output tokens")
        follow = queued <= scheduled < first and (first < last if output > 1 else first <= last)
        if not (np.isfinite(values).all() and follow):
            raise InputError(f"{file}: line {number}: queued, scheduled, first and last token do not follow")
        rows.append(values)
    if len(rows) < LEAST_REQUESTS:
        raise InputError(f"{file} holds {len(rows)} requests: a fit needs {LEAST_REQUESTS} or more")
    rows.sort(key=lambda values: values[2])
    return dict(zip(COLUMNS, np.array(rows).T, strict=True))


def _read_server(file: Path, meta: dict[str, Any]) -> tuple[Limits, int, bool, np.ndarray]:
    """Limits, replicas, whether those run in step, and graph sizes; what is not said is vLLM's default."""
    given, memory = meta["engine_kwargs"], meta.get("kv_cache") or {}
    resolved = meta.get("resolved_config") or {}
    scheduler, cache, parallel, compilation = (
        resolved.get(f"{name}_config") or {} for name in ("scheduler", "cache", "parallel", "compilation")
    )

    def known(name: str, *places: dict[str, Any], default: Any = None) -> Any:
        return next((place[name] for place in places if place.get(name) is not None), default)

    for what, value, plain in (
        ("speculative decoding", known("speculative_config", resolved, given), None),
        ("a transfer of KV memory", known("kv_transfer_config", resolved, given), None),
        ("pipeline parallelism", known("pipeline_parallel_size", parallel, given, default=1), 1),
        ("a queue", known("policy", scheduler, default="fcfs"), "fcfs"),
        ("whole prompts", known("enable_chunked_prefill", scheduler, given, default=True), True),
        ("several prompts in work", known("max_num_partial_prefills", scheduler, default=1), 1),
        ("a longest chunk", known("long_prefill_token_threshold", scheduler, default=0), 0),
        ("a scheduler of its own", known("scheduler_cls", scheduler), None),
    ):
        if value != plain:
            raise InputError(f"{file}: the server ran with {what} ({value}), which is not modelled")
    numbers = {}
    for name, value in (
        ("max_num_seqs", known("max_num_seqs", given, scheduler)),
        ("max_num_batched_tokens", known("max_num_batched_tokens", given, scheduler)),
        ("block_size", known("block_size", memory, cache, default=16)),
        ("kv_blocks", known("num_gpu_blocks", memory, cache)),
        ("data_parallel_size", known("data_parallel_size", given, parallel, default=1)),
    ):
        if value is None and name != "kv_blocks":
            raise InputError(f"{file} does not say {name}: without it the run cannot be modelled")
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise InputError(f"{file}: {name} {value!r} is not a whole number of at least 1")
        numbers[name] = value
    replicas = numbers.pop("data_parallel_size")
    limits = Limits(
        **numbers,
        prefix_caching=bool(known("enable_prefix_caching", memory, cache, given, default=True)),
        asynchronous=bool(known("async_scheduling", scheduler, given, default=True)),
        reserve_prompt=bool(known("scheduler_reserve_full_isl", scheduler, default=True)),
    )
    sizes = known("cudagraph_capture_sizes", compilation)
    if sizes is None:
        most = min(2 * limits.max_num_seqs, 512)
        sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)) if n <= most]
    if known("enforce_eager", resolved.get("model_config") or {}, given, default=False):
        sizes = []
    experts = bool(known("is_moe_model", parallel, default=given.get("enable_expert_parallel")))
    return limits, replicas, replicas > 1 and experts, np.array(sorted(sizes), float)


# ---- cost -----------------------------------------------------------------------------------------------


def cost_table(log: ServerLog, parameters: np.ndarray) -> CostTable:
    """The fitted cost as a table: rows of any kind, prompts, contexts; without the first launch."""
    prompt, context, pair = np.exp(parameters[1:4])
    sizes = log.graph_sizes.astype(int).tolist()
    most = max(log.limits.max_num_batched_tokens, 2 * int(KNOTS[-1]))
    beyond = [*(int(knot) for knot in KNOTS if knot > max([0, *sizes])), most]
    rows = sorted({*sizes, *([sizes[-1] + 1] if sizes else [1]), *beyond})
    times = _row_seconds(parameters, np.array(rows, float))
    return CostTable.from_samples(
        [Sample("verify", None, n, float(t)) for n, t in zip(rows, times, strict=True)],
        max_graph_tokens=sizes[-1] if sizes else 0,
        context_token_s=float(context),
        prefill_pair_s=float(pair),
        prefill_s=float(prompt),
    )


def _row_seconds(parameters: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Seconds of passes over so many rows, padding done."""
    return np.exp(parameters[0]) + _stretches(rows) @ np.exp(parameters[4:_LAUNCH])


def _stretches(rows: np.ndarray) -> np.ndarray:
    """How many of so many rows lie on each slope, float64 [..., slopes]."""
    return np.clip(rows[..., None], KNOTS, np.append(KNOTS[1:], np.inf)) - KNOTS


def _padded(log: ServerLog, rows: np.ndarray) -> np.ndarray:
    """Rows that a pass executes."""
    sizes = log.graph_sizes
    if not len(sizes):
        return rows
    return np.where(rows <= sizes[-1], sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)], rows)


# ---- prediction -----------------------------------------------------------------------------------------


def predict(log: ServerLog, worlds: list[World]) -> Forecast:
    """When each request is queued, and emits its first and last token: the mean over the worlds."""
    runs = [_simulate(log, w.parameters, w.limits, _NOISE[w.noise], w.shared)[0] for w in worlds]
    queued, _, first, last = np.mean(runs, axis=0)
    return Forecast(queued, first, last)


def _simulate(
    log: ServerLog,
    parameters: np.ndarray,
    limits: Limits,
    noise: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    seen: np.ndarray | None = None,
    record: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Queued, scheduled, first and last token [4, requests], and the steps (where `record` is set).

    seen: scheduled, first and last token of the log [3, requests], nan where unknown, that set the clock.
    """
    num = len(log.arrival_s)
    books = np.zeros(num, BOOK)
    books["arrival_s"], books["prompt_tokens"] = log.arrival_s, log.prompt_tokens
    books["output_tokens"], books["tokens"] = log.output_tokens, log.prompt_tokens
    books["stretch"] = -1
    books["shared"] = 0 if shared is None else shared
    for name in ("scheduled_s", "first_token_s", "token_s", "finish_s"):
        books[name] = np.nan
    memories = [kv.new_memory(limits.usable_blocks, limits.block_size) for _ in range(log.replicas)]
    seats = limits.max_num_seqs, limits.max_num_batched_tokens
    queues = [new_queues(num, *seats, limits.reserve_prompt, limits.prefix_caching) for _ in memories]
    queue, running, front, waiting = (np.stack(each) for each in zip(*queues, strict=True))
    plans = [new_plans(limits.depth, limits.max_num_seqs) for _ in memories]
    plan, entries = (np.stack(each) for each in zip(*plans, strict=True))
    seconds = _row_seconds(parameters, _padded(log, np.arange(limits.max_num_batched_tokens + 1.0)))
    _, prompt, context, pair, *_, launch = np.exp(parameters)
    queued, steps = _run(
        books,
        queue,
        running,
        front,
        waiting,
        np.stack([memory for memory, _, _ in memories]),
        np.stack([stretches for _, stretches, _ in memories]),
        plan,
        entries,
        log.lockstep,
        seconds,
        (prompt, context, pair, launch),
        np.zeros(1) if noise is None else noise,
        np.full((3, num), np.nan) if seen is None else seen,
        np.zeros(_MAX_STEPS if record else 1, _STEP),
    )
    return np.stack([queued, *(books[name] for name in ("scheduled_s", "first_token_s", "finish_s"))]), steps


@compiled
def _run(
    books: kv.Rows,
    queues: kv.Rows,
    running: kv.Rows,
    front: kv.Rows,
    waiting: kv.Rows,
    memories: kv.Rows,
    stretches: kv.Rows,
    plans: kv.Rows,
    entries: kv.Rows,
    lockstep: bool,
    seconds: np.ndarray,
    prices: tuple[float, float, float, float],
    noise: np.ndarray,
    seen: np.ndarray,
    steps: kv.Rows,
) -> tuple[np.ndarray, kv.Rows]:
    """The engine's loop for plain decoding, compiled whole, since a fit takes thousands of runs.

    A leading axis counts replicas. A request goes to the one with the least 4 * waiting + running. Replicas
    in lockstep share a clock. Where the log shows a step's end, that is when it ends; and a request that the
    log schedules at a step's end was there by then.
    """
    prompt_s, context_s, pair_s, launch_s = prices
    num, replicas, depth = len(books), len(queues), plans.shape[1]
    clocks = 1 if lockstep else replicas
    each = replicas // clocks
    now = np.full(clocks, np.inf)  # of each clock; inf: idle
    ahead, oldest = np.zeros(clocks, np.int64), np.zeros(clocks, np.int64)
    no_units, no_hashes = np.zeros(0, kv.UNIT), np.zeros(0, np.int64)
    accepted, gaps = np.zeros(entries.shape[2], np.int64), np.zeros(0, np.int64)
    finished = np.zeros(entries.shape[2], np.int64)
    queued = np.full(num, np.nan)
    upcoming, num_done, taken = 0, 0, 0
    while num_done < num and taken < _MAX_STEPS:
        g = np.argmin(now)
        at = now[g]
        if at == np.inf:
            if upcoming >= num:
                break
            at = books[upcoming].arrival_s
            if not np.isnan(seen[0, upcoming]):
                at = seen[0, upcoming] - 1e-4
        while upcoming < num:
            book, scheduled = books[upcoming], seen[0, upcoming]
            known = not np.isnan(scheduled)
            if (scheduled - _SYNC_S if known else book.arrival_s) > at:
                break
            last = steps[(taken - 1) % len(steps)]
            waited = known and taken > 0 and scheduled - book.arrival_s > _SYNC_S
            if waited and abs(scheduled - at) < _SYNC_S and last.num_seen == 0:  # for this step's end
                at = max(scheduled - 1.2e-4, last.start_s + 1e-6)
                last.end_s = at
                last.num_seen = 100
            best, least = 0, 1 << 60
            for e in range(replicas):
                q = queues[e, 0]
                load = 4 * (q.tail - q.head + q.num_front) + q.num_running
                if load < least:
                    best, least = e, load
            waiting[best, queues[best, 0].tail] = upcoming
            queues[best, 0].tail += 1
            queued[upcoming] = at
            if now[best // each] == np.inf:
                now[best // each] = at
            upcoming += 1
        g = np.argmin(now)
        at = max(now[g], at)
        mine = range(g * each, (g + 1) * each)
        if ahead[g] < depth:
            k, scheduled_any = (oldest[g] + ahead[g]) % depth, 0
            for e in mine:
                _, rows, prompts = hold(
                    queues[e], books, running[e], front[e], memories[e], stretches[e], no_units, no_hashes,
                    plans[e], entries[e], k, 0)  # fmt: skip
                if prompts:
                    fill(queues[e], books, running[e], front[e], waiting[e], memories[e], stretches[e],
                         no_units, no_hashes, plans[e], entries[e], k, rows, at)  # fmt: skip
                scheduled_any += plans[e, k].num
            if scheduled_any > 0:
                ahead[g] += 1
                if taken == 0 and ahead[g] == 1:
                    at += launch_s  # kernels load while the engine waits
                now[g] = at
                if ahead[g] < depth:
                    continue
            elif ahead[g] == 0:
                now[g] = np.inf
                continue
        k, step_s = oldest[g], 0.0
        step = steps[taken % len(steps)]
        num_seen, total, low, high = 0, 0.0, np.inf, -np.inf
        for e in mine:
            plan, context = plans[e, k], 0
            for j in range(plan.num):
                entry = entries[e, k, j]
                book = books[entry.request]
                if entry.kind == DECODE:
                    context += book.tokens
                if entry.kind != 0 and book.status != DONE:
                    emitted = book.tokens + 1 - book.prompt_tokens
                    end = np.nan
                    if emitted == book.output_tokens:
                        end = seen[2, entry.request]
                    elif emitted == 1:
                        end = seen[1, entry.request]
                    if not np.isnan(end):
                        num_seen += 1
                        total += end
                        low, high = min(low, end), max(high, end)
            if plan.num > 0:
                price = seconds[plan.rows] + context_s * context + pair_s * plan.prefill_pairs
                step_s = max(step_s, price + (prompt_s if plan.prefill_tokens > 0 else 0.0))
            step.context = context
        first = plans[g * each, k]
        end_s = at + step_s * np.exp(noise[taken % len(noise)])
        if num_seen > 0:
            end_s = max(total / num_seen, at + 1e-6)
        step.rows = first.rows
        step.prefill_tokens = first.prefill_tokens
        step.pairs = first.prefill_pairs
        step.start_s = at
        step.end_s = end_s
        step.num_seen = num_seen
        step.spread_s = high - low if num_seen > 0 else 0.0
        step.running = queues[g * each, 0].num_running
        step.waiting = queues[g * each, 0].tail - queues[g * each, 0].head + queues[g * each, 0].num_front
        taken += 1
        now[g] = end_s
        for e in mine:
            num_done += settle(
                queues[e], books, running[e], front[e], memories[e], stretches[e], no_units, no_hashes,
                plans[e], entries[e], k, accepted, end_s, gaps, finished)  # fmt: skip
        oldest[g] = (k + 1) % depth
        ahead[g] -= 1
    return queued, steps[: min(taken, len(steps))]


# ---- fit ------------------------------------------------------------------------------------------------


def fit(log: ServerLog) -> list[World]:
    """Equally good explanations of the log's first half."""
    limits = log.limits
    parameters = _fit_runs(log, limits)
    bound = limits.kv_blocks is not None and _memory_bound(log, parameters, limits)
    if limits.kv_blocks is None and len(_kept_waiting(log)) >= 3:
        bound = True
        parameters, limits = _find_blocks(log, parameters, limits)
    found = []
    for _ in range(2):
        parameters = _set_launch(log, _fit_intervals(log, parameters, limits), limits)
        found.append(_polish(log, parameters, limits, bound))
        _, parameters, limits = min(found, key=lambda each: each[0])
    none = np.zeros(len(log.arrival_s), np.int64)
    if not bound:
        return [World(parameters, limits, noise, none) for noise in range(8)]
    assert limits.kv_blocks is not None
    if log.limits.kv_blocks is not None:
        excess = limits.kv_blocks / log.limits.kv_blocks - 1
        if not limits.prefix_caching or excess <= 0.002:
            return [World(parameters, limits, noise, none) for noise in range(8)]
        return _draw_worlds(log, parameters, excess)
    sizes = [replace(limits, kv_blocks=round(limits.kv_blocks * part)) for part in (0.996, 1.0, 1.004)]
    return [World(parameters, each, noise, none) for each in sizes for noise in range(4)]


def _residuals(log: ServerLog, times: np.ndarray) -> np.ndarray:
    """Log errors of the calibration half: time a token, end to end, and (lighter) the first token."""
    half, reads = log.half, log.reads
    _, _, first, last = np.where(np.isnan(times[:, :half]), [[0], [0], [1e4], [2e4]], times[:, :half])
    start, true_first, true_last = log.arrival_s[:half], log.first_token_s[:half], log.last_token_s[:half]
    return np.concatenate(
        [
            np.log((last - first)[reads] / np.maximum(true_last - true_first, 1e-6)[reads]),
            np.log((last - start) / (true_last - start)),
            0.3 * np.log((first - start + 0.03) / (true_first - start + 0.03)),
        ]
    )


def _loss(residuals: np.ndarray) -> float:
    return float(_SOFT**2 * (np.sqrt(1 + (residuals / _SOFT) ** 2) - 1).sum())


def _noisy_loss(
    log: ServerLog, parameters: np.ndarray, limits: Limits, noises: range, shared: np.ndarray | None = None
) -> float:
    """The mean loss over some rows of the noise, lest one accident of scheduling decide."""
    runs = (_simulate(log, parameters, limits, _NOISE[noise], shared)[0] for noise in noises)
    return float(np.mean([_loss(_residuals(log, times)) for times in runs]))


def _prior(log: ServerLog) -> np.ndarray:
    """Parameters guessed from the calibration half: its fastest tokens and shortest waits for the first."""
    half, reads = log.half, log.reads
    tpot_s = (log.last_token_s - log.first_token_s)[:half] / np.maximum(log.output_tokens[:half] - 1, 1)
    base = 0.6 * np.percentile(tpot_s[reads], 5)
    wait_s, prompt = (log.first_token_s - log.scheduled_s)[:half], log.prompt_tokens[:half]
    fast = np.argsort(wait_s / prompt)[: max(5, half // 5)]
    row_s = np.median(np.maximum(wait_s[fast] - 1.5 * base, 1e-4) / prompt[fast])
    guess = [base, 0.05 * base, 8e-6 * base, 4e-5 * row_s, *(np.array([0.8, 0.8, 0.9, 1.0]) * row_s), 0.02]
    return np.log(guess)


def _fit_runs(
    log: ServerLog, limits: Limits, start: np.ndarray | None = None, evaluations: int = 10
) -> np.ndarray:
    """Parameters by least squares on free runs."""
    prior = _prior(log)

    def errors(parameters: np.ndarray) -> np.ndarray:
        times, _ = _simulate(log, parameters, limits)
        return np.concatenate([_residuals(log, times), 0.1 * (parameters - prior) / _SPREAD])

    start = prior if start is None else start
    return least_squares(errors, start, diff_step=0.1, loss="soft_l1", f_scale=_SOFT, max_nfev=evaluations).x


def _intervals(
    log: ServerLog, parameters: np.ndarray, limits: Limits, tolerance: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    """Between logged step ends of the calibration half: sums of what parameters multiply, and seconds."""
    seen = np.stack([log.scheduled_s, log.first_token_s, log.last_token_s])
    seen[:, log.half :] = np.nan
    _, steps = _simulate(log, parameters, limits, seen=seen, record=True)
    steps = steps[steps["end_s"] <= np.nanmax(seen[2]) + 1e-6]
    rows = _padded(log, steps["rows"])
    features = [np.ones(len(steps)), steps["prefill_tokens"] > 0, steps["context"], steps["pairs"]]
    sums = np.column_stack([*features, _stretches(rows)]).cumsum(axis=0)
    sums = np.vstack([np.zeros(sums.shape[1]), sums])
    known = np.flatnonzero((steps["num_seen"] > 0) & (steps["spread_s"] < 1e-3))
    idle = np.append(0, np.cumsum(steps["start_s"][1:] - steps["end_s"][:-1] > 1e-9))
    found, lasted = [], []
    before = known[0] if len(known) else 0
    for at in known[1:]:
        if idle[at] > idle[before]:
            before = at
            continue
        row, seconds = sums[at + 1] - sums[before + 1], steps["end_s"][at] - steps["end_s"][before]
        error = abs(np.log(max(row @ np.exp(parameters[:_LAUNCH]), 1e-6) / max(seconds, 1e-6)))
        if error < tolerance or seconds > 2.0:  # else a step counts on the wrong side: join with the next
            if error < 2 * tolerance:
                found.append(row)
                lasted.append(seconds)
            before = at
    return np.array(found), np.array(lasted)


def _fit_intervals(log: ServerLog, parameters: np.ndarray, limits: Limits) -> np.ndarray:
    """Parameters from the intervals between logged step ends, whose total time is then made exact."""
    if log.replicas > 1:  # the log does not say which replica served a request
        return parameters
    prior = _prior(log)
    for _ in range(3):
        rows, seconds = _intervals(log, parameters, limits)
        if len(seconds) < LEAST_REQUESTS:
            return parameters
        weight = np.sqrt(seconds / (seconds + 0.1))

        def errors(
            x: np.ndarray, rows: np.ndarray = rows, seconds: np.ndarray = seconds, weight: np.ndarray = weight
        ) -> np.ndarray:
            apart = weight * np.log(rows @ np.exp(x[:_LAUNCH]) / seconds)
            return np.concatenate([apart, 0.1 * (x - prior) / _SPREAD])

        found = least_squares(errors, parameters, loss="soft_l1", f_scale=_SOFT).x
        found[_LAUNCH] = parameters[_LAUNCH]
        found[:_LAUNCH] -= np.log((rows @ np.exp(found[:_LAUNCH])).sum() / seconds.sum())
        parameters = found
    return parameters


def _set_launch(log: ServerLog, parameters: np.ndarray, limits: Limits) -> np.ndarray:
    """Let the first launch take what the first request waits longer than predicted."""
    parameters = parameters.copy()
    parameters[_LAUNCH] = np.log(1e-3)
    late_s = log.first_token_s[0] - _simulate(log, parameters, limits)[0][2, 0]
    parameters[_LAUNCH] = np.log(np.clip(late_s, 1e-3, 5))
    return parameters


def _polish(
    log: ServerLog, parameters: np.ndarray, limits: Limits, bound: bool, evaluations: int = 80
) -> tuple[float, np.ndarray, Limits]:
    """(loss, parameters, limits) with the scales of decode and prefill, the launch and the blocks moved."""
    least = log.limits.kv_blocks or 0

    def moved(by: np.ndarray) -> tuple[np.ndarray, Limits]:
        found = parameters.copy()
        found[_DECODE] += by[0]
        found[_PREFILL] += by[1]
        found[_LAUNCH] += 50 * by[2]
        if not bound or limits.kv_blocks is None:
            return found, limits
        return found, replace(limits, kv_blocks=max(least, round(limits.kv_blocks * np.exp(by[3]))))

    def loss(by: np.ndarray) -> float:
        too_few = max(0.0, least / (limits.kv_blocks or 1) - np.exp(by[3])) if bound else 0.0
        return _noisy_loss(log, *moved(by), range(4)) + too_few

    size = np.array([0.01, 0.015, 0.01, 0.008])[: 4 if bound else 3]
    simplex = np.vstack([0 * size, np.diag(size)])
    best = minimize(
        loss,
        0 * size,
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "maxfev": evaluations, "xatol": 3e-4, "fatol": 1e-5},
    )
    return float(best.fun), *moved(best.x)


def _memory_bound(log: ServerLog, parameters: np.ndarray, limits: Limits) -> bool:
    """Whether blocks, and not seats or tokens, keep requests waiting or take them out."""
    _, steps = _simulate(log, parameters, limits, record=True)
    steps = steps[steps["start_s"] <= np.nanmax(log.first_token_s[: log.half])]
    short = (steps["waiting"] > 0) & (steps["running"] < limits.max_num_seqs - 1)
    return int((short & (steps["rows"] < limits.max_num_batched_tokens)).sum()) > 5


def _kept_waiting(log: ServerLog) -> list[int]:
    """Calibration requests that waited over a second though seats were free."""
    found = []
    for r in range(1, log.half):
        came = log.queued_s[r] + 1e-3
        seated = ((log.scheduled_s[:r] <= came) & (log.last_token_s[:r] > came)).sum()
        seats = 0.9 * log.limits.max_num_seqs * log.replicas
        if log.scheduled_s[r] - log.queued_s[r] > 1.0 and seated < seats:
            found.append(r)
    return found


def _find_blocks(log: ServerLog, parameters: np.ndarray, limits: Limits) -> tuple[np.ndarray, Limits]:
    """A memory's size from what was in it when requests first had to wait, and then from the fit."""
    in_use = []
    for r in _kept_waiting(log)[:12]:
        before = np.flatnonzero(log.scheduled_s[:r] < log.scheduled_s[r] - 0.5)
        last = log.first_token_s[before].max(initial=0.0)
        at = max(log.queued_s[r], last if last < log.scheduled_s[r] else 0.0)
        there = np.flatnonzero((log.scheduled_s[:r] <= at) & (log.last_token_s[:r] > at))
        lasts = np.maximum(log.last_token_s[there] - log.first_token_s[there], 1e-3)
        part = np.clip((at - log.first_token_s[there]) / lasts, 0, 1)
        tokens = log.prompt_tokens[there] + part * (log.output_tokens[there] - 1)
        half_prompt = 0.5 * log.prompt_tokens[r] / limits.block_size
        in_use.append(np.ceil(tokens / limits.block_size).sum() + half_prompt)
    longest = int((log.prompt_tokens + log.output_tokens).max())
    least = 1 + kv.num_blocks_of(longest, limits.block_size)

    def tried(blocks: float, start: np.ndarray) -> tuple[float, np.ndarray, Limits]:
        sized = replace(limits, kv_blocks=max(least, int(blocks)))
        found = _fit_runs(log, sized, start, evaluations=8)
        return _noisy_loss(log, found, sized, range(2)), found, sized

    guess = float(np.median(in_use)) / log.replicas
    found = [tried(guess * part, parameters) for part in (0.88, 0.96, 1.04, 1.12)]
    _, parameters, best = min(found, key=lambda each: each[0])
    found += [tried((best.kv_blocks or 0) * part, parameters) for part in (0.98, 1.02)]
    return min(found, key=lambda each: each[0])[1:]


def _draw_worlds(
    log: ServerLog, parameters: np.ndarray, excess: float, drawn: int = 150, kept: int = 6, moves: int = 50
) -> list[World]:
    """Worlds of the recorded memory, with cached prefixes worth an `excess` of it."""
    rng = np.random.default_rng(0)
    num, size = len(log.arrival_s), log.limits.block_size

    def some(share: float, rng: np.random.Generator) -> np.ndarray:
        part = log.prompt_tokens * rng.uniform(0.2, 0.8, num)
        return np.where(rng.random(num) < share, part.astype(np.int64) // size, 0)

    def loss(noise: int, shared: np.ndarray) -> float:
        return _noisy_loss(log, parameters, log.limits, range(noise, noise + 1), shared)

    pool = []
    for k in range(drawn):
        shared = some(2.5 * excess * rng.uniform(0.4, 1.6), rng)
        pool.append((loss(k % len(_NOISE), shared), k % len(_NOISE), shared))
    pool.sort(key=lambda each: each[0])
    worlds, later = [], np.random.default_rng(1)
    for best, noise, shared in pool[:kept]:
        for _ in range(moves):
            other, r = shared.copy(), rng.integers(log.half)
            hits = np.flatnonzero(other[: log.half])
            if len(hits) and (other[r] or rng.random() < 0.5):
                other[rng.choice(hits)] = 0
            if rng.random() < 0.7:
                other[r] = int(log.prompt_tokens[r] * rng.uniform(0.2, 0.8)) // size
            if (found := loss(noise, other)) < best:
                best, shared = found, other
        for _ in range(3):
            world = shared.copy()
            world[log.half :] = some(2.5 * excess, later)[log.half :]
            worlds.append(World(parameters, log.limits, noise, world))
    return worlds


# ---- comparison -----------------------------------------------------------------------------------------


MEASURES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "median", "p90", "p99")
WITHIN = {"mean": 0.03, "median": 0.03, "p90": 0.06}
"""How far each statistic of every measure may be off, relative to the log's."""
WITHIN_A_REQUEST = 0.05
"""How far the end-to-end time of a request may be off on average."""


def measures(log: ServerLog, first_s: np.ndarray, last_s: np.ndarray) -> dict[str, np.ndarray]:
    """TTFT and end-to-end time since the arrival and TPOT, seconds [requests]; TPOT nan for one token."""
    gaps = np.where(log.output_tokens > 1, log.output_tokens - 1, np.nan)
    return {
        "ttft": first_s - log.arrival_s,
        "tpot": (last_s - first_s) / gaps,
        "e2e": last_s - log.arrival_s,
    }


def errors(log: ServerLog, forecast: Forecast, part: slice = slice(None)) -> dict[str, dict[str, float]]:
    """Relative error of each statistic of each measure, and the mean absolute one of a request."""
    true = measures(log, log.first_token_s, log.last_token_s)
    found = measures(log, forecast.first_token_s, forecast.last_token_s)
    table = {}
    for name in MEASURES:
        known = ~np.isnan(true[name][part])
        a, b = true[name][part][known], found[name][part][known]
        of = {"mean": np.mean, "median": np.median} | {
            f"p{q}": (lambda x, q=q: np.percentile(x, q)) for q in (90, 99)
        }
        table[name] = {key: float(of[key](b) / of[key](a) - 1) for key in STATISTICS}
        table[name]["per request"] = float(np.mean(np.abs(b / a - 1)))
    return table


def failures(table: dict[str, dict[str, float]]) -> list[str]:
    """What is further off than it may be, in words."""
    found = [
        f"{name} {key} {table[name][key]:+.1%} (within {most:.0%})"
        for name in MEASURES
        for key, most in WITHIN.items()
        if not abs(table[name][key]) <= most
    ]
    if not table["e2e"]["per request"] <= WITHIN_A_REQUEST:
        found.append(f"e2e per request {table['e2e']['per request']:.1%} (within {WITHIN_A_REQUEST:.0%})")
    return found


# ---- what people read -----------------------------------------------------------------------------------


def table(log: ServerLog, worlds: list[World], forecast: Forecast) -> str:
    """The fit and the errors of all requests, and of those that lent nothing to the fit, as lines of text."""
    fitted, limits = np.exp(worlds[0].parameters), worlds[0].limits
    blocks = "no limit seen" if limits.kv_blocks is None else f"{limits.kv_blocks} blocks"
    if log.limits.kv_blocks is None and limits.kv_blocks is not None:
        blocks += " (fitted: the log does not say)"
    shared = np.mean([world.shared.sum() for world in worlds]) * limits.block_size / log.prompt_tokens.sum()
    lines = [
        f"a step: {fitted[0] * 1e3:.2f} ms + {fitted[7] * 1e6:.1f} us a row (beyond {KNOTS[-1]:.0f}) + "
        f"{fitted[2] * 1e9:.0f} ns a context token; with prompts {fitted[1] * 1e3:.2f} ms more",
        f"memory: {blocks}; taken from the prefix cache: {shared:.1%} of the prompt tokens; "
        f"{'asynchronous' if limits.asynchronous else 'synchronous'} scheduling",
        "",
        f"{'':<32}" + "".join(f"{name:>10}" for name in (*STATISTICS, "request")),
    ]
    for title, part in (("all requests", slice(None)), ("second half", slice(log.half, None))):
        for name, row in errors(log, forecast, part).items():
            cells = "".join(f"{row[key]:>+10.2%}" for key in STATISTICS)
            lines.append(f"{title:<14}{name:<18}{cells}{row['per request']:>10.2%}")
    true = measures(log, log.first_token_s, log.last_token_s)
    for name in MEASURES:
        x = true[name][~np.isnan(true[name])]
        seconds = (x.mean(), *np.percentile(x, (50, 90, 99)))
        lines.append(f"{'measured, s':<14}{name:<18}" + "".join(f"{value:>10.4g}" for value in seconds))
    return "\n".join(
        [*lines, "", "request: mean absolute error of a request; the others: error of the statistic"]
    )


def plot(log: ServerLog, forecast: Forecast, path: str | Path) -> None:
    """Write predicted against measured times of every request as .html, .svg or .png."""
    true = measures(log, log.first_token_s, log.last_token_s)
    found = measures(log, forecast.first_token_s, forecast.last_token_s)
    halves = np.where(np.arange(len(log.arrival_s)) < log.half, "first (fitted)", "second")
    panels = []
    for name, title in zip(MEASURES, ("first token", "a token after it", "end to end"), strict=True):
        known = ~np.isnan(true[name])
        rows = [
            {"measured": float(a), "predicted": float(b), "half": str(half)}
            for a, b, half in zip(true[name][known], found[name][known], halves[known], strict=True)
        ]
        ends = [f(row[key] for row in rows for key in ("measured", "predicted")) for f in (min, max)]
        scale = alt.Scale(type="log", nice=False, padding=12)
        x = alt.X("measured:Q", scale=scale, title=f"measured {title}, s")
        y = alt.Y("predicted:Q", scale=scale, title="predicted, s")
        line = alt.Chart(alt.Data(values=[{"measured": end, "predicted": end} for end in ends]))
        points = alt.Chart(alt.Data(values=rows)).mark_point(size=18).encode(x=x, y=y, color="half:N")
        panels.append(
            (line.mark_line(color="#999", strokeDash=[4, 4]).encode(x=x, y=y) + points).properties(
                width=280, height=280
            )
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart = alt.hconcat(*panels).properties(title="Predicted and measured times of every request")
    chart.save(str(path), inline=True) if path.suffix == ".html" else chart.save(str(path))
