"""Command: from a server's aggregate metrics, fit a process of accepted drafts and write a trace of it."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import expit
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import Ratio
from traces.published import DOMAINS, MEAN_STEPS, AcceptanceProcess, Draws, generate, stratified
from traces.schema import Trace
from traces.store import save, whole_directory

# What is assumed where the figures leave it open, on the logit scale: the spreads between domains, steps,
# slots and of the confidences (times or over e), and how much harder each further slot is (give or take).
# No figure of a server tells noise in the confidences from chance in the acceptance, so what is assumed of
# confidences comes from two recordings of small DFlash pairs (bench/knowable.py). There, all that a policy
# may know adds 2 to 3 % (4 % at most) to what a draft's own confidence tells of its acceptance; a spread of
# 0.2 hides 4 to 5 %. And confidences lie 0.29 * sqrt(k) (0.285 and 0.304) below the truth at draft k.
_SPREADS = np.log([0.5, 0.5, 1.5, 0.2])
_CONFIDENCE_DROP = 0.29
_SLOPE_WIDTH = 0.1
_SHARE_WIDTH = 0.01  # how closely a retention is met, against those assumptions
_MOST_ITERATIONS = 20
_NUM_STEPS = 16_384  # behind every figure while fitting; more where batches are large
_NUM_FRESH_STEPS = 40_000  # behind every figure while comparing; more where batches are large
_MOST_DRAFTS = 100_000_000  # of a fit or a trace at once: a few GB of memory


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of a server: its acceptance, and how much of it a cut keeps.

    acceptance_length: tokens emitted by a request in a step under full verification, bonus token included,
        averaged over steps. acceptance_per_position[k]: share of all steps that accept draft k (and so all
        before it), [draft_length]. Give either; both must agree.
    retention: pairs (keep ratio, share). Of batch_size * D positions, anchors included, the ratio that is
        kept goes to the best drafts of the whole batch; the share is the tokens then emitted, bonus tokens
        included, over those emitted under full verification.
    uniform_retention: the same where every request keeps the same number of positions.
    Raises InputError on figures that contradict each other.
    """

    draft_length: int = 15
    batch_size: int = 32
    acceptance_length: float | None = None
    acceptance_per_position: tuple[float, ...] = ()
    retention: tuple[tuple[float, float], ...] = ()
    uniform_retention: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.draft_length < 1 or self.batch_size < 1:
            raise InputError(
                f"draft length {self.draft_length} and batch size {self.batch_size}: at least 1 each"
            )
        if self.draft_length * self.num_fresh_steps > _MOST_DRAFTS:
            raise InputError(
                f"draft length {self.draft_length} at batch size {self.batch_size} is too much to hold in "
                "memory: lower one of them"
            )
        self._check_acceptance()
        for name, pairs in (("retention", self.retention), ("uniform retention", self.uniform_retention)):
            self._check_shares(name, pairs)
        width = self.draft_length + 1
        for ratio, _ in self.uniform_retention:
            if abs(ratio * width - round(ratio * width)) > 1e-6:
                raise InputError(
                    f"uniform retention at {ratio:g}: {ratio * width:g} of {width} positions a request is "
                    f"not a whole number; the nearest is {round(ratio * width) / width:g}"
                )

    @property
    def mean(self) -> float:
        """The mean acceptance length, however it was given."""
        return (
            1 + sum(self.acceptance_per_position)
            if self.acceptance_length is None
            else self.acceptance_length
        )

    @property
    def num_fresh_steps(self) -> int:
        """Steps that a fit is compared on."""
        return max(256 * self.batch_size, _NUM_FRESH_STEPS)

    def _check_acceptance(self) -> None:
        shares, width = self.acceptance_per_position, self.draft_length + 1
        if self.acceptance_length is None and not shares:
            raise InputError("give the mean acceptance length or the acceptance per position")
        if shares and len(shares) != self.draft_length:
            raise InputError(
                f"{len(shares)} acceptances for {self.draft_length} draft positions: give one each"
            )
        for k, share in enumerate(shares):
            if not 0 <= share <= 1:
                raise InputError(f"acceptance {share:g} at position {k + 1} is outside [0, 1]")
            if k and share > shares[k - 1]:
                raise InputError(
                    f"acceptance rises from {shares[k - 1]:g} to {share:g} at position {k + 1}: give shares "
                    "of all steps (a draft counts only if all before it were accepted), which never rise"
                )
        if shares and abs(1 + sum(shares) - self.mean) > 0.01 * self.mean:
            raise InputError(
                f"mean acceptance length {self.mean:g} contradicts the acceptance per position, which "
                f"gives {1 + sum(shares):.4g} (1 + their sum): drop one of them"
            )
        if not 1 < self.mean < width:
            raise InputError(
                f"mean acceptance length {self.mean:g} is not between 1 (the bonus token alone) "
                f"and {width} ({self.draft_length} drafts and the bonus token)"
            )

    def _check_shares(self, name: str, pairs: tuple[tuple[float, float], ...]) -> None:
        width = self.draft_length + 1
        before = (0.0, 0.0)
        for ratio, share in sorted(pairs):
            if not 1 / width - 1e-9 <= ratio <= 1:
                raise InputError(
                    f"{name} at keep ratio {ratio:g}: the ratio must lie in {1 / width:.4g}..1, as the "
                    f"anchors alone are 1 of {width} positions"
                )
            most = min(1.0, ratio * width / self.mean)
            if not 1 / self.mean - 1e-9 <= share <= most + 1e-9 or (ratio == 1 and share != 1):
                low = 1.0 if ratio == 1 else 1 / self.mean
                raise InputError(
                    f"{name} {share:g} at keep ratio {ratio:g} cannot be: with a mean acceptance length of "
                    f"{self.mean:.4g} the share lies in {low:.4g}..{most:.4g}"
                )
            if share < before[1] or ratio == before[0]:
                raise InputError(
                    f"{name} {share:g} at keep ratio {ratio:g} against {before[1]:g} at {before[0]:g}: "
                    "give each ratio once, with shares that never fall"
                )
            before = (ratio, share)


class Line(NamedTuple):
    """One input of a fit: what was asked, what the process does in the long run."""

    name: str
    asked: float
    got: float

    @property
    def error(self) -> float:
        """Of a share in shares, of a length relative to it."""
        return (self.got - self.asked) / max(self.asked, 1.0)


def fit(figures: Figures, progress: Callable[[], object] = lambda: None) -> AcceptanceProcess:
    """The process that meets `figures` best, of those that meet its acceptance exactly.

    Retentions are met by least squares over the spreads; what they leave open is decided by mild assumptions
    about them. Deterministic: the same draws serve every try. progress is called once a try.
    """
    num_each = max(64 * figures.batch_size, _NUM_STEPS) // len(DOMAINS)
    draws = stratified(num_each, figures.draft_length)
    asked = np.array([share for _, share in (*figures.retention, *figures.uniform_retention)])
    start = _SPREADS if figures.acceptance_per_position else np.append(_SPREADS, 0.0)
    width = np.ones(len(start))
    width[len(_SPREADS) :] = _SLOPE_WIDTH

    def misfit(shape: np.ndarray) -> np.ndarray:
        progress()
        got = measure(*_sample(_centred(shape, figures, draws), draws), figures)
        return np.concatenate(((got - asked) / _SHARE_WIDTH, (shape - start) / width))

    if not len(asked):
        return _centred(start, figures, draws)
    found = least_squares(
        misfit, start, x_scale=width, diff_step=0.05, ftol=1e-4, xtol=1e-3, max_nfev=_MOST_ITERATIONS
    )
    return _centred(found.x, figures, draws)


def measure(confidences: np.ndarray, emitted: np.ndarray, figures: Figures) -> np.ndarray:
    """Shares of full acceptance at the figures' retentions, then at their uniform ones, float [ratios].

    confidences: float32 [steps, draft_length]; consecutive steps form the batches.
    emitted: [steps, D], tokens emitted by a step that keeps 0..draft_length drafts.
    """
    full = emitted[:, -1].mean()
    size = figures.batch_size
    num_batches = len(confidences) // size
    shares = []
    for ratio, _ in figures.retention:
        policy = Ratio(ratio)
        total = 0.0
        for first in range(0, num_batches * size, size):
            depth = policy.select(confidences[first : first + size], None).keep_depth
            total += emitted[first : first + size][np.arange(size), depth].sum()
        shares.append(total / (num_batches * size) / full)
    for ratio, _ in figures.uniform_retention:
        shares.append(emitted[:, round(ratio * emitted.shape[1]) - 1].mean() / full)
    return np.array(shares)


def compare(process: AcceptanceProcess, figures: Figures) -> list[Line]:
    """Each given figure beside what `process` does, on draws that the fit has not seen."""
    draws = stratified(figures.num_fresh_steps // len(DOMAINS), figures.draft_length, seed=1)
    confidences, emitted = _sample(process, draws)
    lines = []
    if figures.acceptance_length is not None:
        lines.append(Line("mean acceptance length", figures.acceptance_length, float(emitted[:, -1].mean())))
    survival = np.diff(emitted, axis=1).mean(axis=0)
    for k, share in enumerate(figures.acceptance_per_position):
        lines.append(Line(f"acceptance at position {k + 1}", share, float(survival[k])))
    names = [f"retention at {ratio:g}" for ratio, _ in figures.retention]
    names += [f"uniform retention at {ratio:g}" for ratio, _ in figures.uniform_retention]
    pairs = (*figures.retention, *figures.uniform_retention)
    for name, (_, share), got in zip(names, pairs, measure(confidences, emitted, figures), strict=True):
        lines.append(Line(name, share, float(got)))
    return lines


def acceptance_length(trace: Trace) -> float:
    """Mean acceptance length of a trace by steps, as a server counts it, under full verification."""
    arrays = trace.arrays
    accepted = arrays.num_accepted.tolist()
    steps = tokens = 0
    for first, rows in zip(arrays.first_row.tolist(), arrays.num_rows.tolist(), strict=True):
        position = 0
        while position < rows:
            emitted = accepted[first + position] + 1
            position += emitted
            tokens += emitted
            steps += 1
    return tokens / steps


def _sample(process: AcceptanceProcess, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and the expected tokens emitted at every keep depth, of the process at `draws`."""
    accept, confidence = process.logits(draws)
    emitted = np.ones((len(accept), accept.shape[1] + 1))
    emitted[:, 1:] += np.cumsum(np.cumprod(expit(accept), axis=1), axis=1)
    return expit(confidence).astype(np.float32), emitted


def _centred(shape: np.ndarray, figures: Figures, draws: Draws) -> AcceptanceProcess:
    """The process with these log spreads (and slope) that meets the figures' acceptance exactly."""
    spreads = [float(sd) for sd in np.exp(shape[: len(_SPREADS)])]
    noise = AcceptanceProcess((0.0,) * figures.draft_length, *spreads).logits(draws)[0]
    if figures.acceptance_per_position:
        positions = _position_logits(noise, figures.acceptance_per_position)
    else:
        noise += shape[-1] * np.arange(figures.draft_length)

        def excess(centre: float) -> float:
            return 1 + np.cumprod(expit(noise + centre), axis=1).sum(axis=1).mean() - figures.mean

        positions = _root(excess) + shape[-1] * np.arange(figures.draft_length)
    return AcceptanceProcess(tuple(float(p) for p in positions), *spreads, confidence_drop=_CONFIDENCE_DROP)


def _position_logits(noise: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    """The logit of each position that makes the mean survival of the samples `shares`."""
    alive = np.ones(len(noise))
    logits = []
    for k, share in enumerate(shares):

        def excess(logit: float, k: int = k, share: float = share, alive: np.ndarray = alive) -> float:
            return float((alive * expit(noise[:, k] + logit)).mean() - share)

        logits.append(logit := _root(excess))
        alive = alive * expit(noise[:, k] + logit)
    return logits


def _root(excess: Callable[[float], float]) -> float:
    """Where a rising function of a logit is zero, or the end of the range on its side."""
    low, high = -60.0, 60.0
    if excess(low) > 0 or excess(high) < 0:
        return low if excess(low) > 0 else high
    return float(brentq(excess, low, high, xtol=1e-6))  # pyright: ignore[reportArgumentType]


def _pairs(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = tuple(tuple(float(number) for number in part.split(":")) for part in text.split(","))
        if all(len(pair) == 2 and all(map(math.isfinite, pair)) for pair in pairs):
            return pairs  # pyright: ignore[reportReturnType]
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of ratio:share such as 0.25:0.80,0.5:0.95")


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.71,0.52") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m traces.fit",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make a trace from a server's metrics: fit a random process of accepted drafts and\n"
        "confidences to them, say how well each is met, and write anchors drawn from it.",
        epilog="D is the drafts and the anchor, --draft-length + 1. Example:\n"
        "  python -m traces.fit --mean-acceptance-length 3.07 --retention 0.25:0.80,0.5:0.95,0.75:0.98 \\\n"
        "    --cost cost.csv --out my-trace\n"
        "  python -m sim.replay --trace my-trace --policy off,full,dcut",
    )
    known = parser.add_argument_group("what the server reports (one of the first two, or both)")
    known.add_argument(
        "--mean-acceptance-length",
        type=float,
        metavar="L",
        help="tokens a request gains in a step when every draft is verified, bonus token included, averaged "
        "over steps (vLLM logs it under this name)",
    )
    known.add_argument(
        "--acceptance-per-position",
        type=_shares,
        default=(),
        metavar="P1,P2,...",
        help="share of ALL steps that accept the 1st, 2nd, ... draft; unconditional, so it never rises "
        "(vLLM: per-position acceptance rate)",
    )
    known.add_argument(
        "--retention",
        type=_pairs,
        default=(),
        metavar="RATIO:SHARE,...",
        help="when only RATIO of the batch * D positions (anchors included) is verified, the best drafts of "
        "the whole batch by confidence: SHARE of the tokens of full verification that are still emitted "
        "(bonus tokens included)",
    )
    known.add_argument(
        "--uniform-retention",
        type=_pairs,
        default=(),
        metavar="RATIO:SHARE,...",
        help="the same when every request keeps its first RATIO * D positions",
    )
    known.add_argument("--draft-length", type=int, metavar="N", help="drafts a request and step (default 15)")
    known.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="at which retention was seen (default %(default)s)",
    )
    known.add_argument("--cost", metavar="FILE", help="measured step times, .csv or .json; a replay needs it")
    made = parser.add_argument_group("what is written")
    made.add_argument("--out", required=True, metavar="DIR", help="directory of the new trace")
    made.add_argument("--requests", type=int, default=320, metavar="N", help="default %(default)s")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the anchors (default %(default)s)")
    made.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="X",
        help="error above which an input counts as missed and nothing is written: relative for a length, "
        "a difference for a share "
        "(default %(default)s)",
    )
    return parser


def main() -> None:
    """Parse the command line, fit, report, write."""
    args = _parser().parse_args()
    if args.requests < 1:
        raise InputError(f"--requests {args.requests}: a trace holds at least one request")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: a seed is 0 or more")
    if not args.tolerance >= 0:
        raise InputError(f"--tolerance {args.tolerance:g}: an error is 0 or more")
    figures = Figures(
        draft_length=len(args.acceptance_per_position) or 15
        if args.draft_length is None
        else args.draft_length,
        batch_size=args.batch_size,
        acceptance_length=args.mean_acceptance_length,
        acceptance_per_position=args.acceptance_per_position,
        retention=args.retention,
        uniform_retention=args.uniform_retention,
    )
    most = _MOST_DRAFTS / (MEAN_STEPS * figures.mean * figures.draft_length)  # drafts at every position
    if args.requests > most:
        raise InputError(f"--requests {args.requests}: too many to hold in memory, {int(most)} at most here")
    cost = CostTable.load(args.cost) if args.cost else None
    with whole_directory(args.out) as place:
        with tqdm(desc="fitting", unit=" tries", leave=False, disable=None) as bar:
            process = fit(figures, bar.update)
        lines = compare(process, figures)
        print(f"{'input':26s} {'asked':>8s} {'got':>8s} {'error':>8s}")
        for line in lines:
            flag = "" if abs(line.error) <= args.tolerance else "  missed"
            print(f"{line.name:26s} {line.asked:8.4f} {line.got:8.4f} {line.error:8.1%}{flag}")
        missed = [line for line in lines if not abs(line.error) <= args.tolerance]
        if missed:
            worst = max(missed, key=lambda line: abs(line.error))
            raise InputError(
                f"{worst.name} of {worst.asked:g} cannot be met together with the rest; the nearest fit has "
                f"{worst.got:.4g}. Nothing was written: change a figure, or raise --tolerance"
            )
        meta = {
            "engine": "generated by traces.fit",
            "temperature": 0.0,
            "figures": asdict(figures),
            "process": asdict(process),
        }
        trace = generate(process, meta, cost, args.requests, args.seed)
        save(trace, place)
    print(
        f"wrote {args.out}: {args.requests} requests, {len(trace.anchors)} positions, "
        f"mean acceptance length {acceptance_length(trace):.3f}"
        + ("" if cost else "; without --cost a replay has no step times")
    )


if __name__ == "__main__":
    sys.exit(guard(main))
