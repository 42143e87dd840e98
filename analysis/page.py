"""The report's page: one HTML file that loads nothing, and the same figures as PNG."""

import json
import textwrap
from collections.abc import Sequence
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import altair as alt
import vl_convert

from analysis.charts import CONFIG, GRID, INK, MUTED
from analysis.figures import Figure
from dcut.policies import POLICIES

GLOSSARY = {
    "draft": "A token that the small model (the drafter) proposes. D − 1 of them follow each known token.",
    "position": "A place in the target's forward pass: an anchor or a draft. A batch has batch × D of them.",
    "anchor": "The newest known token of a request. It is always verified.",
    "keep ratio": "The share of positions that the target verifies. Plain decoding verifies 1 / D.",
    "bonus token": "The one token that every verification yields, whatever becomes of the drafts.",
    "acceptance length": "Tokens that a request gains in a step: accepted drafts plus the bonus token.",
    "wasted": "Rejected drafts, as a share of all verified positions.",
    "survival score": "A draft's confidence times those before it: its estimated chance of being accepted.",
    "steady state": "The steps in which at least 85 % of the batch is active. All rates are measured there.",
}

_PAGE = Path(__file__).with_name("page.html")


def html(
    title: str,
    subtitle: str,
    headlines: Sequence[str],
    figures: Sequence[Figure],
    runs: Sequence[dict[str, Any]],
    policies: Sequence[str],
) -> str:
    """The whole page. Figures without a chart become a line that says what would bring them.

    runs: rows of the table, all with the same columns, policy and batch size first; without any, no table.
    """
    drawn = [figure for figure in figures if figure.chart is not None]
    absent = [figure for figure in figures if figure.chart is None]
    sections = [
        f'<h2>{escape(section)}</h2>\n<div class="figures">{"".join(map(_figure, part))}</div>'
        for section, part in groupby(drawn, key=lambda figure: figure.section)
    ]
    lines = "".join(f"<p><b>{escape(f.title)}</b>: {escape(f.note)}.</p>" for f in absent)
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        headlines="".join(f"<li>{escape(sentence)}.</li>" for sentence in headlines),
        sections="\n".join(sections),
        runs=f'<h2>Runs</h2>\n<div class="scroll"><table>{_table(runs)}</table></div>' if runs else "",
        absent=f"<h2>Not drawn</h2>\n{lines}" if absent else "",
        glossary="".join(
            f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in _words(policies).items()
        ),
        bundle=_bundle(),
        config=_script(CONFIG),
        specs=_script({figure.name: _spec(figure) for figure in drawn}),
        names=3 if runs and "source" in runs[0] else 2,
        ink=INK,
        muted=MUTED,
        grid=GRID,
    )


def png(figure: Figure) -> bytes:
    """The figure as a PNG of twice its size in points, with its title, on white."""
    columns = 130 if figure.wide else 68
    title = {
        "text": textwrap.wrap(figure.title, columns - 10),
        "subtitle": textwrap.wrap(figure.note, columns + 10),
    }
    spec = _spec(figure) | {"title": title, "padding": 14}
    config = CONFIG | {"background": "white", "font": "DejaVu Sans, sans-serif"}
    return vl_convert.vegalite_to_png(spec, vl_version=_version(), scale=2, config=config)


def _words(policies: Sequence[str]) -> dict[str, str]:
    """The glossary, and of every policy that was run the first sentence of its own description."""
    families = dict.fromkeys(policy.partition(":")[0] for policy in policies)
    kinds = {name: POLICIES[name] for name in families if name in POLICIES}
    return GLOSSARY | {name: _first_sentence(kind.__doc__ or "") for name, kind in kinds.items()}


def _first_sentence(text: str) -> str:
    """The first paragraph of a docstring as plain text."""
    return " ".join(text.partition("\n\n")[0].replace("`", "").split())


def _figure(figure: Figure) -> str:
    table = f'<div class="scroll"><table>{_table(figure.rows)}</table></div>' if figure.rows else ""
    return (
        f'<figure class="{"wide" if figure.wide else "half"}" id="{figure.name}">'
        f"<figcaption><h3>{escape(figure.title)}</h3><p>{escape(figure.note)}</p></figcaption>"
        f'<div><div class="chart" id="chart-{figure.name}"></div>{table}</div></figure>\n'
    )


def _table(runs: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in runs[0])
    rows = []
    for before, run in zip([runs[0], *runs], runs, strict=False):
        next_size = ' class="next"' if run.get("batch") != before.get("batch") else ""
        rows.append(
            f"<tr{next_size}>{''.join(f'<td>{escape(str(cell))}</td>' for cell in run.values())}</tr>"
        )
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _spec(figure: Figure) -> dict[str, Any]:
    """The Vega-Lite specification, without Altair's own configuration."""
    spec = figure.chart.to_dict()
    return {key: value for key, value in spec.items() if key != "config"} | {"description": figure.title}


def _script(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _version())


def _version() -> str:
    """The Vega-Lite version that Altair writes, as vl-convert names it: "v6.4"."""
    return ".".join(alt.SCHEMA_VERSION.split(".")[:2])
