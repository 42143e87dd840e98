"""The command that replays a grid of policies, loads and seeds on every core, or on a Ray cluster."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
from scipy.special import stdtrit
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policies, parse_policy
from sim import arrivals, load, results
from sim.arrivals import open_traffic, request_order, whole_number
from sim.engine import Engine
from sim.load import Load, open_priced, priced, replay_load
from sim.replay import checked_batch_sizes, default_requests, parse_batch_sizes
from traces.schema import Trace
from traces.store import open_trace

CELLS = "cells"
"""The folder of the results directory that is the data set: policy=.../batch_size=.../seed-0.parquet."""

_OF_STEADY = ("batch_size", "requests", "timeline")
_OF_TRAFFIC = ("arrivals", "lengths", "limit", "max_num_seqs", "kv_blocks", "slo", "timeline")

_STEADY = ("throughput_tps", "speedup_vs_off", "keep_ratio", "mean_acceptance_length")
_TRAFFIC = (
    "throughput_tps",
    "speedup_vs_off",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "tpot_s_p99",
    "e2e_s_mean",
    "token_goodput_tps",
    "request_goodput_rps",
    "kept_share",
    "keep_ratio",
    "mean_acceptance_length",
)


@dataclass(frozen=True, slots=True)
class Config:
    """One sweep, as the command line asks for it: over batch sizes or, with rates, under traffic."""

    out: str
    trace: str = "h20-qwen3-8b"
    policy: str = "off,full,dcut"
    batch_sizes: Sequence[int] | None = None  # None: those of the cost table
    cost: str | None = None  # None: the trace's own table
    seeds: int = 5
    requests: int | None = None  # None: replay.default_requests
    rates: Sequence[float] = ()  # arrivals a second
    load: Load | None = (
        None  # what traffic at these rates is otherwise; its policy, rate and seed are the cells'
    )
    workers: int | None = None  # None: every core, or the whole of a Ray cluster
    ray: str | None = None  # "local" starts Ray here; else the address of a cluster


@dataclass(frozen=True, slots=True)
class Steady:
    """A cell at a steady batch size, and all that a worker needs for it."""

    trace: str
    cost: CostTable
    requests: int | None
    policy: str
    batch_size: int
    seed: int


Cell = Steady | Load


def key(cell: Cell) -> dict[str, Any]:
    """What tells a cell from the others: its policy, its batch size or rate, its seed."""
    level = {"batch_size": cell.batch_size} if isinstance(cell, Steady) else {"rate": cell.rate}
    return {"policy": cell.policy, **level, "seed": cell.seed}


def place(cell: Cell) -> Path:
    """Its file in the data set."""
    *folders, (_, seed) = key(cell).items()
    return Path(*(f"{name}={quote(str(value), safe='')}" for name, value in folders), f"seed-{seed}.parquet")


def sweep(config: Config, progress: bool = False) -> list[dict[str, Any]]:
    """Run what `config.out` does not hold yet of the grid; a row for each policy and batch size or rate.

    Every seed is one world (the requests, their times and, in a generated trace, the anchors), which all
    policies meet: intervals of the speed-up over plain decoding are of pairs in the same world. Plain
    decoding is run everywhere, asked for or not. A row holds the mean of each figure over the seeds and, as
    <figure>_ci95, half its 95 % confidence interval (Student's t; None with one seed). speedup_vs_off is of
    throughput at a steady batch size; of traffic, where throughput follows the rate, of the mean end-to-end
    time. The rows and every byte of `config.out` follow from the configuration, not from who computed them.
    Raises InputError on what cannot be used, before the work wherever that can be known, and where
    `config.out` holds anything but cells of this very trace, cost table and traffic.
    """
    policies = parse_policies(config.policy)
    trace, grid = _traffic(config) if config.rates else _steady(config)
    for policy in policies.values():
        policy.check_drafts(trace.draft_length)
    cells = [
        replace(cell, policy=policy, seed=seed)
        for seed in range(config.seeds)
        for cell in grid
        for policy in dict.fromkeys([*policies, "off"])
    ]
    out = _prepared(Path(config.out), _about(config, grid))
    todo = [cell for cell in cells if not (out / CELLS / place(cell)).exists()]
    with tqdm(
        total=len(cells),
        initial=len(cells) - len(todo),
        unit=" cells",
        disable=None if progress else True,  # None: hidden unless stderr is a terminal
    ) as bar:
        for cell, row in compute(todo, config):
            _write(out / CELLS / place(cell), pl.DataFrame([row]))
            bar.update()
    rows = [pl.read_parquet(out / CELLS / place(cell)).row(0, named=True) for cell in cells]
    summary = _summary(rows, list(policies))
    _write(out / "summary.parquet", pl.DataFrame(summary))
    return summary


def _steady(config: Config) -> tuple[Trace, list[Cell]]:
    """The trace, and the batch sizes, each as a cell of plain decoding."""
    trace, cost = open_priced(config.trace, config.cost)
    batch_sizes = checked_batch_sizes(cost, config.batch_sizes, config.requests)
    return trace, [Steady(config.trace, cost, config.requests, "off", size, 0) for size in batch_sizes]


def _traffic(config: Config) -> tuple[Trace, list[Cell]]:
    """The trace, and the rates, each as a cell of plain decoding."""
    assert config.load is not None
    base = replace(config.load, trace=config.trace, cost=config.cost, policy="off", out=None, timeline=None)
    trace, cost = priced(base)
    cost.check_batch_size(base.limits.max_num_seqs)
    cells = [replace(base, rate=rate) for rate in config.rates]
    for cell in cells:
        open_traffic(trace, cell.arrivals, cell.rate, cell.rate_scale, cell.lengths, cell.limit)
    return trace, [*cells]


def run(cell: Cell) -> dict[str, Any]:
    """Replay one cell: what tells it from others, and its figures."""
    if isinstance(cell, Steady):
        trace = _opened(cell.trace, cell.seed)
        order = request_order(trace, cell.requests or default_requests(trace, cell.batch_size), cell.seed)
        policy = parse_policy(cell.policy)
        figures = results.figures(Engine(trace, policy, cell.cost, cell.batch_size, order).run())
    else:
        (figures,) = replay_load(cell)
        del figures["sim_steps_per_s"]
    shares = [{"bucket": label, "share": share} for label, share in figures.pop("bucket_share").items()]
    return {**figures, **key(cell), "bucket_share": shares}


@lru_cache(maxsize=2)
def _opened(name: str, seed: int) -> Trace:
    return open_trace(name, seed)


# ---- workers --------------------------------------------------------------------------------------------


def compute(cells: Sequence[Cell], config: Config) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Every cell with its row, in the order in which they are ready."""
    workers = min(config.workers or len(os.sched_getaffinity(0)), max(1, len(cells)))
    if config.ray is not None:
        yield from _by_ray(cells, config.ray, config.workers)
    elif workers == 1:
        yield from ((cell, run(cell)) for cell in cells)
    else:
        yield from _by_processes(cells, workers)


def _by_processes(cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    # Spawned, since a fork would copy locks that polars' threads may hold
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures = {pool.submit(run, cell): cell for cell in cells}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _by_ray(
    cells: Sequence[Cell], address: str, workers: int | None
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("--ray needs Ray: pip install -e '.[sweep]'") from error
    if address == "local":
        ray.init(
            "local", num_cpus=workers, include_dashboard=False, logging_level="error", log_to_driver=False
        )
    else:
        ray.init(address, logging_level="error", log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=1)(run)
        running = {remote.remote(cell): cell for cell in cells}
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ready), ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # ours, without the far end's traceback
    finally:
        ray.shutdown()


# ---- the results directory ------------------------------------------------------------------------------


def _about(config: Config, grid: Sequence[Cell]) -> dict[str, Any]:
    """What every cell of a results directory shares."""
    first = grid[0]
    if isinstance(first, Steady):
        trace, cost, rest = open_trace(config.trace), first.cost, {"requests": config.requests}
    else:
        (trace, cost), rest = priced(first), asdict(first)
        for name in ("trace", "cost", "policy", "rate", "seed", "out", "timeline"):
            del rest[name]
    arrays = trace.arrays
    drafts = hashlib.sha256(arrays.confidences.tobytes())
    narrower = [part for drafts in arrays.narrower.values() for part in drafts]
    for part in (arrays.num_accepted, arrays.prompt_tokens, arrays.output_tokens, *narrower):
        drafts.update(part.tobytes())
    prices_of = hashlib.sha256(json.dumps(cost.to_dict()).encode())
    return {"kind": "sweep", "trace": drafts.hexdigest(), "cost": prices_of.hexdigest(), **rest}


def _prepared(out: Path, about: dict[str, Any]) -> Path:
    """A new results directory, or one that holds cells of the same kind."""
    meta = out / "meta.json"
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        try:
            out.mkdir(parents=True, exist_ok=True)
            meta.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}") from error
        return out
    try:
        found = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("kind") != "sweep":
        raise InputError(f"{out} exists and is not a sweep: give another place")
    if other := [key for key in about if found.get(key) != about[key]]:
        raise InputError(f"{out} holds a sweep of another {other[0]}: give another place, or remove it")
    return out


def _write(file: Path, table: pl.DataFrame) -> None:
    """Write a table, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    table.write_parquet(part, compression="zstd")
    part.replace(file)


def _summary(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> list[dict[str, Any]]:
    """Means and intervals over the seeds, a row for each batch size or rate and policy."""
    axis, shown = ("rate", _TRAFFIC) if "rate" in rows[0] else ("batch_size", _STEADY)
    plain = {(row[axis], row["seed"]): row for row in rows if row["policy"] == "off"}
    found = []
    for level in dict.fromkeys(row[axis] for row in rows):
        for policy in policies:
            runs = [row for row in rows if (row["policy"], row[axis]) == (policy, level)]
            line: dict[str, Any] = {"policy": policy, axis: level, "seeds": len(runs)}
            for row in runs:
                off = plain[level, row["seed"]]
                if axis == "rate":
                    row["speedup_vs_off"] = off["e2e_s_mean"] / row["e2e_s_mean"]
                else:
                    row["speedup_vs_off"] = row["throughput_tps"] / off["throughput_tps"]
            for name in shown:
                line[name], line[f"{name}_ci95"] = _interval([row[name] for row in runs])
            found.append(line)
    return found


def _interval(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean, and half the 95 % confidence interval by Student's t; None for a single value or without one."""
    known = np.array([value for value in values if value is not None])
    num = len(values)
    if num < 2 or len(known) < num:
        return values[0], None
    return float(known.mean()), float(stdtrit(num - 1, 0.975) * known.std(ddof=1) / math.sqrt(num))


# ---- the command ----------------------------------------------------------------------------------------


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as lines of text, a blank line between batch sizes or rates."""
    axis = "rate" if "rate" in rows[0] else "batch_size"
    columns = {"throughput_tps": ("tok/s", 1, 1), "speedup_vs_off": ("vs off", 1, 3)}
    if axis == "rate":
        columns |= {
            "ttft_s_p50": ("TTFT, s", 1, 3),
            "tpot_s_p50": ("TPOT, ms", 1e3, 2),
            "e2e_s_mean": ("e2e, s", 1, 2),
            "token_goodput_tps": ("goodput", 1, 1),
        }
    columns |= {"keep_ratio": ("keep", 1, 3), "mean_acceptance_length": ("accept", 1, 2)}
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    head = "".join(f"{title:>10} {'±':>7}" for title, _, _ in columns.values())
    lines = [f"{axis.partition('_')[0]:>5}  {'policy':<{width}}{head}"]
    for at, row in enumerate(rows):
        if at and row[axis] != rows[at - 1][axis]:
            lines.append("")
        cells = ""
        for name, (_, unit, digits) in columns.items():
            for value, place in ((row[name], 10), (row[f"{name}_ci95"], 8)):
                cells += f"{'' if value is None else f'{value * unit:.{digits}f}':>{place}}"
        lines.append(f"{row[axis]:>5g}  {row['policy']:<{width}}{cells}")
    against = "mean end-to-end time" if axis == "rate" else "throughput"
    lines += ["", f"±: half a 95 % confidence interval over {rows[0]['seeds']} seeds;"]
    if axis == "rate":
        lines += [
            "TTFT, TPOT: medians; goodput: tokens a second of requests that kept the promises of --slo;"
        ]
    return "\n".join([*lines, f"vs off: {against} against plain decoding, in pairs of one seed"])


def _rates(text: str) -> list[float]:
    """Rates from a list such as "0.5,1,2"; the processes of arrivals refuse what is no rate."""
    try:
        rates = [float(piece) for piece in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"--rate {text!r} is not a list of numbers such as 0.5,1,2") from None
    if twice := [rate for at, rate in enumerate(rates) if rate in rates[:at]]:
        raise InputError(f"--rate {text!r} names {twice[0]:g} twice: give each once")
    return rates


def main() -> None:
    """Parse the command line, sweep, print."""
    default = Config("")
    parser = Parser(
        prog="python -m sim.sweep",
        conflict_handler="resolve",  # --rate is a list here
        description="Replay a trace under a grid of policies, batch sizes or rates of traffic, and seeds. "
        "Cells that --out holds are kept, so a sweep can be stopped, resumed and extended.",
    )
    parser.add_argument("--trace", default=default.trace, help="built-in name or directory (%(default)s)")
    parser.add_argument("--policy", default=default.policy, help="comma-separated (%(default)s)")
    parser.add_argument(
        "--batch-size", metavar="N,N", help="comma-separated requests in flight (those of the cost table)"
    )
    parser.add_argument("--cost", metavar="FILE", help="cost table, .csv or .json (the trace's own)")
    parser.add_argument("--seeds", default=str(default.seeds), metavar="N", help="worlds (%(default)s)")
    parser.add_argument("--requests", metavar="N", help="requests of a cell (enough for about 1 %% noise)")
    parser.add_argument("--out", required=True, metavar="DIR", help="where finished cells are kept")
    parser.add_argument("--workers", metavar="N", help="processes, or CPUs of a local Ray (every core)")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="by Ray: started here, or the cluster at ADDRESS (its machines need dcut, and the files "
        "at the same paths)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout and nothing else")
    arrivals.add_arguments(parser)
    load.add_arguments(parser)
    parser.add_argument(
        "--rate", metavar="X,X", help="comma-separated arrivals a second, instead of batch sizes"
    )
    args = parser.parse_args()
    rates = _rates(args.rate or "")
    of_other = _OF_STEADY if rates else _OF_TRAFFIC
    for option in of_other:
        if getattr(args, option) is not None:
            remedy = "with --rate" if rates else "without --rate"
            raise InputError(f"--{option.replace('_', '-')} has no meaning {remedy}: leave it out")
    args.arrivals, args.rate, args.seed = args.arrivals or "poisson", None, "0"  # as a replay's options
    config = Config(
        out=args.out,
        trace=args.trace,
        policy=args.policy,
        batch_sizes=None if args.batch_size is None else parse_batch_sizes(args.batch_size),
        cost=args.cost,
        seeds=whole_number("--seeds", args.seeds, 1),
        requests=None if args.requests is None else whole_number("--requests", args.requests, 1),
        rates=rates,
        load=load.from_arguments(args) if rates else None,
        workers=None if args.workers is None else whole_number("--workers", args.workers, 1),
        ray=args.ray,
    )
    rows = sweep(config, progress=not args.json)
    print(json.dumps(rows, indent=1) if args.json else f"{_table(rows)}\n\ncells in {config.out}/{CELLS}")


if __name__ == "__main__":
    from sim.sweep import main  # as a worker imports it: what __main__ defines cannot be sent to one

    sys.exit(guard(main))
