"""The compiled selector against the plain numpy full sort, side by side in one run.

    python bench/selector.py

Prints the time of one selection by batch size and the ratio of the two, and what share of the published
step time (Qwen3-8B on H20, batch 64, smallest bucket: 55.2 ms) the selection is.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

import reference

from dcut.errors import Parser, guard
from dcut.selector import select

PUBLISHED_STEP_S = 0.0552
ROUNDS = 15


def once(function: Callable[..., object], calls: int, *arguments: np.ndarray) -> float:
    """Seconds of one call, averaged over `calls`."""
    start = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    return (time.perf_counter() - start) / calls


def main() -> None:
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"D = 16, four buckets; median and range of {ROUNDS} interleaved rounds, in us")
    print(f"{'batch':>5}  {'compiled':>21}  {'numpy full sort':>24}  {'ratio':>6}")
    for batch in (1, 8, 64, 256, 1024):
        confidences = np.random.default_rng(0).beta(2, 0.7, (batch, 15)).astype(np.float32)
        budgets = np.array([batch * 16 * q // 4 - batch for q in (1, 2, 3, 4)])
        seconds = np.array([55.2, 82.2, 107.9, 133.9]) / 1000
        times = {select: [], reference.select: []}
        select(confidences, budgets, seconds)
        for _ in range(ROUNDS):
            for function, kept in times.items():
                kept.append(1e6 * once(function, max(4, 4000 // batch), confidences, budgets, seconds))
        ours, theirs = (np.array(kept) for kept in times.values())
        row = [f"{np.median(t):8.1f} ({t.min():.1f}..{t.max():.1f})" for t in (ours, theirs)]
        print(f"{batch:>5}  {row[0]:>21}  {row[1]:>24}  {np.median(theirs / ours):5.1f}x")
        if batch == 64:
            share = np.median(ours) / 1e6 / PUBLISHED_STEP_S
            print(f"       {share:.4%} of the published step of 55.2 ms at batch 64")


if __name__ == "__main__":
    sys.exit(guard(main))
