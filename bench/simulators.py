"""Our simulator against vidur and sched-sim from PyPI, side by side, on the same 2,000 requests.

    python bench/simulators.py

Every request has 512 prompt and 200 output tokens, 64 run at once, one token a step. The rivals are
installed once, into out/rivals (about 1.3 GB), and each run of them is a process of its own. What is timed is
the simulation alone, in CPU time, so that a busy machine counts little: no imports, and no compiling.

vidur's wheel holds no measured times, and fetches them from a hub at run time; here its own predictor looks
up made-up ones. It is timed twice: bare, with all its outputs off, and as it comes, with the metrics and the
Chrome trace that it writes by default (but not the plots, which took minutes). Ours keeps every request's
times in both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of this folder

from dcut.errors import InputError, Parser, guard

RIVALS = ROOT / "out" / "rivals"
PACKAGES = ("vidur==0.0.26", "sched-sim==0.2.1")

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 2000, 512, 200, 64
ROUNDS = 5
AZURE = ROOT.parent / "shared" / "workloads" / "azure2023_conv.csv"


def ours(path: Path | None = None) -> tuple[int, float]:
    """Steps and CPU seconds of our engine, on the requests above or on the workload at `path`."""
    import numpy as np

    from dcut.policies import Off
    from sim.arrivals import Traffic
    from sim.scheduler import Limits
    from sim.serving import serve
    from traces.store import open_trace
    from traces.workloads import Workload, read_workload

    trace = open_trace("h20-qwen3-8b")
    assert trace.cost is not None
    found = []
    for num in (AT_ONCE, NUM_REQUESTS):  # the first compiles
        if path is None:
            lengths = np.full(num, PROMPT_TOKENS), np.full(num, OUTPUT_TOKENS)
            load = Workload("made up", 1, np.zeros(num), *lengths)
        else:
            load = read_workload(path)
        steps = []
        start = time.process_time()
        serve(
            Traffic(trace, len(load) if num == NUM_REQUESTS else num, workload=load),
            Off(),
            trace.cost,
            Limits(max_num_seqs=AT_ONCE),
            on_steps=lambda replica, some, loads: steps.append(len(some)),  # noqa: B023
        )
        found = [sum(steps), time.process_time() - start]
    return found[0], found[1]


def vidur(bare: bool) -> tuple[int, float]:
    """Batches and CPU seconds of vidur; runs in its own environment."""
    os.environ["WANDB_MODE"] = "disabled"
    from vidur import config  # pyright: ignore[reportMissingImports]
    from vidur.execution_time_predictor import (  # pyright: ignore[reportMissingImports]
        random_forrest_execution_time_predictor as forest,
    )
    from vidur.simulator import Simulator  # pyright: ignore[reportMissingImports]

    made_up = defaultdict(lambda: defaultdict(lambda: 0.01))  # ms, by operation and size
    forest.RandomForrestExecutionTimePredictor._load_predictions_from_hf = lambda self: made_up
    lengths = config.FixedRequestLengthGeneratorConfig(
        prefill_tokens=PROMPT_TOKENS, decode_tokens=OUTPUT_TOKENS
    )
    simulator = Simulator(
        config.SimulationConfig(
            cluster_config=config.ClusterConfig(
                replica_config=config.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
                cache_config=config.CacheConfig(num_blocks=10_000),
                replica_scheduler_config=config.VllmSchedulerConfig(
                    batch_size_cap=AT_ONCE, max_tokens_in_batch=4096
                ),
            ),
            request_generator_config=config.SyntheticRequestGeneratorConfig(
                num_requests=NUM_REQUESTS, length_generator_config=lengths
            ),
            metrics_config=config.MetricsConfig(
                write_metrics=not bare, enable_chrome_trace=not bare, store_plots=False
            ),
        )
    )
    start = time.process_time()
    simulator.run()
    seconds = time.process_time() - start
    replica = next(iter(simulator.scheduler._replica_schedulers.values()))
    assert replica.is_empty()
    return 0, seconds


def sched_sim() -> tuple[int, float]:
    """Steps and CPU seconds of sched-sim; runs in its own environment."""
    from sched_sim.core.event_engine import Simulator  # pyright: ignore[reportMissingImports]
    from sched_sim.core.request import Request  # pyright: ignore[reportMissingImports]
    from sched_sim.hardware.profile import HardwareProfile  # pyright: ignore[reportMissingImports]
    from sched_sim.schedulers.factory import create_scheduler  # pyright: ignore[reportMissingImports]

    hardware = HardwareProfile(vram_gb=80.0)  # a small model: memory for all 64
    simulator = Simulator(hardware, create_scheduler("fcfs", hardware, max_batch_size=AT_ONCE))
    simulator.submit_workload(
        [
            Request(
                request_id=str(at), arrived_at=0.0, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS
            )
            for at in range(NUM_REQUESTS)
        ]
    )
    start = time.process_time()
    simulator.run()
    seconds = time.process_time() - start
    assert all(request.is_finished for request in simulator.all_requests)
    assert max(simulator.iteration_batch_sizes) == AT_ONCE
    return len(simulator.iteration_records), seconds


RUNS = {
    "ours": ours,
    "vidur, bare": lambda: vidur(bare=True),
    "vidur, as it comes": lambda: vidur(bare=False),
    "sched-sim": sched_sim,
}


def timed(name: str) -> tuple[int, float]:
    """Steps and seconds of a run in a process of its own."""
    python = sys.executable if name == "ours" else str(RIVALS / "bin" / "python")
    with tempfile.TemporaryDirectory() as place:  # vidur writes where it stands
        done = subprocess.run(
            [python, str(Path(__file__).resolve()), "--run", name],
            capture_output=True,
            text=True,
            check=False,
            cwd=place,
        )
    if done.returncode:
        said = done.stderr.strip().split("\n")
        raise InputError(f"{name} failed: {said[-1]}")
    steps, seconds = json.loads(done.stdout.splitlines()[-1])
    return steps, seconds


def install() -> None:
    """Put the rivals into an environment of their own, once."""
    if (RIVALS / "ready").exists():
        return
    print(f"installing {', '.join(PACKAGES)} into {RIVALS.relative_to(ROOT)}", file=sys.stderr)
    venv.create(RIVALS, with_pip=True, clear=True)
    pip = [str(RIVALS / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *PACKAGES]
    if subprocess.run(pip, check=False).returncode:
        raise InputError(f"pip cannot install {' and '.join(PACKAGES)}: it said why above")
    (RIVALS / "ready").touch()


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", default=str(ROUNDS), metavar="N", help="in turns (%(default)s)")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        if args.run != "ours":
            del sys.path[0]  # a rival finds no folder of ours
        print(json.dumps(RUNS[args.run]()))
        return
    from sim.arrivals import whole_number

    rounds = whole_number("--rounds", args.rounds, 1)
    install()
    speeds: dict[str, list[float]] = {name: [] for name in RUNS}
    for _ in range(rounds):
        for name, found in speeds.items():
            found.append(NUM_REQUESTS / timed(name)[1])
    print(
        f"{NUM_REQUESTS:,} requests of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, {AT_ONCE} at once; "
        f"requests a CPU second: median and range of {rounds} rounds in turns"
    )
    for name, found in speeds.items():
        found.sort()
        middle, best = found[len(found) // 2], speeds["ours"][len(found) // 2]
        ratio = "" if name == "ours" else f"   ours is {best / middle:.1f} x as fast"
        print(f"{name:<20} {middle:>9,.0f} ({found[0]:,.0f}..{found[-1]:,.0f}){ratio}")
    if AZURE.exists():
        steps, seconds = ours(AZURE)
        print(f"{AZURE.name}: {steps:,} steps, {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(guard(main))
