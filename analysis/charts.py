"""The pictures of a report: tidy frames in, Altair charts out, one color for a policy in all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

Chart = alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart

# Neutral colors. On a dark screen the page swaps the first three; text on a pale cell stays as it is.
INK, MUTED, GRID, ON_PALE = "#1f2328", "#5f6872", "#dde1e6", "#20242a"

# Okabe and Ito's hues, told apart with any color vision, at a lightness that suits paper and dark screens.
# Members of one family (ratio:0.75, ratio:0.5) take its shades in turn, so that kinship shows.
FAMILIES = {
    "off": ["#7a828c"],
    "full": ["#d4551a"],
    "fixed": ["#b0639f", "#d08fc2", "#83407a"],
    "ratio": ["#0f7d5c", "#4fb58f", "#7fce9f"],
    "dcut": ["#2a78c8", "#6aa9e6", "#1b4f8c"],
    "dcut-plus": ["#c27c00", "#e0a93f"],
}
OTHERS = ["#6b5fb5", "#3f98ad", "#c2527a", "#7a9a2e", "#8a6d3b", "#5b7fa6", "#a35d2e"]
PALE, DEEP = "#a3c8ee", "#1f63ad"  # ends of the ramp for ordered things: buckets, batch sizes

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelOverlap": True,
        "labelFlush": False,
    },
    "axisX": {"grid": False, "titlePadding": 8},
    "axisY": {  # the title stands above the axis, where it reads without turning the head
        "domain": False,
        "ticks": False,
        "labelPadding": 9,
        "tickCount": 5,
        "titleAngle": 0,
        "titleAnchor": "end",
        "titleAlign": "left",
        "titleBaseline": "bottom",
        "titleY": -10,
        "titleX": 0,
    },
    "legend": {
        "orient": "top",
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
    },
    "header": {
        "labelColor": INK,
        "labelFontSize": 12,
        "labelFontWeight": "bold",
        "labelAnchor": "start",
        "labelPadding": 28,
    },
    "line": {"strokeWidth": 2.2},
    "point": {"filled": True, "size": 46, "opacity": 1},
    "rule": {"color": MUTED, "strokeDash": [3, 3]},
    "text": {"fontSize": 12, "color": INK},
    "title": {
        "color": INK,
        "subtitleColor": MUTED,
        "anchor": "start",
        "fontSize": 15,
        "subtitleFontSize": 12,
        "subtitlePadding": 6,
        "offset": 18,
    },
}

WIDTH, WIDE, HEIGHT = 390, 1000, 260
_LABEL_PX = 15  # least distance between the names at the end of lines
_COLUMNS = 5  # panels in a row
_DASHES = [[1, 0], [5, 3], [2, 2], [8, 3, 2, 3]]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows: its title with the unit, the d3 format of its numbers, and where it runs."""

    title: str
    form: str = ",.0f"
    low: float = 0.0
    top: float | None = None  # None: a little above the largest value
    doubling: bool = False  # equal steps for equal factors, ticks at the values themselves


BATCH = Axis("batch size (requests)", "d", doubling=True)
KEPT = Axis("keep ratio (share of positions verified)", "%", top=1)


def policy_order(policy: str) -> tuple[int, float, str]:
    """A sort key: families in the order of FAMILIES, larger options first, others by name at the end."""
    family, _, option = policy.partition(":")
    number = float(option) if option.replace(".", "", 1).isdigit() else 0.0
    return [*FAMILIES, family].index(family), -number, policy


def colors(policies: Sequence[str]) -> dict[str, str]:
    """A color for every policy, in the order in which they are listed."""
    chosen: dict[str, str] = {}
    used: dict[str, int] = {}
    for policy in sorted(set(policies), key=policy_order):
        family = policy.partition(":")[0]
        shades, family = (FAMILIES[family], family) if family in FAMILIES else (OTHERS, "other")
        chosen[policy] = shades[used.get(family, 0) % len(shades)]
        used[family] = used.get(family, 0) + 1
    return chosen


def spread(values: Sequence[float], gap: float, low: float = 0.0) -> list[float]:
    """The values moved apart, as little as it takes: no two closer than `gap`, none below `low`."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[tuple[float, int]] = []  # center and size: values that would collide share a group
    for i in order:
        groups.append((values[i], 1))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            (below, few), (above, more) = groups[-2:]
            groups[-2:] = [((below * few + above * more) / (few + more), few + more)]
    placed = [center + gap * (k - (size - 1) / 2) for center, size in groups for k in range(size)]
    placed = [max(place, low + gap * k) for k, place in enumerate(placed)]
    return [place for _, place in sorted(zip(order, placed, strict=True))]


def ramp(names: Sequence[Any]) -> dict[str, str]:
    """A color for each of several ordered things, from pale to deep."""
    ends = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (PALE, DEEP)]
    steps = [i / max(1, len(names) - 1) for i in range(len(names))]
    mixed = [[round(a + (b - a) * step) for a, b in zip(*ends, strict=True)] for step in steps]
    return {str(name): "#{:02x}{:02x}{:02x}".format(*rgb) for name, rgb in zip(names, mixed, strict=True)}


def lines(
    points: pl.DataFrame,
    palette: Mapping[str, str],
    x: Axis,
    y: Axis,
    published: pl.DataFrame | None = None,
    rule: float | None = None,
    diagonal: bool = False,
) -> Chart:
    """Lines through points: a color a name, written at the right end, and a dash a source.

    points: name, x, value, and optionally source, and dot and hollow (false where the line has no point, and
    where it is filled). published: name, x, value, drawn as hollow diamonds. rule: a value to compare with,
    drawn across; diagonal: compare with value = x.
    """
    published = points.clear() if published is None else published
    top = y.top or max([*points["value"], *published["value"], rule or 0.0]) * 1.06
    sources = list(dict.fromkeys(points["source"])) if "source" in points.columns else []
    at = alt.X("x:Q", title=x.title, scale=_x_scale(x, points["x"]), axis=_x_axis(x, points["x"]))
    height = alt.Y("value:Q", scale=_exact(y.low, top), axis=alt.Axis(title=y.title, format=y.form))
    color = alt.Color("name:N", scale=_scale(palette), legend=None)
    about = [
        alt.Tooltip("name:N"),
        alt.Tooltip("x:Q", title=x.title, format=".0%" if x.form == "%" else x.form),
        alt.Tooltip("value:Q", title=y.title, format=".1%" if y.form == "%" else y.form),
    ]
    base = alt.Chart(points).encode(x=at, y=height, color=color)
    line, dots, layers = base.mark_line(), base.mark_point(), []
    if len(sources) > 1:
        dash = alt.Scale(domain=sources, range=[_DASHES[i % len(_DASHES)] for i in range(len(sources))])
        line = line.encode(
            strokeDash=alt.StrokeDash("source:N", scale=dash, legend=alt.Legend(orient="bottom", title=None))
        )
        about.append(alt.Tooltip("source:N"))
    if "dot" in points.columns:
        hollow = base.mark_point(filled=False, strokeWidth=1.6).encode(tooltip=about)
        layers.append(hollow.transform_filter("datum.hollow"))
        dots = dots.transform_filter("datum.dot && !datum.hollow")
    ends = points.sort("x", maintain_order=True).group_by("name", maintain_order=True).last()
    ends = ends.with_columns(
        value=pl.Series(spread(ends["value"].to_list(), (top - y.low) * _LABEL_PX / HEIGHT, y.low))
    )
    layers = [line, dots.encode(tooltip=about), *layers]
    if rule is not None:
        layers.insert(0, alt.Chart(pl.DataFrame({"value": [rule]})).mark_rule().encode(y=height))
    if diagonal:
        ends_of = pl.DataFrame({"x": [y.low, top], "value": [y.low, top]})
        layers.insert(0, alt.Chart(ends_of).mark_line(**CONFIG["rule"], strokeWidth=1).encode(x=at, y=height))
    if len(published):
        diamonds = alt.Chart(published).mark_point(shape="diamond", filled=False, size=120, strokeWidth=1.6)
        layers.append(diamonds.encode(x=at, y=height, color=color, tooltip=about[:3]))
    names = alt.Chart(ends).mark_text(align="left", dx=12, fontWeight=600)
    layers.append(names.encode(x=at, y=height, color=color, text="name:N"))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def stacks(shares: pl.DataFrame, width: int) -> Chart:
    """How often each budget was chosen: panel, batch_size, bucket, share; a stack a batch size."""
    panels = list(dict.fromkeys(shares["panel"]))
    number = pl.col("bucket").cast(pl.Float64, strict=False).fill_null(-1)  # "off" comes before any ratio
    ranked = shares.with_columns(rank=number).sort("rank", maintain_order=True)
    labels = list(dict.fromkeys(ranked["bucket"]))
    ratios = [label for label in labels if label != "off"]
    shades = ({"off": FAMILIES["off"][0]} if "off" in labels else {}) | ramp(ratios)
    return (
        alt.Chart(ranked)
        .mark_bar()
        .encode(
            x=alt.X("batch_size:O", title=BATCH.title, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("share:Q", title="share of steps", scale=_exact(0, 1), axis=alt.Axis(format="%")),
            color=alt.Color("bucket:N", title="keep ratio chosen", scale=_scale(shades)),
            order=alt.Order("rank:Q"),
            tooltip=[
                alt.Tooltip("panel:N", title="policy"),
                alt.Tooltip("batch_size:O", title="batch size"),
                alt.Tooltip("bucket:N", title="keep ratio"),
                alt.Tooltip("share:Q", title="share of steps", format=".1%"),
            ],
        )
        .properties(width=_panel_width(len(panels), width), height=HEIGHT)
        .facet(facet=alt.Facet("panel:N", title=None, sort=panels), columns=_COLUMNS)
    )


def depths(positions: pl.DataFrame, palette: Mapping[str, str], width: int) -> Chart:
    """Drafts verified (pale) and accepted (solid): panel, name, x (draft position), verified, accepted."""
    panels = list(dict.fromkeys(positions["panel"]))
    marked = [k for k in sorted(set(positions["x"])) if k == 1 or k % 5 == 0]
    x = alt.X("x:O", title="draft position", axis=alt.Axis(labelAngle=0, values=marked))
    color = alt.Color("name:N", scale=_scale(palette), legend=None)
    tooltip = [
        alt.Tooltip("panel:N", title="policy"),
        alt.Tooltip("x:O", title="draft position"),
        alt.Tooltip("verified:Q", format=".1%"),
        alt.Tooltip("accepted:Q", format=".1%"),
    ]
    share = alt.Axis(format="%", title="share of steps and requests")
    base = alt.Chart().encode(x=x, color=color, tooltip=tooltip)
    return (
        alt.layer(
            base.mark_bar(opacity=0.3).encode(y=alt.Y("verified:Q", scale=_exact(0, 1), axis=share)),
            base.mark_bar().encode(y=alt.Y("accepted:Q", scale=_exact(0, 1), axis=share)),
            data=positions,
        )
        .properties(width=_panel_width(len(panels), width), height=HEIGHT - 60)
        .facet(facet=alt.Facet("panel:N", title=None, sort=panels), columns=_COLUMNS)
    )


def errors(cells: pl.DataFrame, title: str, form: str, truth: str = "published") -> Chart:
    """Predicted against published, a cell each: name, batch_size, predicted, published, error, text, detail.

    error: what colors the cell, between -0.1 (blue) and 0.1 (orange); text and detail are written into it.
    truth: what to call the published values.
    """
    names = list(dict.fromkeys(cells["name"]))
    base = alt.Chart(cells).encode(
        x=alt.X("batch_size:O", title=BATCH.title, axis=alt.Axis(labelAngle=0, domain=False, ticks=False)),
        y=alt.Y("name:N", sort=names, axis=alt.Axis(title=title, labelColor=INK)),
        tooltip=[
            alt.Tooltip("name:N", title="policy"),
            alt.Tooltip("batch_size:O", title="batch size"),
            alt.Tooltip("predicted:Q", format=form),
            alt.Tooltip("published:Q", title=truth, format=form),
            alt.Tooltip("text:N", title="difference"),
        ],
    )
    scale = alt.Scale(
        clamp=True, interpolate="rgb", domain=[-0.1, 0, 0.1], range=["#6aa9e6", "#f1f3f5", "#f0a04b"]
    )
    return alt.layer(
        base.mark_rect(cornerRadius=3).encode(color=alt.Color("error:Q", scale=scale, legend=None)),
        base.mark_text(dy=-7, fontWeight=600, color=ON_PALE).encode(text="text:N"),
        base.mark_text(dy=9, fontSize=10.5, color=ON_PALE).encode(text="detail:N"),
    ).properties(width=alt.Step(86), height=alt.Step(44))


def spans(times: pl.DataFrame, palette: Mapping[str, str], width: int) -> Chart:
    """How long most take, a row a name: panel, name, p50, p90, p99; each panel has an axis of its own."""
    names, panels = list(palette), list(dict.fromkeys(times["panel"]))
    drawn = []
    for at, panel in enumerate(panels):
        part = times.filter(panel=panel)
        most = max(part["p99"]) * 1.06
        rows = alt.Axis(title=None, labelColor=INK, grid=True) if at == 0 else None
        base = alt.Chart(part).encode(
            y=alt.Y("name:N", sort=names, axis=rows),
            color=alt.Color("name:N", scale=_scale(palette), legend=None),
            tooltip=["name:N", *(alt.Tooltip(f"{q}:Q", format=".3g") for q in ("p50", "p90", "p99"))],
        )

        def at_share(mark: alt.Chart, share: str, title: str = panel, top: float = most) -> alt.Chart:
            x = alt.X(f"{share}:Q", title=title, scale=_exact(0, top), axis=alt.Axis(grid=True, tickCount=4))
            return mark.encode(x=x)

        layers = [
            at_share(base.mark_rule(strokeDash=[1, 0], strokeWidth=2), "p50").encode(x2="p99:Q"),
            at_share(base.mark_tick(thickness=2, size=12), "p90"),
            at_share(base.mark_point(), "p50"),
            at_share(base.mark_point(filled=False, strokeWidth=1.6), "p99"),
        ]
        size = {"width": _panel_width(len(panels), width - 110), "height": alt.Step(30)}
        drawn.append(alt.layer(*layers).properties(**size))
    return alt.hconcat(*drawn)


def bars(amounts: pl.DataFrame, palette: Mapping[str, str], title: str) -> Chart:
    """A bar a name, its part solid, and a word behind it: name, whole, part, text."""
    base = alt.Chart(amounts).encode(
        y=alt.Y("name:N", sort=list(palette), axis=alt.Axis(title=None, labelColor=INK)),
        color=alt.Color("name:N", scale=_scale(palette), legend=None),
        tooltip=[
            "name:N",
            *(alt.Tooltip(f"{part}:Q", format=",.0f") for part in ("whole", "part")),
            "text:N",
        ],
    )
    top = max(amounts["whole"]) * 1.2

    def along(column: str) -> alt.X:
        return alt.X(
            f"{column}:Q", title=title, scale=_exact(0, top), axis=alt.Axis(format=",.0f", tickCount=5)
        )

    return alt.layer(
        base.mark_bar(opacity=0.3).encode(x=along("whole")),
        base.mark_bar().encode(x=along("part")),
        base.mark_text(align="left", dx=6).encode(x=along("whole"), text="text:N", color=alt.value(INK)),
    ).properties(width=WIDTH - 60, height=alt.Step(30))


def beside(charts: Mapping[str, Any]) -> Chart:
    """Several charts in a row, each with its name above it."""
    style: dict[str, Any] = {"fontSize": 12, "fontWeight": "bold", "anchor": "start", "offset": 22}
    return alt.hconcat(*(chart.properties(title=alt.Title(name, **style)) for name, chart in charts.items()))


def below(*rows: Any) -> Chart:
    """Several charts, one below the other."""
    return alt.vconcat(*rows)


def _scale(palette: Mapping[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(palette), range=list(palette.values()))


def _exact(low: float, top: float) -> alt.Scale:
    return alt.Scale(domain=[low, top], nice=False)


def _x_scale(axis: Axis, values: pl.Series) -> alt.Scale:
    least, most = min(values), max(values)
    if not axis.doubling:
        return _exact(axis.low, axis.top or most)
    domain = [least, most] if least < most else [least / 2, most * 2]
    return alt.Scale(type="log", base=2, nice=False, domain=domain)


def _x_axis(axis: Axis, values: pl.Series) -> alt.Axis:
    if axis.doubling:
        return alt.Axis(format=axis.form, values=sorted(set(values.to_list())))
    return alt.Axis(format=axis.form, tickCount=5)


def _panel_width(num_panels: int, width: int) -> float:
    """Width of each of several panels that share a row, or several."""
    in_row = min(num_panels, _COLUMNS)
    return max(90, (width - 24 * (in_row - 1)) / in_row)
