"""dcut-plus against every rival, side by side in one run: replayed throughput, and the time of deciding.

    python bench/policies.py [--trace h20-qwen3-8b] [--batch-size 4,8,16,32,64] [--by-domain]

For every batch size: plain decoding, the best fixed depth and the best ratio of all, the adaptive rivals and
the oracles, also as a share of the best rival; with --by-domain the same for the requests of each domain
alone. Then microseconds of one decision (draft_length, select and observe together) of dcut and dcut-plus.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dcut.policies import parse_policy
from sim.arrivals import request_order
from sim.engine import Engine
from sim.replay import default_requests
from sim.results import figures
from traces.schema import Trace
from traces.store import open_trace

FIXED = [f"fixed:{k}" for k in range(1, 16)]
RATIOS = [f"ratio:{r / 100:g}" for r in (15, 20, 25, 30, 40, 50, 60, 75, 90)]
SHOWN = ["off", "full", "best fixed", "best ratio", "dcut", "vllm-adaptive", "vllm-adaptive:estimator=true"]
SHOWN += ["dspark", "tetris:2", "smartspec", "dsd", "ema", "threshold:0.3", "dcut-plus"]
ORACLES = ["oracle-survival", "oracle"]
ROUNDS = 15


def throughputs(trace: Trace, batch_size: int, seeds: int) -> dict[str, float]:
    """Tokens per second of every policy, averaged over seeds; the best of a family under its name."""
    assert trace.cost is not None
    names = [*dict.fromkeys([*FIXED, *RATIOS, *(n for n in SHOWN if "best" not in n), "oracle"])]
    if trace.arrays.accept_probs is not None:
        names.append("oracle-survival")
    total = dict.fromkeys(names, 0.0)
    for seed in range(seeds):
        order = request_order(trace, default_requests(trace, batch_size), seed)
        for name in tqdm(names, desc=f"batch {batch_size}", leave=False, disable=None):
            run = Engine(trace, parse_policy(name), trace.cost, batch_size, order).run()
            total[name] += figures(run)["throughput_tps"] / seeds
    total["best fixed"] = max(total[name] for name in FIXED)
    total["best ratio"] = max(total[name] for name in RATIOS)
    return total


def of_domain(trace: Trace, domain: str) -> Trace:
    """The requests of one domain alone."""
    requests = trace.requests.filter(trace.requests["domain"] == domain)
    anchors = trace.anchors.filter(trace.anchors["request_id"].is_in(requests["request_id"].implode()))
    return replace(trace, requests=requests, anchors=anchors)


def show(title: str, found: dict[int, dict[str, float]]) -> list[float]:
    """Print one table; returns dcut-plus over the best rival at every batch size."""
    print(f"\n{title}: tok/s (share of the best rival)")
    print(f"{'batch size':30}" + "".join(f"{size:>16}" for size in found))
    best = {size: max(tps[n] for n in SHOWN if n != "dcut-plus") for size, tps in found.items()}
    for name in [*SHOWN, *ORACLES]:
        cells = [
            f"{tps[name]:8.0f} ({tps[name] / best[size]:.3f})" if name in tps else "-"
            for size, tps in found.items()
        ]
        print(f"{name:30}" + "".join(f"{cell:>16}" for cell in cells))
    for name in ("dcut", "oracle-survival"):
        if all(name in tps for tps in found.values()):
            cells = [tps["dcut-plus"] / tps[name] for tps in found.values()]
            print(f"{'dcut-plus / ' + name:30}" + "".join(f"{cell:>16.3f}" for cell in cells), flush=True)
    return [tps["dcut-plus"] / best[size] for size, tps in found.items()]


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
    start = time.perf_counter()
    for _ in range(calls):
        decide()
    return 1e6 * (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="h20-qwen3-8b", help="default %(default)s")
    parser.add_argument("--batch-size", default="4,8,16,32,64", help="default %(default)s")
    parser.add_argument("--by-domain", action="store_true", help="also each domain alone")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default %(default)s")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_size.split(",")]
    trace = open_trace(args.trace)
    parts = {"all": trace}
    if args.by_domain:
        parts |= {name: of_domain(trace, name) for name in trace.requests["domain"].unique().sort()}
    worst = min(
        min(show(f"{args.trace}, {name}", {b: throughputs(part, b, args.seeds) for b in sizes}))
        for name, part in parts.items()
    )
    print(f"\ndcut-plus: at least {worst:.3f} of the best rival, tuned for each batch size")
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
    main()
