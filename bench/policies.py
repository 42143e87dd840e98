"""dcut-plus against every rival, side by side in one run: replayed throughput, and the time of deciding.

    python bench/policies.py [--trace h20-qwen3-8b] [--batch-size 4,8,16,32,64] [--quick]

For every batch size: plain decoding, the best fixed depth and the best ratio of all, the adaptive rivals and
the oracles, as a share of the best rival. Then microseconds of one decision (draft_length, select and
observe together) of dcut and dcut-plus by batch size.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dcut.policies import parse_policy
from sim.replay import Config, replay
from traces.store import open_trace

FIXED = [f"fixed:{k}" for k in range(1, 16)]
RATIOS = [f"ratio:{r / 100:g}" for r in (15, 20, 25, 30, 40, 50, 60, 75, 90)]
SHOWN = ["off", "full", "best fixed", "best ratio", "dcut", "vllm-adaptive", "vllm-adaptive:estimator=true"]
SHOWN += ["dspark", "tetris:2", "smartspec", "dsd", "ema", "threshold:0.3", "dcut-plus"]
ORACLES = ["oracle-survival", "oracle"]
ROUNDS = 15


def throughputs(trace: str, batch_size: int, seeds: int) -> dict[str, float]:
    """Tokens per second of every policy, averaged over seeds; the best of a family under its name."""
    names = [*dict.fromkeys([*FIXED, *RATIOS, *(n for n in SHOWN if "best" not in n), "oracle"])]
    if open_trace(trace).arrays.accept_probs is not None:
        names.append("oracle-survival")
    total = dict.fromkeys(names, 0.0)
    for seed in range(seeds):
        rows = replay(Config(trace, ",".join(names), batch_sizes=[batch_size], seed=seed), progress=True)
        for row in rows:
            total[row["policy"]] += row["throughput_tps"] / seeds
    total["best fixed"] = max(total[name] for name in FIXED)
    total["best ratio"] = max(total[name] for name in RATIOS)
    return total


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
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default %(default)s")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_size.split(",")]
    found = {size: throughputs(args.trace, size, args.seeds) for size in sizes}
    print(f"{args.trace}: tok/s (share of the best rival)")
    print(f"{'batch size':30}" + "".join(f"{size:>16}" for size in sizes))
    best = {size: max(found[size][n] for n in SHOWN if n != "dcut-plus") for size in sizes}
    for name in [*SHOWN, *ORACLES]:
        cells = [
            f"{found[s][name]:8.0f} ({found[s][name] / best[s]:.3f})" if name in found[s] else "-"
            for s in sizes
        ]
        print(f"{name:30}" + "".join(f"{cell:>16}" for cell in cells))
    for name in ("dcut", "oracle-survival"):
        if all(name in found[s] for s in sizes):
            cells = [found[s]["dcut-plus"] / found[s][name] for s in sizes]
            print(f"{'dcut-plus / ' + name:30}" + "".join(f"{cell:>16.3f}" for cell in cells))
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
