"""dcut-plus against every rival, side by side in one run: replayed throughput, and the time of deciding.

    python bench/policies.py [--trace h20-qwen3-8b] [--batch-size 4,8,16,32,64]
    python bench/policies.py --trace tiny-pair --batch-size 1,2,4,8,16,32,64 --by-domain

For every batch size: plain decoding, the best fixed depth, ratio, threshold and average of all, the adaptive
rivals and the oracles, also as a share of the best rival. With --by-domain instead one table: dcut-plus as a
share of the best rival, and which that is, over all requests and over those of each domain alone. Rivals are
tuned for each batch size. Then microseconds of one decision (draft_length, select and observe together) of
dcut and dcut-plus, in CPU time. Uses every core that it may.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policy
from sim.arrivals import request_order, whole_number
from sim.engine import Engine
from sim.replay import default_requests, parse_batch_sizes
from sim.results import figures
from traces.schema import Trace
from traces.store import open_trace

TUNED = {  # families of which the best at each batch size counts
    "best fixed": [f"fixed:{k}" for k in (1, 2, 3, 4, 5, 7, 10, 15)],
    "best ratio": [f"ratio:{r / 100:g}" for r in (15, 20, 25, 30, 40, 50, 75)],
    "best threshold": [f"threshold:{t}" for t in (0.1, 0.2, 0.3, 0.5, 0.7)],
    "best ema": ["ema", "ema:1/3/7", "ema:0/1/3/7/15"],
}
SHOWN = ["off", "full", *TUNED, "dcut", "vllm-adaptive", "vllm-adaptive:estimator=true", "dspark", "tetris:2"]
SHOWN += ["smartspec", "dsd", "dcut-plus"]
ORACLES = ["oracle-survival", "oracle"]
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size of one part of a trace."""

    trace: str
    domain: str | None  # None: all requests
    batch_size: int
    seeds: int

    def throughputs(self) -> dict[str, float]:
        """Tokens per second of every policy, averaged over seeds; the best of a family under its name."""
        trace = open_trace(self.trace)
        if self.domain is not None:
            trace = of_domain(trace, self.domain)
        assert trace.cost is not None
        names = [name for family in TUNED.values() for name in family]
        names += [name for name in [*SHOWN, "oracle"] if name not in TUNED]
        if trace.arrays.accept_probs is not None:
            names.append("oracle-survival")
        total = dict.fromkeys(names, 0.0)
        for seed in range(self.seeds):
            order = request_order(trace, default_requests(trace, self.batch_size), seed)
            for name in names:
                run = Engine(trace, parse_policy(name), trace.cost, self.batch_size, order).run()
                total[name] += figures(run)["throughput_tps"] / self.seeds
        return total | {best: max(total[name] for name in family) for best, family in TUNED.items()}


def every(cells: list[Cell]) -> dict[Cell, dict[str, float]]:
    """The throughputs of all cells, on all cores that this process may use."""
    cells = sorted(cells, key=lambda cell: cell.batch_size)  # the longest first
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        found = tqdm(pool.map(Cell.throughputs, cells), total=len(cells), leave=False, disable=None)
        return dict(zip(cells, found, strict=True))


def best_rival(tps: dict[str, float]) -> str:
    return max((name for name in SHOWN if name != "dcut-plus"), key=tps.__getitem__)


def of_domain(trace: Trace, domain: str) -> Trace:
    """The requests of one domain alone."""
    requests = trace.requests.filter(trace.requests["domain"] == domain)
    anchors = trace.anchors.filter(trace.anchors["request_id"].is_in(requests["request_id"].implode()))
    return replace(trace, requests=requests, anchors=anchors)


def show(title: str, found: dict[int, dict[str, float]]) -> None:
    """Print every policy at every batch size."""
    print(f"{title}: tok/s (share of the best rival)")
    print(f"{'batch size':30}" + "".join(f"{size:>16}" for size in found))
    for name in [*SHOWN, *ORACLES]:
        cells = [
            f"{tps[name]:8.0f} ({tps[name] / tps[best_rival(tps)]:.3f})" if name in tps else "-"
            for tps in found.values()
        ]
        print(f"{name:30}" + "".join(f"{cell:>16}" for cell in cells))
    for name in ("dcut", "oracle-survival"):
        if all(name in tps for tps in found.values()):
            cells = [tps["dcut-plus"] / tps[name] for tps in found.values()]
            print(f"{'dcut-plus / ' + name:30}" + "".join(f"{cell:>16.3f}" for cell in cells))


def show_shares(found: dict[Cell, dict[str, float]], domains: list[str | None], sizes: list[int]) -> None:
    """Print dcut-plus over the best rival for every part and batch size, and what it is over dcut."""
    print("dcut-plus over the best rival, and which that is")
    print(f"{'batch size':12}" + "".join(f"{size:>24}" for size in sizes))
    for domain in domains:
        cells = []
        for size in sizes:
            tps = next(t for c, t in found.items() if (c.domain, c.batch_size) == (domain, size))
            cells.append(f"{tps['dcut-plus'] / tps[best_rival(tps)]:.3f} {_brief(best_rival(tps))}")
        print(f"{domain or 'all':12}" + "".join(f"{cell:>24}" for cell in cells))
    over = [tps["dcut-plus"] / tps["dcut"] for tps in found.values()]
    print(f"over dcut: {np.mean(over):.3f} times on average, {min(over):.3f} at least")


def _brief(name: str) -> str:
    return name.replace("vllm-adaptive:estimator=true", "vllm-adaptive:est.")


def decision_us(name: str, batch_size: int, calls: int) -> float:
    """One decision, in microseconds, averaged over `calls`, on the H20 costs or a line beyond them."""
    cost = open_trace("h20-qwen3-8b").cost
    rng = np.random.default_rng(0)
    confidences = rng.beta(2, 0.7, (batch_size, 15)).astype(np.float32)
    accepted = rng.geometric(0.4, batch_size) - 1
    policy = parse_policy(name).start()

    def decide() -> None:
        policy.draft_length(batch_size, 15, cost)
        selection = policy.select(confidences, cost, 300.0 * batch_size)
        if policy.learns:
            policy.observe(selection.keep_depth, np.minimum(accepted, selection.keep_depth), 0.02)

    for _ in range(200):
        decide()
    start = time.process_time()
    for _ in range(calls):
        decide()
    return 1e6 * (time.process_time() - start) / calls


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="h20-qwen3-8b", help="default %(default)s")
    parser.add_argument("--batch-size", default="4,8,16,32,64", help="default %(default)s")
    parser.add_argument("--by-domain", action="store_true", help="each domain alone, and all")
    parser.add_argument("--seeds", default="1", metavar="N", help="default %(default)s")
    args = parser.parse_args()
    sizes, seeds = parse_batch_sizes(args.batch_size), whole_number("--seeds", args.seeds, 1)
    trace = open_trace(args.trace)
    if trace.cost is None:
        raise InputError(f"trace {args.trace} has no cost table: replays need one")
    domains: list[str | None] = [None]
    if args.by_domain:
        domains += trace.requests["domain"].drop_nulls().unique().sort().to_list()
    found = every([Cell(args.trace, domain, size, seeds) for domain in domains for size in sizes])
    if args.by_domain:
        show_shares(found, domains, sizes)
    else:
        show(args.trace, {cell.batch_size: tps for cell, tps in found.items()})
    worst = min(found, key=lambda cell: found[cell]["dcut-plus"] / found[cell][best_rival(found[cell])])
    rival = best_rival(found[worst])
    share = found[worst]["dcut-plus"] / found[worst][rival]
    print(f"worst: {share:.3f} of {rival}, {worst.domain or 'all'} at batch {worst.batch_size}")
    print(f"\none decision, us: median and range of {ROUNDS} interleaved rounds")
    for batch_size in (8, 64, 256, 1024):
        times: dict[str, list[float]] = {"dcut": [], "dcut-plus": []}
        for _ in range(ROUNDS):
            for name, kept in times.items():
                kept.append(decision_us(name, batch_size, max(20, 20000 // batch_size)))
        cells = [f"{n} {np.median(t):7.1f} ({min(t):.1f}..{max(t):.1f})" for n, t in times.items()]
        ratio = np.median(np.array(times["dcut-plus"]) / np.array(times["dcut"]))
        print(f"batch {batch_size:>5}: {cells[0]:32} {cells[1]:36} {ratio:.2f}x")


if __name__ == "__main__":
    sys.exit(guard(main))
