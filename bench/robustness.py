"""dcut-plus against the rivals when something is wrong: late, distorted, mispriced, shifted or ramped.

    python bench/robustness.py [--trace h20-qwen3-8b] [--batch-size 4,16,64]

For every trouble and batch size: throughput of dcut-plus as a share of the best rival's in the same trouble,
and which that was. Lag: budgets from confidences 1 or 2 steps old. Temperature: confidences as
sigmoid(log-odds / T). Cost: what policies believe is off, by entry at random, or all drafts too dear or too
cheap against plain decoding. Shift: the requests turn from the hardest domain to the easiest in mid-run, or
back. Ramp: the batch grows 1, 2, 4 ... 64 and shrinks again, policies keeping what they learnt.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policy
from sim.arrivals import request_order
from sim.engine import Engine, acceptance_lengths
from sim.regret import Altered
from sim.replay import parse_batch_sizes
from sim.results import figures
from traces.schema import Trace
from traces.store import open_trace

RIVALS = ["off", "full", *(f"fixed:{k}" for k in (1, 2, 3, 5, 7)), "ratio:0.25", "ratio:0.5", "ratio:0.75"]
RIVALS += ["dcut", "vllm-adaptive", "vllm-adaptive:estimator=true", "dspark", "smartspec", "dsd", "ema"]
LEAST = 0.97  # of the best rival, in every trouble


def warmed(temperature: float) -> Callable[[np.ndarray], np.ndarray]:
    """Confidences as if the drafter's softmax had run at that temperature."""

    def seen(confidences: np.ndarray) -> np.ndarray:
        c = np.clip(confidences.astype(np.float64), 1e-7, 1 - 1e-7)
        return (1.0 / (1.0 + (1.0 / c - 1.0) ** (1.0 / temperature))).astype(np.float32)

    return seen


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong, and the order in which requests come."""

    name: str
    lag: int = 0
    temperature: float = 1.0
    belief: Callable[[CostTable], CostTable] | None = None
    domains: str = "mixed"  # mixed | rising | falling


def at_random(share: float) -> Callable[[CostTable], CostTable]:
    """Every verify and plain time off by up to `share`, each by its own draw."""

    def believed(cost: CostTable) -> CostTable:
        rng = np.random.default_rng(7)
        verify = cost.verify_s * rng.uniform(1 - share, 1 + share, cost.verify_s.shape)
        plain = cost.plain * np.stack(
            [np.ones(len(cost.plain)), rng.uniform(1 - share, 1 + share, len(cost.plain))], 1
        )
        return replace(cost, verify_s=verify, plain=plain)

    return believed


def scaled(factor: float) -> Callable[[CostTable], CostTable]:
    """All that a draft adds to a step off by `factor`, plain decoding right."""

    def believed(cost: CostTable) -> CostTable:
        first = cost.verify_s[:, :1]
        draft = cost.draft * np.array([1.0, factor])
        return replace(cost, verify_s=first + factor * (cost.verify_s - first), draft=draft)

    return believed


TROUBLES = [
    Trouble("none"),
    Trouble("lag 1", lag=1),
    Trouble("lag 2", lag=2),
    *(Trouble(f"temperature {t:g}", temperature=t) for t in (0.5, 0.75, 1.5, 2.0)),
    *(Trouble(f"cost off by {s:.0%} at random", belief=at_random(s)) for s in (0.1, 0.2)),
    *(Trouble(f"drafts cost {f - 1:+.0%} believed", belief=scaled(f)) for f in (0.8, 0.9, 1.1, 1.2)),
    Trouble("hardest, then easiest", domains="rising"),
    Trouble("easiest, then hardest", domains="falling"),
]


def requests_of(trace: Trace, num: int, domains: str) -> np.ndarray:
    """Which requests come, in their order: all domains mixed, or one half of the run each of two extremes."""
    order = request_order(trace, 8 * num if domains != "mixed" else num, seed=0)
    if domains == "mixed":
        return order
    arrays = trace.arrays
    domain = trace.requests["domain"].fill_null("").to_numpy()
    rows = np.repeat(domain, arrays.num_rows)
    ease = {name: arrays.num_accepted[rows == name].mean() for name in np.unique(domain)}
    hard, easy = (order[domain[order] == pick(ease, key=ease.__getitem__)] for pick in (min, max))
    tokens = arrays.output_tokens
    share = max(1, round(num / 2 * tokens[hard].mean() / tokens[easy].mean()))  # halves of equal work
    halves = np.resize(hard, num // 2), np.resize(easy, share)
    return np.concatenate(halves if domains == "rising" else halves[::-1])


def throughput(trace: Trace, cost: CostTable, name: str, batch_size: int, trouble: Trouble) -> float:
    """Steady tokens per second of one policy in one trouble."""
    belief = trouble.belief(cost) if trouble.belief else None
    see = warmed(trouble.temperature) if trouble.temperature != 1 else None
    policy = Altered(parse_policy(name), see, belief)
    order = requests_of(trace, max(96, 4 * batch_size), trouble.domains)
    run = Engine(trace, policy, cost, batch_size, order, decision_lag=trouble.lag).run()
    return figures(run)["throughput_tps"]


def ramp(trace: Trace, cost: CostTable, name: str) -> float:
    """Tokens per second over a run whose batch grows to 64 and shrinks again, as long at every size."""
    sizes = [b for b in (1, 2, 4, 8, 16, 32, 64) if _measured(cost, b)]
    tuned = parse_policy(name).tuned(lambda: acceptance_lengths(trace), cost)
    kept = Altered(tuned.start(), keeps_memory=True)
    rates = []
    for batch_size in sizes + sizes[-2::-1]:
        order = request_order(trace, max(24, 2 * batch_size), seed=batch_size)
        rates.append(figures(Engine(trace, kept, cost, batch_size, order).run())["throughput_tps"])
    return float(np.mean(rates))


def _measured(cost: CostTable, batch_size: int) -> bool:
    return cost.batch_sizes is None or cost.batch_sizes[0] <= batch_size <= cost.batch_sizes[-1]


def compare(names: Iterable[str], run: Callable[[str], float]) -> tuple[float, str]:
    """dcut-plus over the best rival, and that rival's name."""
    rates = {name: run(name) for name in names}
    best = max(RIVALS, key=rates.__getitem__)
    return rates["dcut-plus"] / rates[best], best


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="h20-qwen3-8b", help="default %(default)s")
    parser.add_argument("--batch-size", default="4,16,64", help="default %(default)s")
    args = parser.parse_args()
    trace = open_trace(args.trace)
    cost = trace.cost
    if cost is None:
        raise InputError(f"trace {args.trace} has no cost table: replays need one")
    sizes = parse_batch_sizes(args.batch_size)
    names = [*RIVALS, "dcut-plus"]
    print(f"{args.trace}: dcut-plus over the best rival, and which that is")
    print(f"{'trouble':28}" + "".join(f"{f'batch {size}':>36}" for size in sizes))
    worst = np.inf
    for trouble in TROUBLES:
        cells = []
        for size in sizes:
            bar = tqdm(names, desc=f"{trouble.name}, batch {size}", leave=False, disable=None)
            share, best = compare(bar, lambda name, t=trouble, b=size: throughput(trace, cost, name, b, t))
            cells.append(f"{share:.3f} {best}")
            worst = min(worst, share)
        print(f"{trouble.name:28}" + "".join(f"{cell:>36}" for cell in cells), flush=True)
    share, best = compare(tqdm(names, desc="ramp", leave=False, disable=None), lambda n: ramp(trace, cost, n))
    print(f"{'ramp 1 -> 64 -> 1':28}{f'{share:.3f} {best}':>36}")
    worst = min(worst, share)
    print(
        f"worst {worst:.3f}; {'at least' if worst >= LEAST else 'BELOW'} {LEAST} of the best rival everywhere"
    )


if __name__ == "__main__":
    sys.exit(guard(main))
