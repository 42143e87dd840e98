# pyright: reportMissingImports=false
"""Serve the same requests in vLLM under several policies: tokens a second side by side.

    python bench/vllm_live.py [--trace DIR] [--policy none,full,ratio:0.5,dcut] [--batch-size 32]

"none" is vLLM without speculation. Steps are profiled first, and what the engine around them adds is taken
from a warm-up under full verification, for dcut to decide by. The policies then take turns, each round at
other requests, so that whatever else happens on the machine disturbs all of them alike. Times are CPU seconds
of one thread unless --wall. Only steps in which the batch is at least 85 % full count. With --trace, a
recording of the same prompts, `python -m sim.validate --trace DIR --live OUT` compares runs and replays.
"""

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
if find_spec("vllm") is None:
    print("error: there is no vLLM here: use .venv-vllm/bin/python (README, Inside vLLM)", file=sys.stderr)
    sys.exit(2)

from dcut.errors import InputError, Parser, guard
from dcut.policies import Full, Off, parse_policies
from dcut.selector import Selection
from runtime.engine import Emission, Request, Step, empty_step
from runtime.pair import weights
from runtime.recorder import Log, read_prompts, run_closed, settle, write_live
from runtime.text import Codec
from runtime.vllm.pruner import Pruner
from runtime.vllm.recorder import calibrated, describe
from runtime.vllm.session import Session
from sim.arrivals import whole_number
from sim.engine import STEADY
from sim.results import run_name
from traces.store import open_trace

PLAIN = "none"


class Plain(Session):
    """vLLM without speculation; its steps are told from what it brings, each from the end of the last."""

    def __init__(self, *arguments: Any, clock: Callable[[], float]) -> None:
        super().__init__(*arguments)
        self.worker.dcut = Pruner(Off(), 0, clock=clock)  # there is nothing to prune
        self.ended_s: float | None = None
        self.positions: dict[int, int] = {}  # of the newest token of each running request

    def step(self) -> Step | None:
        """Run the engine once; None where nothing waits or runs."""
        if not self.busy:
            self.ended_s = None
            return None
        began_s = self.clock() if self.ended_s is None else self.ended_s
        self.hand_on()
        emissions, decoded, context_tokens, prefill_tokens = [], [], 0, 0
        for output in self.engine.step():
            number, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            if number in self.positions:
                decoded.append((number, self.positions[number]))
                context_tokens += len(output.prompt_token_ids) + self.positions[number] + 1
            else:
                prefill_tokens += len(output.prompt_token_ids)
            self.positions[number] = self.positions.get(number, -1) + len(tokens)
            emissions.append(Emission(number, tokens, output.outputs[0].finish_reason))
            if output.finished:
                del self.names[number], self.positions[number]
        self.ended_s = self.clock()
        step_s = self.ended_s - began_s
        if not decoded:
            return empty_step(began_s, prefill_tokens, step_s, emissions)
        request_id, position = np.array(decoded).T
        batch_size = len(decoded)
        nothing = np.zeros(batch_size, np.int64)
        times = began_s, prefill_tokens, 0.0, context_tokens, 0.0, 0.0, step_s, step_s, None
        selection = Selection(nothing, batch_size, 0, float(batch_size))
        return Step(*times, request_id, position, selection, nothing, batch_size, emissions)


def figures(log: Log, batch_size: int) -> dict[str, float]:
    """Of the steps in which the batch was at least 85 % full."""
    tables = log.tables()
    steady = tables["steps"].filter(pl.col("batch_size") >= STEADY * batch_size)
    made = tables["decisions"].join(steady.select("step"), on="step", how="semi")
    step_s, decided = float(steady["step_s"].sum()), len(made)
    return {
        "tps": float(steady["num_emitted"].sum()) / step_s,
        "tokens": float(steady["num_emitted"].sum()) / decided,
        "step_ms": 1e3 * step_s / len(steady),
        "verified": float(made["keep_depth"].sum()) / decided,
        "accepted": float(made["num_accepted"].sum()) / decided,
        "selection": float(steady["select_s"].sum()) / step_s,
    }


def main() -> None:
    """Run every policy on every request, and compare."""
    parser = Parser(description="Throughput of policies in vLLM side by side.")
    parser.add_argument("--target", default=str(weights.path("target")), metavar="DIR")
    parser.add_argument("--drafter", default=str(weights.path("dflash16")), metavar="DIR")
    parser.add_argument("--prompts", default=str(weights.PROMPTS), metavar="FILE")
    parser.add_argument("--policy", default=f"{PLAIN},full,ratio:0.5,dcut")
    parser.add_argument("--batch-size", default="32", metavar="N", help="(%(default)s)")
    parser.add_argument("--rounds", default="3", metavar="N", help="turns of each policy (%(default)s)")
    parser.add_argument("--requests", metavar="N", help="in all (every prompt once)")
    parser.add_argument("--max-tokens", default="128", metavar="N", help="without --trace (%(default)s)")
    parser.add_argument("--trace", metavar="DIR", help="a recording of these prompts by --engine vllm")
    parser.add_argument("--out", default="out/vllm-live", metavar="DIR")
    parser.add_argument("--dtype", help="float32 on a CPU, else bfloat16")
    parser.add_argument("--profile-s", type=float, default=30.0, help="(%(default)s)")
    parser.add_argument("--wall", action="store_true", help="wall-clock times")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.thread_time
    size = whole_number("--batch-size", args.batch_size, 1)
    rounds = whole_number("--rounds", args.rounds, 1)
    max_tokens = whole_number("--max-tokens", args.max_tokens, 1)
    requests = None if args.requests is None else whole_number("--requests", args.requests, 1)
    names = [name for name in args.policy.split(",") if name.strip() != PLAIN]
    policies = parse_policies(",".join(names))
    prompts = read_prompts(args.prompts, Codec.load(Path(args.target)), requests)
    trace = open_trace(args.trace) if args.trace else None
    if trace:
        prompts, max_tokens = prompts[: len(trace.requests)], trace.meta["max_tokens"]
    if len(prompts) < 2 * size * rounds:
        raise InputError(
            f"{len(prompts)} requests never fill batch {size} for long in {rounds} rounds: "
            f"give at least {2 * size * rounds}, or fewer --rounds"
        )
    asked = [(Request(i, p.tokens, max_tokens), p.domain) for i, p in enumerate(prompts)]
    longest = max(len(p.tokens) for p in prompts) + max_tokens
    session = Session(args.target, args.drafter, size, longest, args.dtype)
    session.clock = clock
    measured = session.profile(args.profile_s)
    print(measured, file=sys.stderr)
    warm_up = Log()
    session.policy = Full()
    run_closed(session, asked[: 2 * size], warm_up)
    cost = calibrated(measured.cost, [step for step, _ in warm_up.steps])
    session.cost = cost
    engines: dict[str, Session] = {}
    if len(names) < len(args.policy.split(",")):
        engines[PLAIN] = Plain(args.target, None, size, longest, args.dtype, clock=clock)
        run_closed(engines[PLAIN], asked[: 2 * size], Log())
    engines |= dict.fromkeys(policies, session)
    choosers = {}
    for name, policy in policies.items():
        session.policy = policy
        choosers[name] = session.pruner.chooser
    logs = {name: Log() for name in engines}
    settle()
    with tqdm(total=rounds * len(engines), unit=" turns", leave=False, disable=None) as bar:
        for number in range(rounds):
            for name in np.roll(list(engines), -number).tolist():
                if name in choosers:
                    session.pruner.chooser = choosers[name]
                run_closed(engines[name], asked[number::rounds], logs[name])
                bar.update()
    timed = "" if args.wall else "; times are CPU seconds of one thread"
    print(f"batch {size}, {len(asked)} requests, {session.draft_length} drafts{timed}")
    print("policy        tok/s  tokens/step  step ms  verified  accepted  selection  outputs as the first")
    found = {name: figures(log, size) for name, log in logs.items()}
    said = {name: {r.request.request_id: r.output for r in log.finished} for name, log in logs.items()}
    first = next(iter(said.values()))
    for name, row in found.items():
        same = sum(output == first[i] for i, output in said[name].items())
        print(
            f"{name:<10} {row['tps']:>8.0f} {row['tokens']:>12.2f} {row['step_ms']:>8.1f} "
            f"{row['verified']:>9.2f} {row['accepted']:>9.2f} {row['selection']:>10.2%}  "
            f"{same} of {len(first)}"
        )
    for name in policies:
        for other in (PLAIN, "full"):
            if other in found and other != name:
                print(f"{name} / {other} = {found[name]['tps'] / found[other]['tps']:.2f}")
        if "full" in found and name != "full":
            verified, accepted = (found[name][k] / found["full"][k] for k in ("verified", "accepted"))
            print(
                f"{name} verifies {verified:.0%} of the drafts of full, keeps {accepted:.1%} of the accepted"
            )
    about = describe(session, Path(args.target), Path(args.drafter).name)
    about |= {"max_tokens": max_tokens, "clock": "wall" if args.wall else "cpu", "batch_size": size}
    for name in policies:
        write_live(Path(args.out) / run_name(name, size), logs[name], about | {"policy": name}, cost)


if __name__ == "__main__":
    sys.exit(guard(main))
