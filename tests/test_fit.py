"""Fitting a process to aggregate figures: known ones come back, contradictions and misses are named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dcut.errors import InputError, guard
from traces import fit
from traces.fit import Figures
from traces.published import AcceptanceProcess
from traces.store import BUILTIN, load

TRUTH = AcceptanceProcess(
    tuple(1.2 - 0.05 * k for k in range(7)), domain_sd=0.6, step_sd=0.8, slot_sd=1.0, confidence_sd=0.8
)


def sampled(process: AcceptanceProcess, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Accepted drafts [num] and confidences [num, draft_length]: the definition, in plain numpy."""
    rng = np.random.default_rng(seed)
    length = len(process.position_logit)
    scores = np.array([-1.2815516, -0.5244005, 0.0, 0.5244005, 1.2815516])  # normal quantiles .1, .3, ... .9
    quality = process.domain_sd * scores[rng.integers(0, 5, num)] + process.step_sd * rng.normal(size=num)
    logit = np.array(process.position_logit) + quality[:, None]
    logit = logit + process.slot_sd * rng.normal(size=(num, length))
    seen = logit + process.confidence_sd * rng.normal(size=(num, length))
    seen -= process.confidence_drop * np.sqrt(np.arange(length))
    hits = rng.random((num, length)) < 1 / (1 + np.exp(-logit))
    return np.cumprod(hits, axis=1).sum(axis=1), 1 / (1 + np.exp(-seen))


def kept_share(accepted: np.ndarray, confidences: np.ndarray, ratio: float, batch: int) -> float:
    """Share of full acceptance kept when the best slots of each batch are: a full sort, batch by batch."""
    length = confidences.shape[1]
    keep = round(ratio * batch * (length + 1)) - batch
    emitted = 0
    for first in range(0, len(accepted), batch):
        survival = np.cumprod(confidences[first : first + batch], axis=1)
        best = np.argsort(-survival.ravel(), kind="stable")[:keep]
        depth = np.bincount(best // length, minlength=batch)
        emitted += batch + np.minimum(accepted[first : first + batch], depth).sum()
    return emitted / (len(accepted) + accepted.sum())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps behind a fit: coarser and faster."""
    monkeypatch.setattr(fit, "_NUM_STEPS", 4000)


@pytest.mark.usefixtures("quick")
def test_the_figures_of_a_known_process_are_met_by_the_fitted_one() -> None:
    accepted, confidences = sampled(TRUTH, 64_000, seed=1)
    shares = {ratio: kept_share(accepted, confidences, ratio, 16) for ratio in (0.25, 0.5, 0.75)}
    figures = Figures(7, 16, acceptance_length=1 + accepted.mean(), retention=tuple(shares.items()))
    found, seen = sampled(fit.fit(figures), 64_000, seed=2)
    assert 1 + found.mean() == pytest.approx(1 + accepted.mean(), rel=0.015)
    for ratio, share in shares.items():
        assert kept_share(found, seen, ratio, 16) == pytest.approx(share, abs=0.012)


def test_acceptance_by_position_is_met_at_every_position() -> None:
    shares = (0.71, 0.52, 0.52, 0.3, 0.05, 0.0)
    process = fit.fit(Figures(6, acceptance_per_position=shares))
    accepted, _ = sampled(process, 200_000, seed=3)
    assert [(accepted > k).mean() for k in range(6)] == pytest.approx(shares, abs=0.006)


@pytest.mark.usefixtures("quick")
def test_a_uniform_cut_is_met() -> None:
    accepted, _ = sampled(TRUTH, 64_000, seed=4)
    share = (1 + np.minimum(accepted, 1)).sum() / (1 + accepted).sum()
    figures = Figures(7, acceptance_length=1 + accepted.mean(), uniform_retention=((0.25, share),))
    found, _ = sampled(fit.fit(figures), 64_000, seed=5)
    assert (1 + np.minimum(found, 1)).sum() / (1 + found).sum() == pytest.approx(share, abs=0.01)


@pytest.mark.usefixtures("quick")
def test_the_built_in_processes_are_what_their_figures_fit_to() -> None:
    stored = json.loads((BUILTIN / "h20-qwen3-8b" / "process.json").read_text())
    figures = Figures(**stored["figures"])
    again, shipped = fit.fit(figures), AcceptanceProcess(**stored["process"])
    for one, other in zip(fit.compare(again, figures), fit.compare(shipped, figures), strict=True):
        assert one.got == pytest.approx(other.got, abs=0.01)
    for folder in ("h20-qwen3-8b", "h20-allocation"):
        stored = json.loads((BUILTIN / folder / "process.json").read_text())
        for line in fit.compare(AcceptanceProcess(**stored["process"]), Figures(**stored["figures"])):
            assert abs(line.error) < 0.02, line


def test_confidences_fall_behind_with_depth_as_they_do_in_a_recorded_pair(shared: Path) -> None:
    rows = pl.read_parquet(shared / "pair-trial/dense-trace.parquet").filter(pl.col("nfut") == 15)
    confidences, accepted = np.array(rows["conf"].to_list(), float).clip(1e-6, 1 - 1e-6), rows["acc"]
    k = np.arange(15)
    observed = k <= accepted.to_numpy()[:, None]
    labels = (k < accepted.to_numpy()[:, None])[observed]
    odds, depth = (
        np.log(confidences / (1 - confidences))[observed],
        np.broadcast_to(np.sqrt(k), observed.shape),
    )

    def excess(drop: float) -> float:
        """Of the likelihood's slope: zero at the likeliest drop."""
        return float((depth[observed] * (labels - 1 / (1 + np.exp(-odds - drop * depth[observed])))).sum())

    assert excess(0.25) > 0 > excess(0.35)
    assert 0.25 < fit.fit(Figures(acceptance_length=3)).confidence_drop < 0.35


def test_the_reported_figures_are_those_of_a_fresh_large_sample() -> None:
    shares = (0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
    figures = Figures(7, 16, acceptance_per_position=shares, retention=((0.5, 0.9),))
    lines = fit.compare(TRUTH, figures)
    accepted, confidences = sampled(TRUTH, 64_000, seed=6)
    for k in range(7):
        assert lines[k].got == pytest.approx((accepted > k).mean(), abs=0.008)
    assert lines[7].got == pytest.approx(kept_share(accepted, confidences, 0.5, 16), abs=0.008)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({}, "give the mean acceptance length or the acceptance per position"),
        ({"acceptance_length": 1.0}, "mean acceptance length 1 is not between 1 .* and 16"),
        ({"acceptance_length": 16.0}, "mean acceptance length 16 is not between"),
        ({"acceptance_length": float("nan")}, "mean acceptance length nan is not between"),
        ({"acceptance_per_position": (0.7, 0.5), "draft_length": 3}, "2 acceptances for 3 draft positions"),
        ({"acceptance_per_position": (0.5, 0.7), "draft_length": 2}, "rises from 0.5 to 0.7 at position 2"),
        ({"acceptance_per_position": (1.2, 0.7), "draft_length": 2}, "acceptance 1.2 at position 1 is outs"),
        (
            {"acceptance_length": 2.5, "acceptance_per_position": (0.7, 0.5), "draft_length": 2},
            "2.5 contradicts the acceptance per position, which gives 2.2",
        ),
        (
            {"acceptance_length": 3, "retention": ((0.05, 0.4),)},
            r"ratio 0.05: .* lie in 0.0625..1",
        ),
        ({"acceptance_length": 3, "retention": ((1.5, 1.0),)}, "ratio 1.5: the ratio must lie"),
        ({"acceptance_length": 3, "retention": ((0.5, 1.2),)}, r"1.2 at .* the share lies in 0.3333..1"),
        ({"acceptance_length": 3, "retention": ((0.5, 0.2),)}, r"0.2 at .* the share lies in 0.3333..1"),
        ({"acceptance_length": 8, "retention": ((0.25, 0.8),)}, r"0.8 at .* the share lies in 0.125..0.5"),
        ({"acceptance_length": 3, "retention": ((1.0, 0.9),)}, r"0.9 at .* the share lies in 1..1"),
        ({"acceptance_length": 3, "retention": ((0.5, 0.8), (0.25, 0.9))}, "retention 0.8 at .* never fall"),
        ({"acceptance_length": 3, "retention": ((0.5, 0.8), (0.5, 0.8))}, "each ratio once"),
        ({"acceptance_length": 3, "uniform_retention": ((0.3, 0.8),)}, "4.8 of 16 .* the nearest is 0.3125"),
        ({"acceptance_length": 3, "batch_size": 0}, "batch size 0: at least 1"),
        (
            {"acceptance_length": 3, "acceptance_per_position": (0.5, 0.4), "draft_length": 2},
            "3 contradicts the acceptance per position, which gives 1.9",
        ),
        (
            {"acceptance_length": 3, "draft_length": 10**6},
            "draft length 1000000 at batch size 32 is too much to hold",
        ),
        (
            {"acceptance_length": 3, "batch_size": 10**400},
            "0 is too much to hold in memory: lower one of them",
        ),
    ],
)
def test_contradictory_figures_are_refused(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Figures(**figures)


Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command with these arguments; its exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fit", *arguments])
        return guard(fit.main)

    return run


def test_the_command_writes_a_trace_with_its_costs(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.csv"
    cost.write_text("batch_size,num_verify_tokens,step_ms\n4,4,9\n4,64,12\n")
    known = ("--mean-acceptance-length", "3.07", "--cost", str(cost))
    for name in ("one", "two"):
        assert command(*known, "--requests", "40", "--seed", "3", "--out", str(tmp_path / name)) == 0
    trace = load(tmp_path / "one")
    assert (len(trace.requests), trace.draft_length, trace.meta["seed"]) == (40, 15, 3)
    assert trace.cost is not None
    assert trace.cost.seconds(4, 64) == pytest.approx(0.012)
    assert fit.acceptance_length(trace) == pytest.approx(3.07, rel=0.04)
    assert "mean acceptance length       3.0700   3.0" in capsys.readouterr().out
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@pytest.mark.usefixtures("quick")
def test_figures_out_of_reach_are_named_with_the_nearest_and_nothing_is_written(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "trace"))
    assert command("--mean-acceptance-length", "3", "--retention", "0.25:0.4,0.5:0.99", *out) == 2
    shown = capsys.readouterr()
    assert shown.out.count("missed") == 2
    assert shown.err.startswith(
        "error: retention at 0.25 of 0.4 cannot be met together with the rest; the nea"
    )
    assert len(shown.err.splitlines()) == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mean-acceptance-length", "0.5"), "error: mean acceptance length 0.5 is not between"),
        (("--mean-acceptance-length", "3", "--cost", "nowhere.csv"), "error: nowhere.csv: No such file"),
        (("--mean-acceptance-length", "3", "--requests", "0"), "error: --requests 0: a trace holds at least"),
        (("--mean-acceptance-length", "3", "--seed", "-1"), "error: --seed -1: a seed is 0 or more"),
        (("--mean-acceptance-length", "3", "--tolerance", "nan"), "error: --tolerance nan: an error is 0"),
        (("--mean-acceptance-length", "3", "--tolerance", "-1"), "error: --tolerance -1: an error is 0"),
        (
            ("--mean-acceptance-length", "3", "--requests", "100000000"),
            "error: --requests 100000000: too many to hold in memory, 17361 at most here",
        ),
        (("--acceptance-per-position", "0.7,0.5", "--draft-length", "3"), "error: 2 acceptances for 3"),
    ],
)
def test_bad_arguments_end_in_one_line(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert command(*arguments, "--out", str(tmp_path / "trace")) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_before_the_fit(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "fit", lambda *_: pytest.fail("the fit started"))
    assert command("--mean-acceptance-length", "3", "--out", "/dev/null/x") == 2
    assert capsys.readouterr().err == "error: /dev/null/x cannot be written: Not a directory\n"


def test_a_list_that_is_none_and_a_missing_out_are_refused(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ("--retention", "0.5", "--out", "x"),
        ("--acceptance-per-position", "a,b", "--out", "x"),
    ):
        assert command(*arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "is not a list of" in said
    assert command("--mean-acceptance-length", "3") == 2
    assert "--out" in capsys.readouterr().err
