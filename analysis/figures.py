"""The figures of a report and the sentences above them: every number in a title comes from the data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import polars as pl

from analysis import charts
from analysis.charts import BATCH, KEPT, Axis
from analysis.results import (
    ALLOCATION_TRACE,
    PUBLISHED_TRACE,
    Results,
    against_published,
    allocation,
    by_position,
    calibration,
    published,
    step_times,
)
from dcut.errors import InputError
from dcut.policies import POLICIES
from sim.validate import Comparison
from traces.schema import Trace
from traces.store import open_trace

THROUGHPUT = Axis("throughput (tokens/s)")
FACTOR = Axis("throughput / plain decoding", ".1f")
FITTED = ("AR", "DFlash-B16")  # published rows that the built-in trace was fitted to
_DIAMONDS = "Hollow diamonds: the published figures."
_DIFFERENCE, _TOO = "The difference, and below it", "Blue: predicted too low; orange: too high."


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture of the report, or, without a chart, the line that says what would bring it."""

    name: str  # of its PNG and of its place in the page
    section: str
    title: str  # what to see in it, one sentence
    note: str  # what is drawn, or what is missing
    chart: Any = None  # an Altair chart
    wide: bool = False
    rows: Sequence[dict[str, Any]] = ()  # of the table below it


def share(value: float, digits: int = 0) -> str:
    """A share as a percentage, such as "42 %" with a space that does not break."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def counted(number: int, noun: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def several(items: Sequence[Any]) -> str:
    """Items as words: "4", "4 and 8", "4, 8 and 16"."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def pair(meta: Mapping[str, Any]) -> str:
    """Target and drafter, as far as a run names them; that a folder is called "target" is left out."""
    named = [str(meta[key]) for key in ("target", "drafter") if meta.get(key)]
    return " with ".join(named).removeprefix("target: ") or "an unnamed pair"


_NO_RUNS = pl.DataFrame(
    schema=dict.fromkeys(("source", "policy", "trace", "cost"), pl.String) | {"batch_size": pl.Int64}
)


def is_real(policy: str) -> bool:
    """Whether a policy could be served; an oracle sees what no server can know."""
    kind = POLICIES.get(policy.partition(":")[0])
    return kind is None or kind.sees == "confidences"


class Story:
    """What the figures are made from: all runs, and those of the first source by policy and batch size.

    Live runs beside their replays, and runs under traffic, have figures of their own: LIVE and UNDER_TRAFFIC.
    """

    def __init__(
        self,
        results: Sequence[Results],
        live: Sequence[Comparison] = (),
        about: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """live: runs beside their replays; about: what their meta.json say."""
        self.results = [result for result in results if not result.under_traffic]
        self.traffic = [result for result in results if result.under_traffic]
        self.about = about
        self.live = sorted(live, key=lambda c: (charts.policy_order(c.policy), c.batch_size))
        steady = [result.runs for result in self.results]
        self.runs = pl.concat(steady or [_NO_RUNS], how="diagonal_relaxed")
        self.sources = [result.source for result in self.results]
        self.first = {(r["policy"], r["batch_size"]): r for frame in steady[:1] for r in frame.to_dicts()}
        self.batch_sizes = sorted({batch for _, batch in self.first})
        elsewhere = [policy for result in self.traffic for policy in result.runs["policy"]]
        named = [*self.runs["policy"], *elsewhere, *(c.policy for c in self.live)]
        self.palette = charts.colors(named)
        self.against = against_published(self.runs)
        self.dcut = next((p for p in self.palette if p.partition(":")[0] == "dcut" and self.of(p)), None)
        self._traces: dict[str, Trace | str] = {}

    def of(self, policy: str, column: str = "throughput_tps") -> dict[int, float]:
        """A column of one policy's runs by batch size, of the first source."""
        return {b: self.first[policy, b][column] for b in self.batch_sizes if (policy, b) in self.first}

    def both(self, one: str, other: str, column: str = "throughput_tps") -> dict[int, float]:
        """Ratio of a column of two policies at the batch sizes that both have."""
        a, b = self.of(one, column), self.of(other, column)
        return {batch: a[batch] / b[batch] for batch in a if batch in b}

    def trace(self, name: str) -> Trace | str:
        """A trace by its name, or why it cannot be opened."""
        if name not in self._traces:
            seed = next((r.runs["seed"][0] for r in self.results if name in r.runs["trace"]), 0)
            try:
                self._traces[name] = open_trace(name, seed or 0)
            except InputError as error:
                self._traces[name] = str(error)
        return self._traces[name]

    @property
    def live_pair(self) -> str:
        """What the live runs served."""
        return several([*dict.fromkeys(pair(meta) for meta in self.about)])

    @property
    def live_place(self) -> str:
        """What the live runs served, and on which machine."""
        machines = dict.fromkeys(meta.get("device", "an unnamed machine") for meta in self.about)
        return f"{self.live_pair} on {several([*machines])}"

    @property
    def live_second(self) -> str:
        """What the live runs, and so the costs of their replays, were timed in."""
        seconds = ("CPU second" if meta.get("clock") == "cpu" else "second" for meta in self.about)
        return " or ".join(dict.fromkeys(seconds))

    @property
    def traces(self) -> list[str]:
        """Names of the traces that were replayed."""
        return list(dict.fromkeys(self.runs["trace"].drop_nulls()))

    def points(self, column: str) -> pl.DataFrame:
        """A column of all runs as points of lines over the batch size."""
        return self.runs.select("source", name="policy", x="batch_size", value=column)

    def diamonds(self, column: str, policies: Sequence[str] = ()) -> pl.DataFrame | None:
        """Published values as points, of all policies or of those named, once for each batch size."""
        rows = self.against.filter(pl.col("policy").is_in(policies or list(self.palette)))
        points = (
            rows.select(name="policy", x="batch_size", value=column).drop_nulls().unique(maintain_order=True)
        )
        return points if len(points) else None

    def panel(self, run: dict[str, Any]) -> str:
        """The name of a panel that shows one policy."""
        return run["policy"] if len(self.sources) == 1 else f"{run['policy']} ({run['source']})"


# ---- sentences -------------------------------------------------------------------------------------------


def fastest(story: Story) -> str | None:
    """Which policy is fastest where, oracles aside; None where there is nothing to compare."""
    rivals = [policy for policy in story.palette if is_real(policy)]
    best = {
        batch: max((p for p in rivals if (p, batch) in story.first), key=lambda p: story.of(p)[batch])
        for batch in story.batch_sizes
        if any((p, batch) in story.first for p in rivals)
    }
    spans = [(policy, list(sizes)) for policy, sizes in groupby(best, key=best.__getitem__)]
    if len(rivals) < 2 or not spans:
        return None
    if len(spans) == 1:
        return f"{spans[0][0]} is the fastest policy at every batch size"
    where = [
        f"{policy} at batch {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
        for policy, sizes in spans
    ]
    return f"Fastest: {', '.join(where)}"


def full_against_off(story: Story) -> str | None:
    """What full verification brings over plain decoding at the largest batch, and where it starts to lose."""
    factor = story.both("full", "off")
    if not factor:
        return None
    last = max(factor)
    measured = dict(
        story.against.filter(policy="full", source=story.sources[0])
        .select("batch_size", "published_speedup")
        .iter_rows()
    ).get(last)
    losing = [batch for batch in factor if all(factor[b] < 1 for b in factor if b >= batch)]
    if not losing:
        beside = f" (published {measured:.2f})" if measured else ""
        return (
            f"Full verification beats plain decoding throughout, {factor[last]:.2f} times{beside} "
            f"at batch {last}"
        )
    since = (
        f"slower than plain decoding from batch {losing[0]}" if len(losing) < len(factor) else "always slower"
    )
    beside = f" (published {share(measured)})" if measured else ""
    return (
        f"At batch {last} full verification runs at {share(factor[last])} of plain decoding{beside}; "
        f"it is {since}"
    )


def dcut_gain(story: Story) -> str | None:
    """What D-Cut brings at the largest batch over full verification, and beside plain decoding."""
    if not story.dcut or not (gain := story.both(story.dcut, "full")):
        return None
    last = max(gain)
    text = f"At batch {last} {story.dcut} is {gain[last]:.2f} times as fast as full verification"
    beside = story.both(story.dcut, "off").get(last)
    return text + (f" and runs at {share(beside)} of plain decoding" if beside else "")


def waste(story: Story) -> str | None:
    """How much of what full verification and D-Cut compute is thrown away."""
    wasted = story.of("full", "wasted_verify_ratio")
    if not wasted:
        return None
    last = max(wasted)
    text = f"{share(wasted[last])} of what full verification computes at batch {last} is rejected"
    mine = story.of(story.dcut, "wasted_verify_ratio").get(last) if story.dcut else None
    return text + (f"; under {story.dcut} it is {share(mine)}" if mine is not None else "")


def kept(story: Story) -> str | None:
    """How much D-Cut verifies and what that costs in accepted tokens."""
    keep = story.of(story.dcut, "keep_ratio") if story.dcut else {}
    if not keep:
        return None
    low, high = min(keep), max(keep)
    if low == high:
        return f"{story.dcut} verifies {share(keep[low])} of the positions at batch {low}"
    return (
        f"{story.dcut} verifies {share(keep[low])} of the positions at batch {low} "
        f"and {share(keep[high])} at batch {high}"
    )


def gained(story: Story) -> str | None:
    """What D-Cut still accepts of what full verification does, at the largest batch."""
    lengths = story.both(story.dcut, "full", "mean_acceptance_length") if story.dcut else {}
    if not lengths:
        return None
    last = max(lengths)
    keep = story.both(str(story.dcut), "full", "keep_ratio")[last]
    return (
        f"With {share(keep)} of the positions {story.dcut} gains {share(lengths[last])} "
        f"of full verification's tokens a step at batch {last}"
    )


def published_error(story: Story) -> str | None:
    """How far the predictions are from the published throughput, where the trace was not fitted to it."""
    free = story.against.filter(~pl.col("method").is_in(FITTED))
    off = {
        (policy, batch): abs(predicted / measured - 1)
        for policy, batch, predicted, measured in free.select(
            "policy", "batch_size", "throughput_tps", "published_tps"
        ).iter_rows()
    }
    if not off:
        return None
    policy, batch = worst = max(off, key=off.__getitem__)
    return (
        f"Predicted throughput is {share(sum(off.values()) / len(off), 1)} off the published on average over "
        f"{counted(len(off), 'cell')} not used for the fit, {share(off[worst], 1)} at worst "
        f"({policy} at batch {batch})"
    )


def agreement(story: Story) -> str | None:
    """How far the further sources are from the first, over the runs that both have."""
    if len(story.sources) < 2:
        return None
    key = ["policy", "batch_size"]
    one, other = (
        story.runs.filter(source=source).select(*key, "throughput_tps") for source in story.sources[:2]
    )
    off = [abs(b / a - 1) for *_, a, b in one.join(other, on=key).iter_rows()]
    if not off:
        return None
    return (
        f"{story.sources[1]} and {story.sources[0]} differ by {share(sum(off) / len(off), 1)} in throughput "
        f"on average, over {counted(len(off), 'run')} that both have"
    )


def retention(tokens: pl.DataFrame) -> str | None:
    """What the best half and quarter of the positions yield of a trace's full acceptance.

    None where a request's positions cannot be halved; no quarter where they cannot be quartered.
    """
    values = _by_ratio(tokens, "by confidence")
    if 0.5 not in values:
        return None
    half = share(values[0.5] / values[1.0])
    text = f"Half of the positions, the most confident, keep {half} of full verification's tokens"
    return text + (f"; a quarter keeps {share(values[0.25] / values[1.0])}" if 0.25 in values else "")


def ranking_gain(tokens: pl.DataFrame) -> str:
    """What ranking by confidence gains over a uniform cut at a quarter and a half of the positions."""
    ranked, uniform = (_by_ratio(tokens, name) for name in ("by confidence", "uniform"))
    quarter, half = (ranked[at] / uniform[at] - 1 for at in (0.25, 0.5))
    return (
        f"Ranked by confidence, a quarter of the positions yields {share(quarter)} more tokens "
        f"than a uniform cut, half of them {share(half)} more"
    )


def _by_ratio(tokens: pl.DataFrame, name: str) -> dict[float, float]:
    """Tokens a step by keep ratio, of one way to choose the positions."""
    return dict(tokens.filter(name=name).select("x", "value").iter_rows())


def full_cost(curve: pl.DataFrame) -> str:
    """What verifying everything costs beside a quarter, or what of it one batch size's curve holds."""
    few = curve.sort((pl.col("x") - 0.25).abs()).row(0, named=True)
    most = curve.sort("x").row(-1, named=True)
    if few["x"] == most["x"]:
        return "Step time by the share of positions verified"
    parts = [
        name if abs(row["x"] - x) < 1e-9 else f"{share(row['x'])} of the positions"
        for row, x, name in ((most, 1.0, "everything"), (few, 0.25, "a quarter"))
    ]
    return (
        f"At batch {most['batch_size']} verifying {parts[0]} takes {most['value'] / few['value']:.2f} times "
        f"as long as verifying {parts[1]}"
    )


def fidelity(story: Story) -> str | None:
    """How far replayed throughput is from the live one."""
    if not story.live:
        return None
    errors = [abs(c.error) for c in story.live]
    worst = max(story.live, key=lambda c: abs(c.error))
    text = f"Predicted throughput is {share(float(np.median(errors)), 1)} off the measured on the median"
    served = re.sub(r" \d+ layers,", "", story.live_pair)  # its size says more
    return (
        f"{text} of {counted(len(errors), 'live run')} ({served}), {share(max(errors), 1)} at worst "
        f"({worst.policy} at batch {worst.batch_size})"
    )


def same_choices(story: Story) -> str:
    """How many tokens and decisions of live runs their replays repeat."""
    tokens, decisions = (
        np.sum([(getattr(c, f"num_equal_{what}"), getattr(c, f"num_{what}")) for c in story.live], axis=0)
        for what in ("tokens", "decisions")
    )
    return (
        f"A replay repeats {share(tokens[0] / tokens[1], 2)} of {tokens[1]:,} tokens and "
        f"{share(decisions[0] / decisions[1], 2)} of {decisions[1]:,} decisions of the live runs"
    )


def waiting(story: Story) -> str | None:
    """Under which policy requests under traffic are served soonest, and latest."""
    if not story.traffic:
        return None
    runs = story.traffic[0].runs.filter(pl.col("policy").map_elements(is_real, return_dtype=pl.Boolean))
    ranked = runs.drop_nulls("e2e_s_p50").sort("e2e_s_p50", maintain_order=True)
    if not len(ranked):
        return None
    (best, soonest), (worst, latest) = (
        ranked.select("policy", "e2e_s_p50").row(0),
        ranked.select("policy", "e2e_s_p50").row(-1),
    )
    text = f"Under traffic a request takes {soonest:.3g} s from end to end under {best}"
    return text + (f", {latest:.3g} s under {worst}, on the median" if len(ranked) > 1 else ", on the median")


def headlines(story: Story) -> list[str]:
    """The sentences at the top of the page; each stands only if the data say something about it."""
    found = [fidelity(story)]
    if story.results:
        found += [fastest(story), full_against_off(story), dcut_gain(story), waste(story)]
        for name in story.traces[:1]:
            if isinstance(trace := story.trace(name), Trace):
                found.append(retention(allocation(trace)))
        found += [published_error(story), agreement(story)]
    found.append(waiting(story))
    return [sentence for sentence in found if sentence]


# ---- figures ---------------------------------------------------------------------------------------------
# A new one is a function from the story to a Figure, listed in FIGURES; its sections stay together there.

CHOICE, REASON, TRUST = "Which policy", "Why", "How far to trust it"
MEASURED, TRAFFIC = "Predicted beside measured", "Under traffic"


def predicted(story: Story) -> Figure:
    points = pl.DataFrame([{"name": c.policy, "x": c.batch_size, "value": c.replay_tps} for c in story.live])
    measured = points.with_columns(value=pl.Series([c.live_tps for c in story.live]))
    palette = {name: color for name, color in story.palette.items() if name in points["name"]}
    axis = Axis(f"throughput (tokens per {story.live_second})")
    chart = charts.lines(points, palette, BATCH, axis, measured)
    note = (
        "Lines: a replay of the recording with the costs measured at start-up. Hollow diamonds: the same "
        f"requests served live ({story.live_place})."
    )
    return Figure("predicted", MEASURED, str(fidelity(story)), note, chart)


def differences(story: Story) -> Figure:
    rows = [
        {
            "name": c.policy,
            "batch_size": c.batch_size,
            "predicted": c.replay_tps,
            "published": c.live_tps,
            "error": c.error,
        }
        for c in story.live[::-1]
    ]
    cells = _cells(pl.DataFrame(rows), "{:+z.1%}", "{:,.0f}")
    chart = charts.errors(cells, "throughput, difference", ",.0f", "measured")
    note = f"{_DIFFERENCE} predicted / measured tokens per {story.live_second}. {_TOO}"
    return Figure("differences", MEASURED, same_choices(story), note, chart)


def throughput(story: Story) -> Figure:
    note = "Output tokens a second in the steady state."
    diamonds = story.diamonds("published_tps")
    chart = charts.lines(story.points("throughput_tps"), story.palette, BATCH, THROUGHPUT, diamonds)
    return Figure(
        "throughput", CHOICE, fastest(story) or "Throughput by batch size", _with(diamonds, note), chart
    )


def speedup(story: Story) -> Figure:
    diamonds = story.diamonds("published_speedup")
    rule = None if "off" in story.palette else 1.0  # where off is drawn, its own line says it
    chart = charts.lines(story.points("speedup_vs_off"), story.palette, BATCH, FACTOR, diamonds, rule)
    title = full_against_off(story) or "Speed-up over plain decoding"
    line = "the dashed line" if rule else "off, plain decoding"
    note = f"Throughput as a multiple of plain decoding. Below {line}, speculation loses."
    return Figure("speedup", CHOICE, title, _with(diamonds, note), chart)


def keep_ratio(story: Story) -> Figure:
    title = kept(story) or "Share of positions verified"
    note = "Verified positions, anchors included, of all batch × D."
    diamonds = story.diamonds("published_keep")
    axis = Axis("keep ratio", "%", top=1.04)
    chart = charts.lines(story.points("keep_ratio"), story.palette, BATCH, axis, diamonds)
    return Figure("keep-ratio", CHOICE, title, _with(diamonds, note), chart)


def buckets(story: Story) -> Figure:
    rows = [
        {"panel": story.panel(run), "batch_size": run["batch_size"], **part}
        for run in story.runs.sort(_rank(story), "batch_size", maintain_order=True).iter_rows(named=True)
        if len(run["bucket_share"]) > 1
        for part in run["bucket_share"]
        if part["share"] > 0
    ]
    if not rows:
        return Figure(
            "buckets", CHOICE, "Budgets chosen", "replay a policy that chooses among several, such as dcut"
        )
    shares = pl.DataFrame(rows)
    first = shares.filter(panel=shares["panel"][0])
    last = first.filter(batch_size=first["batch_size"][-1]).sort("share").row(-1, named=True)
    title = (
        f"At batch {last['batch_size']} {last['panel']} takes the keep ratio {last['bucket']} "
        f"in {share(last['share'])} of its steps"
    )
    note = "How often each keep ratio was chosen, by batch size."
    wide = shares["panel"].n_unique() > 2
    chart = charts.stacks(shares, charts.WIDE if wide else charts.WIDTH)
    return Figure("buckets", CHOICE, title, note, chart, wide)


def acceptance(story: Story) -> Figure:
    axis = Axis("acceptance length (tokens a request and step)", ".1f")
    chart = charts.lines(story.points("mean_acceptance_length"), story.palette, BATCH, axis)
    note = "Accepted drafts and the bonus token. Cutting drafts costs some of it."
    return Figure("acceptance", CHOICE, gained(story) or "Tokens gained in a step", note, chart)


def ablation(story: Story) -> Figure:
    fixed = [p for p in story.palette if p.partition(":")[0] in ("ratio", "fixed", "full") and story.of(p)]
    gains = {policy: story.both(policy, story.dcut) for policy in fixed} if story.dcut else {}
    gains = {policy: gain for policy, gain in gains.items() if gain}
    if not {*gains} - {"full"}:
        note = "replay dcut and a fixed budget at one batch size, such as --policy dcut,ratio:0.5"
        return Figure("ablation", CHOICE, "One ratio for every step", note)
    drawn = gains | {story.dcut: dict.fromkeys(story.of(str(story.dcut)), 1.0)}
    rows = [(policy, batch, gain) for policy, part in drawn.items() for batch, gain in part.items()]
    best = {policy: min(gain.values()) for policy, gain in gains.items()}
    closest = max(best, key=best.__getitem__)
    low = min(gains[closest], key=gains[closest].__getitem__)
    ahead = [batch for batch, gain in gains[closest].items() if gain > 1]
    title = (
        f"The best fixed budget, {closest}, is {share(1 - best[closest])} behind {story.dcut} at batch {low}"
        if best[closest] < 1
        else f"{closest} is at least as fast as {story.dcut} at every batch size"
    )
    if ahead and best[closest] < 1:
        title += f" and ahead at batch {several(ahead)}"
    points = pl.DataFrame(rows, schema=["name", "x", "value"], orient="row")
    note = f"Throughput of fixed budgets relative to {story.dcut}, which decides anew in every step."
    axis = Axis(f"throughput / {story.dcut}", "%")
    diamonds = story.diamonds("published_against_dcut", list(gains))
    return Figure("ablation", CHOICE, title, note, charts.lines(points, story.palette, BATCH, axis, diamonds))


def cost_curves(story: Story) -> Figure:
    drawn: list[pl.DataFrame] = []
    for result in story.results:
        width = result.runs["draft_length"][0] + 1
        curve = step_times(result.cost, story.batch_sizes, width)
        if not any(curve.equals(other.drop("source")) for other in drawn):
            drawn.append(curve.with_columns(source=pl.lit(result.source)))
    curves = pl.concat(drawn)
    sizes = sorted(set(curves["batch_size"]))
    title = full_cost(drawn[0].filter(batch_size=drawn[0]["batch_size"].max()))
    named = curves.with_columns(name=pl.format("batch {}", "batch_size"))
    chart = charts.lines(named, charts.ramp([f"batch {b}" for b in sizes]), KEPT, Axis("time of a step (ms)"))
    apart = all(len(result.cost.draft) for result in story.results)
    what = "Time of the target's forward pass" if apart else "Step time"
    hollow = "; hollow: steps of plain decoding" if curves["hollow"].any() else ""
    own = [result for result in story.results if result.runs["cost"].has_nulls()]
    sources = dict.fromkeys(str(r.meta["cost_source"]) for r in own if r.meta.get("cost_source"))
    parts = [
        f"{what} by the share of positions verified",
        f"Dots: entries of the cost table{hollow}",
        *sources,
    ]
    return Figure("cost", REASON, title, ". ".join(parts) + ".", chart)


def sensitivity(story: Story) -> Figure:
    if not len(story.against):
        note = f"replay the built-in trace {PUBLISHED_TRACE}, whose costs these published ones stand beside"
        return Figure("sensitivity", REASON, "Dense models and mixtures of experts", note)
    rows = published("cost").filter(bs=64)
    points = rows.select(
        name="model", x="ratio", value=pl.col("cost_ms") / pl.col("cost_ms").first().over("model")
    )
    palette = dict(
        zip(
            points["name"].unique(maintain_order=True),
            (charts.DEEP, charts.FAMILIES["dcut-plus"][0]),
            strict=True,
        )
    )
    dense, experts = (points.filter(name=name)["value"][-1] for name in palette)
    title = (
        f"Verifying four times as much costs {share(dense - 1)} more time on a dense model, "
        f"{share(experts - 1)} on a mixture of experts"
    )
    note = (
        "Published step times at batch 64 (H20), relative to a keep ratio of 25 %. So costs must be measured."
    )
    chart = charts.lines(points, palette, KEPT, Axis("time / time at 25 %", ".1f"))
    return Figure("sensitivity", REASON, title, note, chart)


def depths(story: Story) -> Figure:
    last = story.batch_sizes[-1]
    runs = story.runs.filter(batch_size=last, source=story.sources[0]).sort(_rank(story))
    found = by_position(runs).with_columns(panel="name")
    if not len(found):
        return Figure(
            "depths", REASON, "Accepted and verified by position", "replay a policy that drafts, such as full"
        )
    totals = {
        name: f"{name} verifies {verified:.1f} drafts a request to accept {accepted:.1f}"
        for name, verified, accepted in found.group_by("name", maintain_order=True)
        .agg(pl.col("verified", "accepted").sum())
        .iter_rows()
    }
    told = [name for name in ("full", story.dcut) if name in totals] or [*totals][-1:]
    title = f"At batch {last} " + ", ".join(totals[name] for name in told)
    note = (
        "By draft position. Pale: share of steps that verify it; solid: that accept it. The rest is wasted."
    )
    return Figure("depths", REASON, title, note, charts.depths(found, story.palette, charts.WIDE), wide=True)


def kept_tokens(story: Story) -> Figure:
    name = next(iter(story.traces), "")
    if not isinstance(trace := story.trace(name), Trace):
        return Figure("retention", REASON, "Accepted tokens by budget", f"the replayed trace ({trace})")
    tokens = allocation(trace)
    title = retention(tokens) or "Tokens gained by budget"
    return Figure("retention", REASON, title, f"{name}: {_gained(tokens)}", _allocation(tokens))


def allocations(story: Story) -> Figure:
    if PUBLISHED_TRACE not in story.traces:
        note = f"replay the built-in trace {PUBLISHED_TRACE}; {ALLOCATION_TRACE} is then drawn beside it"
        return Figure("allocation", REASON, "Uniform against confidence", note)
    if not isinstance(trace := story.trace(ALLOCATION_TRACE), Trace):
        return Figure("allocation", REASON, "Uniform against confidence", f"the built-in trace ({trace})")
    tokens = allocation(trace)
    rows = published("allocation").select(
        name=pl.when(pl.col("strategy").str.starts_with("fixed"))
        .then(pl.lit("uniform"))
        .otherwise(pl.lit("by confidence")),
        x="verify_tokens",
        value="accepted_tokens",
    )
    note = f"{ALLOCATION_TRACE}, an easier data set: {_gained(tokens)} {_DIAMONDS}"
    return Figure("allocation", REASON, ranking_gain(tokens), note, _allocation(tokens, rows))


def _gained(tokens: pl.DataFrame) -> str:
    requests = counted(int(tokens["num_verify_tokens"][0]), "request")  # the first row verifies anchors alone
    return (
        f"tokens that {requests} gain in a step when the same number of positions is verified in each alike "
        "(uniform) or where the confidence is highest. Anchors and bonus tokens are counted."
    )


def _allocation(tokens: pl.DataFrame, diamonds: pl.DataFrame | None = None) -> charts.Chart:
    palette = {"by confidence": charts.FAMILIES["dcut"][0], "uniform": charts.FAMILIES["fixed"][0]}
    points = tokens.with_columns(x="num_verify_tokens")
    x, y = Axis("positions verified in a step", "d"), Axis("tokens gained in a step")
    return charts.lines(points, palette, x, y, diamonds)


def honesty(story: Story) -> Figure:
    found = {name: trace for name in story.traces if isinstance(trace := story.trace(name), Trace)}
    if not found:
        return Figure("honesty", TRUST, "Confidence against acceptance", "the replayed trace, in its place")
    points = pl.concat([calibration(trace).with_columns(name=pl.lit(name)) for name, trace in found.items()])
    palette = dict(zip(found, [charts.FAMILIES["dcut"][0], *charts.OTHERS], strict=False))
    accepted = dict(points.filter(name=next(iter(found))).select("bin", "value").iter_rows())
    said = [
        f"{share(accepted[at])} of the drafts scored {where}"
        for at, where in ((9, "above 0.9"), (0, "below 0.1"))
        if at in accepted
    ]
    title = f"Accepted: {several(said)}" if said else "Confidence against acceptance"
    note = "Share of drafts accepted by survival score. On the dashed line, scores are honest probabilities."
    chart = charts.lines(
        points,
        palette,
        Axis("survival score", ".1f", top=1),
        Axis("share accepted", "%", top=1),
        diagonal=True,
    )
    return Figure("honesty", TRUST, title, note, chart)


def prediction(story: Story) -> Figure:
    title = published_error(story)
    if not title:
        note = f"replay the built-in trace {PUBLISHED_TRACE} with its own cost table, under dcut"
        return Figure("published", TRUST, "Predicted against published", note)
    rows = story.against.sort(_rank(story), "batch_size", descending=[True, False])
    labels = [story.panel(r) + " (fitted)" * (r["method"] in FITTED) for r in rows.iter_rows(named=True)]
    rows = rows.select(
        "batch_size",
        "published_keep",
        "keep_ratio",
        name=pl.Series(labels),
        predicted="throughput_tps",
        published="published_tps",
    )
    rate = rows.with_columns(error=pl.col("predicted") / pl.col("published") - 1)
    keep = rows.drop_nulls("published_keep").select(
        "batch_size", "name", predicted="keep_ratio", published="published_keep"
    )
    keep = keep.with_columns(error=pl.col("predicted") - pl.col("published"))
    chart = charts.errors(_cells(rate, "{:+z.1%}", "{:,.0f}"), "throughput, difference", ",.0f")
    if len(keep):
        below = charts.errors(_cells(keep, "{:+z.3f}", "{:.3f}"), "keep ratio, difference", ".3f")
        chart = charts.below(chart, below)
    note = f"{_DIFFERENCE} predicted / published. {_TOO}"
    return Figure("published", TRUST, title, note, chart)


def _with(diamonds: pl.DataFrame | None, note: str) -> str:
    return note if diamonds is None else f"{note} {_DIAMONDS}"


def _cells(rows: pl.DataFrame, difference: str, number: str) -> pl.DataFrame:
    """The rows with what is written into their cells."""
    return rows.with_columns(
        text=pl.Series([difference.format(e).replace("-", "−").replace("%", " %") for e in rows["error"]]),
        detail=pl.Series(
            [
                f"{number.format(a)} / {number.format(b)}"
                for a, b in rows.select("predicted", "published").rows()
            ]
        ),
    )


def drafters(story: Story) -> Figure:
    if not len(story.against):
        note = f"replay the built-in trace {PUBLISHED_TRACE}, the set-up of these published rows"
        return Figure("drafters", TRUST, "Other drafters", note)
    rows = published("throughput").filter(~pl.col("method").str.contains("Fixed"))
    points = rows.select("model", name="method", x="bs", value="steady_output_tok_s")
    families = charts.FAMILIES
    palette = {
        "AR": families["off"][0],
        "DFlash-B16": families["full"][0],
        "D-Cut-B16": families["dcut"][0],
        "D-Cut-B8": families["dcut"][1],
        "EAGLE-3": families["dcut-plus"][0],
        "MTP": families["dcut-plus"][0],
    }
    drawn = {
        str(model): charts.lines(part, palette, BATCH, THROUGHPUT)
        for (model,), part in points.group_by("model", maintain_order=True)
    }
    eagle, cut = (
        dict(points.filter(pl.col("model") == "Qwen3-8B", name=name).select("x", "value").rows())
        for name in ("EAGLE-3", "D-Cut-B16")
    )
    ahead = [batch for batch in eagle if cut[batch] > eagle[batch]]
    title = (
        f"Published beside other drafters: D-Cut-B16 beats EAGLE-3 on Qwen3-8B at batch {several(ahead)} only"
    )
    note = (
        "Published rows, redrawn: these methods are not replayed here. AR is plain decoding, DFlash-B16 full "
        "verification of 16 positions, MTP the model's own drafter."
    )
    return Figure("drafters", TRUST, title, note, charts.beside(drawn), wide=True)


def _rank(story: Story) -> pl.Expr:
    """Policies in the order of the palette."""
    return pl.col("policy").replace_strict(list(story.palette), list(range(len(story.palette))))


def latencies(story: Story) -> Figure:
    labels, palette = _served(story)
    names = {
        "ttft_s": "time to first token (s)",
        "tpot_s": "time per output token (s)",
        "e2e_s": "end to end (s)",
    }
    spans = [
        {"panel": title, "name": label, **{q: run[f"{name}_{q}"] for q in ("p50", "p90", "p99")}}
        for name, title in names.items()
        for label, run in labels.items()
        if run[f"{name}_p50"] is not None
    ]
    note = (
        "Filled: half of the requests are served within; tick: 90 %; hollow: 99 %. From arrival to the first "
        "token, between output tokens after it, and from arrival to the last. In the table: median / 99 %."
    )
    chart = charts.spans(pl.DataFrame(spans), palette, charts.WIDE)
    return Figure(
        "latencies", TRAFFIC, waiting(story) or "Latencies", note, chart, True, _traffic_rows(labels)
    )


def goodput(story: Story) -> Figure:
    labels, palette = _served(story)
    bars = [
        {
            "name": label,
            "whole": run["throughput_tps"],
            "part": run["token_goodput_tps"],
            "text": share(run["kept_share"], 1),
        }
        for label, run in labels.items()
    ]
    slo = story.traffic[0].meta.get("slo") or {}
    promised = [f"{name.upper()} within {value:g} s" for name, value in slo.items() if value is not None]
    best = max(bars, key=lambda bar: bar["part"])
    if promised:
        title = (
            f"{best['name']} brings {best['part']:,.0f} tokens a second to the {best['text']} of requests "
        )
        title += "that it serves as promised"
        note = f"Solid, and behind the bar as a share of requests: those served with {several(promised)}."
    else:
        title = f"{best['name']} brings {best['part']:,.0f} tokens a second under traffic"
        note = "From the first arrival to the last token. Nothing was promised (--slo)."
    return Figure("goodput", TRAFFIC, title, note, charts.bars(pl.DataFrame(bars), palette, "tokens/s"))


def _served(story: Story) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The runs under traffic by the name that each has in a chart, and its color."""
    labels: dict[str, dict[str, Any]] = {}
    for result in story.traffic:
        for run in result.runs.iter_rows(named=True):
            label = run["policy"] if len(story.traffic) == 1 else f"{run['policy']} ({result.source})"
            labels[label] = run
    order = [*story.palette]
    labels = dict(sorted(labels.items(), key=lambda item: order.index(item[1]["policy"])))
    return labels, {label: story.palette[run["policy"]] for label, run in labels.items()}


def _traffic_rows(labels: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    def pair(run: dict[str, Any], name: str, unit: float = 1.0) -> str:
        low, high = run[f"{name}_p50"], run[f"{name}_p99"]
        return "–" if low is None else f"{low * unit:.3g} / {high * unit:.3g}"

    return [
        {
            "policy": label,
            "seats": run["batch_size"],
            "tokens/s": f"{run['throughput_tps']:,.0f}",
            "goodput": f"{run['token_goodput_tps']:,.0f}",
            "kept": share(run["kept_share"], 1),
            "TTFT, s": pair(run, "ttft_s"),
            "TPOT, ms": pair(run, "tpot_s", 1e3),
            "end to end, s": pair(run, "e2e_s"),
            "keep ratio": f"{run['keep_ratio']:.3f}",
            "acceptance length": f"{run['mean_acceptance_length']:.2f}",
            "running": f"{run['num_running_mean']:.1f}",
            "waiting": f"{run['num_waiting_mean']:.1f}",
            "evicted": run["num_preempted"],
        }
        for label, run in labels.items()
    ]


LIVE = (predicted, differences)
UNDER_TRAFFIC = (latencies, goodput)
FIGURES = (
    throughput,
    speedup,
    keep_ratio,
    acceptance,
    ablation,
    buckets,
    cost_curves,
    sensitivity,
    kept_tokens,
    allocations,
    depths,
    prediction,
    honesty,
    drafters,
)
