"""Serve the same requests live under several policies and batch sizes: tokens a second side by side.

    python bench/live.py [--trace DIR] [--policy off,full,ratio:0.5,dcut] [--batch-size 1,4,8,16,32]

Before a batch size's turn its steps are profiled, for dcut to decide by; the policies then take turns,
sixteen steps at a time, so that whatever else happens on the machine disturbs all of them alike. Times are
CPU seconds of one thread unless --wall. Prefills are not counted. With --trace, a recording of the same
prompts, `python -m sim.validate --trace DIR --live OUT` afterwards compares each run with its replay.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from tqdm import tqdm

from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policies
from runtime.engine import Engine, Request
from runtime.pair import weights
from runtime.profiler import Drift, profile
from runtime.recorder import Log, describe, read_prompts, settle, write_live
from runtime.text import Codec
from runtime.verifier import open_pair
from sim.arrivals import whole_number
from sim.engine import STEADY
from sim.replay import parse_batch_sizes
from sim.results import run_name
from traces.store import open_trace


def figures(steps: pl.DataFrame, batch_size: int) -> dict[str, float]:
    """Of the steps in which the batch was at least 85 % full: throughput and where the time went."""
    steady = steps.filter(pl.col("batch_size") >= STEADY * batch_size)
    if steady.is_empty():
        raise InputError(f"no step had a batch of {batch_size}: give more --requests, or more --max-tokens")
    step_s, models_s = float(steady["step_s"].sum()), float((steady["draft_s"] + steady["verify_s"]).sum())
    num_emitted = float(steady["num_emitted"].sum())
    return {
        "tps": num_emitted / step_s,
        "tokens": num_emitted / float(steady["batch_size"].sum()),
        "step_ms": 1e3 * step_s / len(steady),
        "own": 1 - models_s / step_s,
    }


def warm_up(engine: Engine, asked: Sequence[Request]) -> None:
    """A few steps of a full batch, so that none that counts has anything to compile."""
    some = asked[: engine.max_batch_size]
    for request in some:
        engine.add(request)
    for _ in range(3):
        engine.step()
    for request in some:
        engine.cancel(request.request_id)
    engine.admit()


def main() -> None:
    """Run every policy at every batch size, and compare."""
    parser = Parser(description="Live throughput of policies side by side.")
    parser.add_argument("--target", default=str(weights.HERE / "weights/target"), metavar="DIR")
    parser.add_argument("--drafter", default=str(weights.HERE / "weights/dflash16"), metavar="DIR")
    parser.add_argument("--prompts", default=str(weights.PROMPTS), metavar="FILE")
    parser.add_argument("--policy", default="off,full,ratio:0.5,dcut")
    parser.add_argument("--batch-size", default="1,4,8,16,32")
    parser.add_argument("--requests", metavar="N", help="in a run (24, or four times the batch)")
    parser.add_argument("--max-tokens", default="256", metavar="N", help="without --trace (%(default)s)")
    parser.add_argument("--trace", metavar="DIR", help="a recording of these prompts")
    parser.add_argument("--out", default="out/live", metavar="DIR")
    parser.add_argument("--profile-s", type=float, default=10.0, help="a batch size (%(default)s)")
    parser.add_argument("--wall", action="store_true", help="wall-clock times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.perf_counter if args.wall else time.thread_time
    sizes, max_tokens = parse_batch_sizes(args.batch_size), whole_number("--max-tokens", args.max_tokens, 1)
    requests = None if args.requests is None else whole_number("--requests", args.requests, 1)
    prompts = read_prompts(args.prompts, Codec.load(Path(args.target)))
    trace = open_trace(args.trace) if args.trace else None
    context = round(float(np.mean([len(prompt.tokens) for prompt in prompts])) + max_tokens / 3)
    if trace:
        if "max_tokens" not in trace.meta:
            raise InputError(f"--trace {args.trace} is no recording by dcut.record, but generated")
        prompts, max_tokens = prompts[: len(trace.requests)], trace.meta["max_tokens"]
        context = round(float(trace.steps["context_tokens"].sum()) / float(trace.steps["batch_size"].sum()))
    texts = [prompt.tokens for prompt in prompts]
    longest = max(map(len, texts)) + max_tokens
    policies = parse_policies(args.policy)
    verifier, drafter = open_pair(args.target, args.drafter, len(policies) * max(sizes), longest)
    about = describe(verifier, drafter, Path(args.target), Path(args.drafter).name)
    about |= {"max_tokens": max_tokens, "clock": "wall" if args.wall else "cpu"}
    if not args.wall:
        print("times are CPU seconds of one thread")
    print("batch  policy       tok/s  tokens/step  step ms  engine's own  drift")
    for size in sizes:
        options: dict[str, Any] = {"budget_s": args.profile_s, "clock": clock, "progress": True}
        nearby = sorted({max(1, size // 2), size})  # the tail of a run drains below the batch size
        cost = profile(verifier, drafter, texts, context, nearby, **options).cost
        count = min(requests or max(24, 4 * size), len(prompts))
        asked = [(Request(i, p.tokens, max_tokens), p.domain) for i, p in enumerate(prompts[:count])]
        runs: dict[str, tuple[Engine, Log, Drift]] = {}
        for policy in policies.values():
            warm_up(Engine(verifier, drafter, policy, cost, size), [request for request, _ in asked])
        for turn, (name, policy) in enumerate(policies.items()):
            engine = Engine(verifier, drafter, policy, cost, size, clock=clock)
            engine.free_slots = list(range(turn * size, (turn + 1) * size))
            runs[name] = engine, Log(), Drift(cost, window=100_000)
            for request, domain in asked:
                runs[name][1].expect(request, domain)
                engine.add(request)
        settle()
        with tqdm(total=len(runs) * count, unit=" requests", leave=False, disable=None) as bar:
            while any(engine.busy for engine, _, _ in runs.values()):
                for engine, log, drift in runs.values():
                    drafter.catch_up()  # what the turn before left behind is no part of this one
                    for step in filter(None, (engine.step() for _ in range(16))):
                        log.add(step, engine.policy.labels[step.selection.bucket])
                        if len(step.request_id) >= STEADY * size:
                            drift.add(step)
                bar.update(sum(len(log.finished) for _, log, _ in runs.values()) - bar.n)
        found: dict[str, dict[str, float]] = {}
        for name, (_, log, drift) in runs.items():
            row = found[name] = figures(log.tables()["steps"], size)
            print(
                f"{size:>5}  {name:<10} {row['tps']:>7.0f} {row['tokens']:>12.2f} {row['step_ms']:>8.1f} "
                f"{row['own']:>13.1%} {drift.ratio:>6.2f}",
                flush=True,
            )
            meta = about | {"policy": name, "batch_size": size}
            write_live(Path(args.out) / run_name(name, size), log, meta, cost)
        if {"full", "ratio:0.5", "dcut"} <= found.keys():
            full, ratio, dcut = (found[name]["tps"] for name in ("full", "ratio:0.5", "dcut"))
            over, best = dcut / full, dcut / max(full, ratio)
            print(f"{size:>5}  dcut / full = {over:.2f}, / the better of full and ratio:0.5 = {best:.2f}")


if __name__ == "__main__":
    sys.exit(guard(main))
