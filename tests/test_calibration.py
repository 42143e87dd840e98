"""Calibrations turn confidences into what is accepted, from censored labels, and say how well they do."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut.calibration import (
    LOG_ODDS,
    NUM_CELLS,
    Calibration,
    OnlineCalibration,
    area_under_curve,
    cell,
    expected_calibration_error,
    fit_isotonic,
    fit_temperatures,
)
from dcut.errors import InputError
from traces.calibrate import fit, hold_out, judge, learn_online, survivals
from traces.store import open_trace


def drafts(
    rows: int, width: int = 8, slope: float = 0.6, bias: float = 0.4, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and accepted drafts of a drafter with sigmoid(slope * log_odds(c) + bias) accepted."""
    rng = np.random.default_rng(seed)
    confidences = rng.beta(1.5, 0.6, (rows, width)).astype(np.float32).clip(1e-4, 1 - 1e-4)
    odds = np.log(confidences / (1 - confidences.astype(float)))
    hits = rng.random((rows, width)) < 1 / (1 + np.exp(-slope * odds - bias))
    return confidences, np.logical_and.accumulate(hits, axis=1).sum(axis=1)


def error(calibration: Calibration | OnlineCalibration | None, bias: float = 0.4) -> tuple[float, float]:
    """ECE and AUC of survival on fresh drafts; None: of the raw confidences."""
    confidences, accepted = drafts(6000, bias=bias, seed=9)
    values = calibration.probabilities(confidences) if calibration else confidences
    survival = np.cumprod(values, axis=1, dtype=float)
    label = np.arange(confidences.shape[1]) < accepted[:, None]
    return expected_calibration_error(survival, label), area_under_curve(survival, label)


def test_cells_rise_with_the_confidence_and_stand_for_its_log_odds() -> None:
    values = np.concatenate(
        (np.linspace(0, 1, 20001), 10.0 ** -np.arange(1, 7), 1 - 10.0 ** -np.arange(1, 7))
    )
    values = np.sort(values.astype(np.float32))
    cells = np.array([cell(c) for c in values])
    assert (np.diff(cells) >= 0).all()
    assert cells[0] == 0
    assert cells[-1] == NUM_CELLS - 1
    inner = (values > 1e-5) & (values < 1 - 1e-5)
    exact = np.log(values[inner] / (1 - values[inner].astype(float)))
    assert np.abs(LOG_ODDS[cells[inner]] - exact).max() < 0.025


@pytest.mark.parametrize(("batch", "depth"), [(8, 8), (32, 8), (32, 2)])
def test_the_online_calibration_converges_within_300_steps_whatever_is_verified(
    batch: int, depth: int
) -> None:
    calibration = OnlineCalibration(8)
    confidences, accepted = drafts(300 * batch)
    for step in range(300):
        rows = slice(step * batch, (step + 1) * batch)
        keep_depth = np.full(batch, depth)
        calibration.observe(confidences[rows], keep_depth, np.minimum(accepted[rows], keep_depth))
    raw, learnt = error(None), error(calibration)
    assert raw[0] > 0.05
    assert learnt[0] < 0.03
    assert learnt[1] >= raw[1] - 1e-3
    assert calibration.slope == pytest.approx(0.6, abs=0.1)


def test_the_online_calibration_starts_as_the_confidence_itself() -> None:
    confidences = drafts(50)[0]
    start = OnlineCalibration(8).probabilities(confidences)
    assert np.abs(start - confidences).max() < 0.005


def test_the_online_calibration_follows_a_change() -> None:
    calibration = OnlineCalibration(8)
    for seed, bias in enumerate((1.5, -1.0)):
        confidences, accepted = drafts(32 * 300, slope=1.0, bias=bias, seed=seed)
        for at in range(0, len(accepted), 32):
            calibration.observe(confidences[at : at + 32], np.full(32, 8), accepted[at : at + 32])
        even = calibration.probabilities(np.full((1, 8), 0.5, np.float32))[0]
        assert even[:3] == pytest.approx(1 / (1 + np.exp(-bias)), abs=0.06)


def test_unverified_positions_are_not_labels() -> None:
    calibration = OnlineCalibration(4)
    confidences = np.full((64, 4), 0.9, np.float32)
    for _ in range(50):
        calibration.observe(confidences, np.ones(64, np.int64), np.ones(64, np.int64))
    p = calibration.probabilities(confidences[:1])[0]
    assert p[0] > 0.97  # verified and always accepted
    assert (p[1:] < p[0]).all()  # never verified: only what position 0 says of all


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_the_online_calibration_stays_finite_on_any_sequence(
    steps: list[tuple[float, int, int]],
) -> None:
    calibration = OnlineCalibration(3)
    for confidence, depth, accepted in steps * 20:
        confidences = np.full((2, 3), confidence, np.float32)
        calibration.observe(confidences, np.full(2, depth), np.full(2, min(depth, accepted)))
    p = calibration.probabilities(np.array([[0, 0.5, 1], [1, 1, 1]], np.float32))
    assert np.isfinite(p).all()
    assert ((p >= 0) & (p <= 1)).all()
    assert calibration.slope > 0


def test_isotonic_curves_and_temperatures_make_survival_honest_and_keep_its_order() -> None:
    isotonic, temperature = fit_isotonic(*drafts(8000)), fit_temperatures(*drafts(8000, bias=0.0))
    assert error(isotonic)[0] < 0.02
    assert error(isotonic)[1] >= error(None)[1] - 1e-3
    raw, scaled = error(None, bias=0.0), error(temperature, bias=0.0)
    assert raw[0] > 0.02 > scaled[0]
    assert scaled[1] >= raw[1] - 1e-3
    for curve in (*isotonic.curves, *temperature.curves):
        assert (np.diff(curve[1]) >= 0).all()
        assert ((curve[1] > 0) & (curve[1] < 1)).all()


def test_isotonic_curves_from_censored_labels_agree_with_those_from_all() -> None:
    confidences, accepted = drafts(20000)
    keep_depth = (np.cumprod(confidences, axis=1) >= 0.4).sum(axis=1)
    censored = fit_isotonic(confidences, np.minimum(accepted, keep_depth), keep_depth)
    whole = fit_isotonic(confidences, accepted)
    sure = np.full((1, 8), 0.9, np.float32)
    assert censored.probabilities(sure)[0, :4] == pytest.approx(whole.probabilities(sure)[0, :4], abs=0.04)


def test_thin_positions_share_a_curve() -> None:
    confidences, accepted = drafts(300)
    curves = fit_isotonic(confidences, accepted).curves
    assert len(curves) == 8
    assert curves[-1] is curves[-2]


def test_ece_and_auc_agree_with_their_definitions() -> None:
    rng = np.random.default_rng(0)
    p, label = rng.random(500).round(2), rng.random(500) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in p[label] for b in p[~label]]
    assert area_under_curve(p, label) == pytest.approx(np.mean(pairs))
    bins = np.minimum((p * 20).astype(int), 19)
    gaps = [abs(p[bins == b].mean() - label[bins == b].mean()) * (bins == b).mean() for b in set(bins)]
    assert expected_calibration_error(p, label) == pytest.approx(sum(gaps))
    assert expected_calibration_error(np.full(10, 1.0), np.ones(10, bool)) == 0
    assert np.isnan(area_under_curve(p, np.ones(500, bool)))


def test_a_calibration_survives_its_file_and_refuses_another() -> None:
    calibration = fit_isotonic(*drafts(2000))
    confidences = drafts(20, seed=3)[0]
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again.probabilities(confidences) == pytest.approx(calibration.probabilities(confidences), abs=1e-5)
    with pytest.raises(InputError, match="format 7; this version reads format 1"):
        Calibration.from_dict({"format": 7, "curves": []})
    for wrong in ({}, [], {"format": 1, "kind": "isotonic", "curves": [[[1, 0], [0.1, 0.2]]]}):
        with pytest.raises(InputError, match="not a calibration"):
            Calibration.from_dict(wrong)
    with pytest.raises(InputError, match="9 drafts, but the calibration was fitted to 8"):
        calibration.probabilities(np.full((1, 9), 0.5, np.float32))


def test_held_out_requests_of_the_built_in_pair_are_judged_honest() -> None:
    trace = open_trace("tiny-pair")
    online, raw_auc = [], []
    for seed in range(4):
        held_out = hold_out(trace, 0.5, seed=seed)
        values = survivals(trace, fit(trace, ~held_out, seed), {})
        verdict = {v.calibration: v for v in judge(trace, values, held_out) if v.domain == "all"}
        for kind in ("isotonic", "temperature"):
            assert verdict[kind].ece <= 0.02
            assert verdict[kind].auc >= verdict["raw"].auc
        online.append(verdict["online"])
        raw_auc.append(verdict["raw"].auc)
    assert np.mean([v.ece for v in online]) <= 0.03  # one run of 300 steps scatters by 0.005
    assert np.mean([v.auc for v in online]) >= np.mean(raw_auc) - 1e-3


def test_isotonic_curves_are_honest_where_later_confidences_tell_of_earlier_drafts() -> None:
    rng = np.random.default_rng(0)
    luck, own = rng.choice([-1.0, 1.0], (20000, 1)), rng.normal(1.5, 1.0, (20000, 8))
    hits = rng.random(own.shape) < 1 / (1 + np.exp(-own - luck))
    shown = own + luck * np.arange(8) / 7  # the luck of a block shows in its later confidences only
    confidences, accepted = (1 / (1 + np.exp(-shown))).astype(np.float32), np.cumprod(hits, 1).sum(1)
    fitted = fit_isotonic(confidences[:10000], accepted[:10000])
    survival = np.cumprod(fitted.probabilities(confidences[10000:]), axis=1)
    label = np.arange(8) < accepted[10000:, None]
    assert expected_calibration_error(survival, label) < 0.022  # 0.035 by shares of the drafts reached


def test_learning_online_repeats_itself() -> None:
    trace = open_trace("tiny-pair")
    rows = ~hold_out(trace, 0.5, seed=1)
    first, again = (learn_online(trace, rows, seed=1) for _ in range(2))
    assert (first.slope, first.bias) == (again.slope, again.bias)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-m", "traces.calibrate", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_writes_a_calibration_and_a_picture(tmp_path: Path) -> None:
    done = run("tiny-pair", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "isotonic, by domain" in done.stdout
    out = tmp_path / "out/calibration-tiny-pair"
    stored = json.loads((out / "calibration.json").read_text())
    assert Calibration.from_dict(stored["isotonic"]).kind == "isotonic"
    assert set(stored["domains"]) == {"chat", "code", "data", "math", "prose"}
    assert (out / "reliability.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no trace 'nowhere'"),
        (["tiny-pair", "--held-out", "1.5"], "--held-out 1.5 is not a share"),
        (["tiny-pair", "--held-out", "0.0001"], "leaves none to fit or none to judge by"),
    ],
)
def test_the_command_refuses_what_it_cannot_use_in_one_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
