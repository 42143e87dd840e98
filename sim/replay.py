"""The command that replays a trace under budget policies, and says what each would bring."""

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import POLICIES, Off, parse_policies
from sim import arrivals, load, results
from sim.arrivals import request_order, whole_number
from sim.engine import Engine
from sim.regret import Regrets, regret_table
from traces.schema import Trace

MOST_REQUESTS = 10_000_000
"""Requests of a run, which are all in memory, in about 1 GB."""


@dataclass(frozen=True, slots=True)
class Config:
    """One replay, as the command line asks for it."""

    trace: str = "h20-qwen3-8b"
    policy: str = "off,full,dcut"
    batch_sizes: Sequence[int] | None = None  # None: those of the cost table
    cost: str | None = None  # None: the trace's own table
    seed: int = 0
    requests: int | None = None  # None: default_requests
    decisions: bool = False
    decision_lag: int = 0
    out: str | None = None
    regret: bool = False


def replay(config: Config, progress: bool = False) -> list[dict[str, Any]]:
    """Replay every policy at every batch size: a row of figures a run, as `results.figures` names them.

    speedup_vs_off compares with plain decoding of the same requests at the same batch size.
    sim_steps_per_s is this machine's; everything else, and every byte of `config.out`, follows from the
    seed. Raises InputError on what cannot be used, before the work wherever that can be known.
    """
    policies = parse_policies(config.policy)
    trace, cost = load.open_priced(config.trace, config.cost, config.seed)
    for policy in policies.values():
        policy.check_drafts(trace.draft_length)
    batch_sizes = checked_batch_sizes(cost, config.batch_sizes, config.requests)
    for batch_size in batch_sizes:
        if (num_requests := config.requests or default_requests(trace, batch_size)) > MOST_REQUESTS:
            raise InputError(
                f"{num_requests} requests at batch size {batch_size}: a replay keeps them all in memory, "
                f"at most {MOST_REQUESTS}"
            )
    rows, tables = [], []
    runs = [(policy, batch_size) for batch_size in batch_sizes for policy in policies]
    with nullcontext() if config.out is None else results.new_directory(config.out, runs) as directory:
        for batch_size in batch_sizes:
            num_requests = config.requests or default_requests(trace, batch_size)
            order = request_order(trace, num_requests, config.seed)
            runs = {}
            for name, policy in (policies | {"off": Off()}).items():
                engine = Engine(trace, policy, cost, batch_size, order, config.decisions, config.decision_lag)
                with tqdm(
                    total=num_requests,
                    desc=f"{name} at batch {batch_size}",
                    unit=" requests",
                    leave=False,
                    disable=None if progress else True,  # None: hidden unless stderr is a terminal
                ) as bar:
                    runs[name] = engine.run(bar.update)
            off_tps = results.figures(runs["off"])["throughput_tps"]
            regrets = Regrets(trace, cost, batch_size, order, config.decision_lag) if config.regret else None
            for name in policies:
                figures = results.figures(runs[name])
                speed = {
                    "speedup_vs_off": figures["throughput_tps"] / off_tps,
                    "sim_steps_per_s": runs[name].steps_per_s,
                }
                rows.append({"policy": name, "batch_size": batch_size, **figures, **speed})
                if regrets is not None:
                    rows[-1]["regret"] = asdict(regrets.split(policies[name], runs[name]))
                if directory is not None:
                    tables.append(results.tables(runs[name], trace))
        if directory is not None:
            about = {"engine": "sim", "trace": config.trace, "cost": config.cost, "seed": config.seed}
            results.write(directory, rows, tables, cost, {**trace.meta, **about})
    return rows


def default_requests(trace: Trace, batch_size: int) -> int:
    """Requests enough for a throughput within about 1 % from seed to seed, in about a second."""
    return max(16 * batch_size, round(100_000 / trace.arrays.output_tokens.mean()))


def checked_batch_sizes(cost: CostTable, asked: Sequence[int] | None, requests: int | None) -> Sequence[int]:
    """The batch sizes asked for, else the measured ones; InputError where one has no price or too few."""
    batch_sizes = asked or measured_batch_sizes(cost)
    for batch_size in batch_sizes:
        cost.check_batch_size(batch_size)
        if requests is not None and requests < batch_size:
            raise InputError(
                f"--requests {requests} cannot fill batch size {batch_size}: ask for {batch_size} or more"
            )
    return batch_sizes


def measured_batch_sizes(cost: CostTable) -> list[int]:
    """The batch sizes that a cost table holds; InputError where it names none."""
    if cost.batch_sizes is not None:
        return [int(batch_size) for batch_size in cost.batch_sizes]
    if len(cost.plain):
        return [int(batch_size) for batch_size in cost.plain[:, 0]]
    raise InputError("the cost table names no batch sizes: give some with --batch-size, such as 4,8,16")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """The runs as lines of text, a blank line between batch sizes."""
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [
        f"batch  {'policy':<{width}}     tok/s  vs off   keep  accept  wasted    steps  sim steps/s"
        "  budgets chosen"
    ]
    for at, row in enumerate(rows):
        shares = ", ".join(
            f"{label} {f'{share:.0%}' if share >= 0.005 else '<1%'}"
            for label, share in row["bucket_share"].items()
            if share
        )
        if at and row["batch_size"] != rows[at - 1]["batch_size"]:
            lines.append("")
        lines.append(
            f"{row['batch_size']:>5}  {row['policy']:<{width}} {row['throughput_tps']:>9.1f} "
            f"{row['speedup_vs_off']:>6.2f}x {row['keep_ratio']:>6.3f} {row['mean_acceptance_length']:>7.2f} "
            f"{row['wasted_verify_ratio']:>7.1%} {row['num_steps']:>8} {row['sim_steps_per_s']:>12,.0f}"
            f"  {shares}"
        )
    lines += ["", "keep: share of all positions that is verified; accept: tokens a request and step;"]
    return "\n".join([*lines, "wasted: share of the verified positions that is a rejected draft"])


def describe_policies() -> str:
    """Every policy: its name, the first sentence of its docstring, and its options with their defaults."""
    lines = ["policies (name, name:value or name:option=value,option=value):"]
    for name, kind in POLICIES.items():
        sentence = " ".join((kind.__doc__ or "").replace("`", "").split()).partition(". ")[0].rstrip(".")
        options = ", ".join(_option(field) for field in dataclasses.fields(cast(Any, kind)))
        text = f"{sentence}." + (f" Options: {options}" if options else "")
        first, rest = f"  {name:<15} ", " " * 18
        lines += textwrap.wrap(
            text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    return "\n".join(lines)


def _option(field: dataclasses.Field[Any]) -> str:
    """ "ratio (required)", "buckets=0.25/0.5/1", "bonus=false"."""
    match field.default:
        case dataclasses.MISSING:
            return f"{field.name} (required)"
        case ():  # found from the trace
            return field.name
        case tuple() as parts:
            return f"{field.name}={'/'.join(f'{part:g}' for part in parts)}"
        case bool() as flag:
            return f"{field.name}={str(flag).lower()}"
        case value:
            return f"{field.name}={value}"


def parse_batch_sizes(text: str) -> list[int]:
    """Batch sizes from a list such as "4,8,16"."""
    sizes = [whole_number("--batch-size", piece.strip(), 1) for piece in text.split(",")]
    if twice := [size for at, size in enumerate(sizes) if size in sizes[:at]]:
        raise InputError(f"--batch-size {text!r} names {twice[0]} twice: give each once")
    return sizes


def main() -> None:
    """Parse the command line, replay, print."""
    default = Config()
    parser = Parser(
        prog="python -m sim.replay",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=describe_policies(),
        description="Replay a trace under budget policies in simulated time: at steady batch sizes or, with "
        "--arrivals, under traffic.",
    )
    parser.add_argument("--trace", default=default.trace, help="built-in name or directory (%(default)s)")
    parser.add_argument(
        "--policy",
        default=default.policy,
        help="comma-separated: off, full, fixed:3, ratio:0.75, dcut, dcut:form=paper (%(default)s)",
    )
    parser.add_argument(
        "--batch-size", metavar="N,N", help="comma-separated requests in flight (those of the cost table)"
    )
    parser.add_argument("--cost", metavar="FILE", help="cost table, .csv or .json (the trace's own)")
    parser.add_argument("--seed", default=str(default.seed), metavar="N", help="(%(default)s)")
    parser.add_argument("--requests", metavar="N", help="requests to serve (enough for about 1 %% noise)")
    parser.add_argument("--decisions", action="store_true", help="with --out, keep every request's decisions")
    parser.add_argument(
        "--regret", action="store_true", help="split what each policy loses to an oracle by its causes"
    )
    parser.add_argument("--out", metavar="DIR", help="write runs, steps and requests there")
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout and nothing else")
    arrivals.add_arguments(parser)
    load.add_arguments(parser)
    args = parser.parse_args()
    if args.arrivals is not None:
        _main_load(args)
        return
    for option in ("rate", "lengths", "limit", "max_num_seqs", "kv_blocks", "slo", "timeline"):
        if getattr(args, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} is of traffic: give --arrivals too")
    if args.decisions and args.out is None:
        raise InputError("--decisions keeps them in the results directory: name it with --out DIR")
    config = Config(
        trace=args.trace,
        policy=args.policy,
        batch_sizes=None if args.batch_size is None else parse_batch_sizes(args.batch_size),
        cost=args.cost,
        seed=whole_number("--seed", args.seed, 0),
        requests=None if args.requests is None else whole_number("--requests", args.requests, 1),
        decisions=args.decisions,
        decision_lag=args.decision_lag or 0,
        out=args.out,
        regret=args.regret,
    )
    rows = replay(config, progress=not args.json)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(_table(rows))
    if config.regret:
        print("\n" + regret_table(rows))
    if config.out is not None:
        print(f"results in {config.out}")


def _main_load(args: argparse.Namespace) -> None:
    """Replay traffic, print."""
    for option, instead in (("batch_size", "--max-num-seqs"), ("requests", "--limit"), ("decisions", None)):
        if getattr(args, option):
            remedy = "leave it out" if instead is None else f"give {instead}"
            raise InputError(f"--{option.replace('_', '-')} is of steady batch sizes: with traffic {remedy}")
    asked = load.from_arguments(args)
    rows = load.replay_load(asked, progress=not args.json)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(load.table(rows))
    for what, place in (("results", args.out), ("timeline", args.timeline)):
        if place is not None:
            print(f"{what} in {place}")


if __name__ == "__main__":
    sys.exit(guard(main))
