"""The cells of a sweep by two workers against the same by one: in processes and, where installed, by Ray.

    python bench/sweep.py

All must find the same figures. Timed are the cells once every worker has done its first: starting, importing
and compiling count for nothing in a long sweep. Two workers cannot be twice as fast on a machine whose cores
others use, so a loop that only counts is timed as well, by one process and by two: what the machine gave.
"""

import argparse
import multiprocessing
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dcut.errors import Parser, guard
from sim.sweep import Config, Steady, compute
from traces.store import open_trace

CELLS, REQUESTS, BATCH_SIZE = 12, 12_288, 64
ROUNDS = 3


def cells_per_s(workers: int, ray: str | None) -> tuple[float, list[object]]:
    """Cells a second once all workers run, and the rows of all cells in order."""
    cost = open_trace("h20-qwen3-8b").cost
    assert cost is not None
    cells = [Steady("h20-qwen3-8b", cost, REQUESTS, "dcut", BATCH_SIZE, seed) for seed in range(CELLS)]
    times, rows = [], {}
    for cell, row in compute(cells, Config("", workers=workers, ray=ray)):
        times.append(time.perf_counter())
        rows[cell] = row
    return (CELLS - workers) / (times[-1] - times[workers - 1]), [rows[cell] for cell in cells]


def count(seconds: float) -> int:
    """How far a process counts in that time."""
    end, counted = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        counted += 1
    return counted


def given(workers: int) -> float:
    """Counts a second of all processes together."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(count, [0.1] * workers, chunksize=1)
        return sum(pool.map(count, [3.0] * workers, chunksize=1)) / 3


def main() -> None:
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    kinds = {"processes": None, **({"Ray": "local"} if find_spec("ray") else {})}
    found = []
    print(f"{CELLS} cells of {REQUESTS:,} requests: dcut at batch {BATCH_SIZE}; {ROUNDS} rounds in turns")
    for at in range(ROUNDS):
        for kind, ray in kinds.items():
            (one, rows), (two, same) = cells_per_s(1, ray), cells_per_s(2, ray)
            found += [rows, same]
            machine = given(2) / given(1)
            print(
                f"round {at + 1}, {kind:<9}  1 worker {one:5.2f} cells/s, 2 workers {two:5.2f}: "
                f"{two / one:.2f} x   (the machine gave two processes {machine:.2f} x)",
                flush=True,
            )
    assert all(rows == found[0] for rows in found), "the figures depend on who computed them"
    print("all figures equal")


if __name__ == "__main__":
    sys.exit(guard(main))
