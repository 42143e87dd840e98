"""What a recorded trace tells of its drafter's confidences: how honest, and what else foretells acceptance.

    python bench/knowable.py [--trace tiny-pair] [--seeds 3]

For each draft position: the log-odds that its confidence lies below the truth, and one line through them,
drop * sqrt(position). Then, on requests held out in turn: how well acceptance is foretold (nats, AUC) by the
draft's own calibrated confidence, and by a small network that also sees all confidences of the block, what
was accepted in the steps before, the domain, the position in the output and the anchor token. The share by
which the second knows more is what noise in generated confidences may hide (traces/fit.py); the interval is
over resampled requests. Needs torch.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dcut.calibration import area_under_curve
from dcut.errors import Parser, guard
from sim.arrivals import whole_number
from traces.calibrate import row_domains
from traces.schema import Trace
from traces.store import open_trace

FOLDS = 3
LOOK_BACK = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens


def log_odds(confidences: np.ndarray) -> np.ndarray:
    c = np.clip(confidences.astype(np.float64), 1e-6, 1 - 1e-6)
    return np.log(c / (1 - c))


def logistic(x: np.ndarray, label: np.ndarray, offset: np.ndarray | float = 0.0) -> np.ndarray:
    """Coefficients of P(label) = sigmoid(offset + x @ coefficients), by Newton's method."""
    found = np.zeros(x.shape[1])
    for _ in range(40):
        p = 1 / (1 + np.exp(-(x @ found) - offset))
        curvature = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(found))
        found = found + np.linalg.solve(curvature, x.T @ (label - p) - found)
    return found


def hinges(x: np.ndarray) -> np.ndarray:
    """A line with three bends, as columns."""
    return np.stack([np.ones_like(x), x, np.maximum(x, 0), np.maximum(x - 0.7, 0), np.minimum(x + 0.5, 0)], 1)


def own(odds: np.ndarray, labels: np.ndarray, alive: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """Log-odds of acceptance by a draft's own confidence, a curve a position, fitted to the rows `fit`."""
    found = np.empty(odds.shape)
    for k in range(odds.shape[1]):
        rows = fit & alive[:, k]
        found[:, k] = hinges(odds[:, k]) @ logistic(hinges(odds[rows, k]), labels[rows, k])
    return found


def known(trace: Trace, odds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All that a policy may know at each anchor: numbers [rows, features], and the anchor token."""
    accepted, position = trace.arrays.num_accepted, trace.anchors["position"].to_numpy()
    before = np.zeros((len(accepted), len(LOOK_BACK)))
    for at, back in enumerate(LOOK_BACK):  # a draft made `back` tokens ago is judged only as far as to here
        rows = np.flatnonzero(position >= back)
        before[rows, at] = np.minimum(accepted[rows - back], back) / back
    domain = row_domains(trace)
    domains = np.stack([domain == name for name in np.unique(domain)], 1)
    tokens = trace.anchors["token_id"].fill_null(0).to_numpy()
    return np.concatenate([odds / 3, before, position[:, None] / 100, domains], 1), np.array(tokens)


def network(
    start: np.ndarray,
    seen: tuple[np.ndarray, np.ndarray],
    labels: np.ndarray,
    alive: np.ndarray,
    fit: np.ndarray,
    stop: np.ndarray,
    seed: int,
) -> np.ndarray:
    """`start` as improved by a network fitted to the rows `fit`, stopped where the rows `stop` are best."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    x, y, a, z = (torch.tensor(v, dtype=torch.float32) for v in (seen[0], labels, alive, start))
    token = torch.tensor(seen[1])
    embedding = torch.nn.Embedding(int(token.max()) + 1, 6)
    last = torch.nn.Linear(64, labels.shape[1])
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1] + 6, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), last
    )
    for zero in (embedding.weight, last.weight, last.bias):
        torch.nn.init.zeros_(zero)
    optimiser = torch.optim.AdamW([*net.parameters(), *embedding.parameters()], lr=1e-3, weight_decay=0.05)

    def better(rows: torch.Tensor) -> torch.Tensor:
        return z[rows] + net(torch.cat([x[rows], embedding(token[rows])], 1))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        every = binary_cross_entropy_with_logits(better(rows), y[rows], reduction="none")
        return (every * a[rows]).sum() / a[rows].sum()

    stopping, candidates = torch.tensor(np.flatnonzero(stop)), np.flatnonzero(fit)
    best, found = np.inf, start
    for _ in range(10):
        net.train()
        for _ in range(len(candidates) // 512 + 1):
            step = loss(torch.tensor(rng.choice(candidates, 512)))
            optimiser.zero_grad()
            step.backward()
            optimiser.step()
        net.eval()
        with torch.no_grad():
            if (judged := float(loss(stopping))) < best:
                best, found = judged, better(torch.arange(len(x))).numpy().astype(np.float64)
    return found


def nats(log_odds: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """What each label costs."""
    return np.logaddexp(0, np.where(labels, -log_odds, log_odds))


def interval(of: Callable[[np.ndarray], float], num_requests: int) -> tuple[float, float]:
    """95 % of `of` over resampled requests."""
    rng = np.random.default_rng(0)
    drawn = [of(rng.integers(0, num_requests, num_requests)) for _ in range(500)]
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="tiny-pair", help="default %(default)s")
    parser.add_argument("--seeds", default="3", metavar="N", help="networks to average (default %(default)s)")
    args = parser.parse_args()
    seeds = range(whole_number("--seeds", args.seeds, 1))
    torch.set_num_threads(1)
    trace = open_trace(args.trace)
    arrays = trace.arrays
    odds, position = log_odds(arrays.confidences), np.arange(trace.draft_length)
    labels, alive = (position < arrays.num_accepted[:, None]), (position <= arrays.num_accepted[:, None])
    at = np.broadcast_to(position, odds.shape)[alive]
    short = logistic((at[:, None] == position).astype(float), labels[alive], odds[alive])
    (drop,) = logistic(np.sqrt(at)[:, None], labels[alive], odds[alive])
    print(f"{args.trace}: log-odds by which confidences lie below the truth, by position")
    print("  " + " ".join(f"{value:.2f}" for value in short) + f"\n  or {drop:.3f} * sqrt(position from 0)")

    request = np.repeat(np.arange(len(arrays.num_rows)), arrays.num_rows)
    fold, stop = request // 2 % FOLDS, request % 7 == 0
    seen = known(trace, odds)
    alone, all_known = np.empty(odds.shape), np.empty(odds.shape)
    for held_out in tqdm(range(FOLDS), desc="folds", leave=False, disable=None):
        out = fold == held_out
        fit = ~out & ~stop
        alone[out] = own(odds, labels, alive, ~out)[out]
        start = own(odds, labels, alive, fit)
        ways = [network(start, seen, labels, alive, fit, ~out & stop, seed) for seed in seeds]
        all_known[out] = np.mean(ways, axis=0)[out]
    share = labels[alive].mean()
    nothing = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    cost = {"own confidence": nats(alone, labels), "all that is known": nats(all_known, labels)}
    print(f"held-out acceptance is foretold with {nothing:.4f} nats a draft left by its share alone, and by")
    for (name, left), odds_of in zip(cost.items(), (alone, all_known), strict=True):
        auc = area_under_curve(odds_of[alive], labels[alive])
        print(f"  {name:18} {left[alive].mean():.4f}, AUC {auc:.4f}")
    told = np.bincount(request, ((nothing - cost["own confidence"]) * alive).sum(axis=1))
    more = np.bincount(request, ((cost["own confidence"] - cost["all that is known"]) * alive).sum(axis=1))

    def extra(rows: np.ndarray) -> float:
        return float(more[rows].sum() / told[rows].sum())

    low, high = interval(extra, len(told))
    print(f"  so all that is known tells {extra(np.arange(len(told))):.1%} more ({low:.1%} to {high:.1%})")


if __name__ == "__main__":
    sys.exit(guard(main))
