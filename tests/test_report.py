"""The report says what the runs say, stands beside the published figures, and loads nothing from anywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from scenes import make_trace

from analysis import charts, figures, page, report
from analysis.figures import (
    FIGURES,
    Figure,
    Story,
    cost_curves,
    full_against_off,
    full_cost,
    headlines,
    honesty,
    ranking_gain,
    retention,
    speedup,
)
from analysis.results import PUBLISHED, Results, against_published, allocation, calibration, load, step_times
from dcut.cost import CostTable, Sample
from dcut.errors import guard
from sim.latencies import Slo
from sim.load import Load, replay_load
from sim.replay import Config, replay
from sim.scheduler import Limits
from sim.validate import Comparison
from traces.store import BUILTIN, open_trace, read_directory

SIZES = (4, 16, 64)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory of the published set-up, smaller than the demo's."""
    out = tmp_path_factory.mktemp("results") / "replay"
    policies = "off,full,ratio:0.75,ratio:0.5,dcut"
    replay(Config(policy=policies, batch_sizes=SIZES, requests=128, out=str(out)))
    return out


@pytest.fixture(scope="session")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a report with its pictures."""
    out = tmp_path_factory.mktemp("report")
    report.report([str(results)], str(out / "report.html"), str(out / "png"))
    return out


@pytest.fixture(scope="session")
def text(written: Path) -> str:
    return (written / "report.html").read_text(encoding="utf-8")


def specs(text: str) -> dict[str, dict]:
    """The Vega-Lite specifications inside a page."""
    line = next(line for line in text.splitlines() if "Object.entries(" in line)
    return json.loads(line.partition("Object.entries(")[2].rpartition(")) vegaEmbed")[0])


def made_up(throughput: dict[tuple[str, int], float], results: Path) -> Story:
    """A story of the given throughputs alone; everything else is that of real runs."""
    first = load([results])[0]
    row = first.runs.row(0, named=True) | {"trace": "elsewhere"}
    rows = [
        row | {"policy": policy, "batch_size": batch, "throughput_tps": tps}
        for (policy, batch), tps in throughput.items()
    ]
    runs = pl.DataFrame(rows, schema=first.runs.schema)
    return Story([Results("made-up", first.meta, runs, first.cost)])


# ---- the page --------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_tells_the_browser_to_refuse_it(text: str) -> None:
    script = re.compile(r"<script>.*?</script>", re.DOTALL)
    markup = script.sub("", text)
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc=|\bhref=|@import|url\(", markup)
    assert "http" not in markup.replace("http-equiv", "")
    assert "default-src 'none'" in markup
    assert len(script.findall(text)) == 2  # the Vega bundle once, and the charts
    assert text.count("</script>") == 2
    for spec in specs(text).values():
        assert spec.pop("$schema").startswith(
            "https://vega.github.io/schema/vega-lite/"
        )  # a name, not loaded
        assert "http" not in json.dumps(spec)
        assert '"url"' not in json.dumps(spec)


def test_every_figure_is_drawn_for_the_published_trace(text: str, written: Path) -> None:
    assert len(specs(text)) == len(FIGURES)
    assert "Not drawn" not in text
    for name in specs(text):
        assert f'id="chart-{name}"' in text
        assert (written / "png" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_published_cell_of_the_runs_is_shown_with_its_error(results: Path, text: str) -> None:
    cells = against_published(load([results])[0].runs)
    assert len(cells) == 5 * len(SIZES)
    shown = json.dumps(specs(text)["published"], ensure_ascii=False)
    for cell in cells.iter_rows(named=True):
        assert f"{cell['throughput_tps']:,.0f} / {cell['published_tps']:,.0f}" in shown
        if cell["method"] == "D-Cut-B16":
            assert f"{cell['keep_ratio']:.3f} / {cell['published_keep']:.3f}" in shown


def test_a_policy_has_one_color_in_all_charts(text: str) -> None:
    palettes = re.findall(r'"domain":(\["off"[^]]*\]),"range":(\[[^]]*\])', text)
    assert len(palettes) > 8
    assert len(set(palettes)) == 1
    domain, colors = map(json.loads, palettes[0])
    assert domain == ["off", "full", "ratio:0.75", "ratio:0.5", "dcut"]
    assert len(set(colors)) == 5


def test_what_the_runs_do_not_hold_is_left_out_and_named(results: Path) -> None:
    story = made_up({("off", 8): 100.0}, results)
    figures = [draw(story) for draw in FIGURES]
    absent = {figure.name for figure in figures if figure.chart is None}
    assert absent >= {"buckets", "ablation", "retention", "allocation", "published", "depths"}
    text = page.html("title", "", headlines(story), figures, [{"batch": 8, "policy": "off"}], ["off"])
    assert "Not drawn" in text
    assert "no trace &#x27;elsewhere&#x27;" in text
    assert {*specs(text)} == {figure.name for figure in figures} - absent


def test_names_from_outside_cannot_break_out_of_the_page(results: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    story = made_up({("off", 8): 100.0, (evil, 8): 50.0}, results)
    figures = [draw(story) for draw in FIGURES]
    text = page.html(
        evil, evil, [evil], [*figures, Figure("x", evil, evil, evil)], [{"batch": 8, "policy": evil}], [evil]
    )
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_several_results_are_told_apart_and_compared(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "replay"
    replay(Config(policy="off,dcut", batch_sizes=(4,), requests=64, seed=1, out=str(other)))
    story = Story(load([results, other]))
    assert story.sources[0].endswith("/replay")
    assert story.sources[1].endswith("/replay")
    assert len({*story.sources}) == 2
    assert "over 2 runs that both have" in headlines(story)[-1]
    dashes = json.dumps(
        next(f for draw in FIGURES if (f := draw(story)).name == "throughput").chart.to_dict()
    )
    assert all(source in dashes for source in story.sources)


def test_a_name_that_is_not_utf_8_is_shown_as_well_as_can_be(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results, tmp_path / os.fsdecode(b"gr\xfcn"))
    assert load([tmp_path / os.fsdecode(b"gr\xfcn")])[0].source == "gr\N{REPLACEMENT CHARACTER}n"


# ---- live runs, and runs under traffic -------------------------------------------------------------------


def test_the_page_opens_with_live_runs_beside_their_replays(results: Path, tmp_path: Path) -> None:
    recording = BUILTIN / "tiny-pair"  # the run behind it is a live one, under full verification
    out = tmp_path / "report.html"
    report.report([str(results)], str(out), None, str(recording), "tiny-pair")
    text = out.read_text(encoding="utf-8")
    assert [*specs(text)][:2] == ["predicted", "differences"]
    assert text.index("Predicted beside measured</h2>") < text.index("Which policy</h2>")
    trace = open_trace("tiny-pair")
    steady = trace.steps.filter(pl.col("batch_size") >= 0.85 * 8)
    measured = float(steady["num_emitted"].sum()) / float(steady["step_s"].sum())
    (cell,) = next(iter(specs(text)["differences"]["datasets"].values()))
    assert (cell["name"], cell["batch_size"]) == ("full", 8)
    assert cell["published"] == pytest.approx(measured)
    assert cell["error"] == pytest.approx(cell["predicted"] / measured - 1)
    assert abs(cell["error"]) < 0.2
    served = f"qwen3, 6 layers, 2.98 M parameters with dflash16 on {trace.meta['device']}"
    assert f"served live ({served})" in text
    assert (
        f"1 live run of {served} · replay: Qwen3-8B with DFlash, block 16 (generated from published figures)"
        " · D = 16 · batch 4, 16, 64 · 15 runs from replay<"
    ) in text
    assert "throughput (tokens per CPU second)" in json.dumps(specs(text)["predicted"])
    assert "predicted / measured tokens per CPU second" in text
    assert f"{cell['predicted']:,.0f} / {measured:,.0f}" == cell["detail"]
    shown = re.findall(r"<li>(.*?)</li>", text)
    assert shown[0].startswith(
        f"Predicted throughput is {100 * abs(cell['error']):.1f}\N{NO-BREAK SPACE}% off"
    )
    tokens, decisions = trace.requests["output_tokens"].sum(), len(trace.decisions)
    assert f"100.00\N{NO-BREAK SPACE}% of {tokens:,} tokens" in text
    assert f"100.00\N{NO-BREAK SPACE}% of {decisions:,} decisions" in text


def test_fidelity_is_the_median_and_the_worst_error() -> None:
    counts = {"num_tokens": 200, "num_equal_tokens": 199, "num_decisions": 50, "num_equal_decisions": 49}
    rates = (("off", 4, 100, 102), ("full", 4, 100, 90), ("dcut", 8, 200, 206))
    live = [Comparison(p, b, **counts, live_tps=live, replay_tps=replay) for p, b, live, replay in rates]
    about = {"target": "target: qwen3, 6 layers, 2.98 M parameters", "drafter": "dflash16", "device": "a CPU"}
    story = Story([], live, [about | {"clock": "cpu"}] * 3)
    said = figures.fidelity(story)
    assert said is not None
    assert said.replace("\N{NO-BREAK SPACE}", " ") == (
        "Predicted throughput is 3.0 % off the measured on the median of 3 live runs "
        "(qwen3, 2.98 M parameters with dflash16), 10.0 % at worst (full at batch 4)"
    )
    assert "99.50 % of 600 tokens and 98.00 % of 150 decisions" in figures.same_choices(story).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert headlines(story) == [said]
    assert story.live_second == "CPU second"
    assert Story([], live, [about | {"clock": "wall"}]).live_second == "second"
    both = Story([], live, [about, {"target": "llama", "device": "a GPU", "clock": "cpu"}])
    assert both.live_second == "second or CPU second"
    assert both.live_place.endswith("with dflash16 and llama on a CPU and a GPU")


def test_the_subtitle_says_what_was_replayed_and_how_it_was_timed(tmp_path: Path) -> None:
    shutil.copytree(BUILTIN / "tiny-pair", tmp_path / "fitted")
    meta = json.loads((tmp_path / "fitted" / "meta.json").read_text())
    changed = {"engine": "generated by traces.fit", "target": None, "drafter": None, "clock": None}
    (tmp_path / "fitted" / "meta.json").write_text(json.dumps(meta | changed))
    for name, trace in (("recorded", "tiny-pair"), ("other", str(tmp_path / "fitted"))):
        replay(Config(trace=trace, policy="off", batch_sizes=(4,), requests=8, out=str(tmp_path / name)))
    said = report._subtitle(Story(load([tmp_path / "recorded", tmp_path / "other"])))
    assert said.startswith(
        "replay: qwen3, 6 layers, 2.98 M parameters with dflash16 (times are CPU seconds of one thread) and "
        "an unnamed pair (generated by traces.fit) · D = 16 · batch 4 · 2 runs from "
    )


@pytest.mark.parametrize("options", [(), ("--wall",)])
def test_the_table_of_live_runs_says_when_its_seconds_are_a_cpus(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    short = ["--policy=full", "--batch-size=1", "--requests=1", "--max-tokens=8", "--profile-s=0.1"]
    command = [sys.executable, "bench/live.py", *short, f"--out={tmp_path / 'live'}", *options]
    root = Path(__file__).parents[1]
    said = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout
    assert said.startswith(
        "batch  policy" if options else "times are CPU seconds of one thread\nbatch  policy"
    )


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory of a little traffic."""
    out = tmp_path_factory.mktemp("traffic") / "out"
    slo = Slo(ttft=0.2, tpot=0.03)
    load = Load("poisson", policy="off,full,dcut", rate=6.0, limit=60, limits=Limits(16), slo=slo)
    replay_load(replace(load, out=str(out)))
    return out


def test_latencies_under_traffic_are_those_of_the_requests(traffic: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    report.report([str(traffic)], str(out), str(tmp_path / "png"))
    text = out.read_text(encoding="utf-8")
    assert [*specs(text)] == ["latencies", "goodput"]
    assert {path.stem for path in (tmp_path / "png").iterdir()} == {"latencies", "goodput"}
    assert "<h2>Runs</h2>" not in text
    spans = [row for rows in specs(text)["latencies"]["datasets"].values() for row in rows]
    bars = {row["name"]: row for rows in specs(text)["goodput"]["datasets"].values() for row in rows}
    assert [*bars] == ["off", "full", "dcut"]
    for policy, bar in bars.items():
        requests = read_directory(traffic / f"{policy}-16", "service")[1]["requests"]
        start, first, end, n = (
            requests[name].to_numpy() for name in ("arrival_s", "first_token_s", "finish_s", "output_tokens")
        )
        tpot = (end - first) / np.maximum(n - 1, 1)
        took = {"first token": first - start, "per output token": tpot[n > 1], "end to end": end - start}
        for what, seconds in took.items():
            (row,) = (row for row in spans if row["name"] == policy and what in row["panel"])
            expected = np.percentile(seconds, (50, 90, 99))
            assert [row[q] for q in ("p50", "p90", "p99")] == pytest.approx(expected.tolist())
        kept = (first - start <= 0.2) & (tpot <= 0.03)
        assert bar["whole"] == pytest.approx(n.sum() / (end.max() - start.min()))
        assert bar["part"] == pytest.approx(n[kept].sum() / (end.max() - start.min()))
        assert bar["text"] == f"{100 * kept.mean():.1f}\N{NO-BREAK SPACE}%"
        assert f"<td>{policy}</td><td>16</td><td>{bar['whole']:,.0f}</td>" in text
    assert "TTFT within 0.2 s and TPOT within 0.03 s" in text


def test_traffic_stands_beside_steady_batches(results: Path, traffic: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    report.report([str(traffic), str(results)], str(out), None)
    text = out.read_text(encoding="utf-8")
    assert len(specs(text)) == len(FIGURES) + 2
    assert "<h2>Runs</h2>" in text
    assert "15 runs from replay · 3 runs under traffic" in text


# ---- sentences -------------------------------------------------------------------------------------------


def test_sentences_are_computed_from_the_runs(results: Path) -> None:
    losing = made_up(
        {
            ("off", 4): 100,
            ("full", 4): 150,
            ("off", 8): 100,
            ("full", 8): 90,
            ("off", 64): 100,
            ("full", 64): 42,
        },
        results,
    )
    assert full_against_off(losing) == (
        "At batch 64 full verification runs at 42\N{NO-BREAK SPACE}% of plain decoding; "
        "it is slower than plain decoding from batch 8"
    )
    assert headlines(losing)[0] == "Fastest: full at batch 4, off at batch 8 to 64"
    winning = made_up({("off", 4): 100, ("full", 4): 150}, results)
    assert full_against_off(winning) == (
        "Full verification beats plain decoding throughout, 1.50 times at batch 4"
    )


def test_the_published_figure_stands_beside_the_predicted_one(results: Path) -> None:
    text = full_against_off(Story(load([results])))
    assert text
    assert re.search(r"batch 64 .* of plain decoding \(published 42\N{NO-BREAK SPACE}%\); it is slower", text)


@pytest.mark.parametrize(
    ("draft_length", "said"),
    [
        (1, "Half of the positions, the most confident, keep {0.5} of full verification's tokens"),
        (3, "Half of the positions, the most confident, keep {0.5} of .* tokens; a quarter keeps {0.25}"),
        (4, None),
        (5, "Half of the positions, the most confident, keep {0.5} of full verification's tokens"),
    ],
)
def test_a_share_of_the_positions_is_named_only_where_it_exists(draft_length: int, said: str | None) -> None:
    tokens = allocation(make_trace([40] * 8, draft_length), batch_size=4)
    text = retention(tokens)
    if said is None:
        assert text is None
        return
    values = dict(tokens.filter(name="by confidence").select("x", "value").iter_rows())
    for x in (0.5, 0.25):
        if f"{{{x}}}" in said:
            said = said.replace(f"{{{x}}}", f"{100 * values[x] / values[1.0]:.0f}\N{NO-BREAK SPACE}%")
    assert text is not None
    assert re.fullmatch(said, text)


@pytest.mark.parametrize(
    ("knots", "width", "said"),
    [
        ((1, 2, 4), 4, "verifying everything takes 4.00 times as long as verifying a quarter"),
        ((2, 3), 6, "verifying 50 % of the positions takes 1.50 times as long as verifying 33 % of the pos"),
        ((1, 2), 2, "verifying everything takes 2.00 times as long as verifying 50 % of the positions"),
        ((1,), 4, "Step time by the share of positions verified"),
    ],
)
def test_the_cost_title_names_what_the_table_holds(knots: tuple[int, ...], width: int, said: str) -> None:
    cost = CostTable.from_samples([Sample("verify", 4, 4 * n, 0.01 * n) for n in knots])
    text = full_cost(step_times(cost, [], width)).replace("\N{NO-BREAK SPACE}", " ")
    assert said in text


def test_empty_bins_of_confidence_are_not_spoken_of(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(load([results]))
    bins = calibration(open_trace("h20-qwen3-8b"))
    assert "scored above 0.9 and" in honesty(story).title
    for gone, said in ((0, "scored above 0.9$"), (9, "^Accepted: [^ ]* of the drafts scored below 0.1$")):
        left = bins.filter(pl.col("bin") != gone)
        monkeypatch.setattr(figures, "calibration", lambda trace, left=left: left)
        assert re.search(said, honesty(story).title)
    monkeypatch.setattr(figures, "calibration", lambda trace: bins.filter(bin=5))
    assert honesty(story).title == "Confidence against acceptance"


def test_the_cost_figure_tells_measured_from_derived(results: Path) -> None:
    figure = cost_curves(Story(load([results])))
    assert figure.note.startswith(
        "Step time by the share of positions verified. Dots: entries of the cost table; "
    )
    assert "draft included (whole steps); plain step times are batch size / published" in figure.note
    trace = open_trace("h20-qwen3-8b")
    assert trace.cost
    curves = step_times(trace.cost, [], 16)
    hollow = curves.filter("hollow")
    assert hollow["x"].to_list() == [1 / 16] * 5
    assert hollow["dot"].all()
    seconds = [trace.cost.plain_seconds(batch) for batch in hollow["batch_size"]]
    assert (hollow["value"] / 1000).to_list() == pytest.approx(seconds)


def test_plain_decoding_is_one_line_in_the_speed_up_figure(results: Path) -> None:
    with_off = made_up({("off", 4): 100, ("full", 4): 150}, results)
    without = made_up({("full", 4): 150}, results)
    assert "Below off, plain decoding, speculation loses" in speedup(with_off).note
    assert '"rule"' not in json.dumps(speedup(with_off).chart.to_dict()["layer"])
    assert "Below the dashed line, speculation loses" in speedup(without).note
    assert '"rule"' in json.dumps(speedup(without).chart.to_dict()["layer"])


def test_an_oracle_is_never_called_the_fastest(results: Path) -> None:
    story = made_up({("off", 4): 100, ("dcut", 4): 150, ("oracle", 4): 900}, results)
    assert headlines(story)[0] == "dcut is the fastest policy at every batch size"


def test_the_write_ups_sentences_come_out_of_the_demo(results: Path) -> None:
    said = " ".join(headlines(Story(load([results]))))
    full = int(re.findall(r"At batch 64 full verification runs at (\d+)", said)[0])
    assert full == pytest.approx(42, abs=3)
    assert "slower than plain decoding from batch 16" in said
    half = int(re.findall(r"the most confident, keep (\d+)", said)[0])
    assert half == pytest.approx(95, abs=2)
    gains = re.findall(r"(\d+)\N{NO-BREAK SPACE}%", ranking_gain(allocation(open_trace("h20-allocation"))))
    assert all(20 <= int(gain) <= 25 for gain in gains)


# ---- what is computed beyond the runs --------------------------------------------------------------------


def test_allocation_agrees_with_a_full_sort() -> None:
    trace = make_trace([40] * 8, draft_length=5)
    found = allocation(trace, batch_size=4, num_batches=10_000)
    rows, arrays = [], trace.arrays
    for first, count in zip(arrays.first_row, arrays.num_rows, strict=True):
        at = first
        while at < first + count:
            rows.append(at)
            at += 1 + arrays.num_accepted[at]
    order = np.random.default_rng(0).permutation(len(rows))[: len(rows) // 4 * 4].reshape(-1, 4)
    for depth in range(6):
        gained = []
        for batch in np.array(rows)[order]:
            kept = reference.select(arrays.confidences[batch], np.array([4 * depth]), np.ones(1)).keep_depth
            gained.append(np.minimum(arrays.num_accepted[batch], kept).sum() + 4)
        uniform = np.minimum(arrays.num_accepted[rows], depth)[order].sum(axis=1).mean() + 4
        at = found.filter(num_verify_tokens=4 * (depth + 1))
        assert at.filter(name="by confidence")["value"][0] == pytest.approx(np.mean(gained))
        assert at.filter(name="uniform")["value"][0] == pytest.approx(uniform)


def test_allocation_meets_the_published_one() -> None:
    found = allocation(open_trace("h20-allocation"))
    rows = pl.read_csv(PUBLISHED / "allocation.csv")
    for strategy, verified, accepted in rows.select(
        "strategy", "verify_tokens", "accepted_tokens"
    ).iter_rows():
        name = "uniform" if strategy.startswith("fixed") else "by confidence"
        value = found.filter(name=name, num_verify_tokens=verified)["value"][0]
        assert value == pytest.approx(accepted, rel=0.04), strategy


def test_honest_confidences_lie_on_the_diagonal() -> None:
    bins = calibration(make_trace([400] * 40, draft_length=4))  # accepted with just these probabilities
    assert bins["num_drafts"].sum() > 10_000
    assert np.abs(bins["x"].to_numpy() - bins["value"].to_numpy()).max() < 0.05


def test_step_times_are_those_of_the_table() -> None:
    trace = open_trace("h20-qwen3-8b")
    assert trace.cost
    curves = step_times(trace.cost, [], 16)
    for batch, x, value in curves.select("batch_size", "x", "value").iter_rows():
        assert value == pytest.approx(1000 * trace.cost.seconds(batch, x * batch * 16))
    assert curves.filter("dot").filter(batch_size=64).select("x").to_series().to_list() == [
        1 / 16, 0.25, 0.5, 0.75, 1.0
    ]  # fmt: skip


def test_the_shipped_figures_are_the_published_ones(shared: Path) -> None:
    for file in sorted(PUBLISHED.glob("*.csv")):
        assert file.read_bytes() == (shared / "published" / file.name).read_bytes()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_labels_keep_their_distance_and_their_order(values: list[float]) -> None:
    placed = charts.spread(values, 5.0, 0.0)
    ranked = [place for _, place in sorted(zip(values, placed, strict=True))]
    assert min(placed) >= 0
    assert all(b - a >= 5 - 1e-9 for a, b in pairwise(ranked))
    if all(b - a >= 5 for a, b in pairwise(sorted(values))):
        assert placed == pytest.approx(values)


# ---- bad input -------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["analysis.report", *arguments])
    return guard(report.main)


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """What a refusal says: one line, on stderr."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", "no directory is there"),
        ("file", "no directory is there"),
        ("empty", "holds no runs.parquet"),
        ("truncated", "damaged or truncated"),
        ("no meta", "meta.json is missing"),
    ],
)
def test_what_is_no_results_directory_is_refused_in_one_line(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    said: str,
) -> None:
    place, out = tmp_path / "place", tmp_path / "out" / "report.html"
    if damage == "file":
        place.write_text("")
    if damage in ("empty", "truncated", "no meta"):
        place.mkdir()
    if damage in ("truncated", "no meta"):
        for name in ("runs.parquet", "cost.json", "meta.json"):
            (place / name).write_bytes((results / name).read_bytes())
    if damage == "truncated":
        (place / "runs.parquet").write_bytes((place / "runs.parquet").read_bytes()[:-9])
    if damage == "no meta":
        (place / "meta.json").unlink()
    error = refused(capsys, run(monkeypatch, str(results), str(place), "--out", str(out)))
    assert said in error
    assert str(place) in error
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name results directories, or live runs with --live DIR --trace DIR"),
        (("--live", "somewhere"), "give --live and --trace"),
        (("--trace", "tiny-pair"), "name results directories, or live runs"),
        (("--live", "nowhere", "--trace", "tiny-pair"), "nowhere holds no live run"),
    ],
)
def test_a_page_of_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, run(monkeypatch, *arguments))


def test_damaged_traffic_is_refused_by_name(
    traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    shutil.copytree(traffic, place)
    (place / "runs.parquet").write_bytes(b"PAR1")
    said = refused(capsys, run(monkeypatch, str(place), "--out", str(tmp_path / "report.html")))
    assert f"{place / 'runs.parquet'} is damaged or truncated" in said


def test_results_named_twice_are_refused(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "named twice" in refused(capsys, run(monkeypatch, str(results), str(results)))


@pytest.mark.parametrize("option", ["--out", "--png"])
def test_a_place_that_cannot_be_written_leaves_nothing_behind(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.setattr(report, "FIGURES", (lambda story: pytest.fail("the drawing started"),))
    (tmp_path / "file").write_text("mine")
    places = {"--out": str(tmp_path / "new" / "report.html"), "--png": str(tmp_path / "png")}
    places[option] = str(tmp_path / "file" / "below")
    error = refused(
        capsys, run(monkeypatch, str(results), *(word for pair in places.items() for word in pair))
    )
    assert f"{tmp_path / 'file' / 'below'}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_a_file_is_overwritten(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, pictures = tmp_path / "report.html", tmp_path / "png"
    pictures.mkdir()
    os.mkfifo(tmp_path / "fifo")  # as a device node is: neither a file nor a directory
    os.mkfifo(pictures / "throughput.png")
    for place in (tmp_path, tmp_path / "fifo"):
        error = refused(capsys, run(monkeypatch, str(results), "--out", str(place)))
        assert f"{place} exists and is not a file: give another name" in error
    monkeypatch.setattr(report, "FIGURES", FIGURES[:1])
    error = refused(capsys, run(monkeypatch, str(results), "--out", str(page), "--png", str(pictures)))
    assert "throughput.png exists and is not a file" in error
    assert (tmp_path / "fifo").is_fifo()
    assert (pictures / "throughput.png").is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["fifo", "png"]


@pytest.mark.parametrize("option", ["--out", "--png"])
def test_an_empty_name_is_refused(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert f"{option} '' names no place" in refused(capsys, run(monkeypatch, str(results), option, ""))


def test_the_command_says_where_the_report_is(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FIGURES", FIGURES[:1])
    out = tmp_path / "new" / "report.html"
    assert run(monkeypatch, str(results), "--out", str(out)) == 0
    assert capsys.readouterr().out == f"report in {out}\n"
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
