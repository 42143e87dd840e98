"""Command: fit calibrations of the drafter's confidences to a trace, and say how honest each makes them."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from dcut.calibration import (
    Calibration,
    OnlineCalibration,
    area_under_curve,
    expected_calibration_error,
    fit_isotonic,
    fit_temperatures,
)
from dcut.errors import InputError, Parser, guard
from traces.schema import Trace
from traces.store import open_trace, whole_directory

ONLINE_BATCH, ONLINE_STEPS = 8, 300  # what the online calibration has seen when it is judged
FEWEST_ROWS = 500  # of a domain's own positions; less is calibrated with all


@dataclass(frozen=True, slots=True)
class Verdict:
    """How honest the survival of one calibration is on one set of held-out positions."""

    calibration: str
    domain: str  # "all" or a domain
    ece: float
    auc: float
    num_positions: int


def hold_out(trace: Trace, share: float, seed: int) -> np.ndarray:
    """Which anchors belong to held-out requests, bool [rows]; `share` of each domain's requests, seeded.

    Raises InputError where that leaves no request on one of the two sides.
    """
    rng = np.random.default_rng(seed)
    domains = trace.requests["domain"].fill_null("").to_numpy()
    out = np.zeros(len(domains), bool)
    for domain in np.unique(domains):
        of = np.flatnonzero(domains == domain)
        out[rng.permutation(of)[: round(share * len(of))]] = True
    if out.all() or not out.any():
        raise InputError(
            f"holding out {share:g} of {len(out)} requests leaves none to fit or none to judge by; "
            "give a larger trace or another --held-out"
        )
    return np.repeat(out, trace.arrays.num_rows)


def learn_online(trace: Trace, rows: np.ndarray, seed: int) -> OnlineCalibration:
    """The online calibration after `ONLINE_STEPS` fully verified steps of `ONLINE_BATCH` of the requests.

    rows: bool [anchors], those of the requests to learn from.
    """
    arrays, rng = trace.arrays, np.random.default_rng(seed)
    usable = np.flatnonzero((arrays.num_rows > 0) & rows[np.minimum(arrays.first_row, len(rows) - 1)])
    batch = rng.choice(usable, ONLINE_BATCH)
    position = np.zeros(ONLINE_BATCH, np.int64)
    calibration = OnlineCalibration(trace.draft_length)
    for _ in range(ONLINE_STEPS):
        at = arrays.first_row[batch] + position
        accepted = arrays.num_accepted[at]
        calibration.observe(
            arrays.confidences[at], np.full(ONLINE_BATCH, trace.draft_length, np.int64), accepted
        )
        position += accepted + 1
        done = position >= arrays.num_rows[batch]
        batch[done], position[done] = rng.choice(usable, int(done.sum())), 0
    return calibration


def fit(trace: Trace, rows: np.ndarray, seed: int) -> dict[str, Calibration | OnlineCalibration]:
    """Every kind of calibration, fitted to the anchors `rows`, bool [anchors]."""
    confidences, accepted = trace.arrays.confidences[rows], trace.arrays.num_accepted[rows]
    return {
        "isotonic": fit_isotonic(confidences, accepted),
        "temperature": fit_temperatures(confidences, accepted),
        "online": learn_online(trace, rows, seed),
    }


def fit_domains(trace: Trace, rows: np.ndarray) -> dict[str, Calibration]:
    """An isotonic calibration of its own for every domain with at least `FEWEST_ROWS` anchors to fit."""
    arrays, domain = trace.arrays, row_domains(trace)
    sizes = {name: rows & (domain == name) for name in np.unique(domain)}
    return {
        str(name): fit_isotonic(arrays.confidences[own], arrays.num_accepted[own])
        for name, own in sizes.items()
        if own.sum() >= FEWEST_ROWS
    }


def row_domains(trace: Trace) -> np.ndarray:
    """The domain of every anchor, str [rows]."""
    return np.repeat(trace.requests["domain"].fill_null("").to_numpy(), trace.arrays.num_rows)


def survivals(
    trace: Trace, fitted: Mapping[str, Calibration | OnlineCalibration], own: Mapping[str, Calibration]
) -> dict[str, np.ndarray]:
    """Survival of every anchor's drafts, float64 [rows, draft_length], raw and by each calibration."""
    confidences = trace.arrays.confidences
    values = {"raw": np.cumprod(confidences, axis=1, dtype=np.float64)}
    values |= {name: np.cumprod(c.probabilities(confidences), axis=1) for name, c in fitted.items()}
    if len(own) > 1:
        mixed, domain = values["isotonic"].copy(), row_domains(trace)
        for name, calibration in own.items():
            of = domain == name
            mixed[of] = np.cumprod(calibration.probabilities(confidences[of]), axis=1)
        values["isotonic, by domain"] = mixed
    return values


def judge(trace: Trace, values: Mapping[str, np.ndarray], held_out: np.ndarray) -> list[Verdict]:
    """ECE and AUC of survival over all drafts of the held-out positions, together and by domain."""
    label = np.arange(trace.draft_length) < trace.arrays.num_accepted[:, None]
    domain = row_domains(trace)
    sets = {"all": held_out} | {name: held_out & (domain == name) for name in np.unique(domain)}
    return [
        Verdict(
            name,
            part,
            expected_calibration_error(value[rows], label[rows]),
            area_under_curve(value[rows], label[rows]),
            int(rows.sum()),
        )
        for part, rows in sets.items()
        for name, value in values.items()
    ]


def reliability(
    trace: Trace, values: Mapping[str, np.ndarray], held_out: np.ndarray, bins: int = 20
) -> alt.LayerChart | alt.FacetChart:
    """Observed acceptance by predicted survival, a line a calibration; the diagonal is honesty."""
    label = (np.arange(trace.draft_length) < trace.arrays.num_accepted[:, None])[held_out].ravel()
    rows = []
    for name, value in values.items():
        p = value[held_out].ravel()
        at = np.minimum((p * bins).astype(np.int64), bins - 1)
        for b in np.unique(at):
            rows.append((name, float(p[at == b].mean()), float(label[at == b].mean())))
    data = pl.DataFrame(rows, schema=["calibration", "predicted", "accepted"], orient="row")
    lines = (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(
            x=alt.X("predicted", title="predicted survival").scale(domain=[0, 1]),
            y=alt.Y("accepted", title="share accepted").scale(domain=[0, 1]),
            color=alt.Color("calibration", sort=list(values), title=None),
        )
    )
    honest = alt.Chart(pl.DataFrame({"x": [0, 1], "y": [0, 1]})).mark_line(color="#9aa2ab", strokeDash=[4, 4])
    return (honest.encode(x="x", y="y") + lines).properties(
        width=380, height=380, title="Reliability on held-out requests"
    )


def _print(verdicts: list[Verdict]) -> None:
    print(f"{'held-out positions of':24} {'calibration':20} {'ECE':>7} {'AUC':>7}")
    part = ""
    for v in verdicts:
        where = f"{v.domain or '(no domain)'} ({v.num_positions:,})" if v.domain != part else ""
        print(f"{where:24} {v.calibration:20} {v.ece:7.4f} {v.auc:7.4f}")
        part = v.domain


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m traces.calibrate",
        description="Fit calibrations of a drafter's confidences to a trace: per-position isotonic curves, "
        "sequential temperatures, and the online one as it stands after "
        f"{ONLINE_STEPS} steps of {ONLINE_BATCH} requests. Prints the error (ECE) and ranking (AUC) of "
        "survival on held-out requests, before and after, and writes calibration.json and reliability.png.",
    )
    parser.add_argument("trace", help="a built-in trace's name, or a directory")
    parser.add_argument("--out", metavar="DIR", help="default out/calibration-TRACE")
    parser.add_argument(
        "--held-out", type=float, default=0.5, metavar="SHARE", help="of the requests (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default %(default)s")
    return parser


def main() -> None:
    """Raises InputError or OSError on what cannot be read, fitted or written."""
    args = _parser().parse_args()
    if not 0 < args.held_out < 1:
        raise InputError(f"--held-out {args.held_out:g} is not a share between 0 and 1")
    trace = open_trace(args.trace, args.seed)
    held_out = hold_out(trace, args.held_out, args.seed)
    fitted, own = fit(trace, ~held_out, args.seed), fit_domains(trace, ~held_out)
    values = survivals(trace, fitted, own)
    verdicts = judge(trace, values, held_out)
    out = Path(args.out or f"out/calibration-{Path(args.trace).name}")
    document: dict[str, Any] = {name: c.to_dict() for name, c in fitted.items() if isinstance(c, Calibration)}
    document["domains"] = {name: c.to_dict() for name, c in own.items()}
    with whole_directory(out, lambda _: ("calibration.json", "reliability.png")) as part:
        (part / "calibration.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
        reliability(trace, values, held_out).save(part / "reliability.png", scale_factor=2)
    _print(verdicts)
    print(f"wrote {out}/calibration.json and {out}/reliability.png")


if __name__ == "__main__":
    sys.exit(guard(main))
