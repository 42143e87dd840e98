"""Replaying dcut with the compiled selector against the same loop with a plain numpy full sort.

    python bench/replay.py

Both replay the built-in trace h20-qwen3-8b at batch 64, D = 16, four buckets, in turns; the same steps must
come out. Speeds are simulated steps a second of one core's CPU time, so that a busy machine counts little.
"""

import argparse
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

import reference

from dcut import policies
from dcut.errors import Parser, guard
from dcut.selector import select
from sim.arrivals import request_order
from sim.engine import Engine, Run
from traces.schema import Trace
from traces.store import open_trace

BATCH_SIZE = 64
ROUNDS = 9
REQUESTS = 1024


def replay(trace: Trace, order: np.ndarray, selector: object) -> tuple[Run, float]:
    """A run whose policy calls `selector`, and its steps a second of CPU time."""
    assert trace.cost is not None
    engine = Engine(trace, policies.DCut(), trace.cost, BATCH_SIZE, order)
    with mock.patch.object(policies, "select", selector):
        start = time.thread_time()
        run = engine.run()
        return run, len(run.steps) / (time.thread_time() - start)


def main() -> None:
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    trace = open_trace("h20-qwen3-8b")
    order = request_order(trace, REQUESTS, seed=0)
    selectors = {"compiled selector": select, "numpy full sort": reference.select}
    runs = {name: replay(trace, order, selector)[0] for name, selector in selectors.items()}
    ours, theirs = (run.steps[["num_verify_tokens", "num_emitted", "bucket"]] for run in runs.values())
    assert ours.tolist() == theirs.tolist(), "the two selectors disagree"
    speeds = {name: np.zeros(ROUNDS) for name in selectors}
    for at in range(ROUNDS):
        for name, selector in selectors.items():
            _, speeds[name][at] = replay(trace, order, selector)
    print(f"dcut at batch {BATCH_SIZE}, {len(ours)} steps; median and range of {ROUNDS} rounds in turns")
    for name, found in speeds.items():
        print(f"{name:<18} {np.median(found):>8,.0f} steps/s ({found.min():,.0f}..{found.max():,.0f})")
    ratios = speeds["compiled selector"] / speeds["numpy full sort"]
    print(f"{'ratio':<18} {np.median(ratios):>8.1f}x       ({ratios.min():.1f}..{ratios.max():.1f})")


if __name__ == "__main__":
    sys.exit(guard(main))
