"""Recordings with drafters of different width become one trace, in which a policy chooses the width."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dcut.cost import CostTable, Sample
from dcut.errors import InputError, guard
from dcut.policies import parse_policy
from sim.engine import Engine, acceptance_lengths
from sim.regret import Regrets
from sim.results import figures
from tests.scenes import make_trace
from traces import merge
from traces.schema import Trace
from traces.store import load, save

LENGTHS = [40, 60, 50, 70] * 6


def cost(draft: float) -> CostTable:
    """Milliseconds: 8 a step, 0.3 a token, `draft` for the drafter."""
    verify = [
        Sample("verify", b, b * k, (8 + 0.3 * b * k) / 1000) for b in (1, 2, 4, 8) for k in (1, 4, 8, 16)
    ]
    return CostTable.from_samples(verify + [Sample("draft", b, None, draft / 1000) for b in (1, 2, 4, 8)])


def recording(width: int, quality: float, draft: float, seed: int) -> Trace:
    """The same requests and tokens whatever the drafter; `quality` of its drafts, in log-odds."""
    trace = make_trace(LENGTHS, width)
    rng = np.random.default_rng(seed)
    rows = len(trace.anchors)
    p = 1 / (1 + np.exp(-quality - rng.standard_normal((rows, width))))
    accepted = np.cumprod(rng.random(p.shape) < p, axis=1).sum(axis=1)
    anchors = trace.anchors.with_columns(
        pl.Series("token_id", np.arange(rows)),
        pl.Series("num_accepted", accepted),
        pl.Series("confidences", p.astype(np.float32), dtype=pl.Array(pl.Float32, width)),
    )
    requests = trace.requests.with_columns(prompt_tokens=pl.lit(10, pl.Int64))
    return replace(trace, anchors=anchors, requests=requests, cost=cost(draft))


def throughput(trace: Trace, policy: str, batch: int = 4) -> float:
    assert trace.cost is not None
    order = np.tile(np.arange(len(LENGTHS)), 8)
    return figures(Engine(trace, parse_policy(policy), trace.cost, batch, order).run())["throughput_tps"]


@pytest.fixture
def wide() -> Trace:
    return recording(15, quality=1.0, draft=12.0, seed=1)


@pytest.fixture
def narrow() -> Trace:
    return recording(7, quality=1.6, draft=3.0, seed=2)


def test_each_width_replays_as_its_own_recording_does(wide: Trace, narrow: Trace) -> None:
    both = merge.merge(wide, narrow)
    assert both.cost is not None
    assert both.cost.draft_lengths == ((7, pytest.approx(0.25)),)
    assert throughput(both, "full") == throughput(wide, "full")
    assert throughput(both, "dsd:1x7") == pytest.approx(throughput(narrow, "full"))
    wider, narrower = acceptance_lengths(wide), acceptance_lengths(narrow)
    assert acceptance_lengths(both) == pytest.approx([*wider[:7], narrower[7], *wider[8:]])


@pytest.mark.parametrize(("wide_ms", "narrow_ms", "better"), [(12.0, 3.0, "narrow"), (1.0, 0.9, "wide")])
def test_dcut_plus_chooses_the_drafter_that_pays(wide_ms: float, narrow_ms: float, better: str) -> None:
    alone = {
        "wide": recording(15, 3.0 if better == "wide" else 1.0, wide_ms, seed=1),
        "narrow": recording(7, 1.6, narrow_ms, seed=2),
    }
    tps = {name: throughput(trace, "dcut-plus") for name, trace in alone.items()}
    other = "narrow" if better == "wide" else "wide"
    assert tps[better] > 1.1 * tps[other]
    both = merge.merge(alone["wide"], alone["narrow"])
    assert throughput(both, "dcut-plus") > 0.96 * tps[better]
    assert throughput(both, "oracle") > throughput(both, "dcut-plus")


def test_regret_counts_the_drafts_of_the_drafter_that_was_asked(wide: Trace, narrow: Trace) -> None:
    both = merge.merge(wide, narrow)
    assert both.cost is not None
    order = np.arange(len(LENGTHS))
    regrets = Regrets(both, both.cost, 4, order)
    policy = parse_policy("dsd:1x7")
    regret = regrets.split(policy, Engine(both, policy, both.cost, 4, order, True).run())
    assert regret.unverified == pytest.approx(
        0, abs=1e-9
    )  # all 7 drafts are verified: none accepted is missed
    assert regret.rejected > 0.05


def test_what_is_joined_is_saved_loaded_and_checked(wide: Trace, narrow: Trace, tmp_path: Path) -> None:
    both = merge.merge(wide, narrow)
    save(both, tmp_path / "both")
    again = load(tmp_path / "both")
    assert again.anchors.equals(both.anchors)
    assert again.narrower == (7,)
    for name, value in (("num_accepted_7", 8), ("num_accepted_7", -1)):
        broken = both.anchors.with_columns(pl.lit(value, pl.Int64).alias(name))
        with pytest.raises(
            InputError, match=rf"{name} {value} at position 0 of request 10 is outside 0\.\.7"
        ):
            save(replace(both, anchors=broken), tmp_path / "broken")
    for narrower in ([15], [7, 7], ["7"], 7):
        with pytest.raises(InputError, match="is not a rising list of widths below 15"):
            save(replace(both, meta={**both.meta, "narrower": narrower}), tmp_path / "broken")


def test_requests_may_have_finished_in_another_order(wide: Trace, narrow: Trace) -> None:
    order = narrow.requests["request_id"].shuffle(seed=1)
    requests = pl.DataFrame({"request_id": order}).join(
        narrow.requests, on="request_id", maintain_order="left"
    )
    anchors = requests.select("request_id").join(narrow.anchors, on="request_id", maintain_order="left")
    shuffled = replace(narrow, requests=requests, anchors=anchors)
    assert merge.merge(wide, shuffled).anchors.equals(merge.merge(wide, narrow).anchors)


def test_recordings_that_do_not_belong_together_are_refused(wide: Trace, narrow: Trace) -> None:
    with pytest.raises(InputError, match="give the widest first"):
        merge.merge(narrow, wide)
    with pytest.raises(InputError, match="drafters of 15, 7 and 7 drafts: give the widest first"):
        merge.merge(merge.merge(wide, narrow), narrow)
    token = pl.when(pl.int_range(pl.len()) == 45).then(3).otherwise("token_id").alias("token_id")
    with pytest.raises(InputError, match="part at position 6 of request 13"):
        merge.merge(wide, replace(narrow, anchors=narrow.anchors.with_columns(token)))
    with pytest.raises(InputError, match="not of the same requests"):
        merge.merge(wide, replace(narrow, requests=narrow.requests.with_columns(prompt_tokens=9)))
    with pytest.raises(InputError, match="no times of its drafter"):
        merge.merge(wide, replace(narrow, cost=None))
    sampled = narrow.anchors.with_columns(narrow.anchors["confidences"].alias("accept_probs"))
    with pytest.raises(InputError, match="with 7 drafts was sampled"):
        merge.merge(wide, replace(narrow, anchors=sampled))


def test_the_command_joins_two_directories(
    wide: Trace,
    narrow: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(wide, tmp_path / "wide")
    save(narrow, tmp_path / "narrow")
    places = [str(tmp_path / name) for name in ("wide", "narrow", "both")]
    monkeypatch.setattr(sys, "argv", ["merge", *places[:2], "--out", places[2]])
    assert guard(merge.main) == 0
    assert "with 7, 15 drafts at each" in capsys.readouterr().out
    assert load(places[2]).narrower == (7,)
