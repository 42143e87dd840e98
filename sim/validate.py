"""The command that tells whether a replay is true: the same run, live and simulated, decision by decision."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl
from tqdm import tqdm

from dcut.cost import CostTable
from dcut.errors import InputError, Parser, guard
from dcut.policies import parse_policy
from dcut.selector import Selection
from sim import results, serverlog
from sim.engine import SLOT, STEADY, Engine
from traces.schema import Trace
from traces.store import open_trace, read_directory


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What a live engine wrote down: its steps, decisions and tokens."""

    meta: dict[str, Any]  # its meta.json
    requests: pl.DataFrame
    steps: pl.DataFrame
    decisions: pl.DataFrame
    tokens: pl.DataFrame  # request_id, position, token_id
    cost: CostTable  # that the policy decided by

    @property
    def policy(self) -> str:
        return self.meta["policy"]

    @property
    def batch_size(self) -> int:
        return self.meta["batch_size"]

    @property
    def own_batches(self) -> bool:
        """Whether the engine made up its batches by rules of its own (vLLM), not by those of the replayed
        engine, so that prompts share its steps."""
        return bool(self.meta.get("own_batches"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run, live and replayed."""

    policy: str
    batch_size: int
    num_tokens: int
    num_equal_tokens: int  # of the live tokens, those that the trace holds at the same place
    num_decisions: int  # of the live run or the replay, whichever made more
    num_equal_decisions: int  # same step, request, position and keep depth
    live_tps: float  # tokens a second of the steps in which the batch was at least 85 % full
    replay_tps: float

    @property
    def error(self) -> float:
        """Of the simulated throughput, relative to the live one."""
        return self.replay_tps / self.live_tps - 1


def read_live(path: str | Path) -> list[LiveRun]:
    """The live runs in a directory: one, one in each sub-directory, or the run behind a recorded trace.

    Raises InputError where there is none, or as `traces.store.read_directory` does.
    """
    path = Path(path)
    if (path / "meta.json").is_file():
        return [_read_run(path)]
    found = sorted(p.parent for p in path.glob("*/meta.json"))
    if not found:
        raise InputError(f"{path} holds no live run: give what dcut.record or bench/live.py wrote")
    return [_read_run(directory) for directory in found]


def _read_run(path: Path) -> LiveRun:
    try:
        meta, tables, documents = read_directory(path, "live")
    except InputError as not_live:
        try:
            meta, tables, documents = read_directory(path, "trace")
        except InputError:
            raise not_live from None
        tables["tokens"] = tables["anchors"].select("request_id", "position", "token_id")
    missing = [name for name in ("policy", "batch_size") if name not in meta]
    missing += [name for name in ("steps", "decisions") if name not in tables]
    missing += [name for name in ("cost",) if name not in documents]
    if missing:
        raise InputError(f"{path} is not a live run: it holds no {', '.join(missing)}")
    if meta.get("resumed"):
        raise InputError(f"{path} was recorded in pieces: its steps are not one run that can be replayed")
    columns = {name: tables[name] for name in ("requests", "steps", "decisions", "tokens")}
    return LiveRun(meta, **columns, cost=CostTable.from_dict(documents["cost"]))


class Follower(Engine):
    """Decides in the batches of a live run, step by step: the same requests, in the same order, as far on.

    All else is the replayed engine's: drafts, acceptance and times come from the trace and the cost table, to
    which a step's prompt tokens add their own. A policy that learns is told what the live one saw.
    """

    def __init__(self, trace: Trace, live: LiveRun, order: np.ndarray) -> None:
        """order: int64 [requests], the index in the trace of each of `live.requests` by rising request_id.

        Raises InputError as `Engine` does, where steps lack requests, and where they leave the trace.
        """
        super().__init__(
            trace, parse_policy(live.policy), live.cost, live.batch_size, order, record_decisions=True
        )
        sizes, steps = live.steps["batch_size"].to_numpy(), live.decisions["step"].to_numpy()
        if not np.array_equal(np.repeat(live.steps["step"].to_numpy(), sizes), steps):
            raise InputError(
                "the run's decisions are not those of its steps, one after the other: record anew"
            )
        ids = live.requests.sort("request_id")["request_id"].to_numpy()
        request = np.searchsorted(ids, live.decisions["request_id"].to_numpy())
        source, arrays = order[request], trace.arrays
        self.rows = np.zeros(len(request), SLOT)
        self.rows["request"] = request
        self.rows["position"] = position = live.decisions["position"].to_numpy()
        self.rows["row"] = arrays.first_row[source] + position
        self.rows["left"] = arrays.output_tokens[source] - 1 - position
        self.rows["context"] = arrays.prompt_tokens[source] + 1 + position
        if self.rows["left"].min() < 1:
            at = int(self.rows["left"].argmin())
            raise InputError(f"request {ids[request[at]]} decodes at position {position[at]}, behind its end")
        self.ends = np.cumsum(sizes)
        self.prefill_tokens = live.steps["prefill_tokens"].to_numpy()
        self.live_s = live.steps["step_s"].to_numpy()
        self.live_accepted = np.minimum(live.decisions["num_accepted"].to_numpy(), self.rows["left"] - 1)
        self.live_depth = live.decisions["keep_depth"].to_numpy()

    def admit(self, now_s: float) -> int:
        """Take the batch that the live run had in this step; return how many are active."""
        self.batch = self.rows[self._recorded] if self.num_steps < len(self.ends) else self.rows[:0]
        return len(self.batch)

    def verify(
        self, confidences: np.ndarray, selection: Selection, context_tokens: int
    ) -> tuple[float, float]:
        """Seconds of the drafter and of the target, with the prompts that shared its pass."""
        draft_s, verify_s = super().verify(confidences, selection, context_tokens)
        return draft_s, verify_s + self.cost.prefill_seconds(int(self.prefill_tokens[self.num_steps]))

    def learn(self, selection: Selection, seconds: float) -> None:
        """Tell the policy what became of the live step."""
        depth, accepted = self.live_depth[self._recorded], self.live_accepted[self._recorded]
        self.policy.observe(depth, accepted, float(self.live_s[self.num_steps]))

    @property
    def _recorded(self) -> slice:
        before = self.ends[self.num_steps - 1] if self.num_steps else 0
        return slice(before, self.ends[self.num_steps])


def compare(trace: Trace, live: LiveRun) -> Comparison:
    """Replay a live run's requests, in their order and with its policy, batch size and costs, and compare.

    Where the live engine made up its own batches, the replay follows them.
    Raises InputError where the trace lacks one of the requests, or holds an output of another length.
    """
    asked = live.requests.sort("request_id")
    known = trace.requests.with_row_index("index").select("index", "request_id", recorded="output_tokens")
    both = asked.join(known, on="request_id", how="left", maintain_order="left")
    lost = both.filter(pl.col("recorded").is_null() | (pl.col("recorded") != pl.col("output_tokens")))
    if len(lost):
        raise InputError(
            f"request {lost['request_id'][0]} has {lost['output_tokens'][0]} output tokens live, and "
            f"{lost['recorded'][0] or 'none'} in the trace: not a recording of the same requests"
        )
    order = both["index"].to_numpy().astype(np.int64)
    if live.own_batches:
        run = Follower(trace, live, order).run()
    else:
        policy = parse_policy(live.policy)
        run = Engine(trace, policy, live.cost, live.batch_size, order, record_decisions=True).run()
    replayed = results.tables(run, trace)["decisions"]
    same = live.decisions.join(replayed, on=["step", "request_id", "position", "keep_depth"], how="semi")
    tokens = live.tokens.join(
        trace.anchors.select("request_id", "position", "token_id"),
        on=["request_id", "position", "token_id"],
        how="semi",
    )
    steady = live.steps.filter(pl.col("batch_size") >= STEADY * live.batch_size)
    return Comparison(
        live.policy,
        live.batch_size,
        num_tokens=len(live.tokens),
        num_equal_tokens=len(tokens),
        num_decisions=max(len(live.decisions), len(replayed)),
        num_equal_decisions=len(same),
        live_tps=float(steady["num_emitted"].sum()) / float(steady["step_s"].sum()),
        replay_tps=results.figures(run)["throughput_tps"],
    )


def table(found: Sequence[Comparison]) -> str:
    """The comparisons as lines of text, and the median and the worst error of the time."""
    width = max(len("policy"), *(len(c.policy) for c in found))
    lines = [f"batch  {'policy':<{width}}  live tok/s  replay tok/s   error  equal tokens  equal decisions"]
    for c in sorted(found, key=lambda c: (c.batch_size, c.policy)):
        lines.append(
            f"{c.batch_size:>5}  {c.policy:<{width}} {c.live_tps:>11.1f} {c.replay_tps:>13.1f} "
            f"{c.error:>+7.1%}  {c.num_equal_tokens / c.num_tokens:>12.2%} "
            f"{c.num_equal_decisions / c.num_decisions:>16.2%}"
        )
    errors = [abs(c.error) for c in found]
    tokens = sum(c.num_equal_tokens for c in found), sum(c.num_tokens for c in found)
    decisions = sum(c.num_equal_decisions for c in found), sum(c.num_decisions for c in found)
    lines += [
        "",
        f"throughput: median error {np.median(errors):.1%}, worst {max(errors):.1%}; "
        f"equal: {tokens[0]:,} of {tokens[1]:,} tokens, {decisions[0]:,} of {decisions[1]:,} decisions",
    ]
    return "\n".join(lines)


def plot(found: Sequence[Comparison], path: str | Path) -> None:
    """Write a chart of simulated against live throughput, with the diagonal, as .html, .svg or .png."""
    rows: list[dict[str, Any]] = [
        {"policy": c.policy, "batch size": c.batch_size, "live": c.live_tps, "replay": c.replay_tps}
        for c in found
    ]
    ends = [min(min(r["live"], r["replay"]) for r in rows), max(max(r["live"], r["replay"]) for r in rows)]
    log = alt.Scale(type="log", nice=False, padding=12)
    x = alt.X("live:Q", scale=log, title="live, tokens a second")
    y = alt.Y("replay:Q", scale=log, title="replayed, tokens a second")
    line = alt.Chart(alt.Data(values=[{"live": end, "replay": end} for end in ends]))
    points = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=70)
    chart = line.mark_line(color="#999", strokeDash=[4, 4]).encode(x=x, y=y) + points.encode(
        x=x,
        y=y,
        color=alt.Color("policy:N"),
        tooltip=["policy:N", "batch size:Q", "live:Q", "replay:Q"],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart = chart.properties(width=420, height=420, title="Simulated and live throughput")
    chart.save(str(path), inline=True) if path.suffix == ".html" else chart.save(str(path))


def validate_log(path: str, plot_path: str, cost_path: str | None = None) -> int:
    """Fit a server's log, print and plot how its requests are predicted; 0 where all is met, else 1.

    Raises InputError as `serverlog.read_log` does.
    """
    log = serverlog.read_log(path)
    print(f"{path}: {len(log.arrival_s)} requests, the first {log.half} to calibrate on", flush=True)
    worlds = serverlog.fit(log)
    forecast = serverlog.predict(log, worlds)
    print(serverlog.table(log, worlds, forecast))
    serverlog.plot(log, forecast, plot_path)
    print(f"plotted in {plot_path}")
    if cost_path is not None:
        serverlog.cost_table(log, worlds[0].parameters).save(cost_path)
        print(f"cost table in {cost_path}")
    missed = serverlog.failures(serverlog.errors(log, forecast))
    print("FAIL: " + "; ".join(missed) if missed else "PASS")
    return 1 if missed else 0


def main() -> None:
    """Parse the command line, compare, print and plot; exit code 1 where a server's log is not met."""
    parser = Parser(
        prog="python -m sim.validate",
        description="Compare live runs with replays of the same runs, or a server's log with a prediction.",
    )
    parser.add_argument("--trace", help="built-in name or directory of the recording")
    parser.add_argument("--live", metavar="DIR", help="a live run, or a folder of some")
    parser.add_argument(
        "--server-log",
        metavar="DIR",
        help="a vLLM server's meta.json and requests.jsonl: fit to the first half, predict all requests",
    )
    parser.add_argument(
        "--cost-out", metavar="FILE", help="with --server-log, write the fitted cost table (.json)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", default="out/validate.html", help=".html, .svg or .png (%(default)s)"
    )
    args = parser.parse_args()
    if args.server_log is not None:
        if args.trace is not None or args.live is not None:
            raise InputError("--server-log stands alone: leave out --trace and --live")
        sys.exit(validate_log(args.server_log, args.plot, args.cost_out))
    if args.cost_out is not None:
        raise InputError("--cost-out writes what --server-log fits: name a server's log")
    if args.trace is None or args.live is None:
        raise InputError("give --trace and --live DIR, or --server-log DIR")
    trace = open_trace(args.trace)
    bar = tqdm(read_live(args.live), unit=" runs", leave=False, disable=None)
    found = [compare(trace, live) for live in bar]
    print(table(found))
    plot(found, args.plot)
    print(f"plotted in {args.plot}")


if __name__ == "__main__":
    sys.exit(guard(main))
