"""A replay of traffic: the same requests under each policy, and what becomes of latency and goodput."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import parse_policies
from sim import latencies
from sim.arrivals import open_traffic, whole_number
from sim.latencies import Slo, StepLog
from sim.scheduler import Limits
from sim.serving import Router, serve
from sim.timeline import Timeline
from traces.schema import Trace
from traces.store import open_trace
from traces.workloads import check_memory


@dataclass(frozen=True, slots=True)
class Load:
    """One replay of traffic, as the command line asks for it."""

    arrivals: str
    trace: str = "h20-qwen3-8b"
    policy: str = "off,full,dcut"
    cost: str | None = None  # None: the trace's own table
    seed: int = 0
    rate: float | None = None
    rate_scale: float = 1.0
    lengths: str | None = None
    limit: int | None = None
    limits: Limits = field(default_factory=Limits)
    decision_lag: int | None = None  # None: 1 where steps are scheduled ahead, else 0
    slo: Slo = field(default_factory=Slo)
    replicas: int = 1
    router: Router = "round-robin"
    timeline: str | None = None
    out: str | None = None


def replay_load(load: Load, progress: bool = False) -> list[dict[str, Any]]:
    """Serve the same traffic under every policy: a row of figures each, as `latencies.figures` names them.

    sim_steps_per_s is this machine's; everything else, and every byte of `load.out`, follows from the seed.
    Raises InputError on what cannot be used, before the work wherever that can be known.
    """
    policies = parse_policies(load.policy)
    (trace, cost), limits = priced(load), load.limits
    for policy in policies.values():
        policy.check_drafts(trace.draft_length)
    cost.check_batch_size(limits.max_num_seqs)
    if load.decision_lag is None:
        load = replace(load, decision_lag=int(limits.asynchronous))
    traffic = open_traffic(
        trace, load.arrivals, load.rate, load.rate_scale, load.lengths, load.limit, load.seed
    )
    if traffic.workload is not None and limits.kv_blocks is not None:
        check_memory(traffic.workload, limits.usable_blocks * limits.block_size)
    if load.replicas > len(traffic):
        raise InputError(f"--replicas {load.replicas}: {len(traffic)} requests keep no more servers busy")
    rows = []
    runs = [(policy, limits.max_num_seqs) for policy in policies]
    with ExitStack() as stack:
        directory = None if load.out is None else stack.enter_context(latencies.new_directory(load.out, runs))
        folder = None
        if directory is not None:  # beside the results, so that runs can be moved there
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory.parent)))
        timeline = None if load.timeline is None else stack.enter_context(Timeline(load.timeline))
        for name, policy in policies.items():
            log = StepLog(policy.labels, folder)
            first = 0 if timeline is None else timeline.start(name, load.replicas)

            def on_steps(
                replica: int, steps: Any, loads: Any, log: StepLog = log, first: int = first
            ) -> None:
                log.add(replica, steps, loads)
                if timeline is not None:
                    timeline.steps(first + replica, steps, loads, log.labels)

            began = time.perf_counter()
            with tqdm(
                total=len(traffic),
                desc=name,
                unit=" requests",
                leave=False,
                disable=None if progress else True,  # None: hidden unless stderr is a terminal
            ) as bar:
                service = serve(
                    traffic,
                    policy,
                    cost,
                    limits,
                    load.replicas,
                    load.router,
                    load.decision_lag or 0,
                    on_steps,
                    bar.update,
                )
            elapsed = time.perf_counter() - began
            if timeline is not None:
                timeline.requests(first, service.ledger)
            about = {"batch_size": limits.max_num_seqs, "replicas": load.replicas, "router": load.router}
            about |= {"prefill_token_s": cost.prefill_token_s}
            row = {"policy": name, **about, **latencies.figures(service, log, load.slo)}
            rows.append({**row, "sim_steps_per_s": row["num_steps"] / elapsed})
            if folder is not None:
                latencies.write_run(folder, row, service, log, trace)
        if directory is not None and folder is not None:
            about = {"engine": "sim", "trace": load.trace, "cost": load.cost, "seed": load.seed}
            about |= {"arrivals": load.arrivals, "rate": load.rate, "slo": asdict(load.slo)}
            latencies.write(directory, folder, rows, cost, {**trace.meta, **about})
    return rows


def open_priced(name: str, cost_file: str | None, seed: int = 0) -> tuple[Trace, CostTable]:
    """A trace and the cost table to replay it with: the file's, else its own; InputError without either."""
    trace = open_trace(name, seed)
    cost = CostTable.load(cost_file) if cost_file else trace.cost
    if cost is None:
        raise InputError(f"trace {name} has no cost table: give one with --cost FILE (.csv or .json)")
    return trace, cost


def priced(load: Load) -> tuple[Trace, CostTable]:
    """The trace of a replay of traffic and its cost table, with a price for prompts.

    A table that holds none is given one: a prompt token costs what a verified row costs at the largest
    measured batch, since both are rows of one pass that computing, not memory, holds up. That is an
    assumption; attention among a long prompt's tokens comes on top in truth, and is left out.
    """
    trace, cost = open_priced(load.trace, load.cost, load.seed)
    if cost.batch_sizes is None or cost.prefill_token_s:
        return trace, cost
    tokens, seconds = cost.verify_tokens[-1], cost.verify_s[-1]
    if tokens[-1] == tokens[0]:
        raise InputError("the cost table prices no prompts: add prefill_token_s to it (.json)")
    token_s = float(max(0.0, seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))
    return trace, replace(cost, prefill_token_s=token_s)


def largest_batch(load: Load) -> int:
    """The most requests at once: vLLM's default, as far as the cost table was measured."""
    _, cost = priced(load)
    tops = [int(points[-1, 0]) for points in (cost.draft, cost.plain) if len(points)]
    if cost.batch_sizes is not None:
        tops.append(int(cost.batch_sizes[-1]))
    return min([Limits().max_num_seqs, *tops])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a server that traffic comes to."""
    default, load = Limits(), Load("")
    group = parser.add_argument_group("server, with --arrivals")
    group.add_argument(
        "--max-num-seqs", metavar="N", help=f"requests at once ({default.max_num_seqs}, if so measured)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        default=str(default.max_num_batched_tokens),
        help="rows of a step, prompts among them (%(default)s)",
    )
    group.add_argument("--kv-blocks", metavar="N", help="KV memory, in blocks (never runs out)")
    group.add_argument(
        "--block-size", metavar="N", default=str(default.block_size), help="tokens (%(default)s)"
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="forget what freed blocks hold")
    group.add_argument(
        "--async-scheduling", action="store_true", help="schedule a step while the one before runs"
    )
    group.add_argument(
        "--prefill-elsewhere", action="store_true", help="requests come with their prompts computed"
    )
    group.add_argument(
        "--host-overhead-ms",
        type=float,
        metavar="X",
        default=1e3 * default.host_s,
        help="of scheduling a step (%(default)s)",
    )
    group.add_argument(
        "--decision-lag",
        type=int,
        choices=(0, 1, 2),
        help="how many steps old the confidences are that settle a budget (1 with --async-scheduling, or 0)",
    )
    group.add_argument(
        "--slo", metavar="ttft=X,tpot=X", help="seconds promised to a request; e2e=X too (nothing)"
    )
    group.add_argument("--replicas", metavar="N", default=str(load.replicas), help="servers (%(default)s)")
    group.add_argument(
        "--router", choices=get_args(Router), default=load.router, help="between them (%(default)s)"
    )
    group.add_argument("--timeline", metavar="FILE", help="write a Chrome trace, .json or .json.gz")


def from_arguments(args: argparse.Namespace) -> Load:
    """What the options of `add_arguments`, of arrivals.add_arguments and of a replay ask for."""
    load = Load(
        args.arrivals,
        trace=args.trace,
        policy=args.policy,
        cost=args.cost,
        seed=whole_number("--seed", args.seed, 0),
        rate=args.rate,
        rate_scale=args.rate_scale,
        lengths=args.lengths,
        limit=args.limit,
        decision_lag=args.decision_lag,
        slo=Slo() if args.slo is None else Slo.parse(args.slo),
        replicas=whole_number("--replicas", args.replicas, 1),
        router=args.router,
        timeline=args.timeline,
        out=args.out,
    )
    seats = args.max_num_seqs
    limits = Limits(
        largest_batch(load) if seats is None else whole_number("--max-num-seqs", seats, 1),
        whole_number("--max-num-batched-tokens", args.max_num_batched_tokens, 1),
        None if args.kv_blocks is None else whole_number("--kv-blocks", args.kv_blocks, 2),
        whole_number("--block-size", args.block_size, 1),
        prefix_caching=not args.no_prefix_caching,
        asynchronous=args.async_scheduling,
        prefill=not args.prefill_elsewhere,
        host_s=args.host_overhead_ms / 1e3,
    )
    return replace(load, limits=limits)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The runs as lines of text."""
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [
        f"{'policy':<{width}}   tok/s  goodput   req/s  kept     TTFT p50/p99, s     TPOT p50/p99, ms"
        "   ITL p50/p99, ms    e2e p50/p99, s   keep  accept  batch  queue  evicted"
    ]
    for row in rows:

        def pair(name: str, unit: float = 1.0, row: dict[str, Any] = row) -> str:
            low, high = row[f"{name}_p50"], row[f"{name}_p99"]
            return "-" if low is None else f"{low * unit:.4g} / {high * unit:.4g}"

        lines.append(
            f"{row['policy']:<{width}} {row['throughput_tps']:>7.1f} {row['token_goodput_tps']:>8.1f} "
            f"{row['request_goodput_rps']:>7.2f} {row['kept_share']:>5.1%} {pair('ttft_s'):>19} "
            f"{pair('tpot_s', 1e3):>20} {pair('itl_s', 1e3):>17} {pair('e2e_s'):>17} "
            f"{row['keep_ratio']:>6.3f} {row['mean_acceptance_length']:>7.2f} "
            f"{row['num_running_mean']:>6.1f} {row['num_waiting_mean']:>6.1f} {row['num_preempted']:>8}"
        )
    requests, reused = rows[0]["num_requests"], rows[0]["num_reused_anchors"]
    price = f"{rows[0]['prefill_token_s'] * 1e6:.0f} us a token"
    return "\n".join(
        [
            *lines,
            "",
            f"{requests} requests in {rows[0]['simulated_s']:.0f} s; goodput, req/s and kept: of those that "
            "kept the promises of --slo;",
            f"evicted: taken out of memory and computed again; {reused} requests ({reused / requests:.1%}) "
            "are longer than what was recorded, and met anchors again; prompts: "
            + (price if rows[0]["prefill_token_s"] else "rows of a step like others"),
        ]
    )
