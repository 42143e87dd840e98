"""The command that replays a grid of policies, loads and seeds on every core, or on a Ray cluster."""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
from scipy.special import stdtrit
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, guard
from dcut.policies import parse_policies, parse_policy
from sim import results
from sim.arrivals import request_order
from sim.engine import Engine
from sim.replay import default_requests, measured_batch_sizes, parse_batch_sizes, whole_number
from traces.schema import Trace
from traces.store import open_trace

CELLS = "cells"
"""The folder of the results directory that is the data set: policy=.../batch_size=.../seed-0.parquet."""

_SHOWN = ("throughput_tps", "speedup_vs_off", "keep_ratio", "mean_acceptance_length")


@dataclass(frozen=True, slots=True)
class Config:
    """One sweep, as the command line asks for it."""

    out: str
    trace: str = "h20-qwen3-8b"
    policy: str = "off,full,dcut"
    batch_sizes: Sequence[int] | None = None  # None: those of the cost table
    cost: str | None = None  # None: the trace's own table
    seeds: int = 5
    requests: int | None = None  # None: replay.default_requests
    workers: int | None = None  # None: every core, or the whole of a Ray cluster
    ray: str | None = None  # "local" starts Ray here; else the address of a cluster


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid, and all that a worker needs for it."""

    trace: str
    cost: CostTable
    requests: int | None
    policy: str
    batch_size: int
    seed: int

    @property
    def file(self) -> Path:
        """Its place in the data set."""
        folder = Path(f"policy={quote(self.policy, safe='')}", f"batch_size={self.batch_size}")
        return folder / f"seed-{self.seed}.parquet"


def sweep(config: Config, progress: bool = False) -> list[dict[str, Any]]:
    """Run what `config.out` does not hold yet of the grid; a row for each policy and batch size.

    Every seed is one world (the order of the requests and, in a generated trace, the anchors), which all
    policies meet: intervals of the speed-up over plain decoding are of pairs in the same world. Plain
    decoding is run at every batch size and seed, asked for or not. A row holds the mean of each figure over
    the seeds and, as <figure>_ci95, half its 95 % confidence interval (Student's t; None with one seed).
    The rows and every byte of `config.out` follow from the configuration, not from who computed them.
    Raises InputError on what cannot be used, before the work wherever that can be known, and where
    `config.out` holds anything but cells of this very trace, cost table and number of requests.
    """
    policies = list(parse_policies(config.policy))
    trace = open_trace(config.trace)
    cost = CostTable.load(config.cost) if config.cost else trace.cost
    if cost is None:
        raise InputError(f"trace {config.trace} has no cost table: give one with --cost FILE (.csv or .json)")
    batch_sizes = config.batch_sizes or measured_batch_sizes(cost)
    for batch_size in batch_sizes:
        cost.check_batch_size(batch_size)
        if config.requests is not None and config.requests < batch_size:
            raise InputError(
                f"--requests {config.requests} cannot fill batch size {batch_size}: ask for more"
            )
    cells = [
        Cell(config.trace, cost, config.requests, policy, batch_size, seed)
        for seed in range(config.seeds)
        for batch_size in batch_sizes
        for policy in dict.fromkeys([*policies, "off"])
    ]
    out = _prepared(Path(config.out), _about(trace, cost, config.requests))
    todo = [cell for cell in cells if not (out / CELLS / cell.file).exists()]
    with tqdm(
        total=len(cells),
        initial=len(cells) - len(todo),
        unit=" cells",
        disable=None if progress else True,  # None: hidden unless stderr is a terminal
    ) as bar:
        for cell, row in _computed(todo, config):
            _write(out / CELLS / cell.file, pl.DataFrame([row]))
            bar.update()
    rows = [pl.read_parquet(out / CELLS / cell.file).row(0, named=True) for cell in cells]
    summary = _summary(rows, policies)
    _write(out / "summary.parquet", pl.DataFrame(summary))
    return summary


def run(cell: Cell) -> dict[str, Any]:
    """Replay one cell: what tells it from others, and its figures."""
    trace = _opened(cell.trace, cell.seed)
    order = request_order(trace, cell.requests or default_requests(trace, cell.batch_size), cell.seed)
    figures = results.figures(
        Engine(trace, parse_policy(cell.policy), cell.cost, cell.batch_size, order).run()
    )
    shares = [{"bucket": label, "share": share} for label, share in figures.pop("bucket_share").items()]
    which = {"policy": cell.policy, "batch_size": cell.batch_size, "seed": cell.seed}
    return {**which, **figures, "bucket_share": shares}


@lru_cache(maxsize=2)
def _opened(name: str, seed: int) -> Trace:
    return open_trace(name, seed)


# ---- workers --------------------------------------------------------------------------------------------


def _computed(cells: Sequence[Cell], config: Config) -> Iterator[tuple[Cell, dict[str, Any]]]:
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
        raise InputError("--ray needs Ray: pip install 'dcut[sweep]'") from error
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


def _about(trace: Trace, cost: CostTable, requests: int | None) -> dict[str, Any]:
    """What every cell of a results directory shares."""
    arrays = trace.arrays
    drafts = hashlib.sha256(arrays.confidences.tobytes())
    for part in (arrays.num_accepted, arrays.prompt_tokens, arrays.output_tokens):
        drafts.update(part.tobytes())
    prices = hashlib.sha256(json.dumps(cost.to_dict()).encode())
    return {
        "kind": "sweep",
        "trace": drafts.hexdigest(),
        "cost": prices.hexdigest(),
        "requests": requests,
    }


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
    """Means and intervals over the seeds, a row for each batch size and policy."""
    plain = {
        (row["batch_size"], row["seed"]): row["throughput_tps"] for row in rows if row["policy"] == "off"
    }
    found = []
    for batch_size in dict.fromkeys(row["batch_size"] for row in rows):
        for policy in policies:
            runs = [row for row in rows if (row["policy"], row["batch_size"]) == (policy, batch_size)]
            line: dict[str, Any] = {"policy": policy, "batch_size": batch_size, "seeds": len(runs)}
            for name in _SHOWN:
                if name == "speedup_vs_off":
                    values = [row["throughput_tps"] / plain[batch_size, row["seed"]] for row in runs]
                else:
                    values = [row[name] for row in runs]
                line[name], line[f"{name}_ci95"] = _interval(values)
            found.append(line)
    return found


def _interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the 95 % confidence interval by Student's t; None for a single value."""
    num = len(values)
    if num < 2:
        return values[0], None
    return float(np.mean(values)), float(stdtrit(num - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(num))


# ---- the command ----------------------------------------------------------------------------------------


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as lines of text, a blank line between batch sizes."""
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [f"batch  {'policy':<{width}}     tok/s        ±   vs off       ±    keep  accept"]
    for at, row in enumerate(rows):
        if at and row["batch_size"] != rows[at - 1]["batch_size"]:
            lines.append("")
        tps, ratio = (row[f"{name}_ci95"] for name in ("throughput_tps", "speedup_vs_off"))
        lines.append(
            f"{row['batch_size']:>5}  {row['policy']:<{width}} {row['throughput_tps']:>9.1f} "
            f"{'' if tps is None else f'{tps:.1f}':>8} {row['speedup_vs_off']:>7.3f}x "
            f"{'' if ratio is None else f'{ratio:.3f}':>7} {row['keep_ratio']:>7.3f} "
            f"{row['mean_acceptance_length']:>7.2f}"
        )
    seeds = rows[0]["seeds"]
    return "\n".join(
        [*lines, "", f"±: half a 95 % confidence interval over {seeds} seeds; vs off: in pairs of one seed"]
    )


def main() -> None:
    """Parse the command line, sweep, print."""
    default = Config("")
    parser = argparse.ArgumentParser(
        prog="python -m sim.sweep",
        description="Replay a trace under a grid of policies, batch sizes and seeds. Cells that --out holds "
        "are kept, so a sweep can be stopped, resumed and extended.",
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
        help="by Ray: started here, or the cluster at ADDRESS (its machines need dcut and the trace, at the "
        "same path)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout and nothing else")
    args = parser.parse_args()
    config = Config(
        out=args.out,
        trace=args.trace,
        policy=args.policy,
        batch_sizes=None if args.batch_size is None else parse_batch_sizes(args.batch_size),
        cost=args.cost,
        seeds=whole_number("--seeds", args.seeds, 1),
        requests=None if args.requests is None else whole_number("--requests", args.requests, 1),
        workers=None if args.workers is None else whole_number("--workers", args.workers, 1),
        ray=args.ray,
    )
    rows = sweep(config, progress=not args.json)
    print(json.dumps(rows, indent=1) if args.json else f"{_table(rows)}\n\ncells in {config.out}/{CELLS}")


if __name__ == "__main__":
    from sim.sweep import main  # as a worker imports it: what __main__ defines cannot be sent to one

    sys.exit(guard(main))
