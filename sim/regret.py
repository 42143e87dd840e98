"""What a policy loses against knowing the future: where the tokens per second of a replay went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from dcut.calibration import fit_isotonic
from dcut.cost import CostTable
from dcut.plus import Oracle
from dcut.policies import Off
from dcut.protocol import BudgetPolicy, UniformPolicy
from dcut.selector import Selection
from sim.engine import Engine, Run
from traces.schema import Trace


@dataclass(frozen=True, slots=True)
class Regret:
    """Shares of the oracle's throughput that a policy does not reach, by cause; they add up to `total`.

    The first two are what the same policy gains when re-run with fresh confidences, and then with honest
    ones (isotonic curves fitted to the whole trace). The rest is what is missing in that last run, divided
    as its steady steps miss it: by time at the oracle's rate, and by tokens. (The shares are scaled to add
    up: who verifies less comes by the same easy stretch in more of its steps, and misses it in each.)
    """

    total: float  # 1 - throughput / oracle's
    stale: float  # the budget was settled by old confidences
    miscalibrated: float  # confidences are not probabilities
    rejected: float  # time of verifying drafts that were rejected, or that the request no longer needed
    unverified: float  # accepted drafts worth their time that were not verified, or not drafted
    padding: float  # time of executing a graph larger than the tokens need
    drafting: float  # time of drafting where even the best budget brought less than plain decoding


class Altered(BudgetPolicy):
    """A policy that sees other confidences, believes other costs, decides at another lag, or keeps memory."""

    def __init__(
        self,
        policy: BudgetPolicy,
        see: Callable[[np.ndarray], np.ndarray] | None = None,
        belief: CostTable | None = None,
        lag: int | None = None,
        keeps_memory: bool = False,
    ) -> None:
        self.policy, self.see, self.belief, self.keeps_memory = policy, see, belief, keeps_memory
        self.__dict__ |= {
            "learns": policy.learns,
            "sees": policy.sees,
            "lag": policy.lag if lag is None else lag,
        }

    @property
    def labels(self) -> tuple[str, ...]:
        return self.policy.labels

    def _as(self, policy: BudgetPolicy) -> "Altered":
        return Altered(policy, self.see, self.belief, self.lag, self.keeps_memory)

    def start(self) -> BudgetPolicy:
        return self if self.keeps_memory else self._as(self.policy.start())

    def tuned(self, lengths: Callable[[], np.ndarray], cost: CostTable) -> BudgetPolicy:
        return self if self.keeps_memory else self._as(self.policy.tuned(lengths, self.belief or cost))

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        return self.policy.draft_length(batch_size, longest, self.belief or cost)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        seen = self.see(confidences) if self.see else confidences
        return self.policy.select(seen, self.belief or cost, context_tokens)

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        if self.see:
            confidences, stale = self.see(confidences), self.see(stale)
        return self.policy.select_lagged(confidences, stale, self.belief or cost, context_tokens)

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.policy.observe(keep_depth, num_accepted, seconds)


class Regrets:
    """Splits the regret of policies replayed on one trace, at one batch size, with the same requests."""

    def __init__(
        self, trace: Trace, cost: CostTable, batch_size: int, order: np.ndarray, lag: int = 0
    ) -> None:
        self.trace, self.cost, self.batch_size, self.order, self.lag = trace, cost, batch_size, order, lag
        # An oracle that drafts may still lose to not drafting at all
        self.oracle_tps = max(_throughput(self._run(trace, best, 0)) for best in (Oracle(), Off()))
        self._honest: Trace | None = None

    def split(self, policy: BudgetPolicy, run: Run) -> Regret:
        """The causes of what `run`, a replay of `policy`, does not reach."""
        tps = [_throughput(run)]
        lag, blind = max(self.lag, policy.lag), isinstance(policy, UniformPolicy)
        fresh = run
        if lag and not blind:
            policy = Altered(policy, lag=0)
            fresh = self._run(self.trace, policy, 0)
        tps.append(_throughput(fresh))
        if blind or policy.sees != "confidences":
            honest = fresh if fresh.decisions is not None else self._run(self.trace, policy, 0)
        else:
            honest = self._run(self.honest_trace, policy, 0)
        tps.append(_throughput(honest))
        stale, miscalibrated = np.diff(tps) / self.oracle_tps
        lost = _account(self.trace, self.cost, self.order, honest, self.oracle_tps)
        missing, counted = 1.0 - tps[2] / self.oracle_tps, sum(lost.values())
        return Regret(
            total=1.0 - tps[0] / self.oracle_tps,
            stale=float(stale),
            miscalibrated=float(miscalibrated),
            **{cause: value * missing / counted if counted else 0.0 for cause, value in lost.items()},
        )

    @property
    def honest_trace(self) -> Trace:
        """The trace with its confidences calibrated, by hindsight."""
        if self._honest is None:
            arrays = self.trace.arrays
            drafters = {"confidences": arrays.drafts(self.trace.draft_length)}
            drafters |= {f"confidences_{width}": drafts for width, drafts in arrays.narrower.items()}
            columns = []
            for name, (accepted, confidences) in drafters.items():
                calibration = fit_isotonic(confidences, accepted)
                honest = calibration.probabilities(confidences).astype(np.float32)
                columns.append(pl.Series(name, honest, dtype=pl.Array(pl.Float32, honest.shape[1])))
            self._honest = replace(self.trace, anchors=self.trace.anchors.with_columns(columns))
        return self._honest

    def _run(self, trace: Trace, policy: BudgetPolicy, lag: int) -> Run:
        return Engine(trace, policy, self.cost, self.batch_size, self.order, True, decision_lag=lag).run()


def _throughput(run: Run) -> float:
    steady = run.steps[run.steady]
    return float(steady["num_emitted"].sum() / steady["step_s"].sum())


def _account(trace: Trace, cost: CostTable, order: np.ndarray, run: Run, rate: float) -> dict[str, float]:
    """Tokens that the steady steps missed, by cause: time lost at `rate`, and drafts worth their time."""
    arrays, made, steps = trace.arrays, run.decisions, run.steps
    assert made is not None
    request = order[made["request"]]
    left = arrays.output_tokens[request] - 1 - made["position"]
    row, drafts = arrays.first_row[request] + made["position"], steps["drafts"][made["step"]]
    possible = arrays.num_accepted[row]
    for width, narrow in arrays.narrower.items():
        possible = np.where(drafts == width, narrow.num_accepted[row], possible)
    possible = np.minimum(possible, left - 1)
    taken = np.minimum(possible, made["keep_depth"])
    num_possible = np.bincount(made["step"], possible, minlength=len(steps)).astype(np.int64)
    num_taken = np.bincount(made["step"], taken, minlength=len(steps)).astype(np.int64)
    lost: dict[str, float] = dict.fromkeys(("rejected", "unverified", "padding", "drafting"), 0.0)
    for at in np.flatnonzero(run.steady):
        step = steps[at]
        batch, verified = int(step["batch_size"]), int(step["num_verify_tokens"])
        stairs, smooth = _curves(cost, batch, trace.draft_length)
        drafted = verified > batch or step["draft_s"] > 0
        draft_s, plain_s = (
            cost.draft_seconds(batch, extrapolate=True, drafts=int(step["drafts"]) or None),
            cost.plain_seconds(batch, extrapolate=True),
        )
        few, many = num_taken[at], num_possible[at]
        worth = np.arange(many + 1) - rate * smooth[: many + 1]
        best = float(worth.max()) - rate * draft_s
        off = -rate * plain_s
        if drafted:
            lost["padding"] += rate * (stairs[verified - batch] - smooth[verified - batch])
            lost["rejected"] += rate * (smooth[verified - batch] - smooth[few])
            lost["unverified"] += best + rate * draft_s - worth[few]
            lost["drafting"] += max(0.0, off - best)
        else:
            lost["unverified"] += max(0.0, best - off)
    return lost


def _curves(cost: CostTable, batch: int, drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of verifying 0..batch * drafts drafts: as executed, and without padding to a graph."""
    key = id(cost), batch, drafts
    if key not in _CURVES:
        most = batch * (1 + drafts)
        stairs = cost.curve(batch, most, extrapolate=True)[batch:]
        smooth = replace(cost, max_graph_tokens=0).curve(batch, most, extrapolate=True)[batch:]
        _CURVES[key] = stairs, smooth
    return _CURVES[key]


_CURVES: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}


def regret_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Regrets of replays as lines of text; rows hold policy, batch_size and regret, a `Regret` as a dict."""
    causes = [field.name for field in fields(Regret)]
    width = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [
        "missing to the oracle's throughput, and why",
        f"batch  {'policy':<{width}}" + "".join(f"{cause:>15}" for cause in causes),
    ]
    for at, row in enumerate(rows):
        if at and row["batch_size"] != rows[at - 1]["batch_size"]:
            lines.append("")
        cells = "".join(f"{row['regret'][cause]:>15.1%}" for cause in causes)
        lines.append(f"{row['batch_size']:>5}  {row['policy']:<{width}}{cells}")
    return "\n".join(lines)
