"""Results directories read back, and what the figures need beyond them: curves, counts, published rows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import DCut, Full, Off, Ratio, parse_policy
from dcut.scores import survival
from dcut.selector import select
from traces.schema import Trace
from traces.store import RESULTS, TRAFFIC, kind_of, read_directory

PUBLISHED = Path(__file__).parent / "published"
PUBLISHED_TRACE = "h20-qwen3-8b"  # the built-in trace that the published throughput describes
ALLOCATION_TRACE = "h20-allocation"  # the one that allocation.csv describes
_COLUMNS = (
    "policy",
    "batch_size",
    "throughput_tps",
    "speedup_vs_off",
    "keep_ratio",
    "mean_acceptance_length",
    "wasted_verify_ratio",
    "num_steps",
    "bucket_share",
    "verified_by_position",
    "accepted_by_position",
    "trace",
    "cost",
    "seed",
    "draft_length",
)
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_TRAFFIC_COLUMNS = (
    "policy",
    "batch_size",
    "num_requests",
    "request_rps",
    "throughput_tps",
    "token_goodput_tps",
    "kept_share",
    *(f"{name}_p{q}" for name in LATENCIES for q in (50, 90, 99)),
    "keep_ratio",
    "mean_acceptance_length",
    "num_running_mean",
    "num_waiting_mean",
    "num_preempted",
)


@dataclass(frozen=True, slots=True)
class Results:
    """One results directory: its runs, one row each, and the cost table that they were priced with."""

    source: str  # the name by which the report tells it from the others
    meta: dict[str, Any]
    runs: pl.DataFrame
    cost: CostTable
    under_traffic: bool = False  # requests came when they came, not one for each that left


def load(paths: Sequence[str | Path]) -> list[Results]:
    """Read results directories; each is named by as much of its path as tells it from the others.

    Raises InputError, naming the file, for what is not a results directory, damaged, or without a column.
    """
    parts = [Path(path).resolve().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len({*parts}):
        depth += 1
    names = [os.fsencode("/".join(part[-depth:])).decode(errors="replace") for part in parts]
    if len({*names}) < len(names):
        raise InputError(f"{paths[names.index(max(names, key=names.count))]} is named twice: give each once")
    return [_load(Path(path), name) for path, name in zip(paths, names, strict=True)]


def _load(path: Path, source: str) -> Results:
    if not (path / "runs.parquet").is_file():
        found = "it holds no runs.parquet" if path.is_dir() else "no directory is there"
        raise InputError(f"{path} is not a results directory: {found}; sim.replay --out makes one")
    under_traffic = kind_of(path) == TRAFFIC
    meta, tables, documents = read_directory(path, TRAFFIC if under_traffic else RESULTS)
    runs = tables["runs"]
    columns = _TRAFFIC_COLUMNS if under_traffic else _COLUMNS
    missing = [name for name in columns if name not in runs.columns]
    if missing:
        raise InputError(f"{path / 'runs.parquet'} has no column {missing[0]!r}: not the runs of a replay")
    if not len(runs):
        raise InputError(f"{path / 'runs.parquet'} holds no runs")
    return Results(
        source,
        meta,
        runs.select(pl.lit(source).alias("source"), pl.all()).sort("batch_size", maintain_order=True),
        CostTable.from_dict(documents["cost"]),
        under_traffic,
    )


def step_times(cost: CostTable, batch_sizes: Sequence[int], width: int) -> pl.DataFrame:
    """Step time against keep ratio over the measured range: batch_size, x, value (ms), dot, hollow.

    dot: an entry of the table; hollow: an entry that is its step of plain decoding. A quarter of the
    positions is among the points where it can be verified.
    width: positions of a request, D. batch_sizes: used where the table knows none of its own.
    """
    plain = {int(batch): seconds for batch, seconds in cost.plain}
    own = cost.batch_sizes
    frames = []
    for row, batch in enumerate(batch_sizes if own is None else own.astype(int)):
        knots = cost.verify_tokens[0 if own is None else row]
        low, high = max(batch, int(knots[0])), min(int(knots[-1]), batch * width)
        every = max(1, (high - low) // 60)
        exact = [batch * width / 4] if batch * width % 4 == 0 else []
        points = np.array([*range(low, high + 1, every), high, *exact, *knots])
        tokens = np.unique(points[(points >= low) & (points <= high)])
        seconds = np.array([cost.seconds(batch, n) for n in tokens])
        dot = np.isin(tokens, knots)
        frames.append(
            pl.DataFrame(
                {
                    "batch_size": np.full(len(tokens), batch),
                    "x": tokens / (batch * width),
                    "value": seconds * 1000,
                    "dot": dot,
                    "hollow": dot & (tokens == batch) & (seconds == plain.get(batch)),
                }
            )
        )
    return pl.concat(frames)


def full_verification_rows(trace: Trace) -> np.ndarray:
    """Rows of the trace's anchors at which full verification would draft, one after the other, int64."""
    arrays = trace.arrays
    rows = []
    for first, count in zip(arrays.first_row, arrays.num_rows, strict=True):
        row, end = int(first), int(first + count)
        while row < end:
            rows.append(row)
            row += int(arrays.num_accepted[row]) + 1
    return np.array(rows)


def allocation(trace: Trace, batch_size: int = 32, num_batches: int = 400, seed: int = 0) -> pl.DataFrame:
    """Tokens a step when n positions a request are verified, in every request alike or by confidence.

    Batches are drawn from the anchors of full verification. Columns: name ("by confidence", "uniform"),
    x (keep ratio), num_verify_tokens, value (accepted tokens of the batch); both counts include the anchor
    and the bonus token, as the published ones do.
    """
    rng = np.random.default_rng(seed)
    rows = full_verification_rows(trace)
    batch_size = min(batch_size, len(rows))
    order = rng.permutation(len(rows))[: len(rows) // batch_size * batch_size].reshape(-1, batch_size)
    batches = rows[order[:num_batches]]
    accepted, confidences = trace.arrays.num_accepted, trace.arrays.confidences
    depths = np.arange(trace.draft_length + 1)
    found = []
    for depth in depths:
        budget = np.array([depth * batch_size])
        chosen = [select(confidences[batch], budget, np.ones(1)).keep_depth for batch in batches]
        for name, kept in (("by confidence", np.array(chosen)), ("uniform", depth)):
            tokens = np.minimum(accepted[batches], kept).sum(axis=1).mean() + batch_size
            found.append((name, (depth + 1) / len(depths), int(depth + 1) * batch_size, float(tokens)))
    return pl.DataFrame(found, schema=["name", "x", "num_verify_tokens", "value"], orient="row")


def calibration(trace: Trace, num_bins: int = 10) -> pl.DataFrame:
    """Share of drafts accepted by survival score: bin, x (mean score), value (share), num_drafts.

    Bins without a draft are left out.
    """
    rows = full_verification_rows(trace)
    scores = survival(trace.arrays.confidences[rows]).ravel()
    hits = (trace.arrays.num_accepted[rows, None] > np.arange(trace.draft_length)).ravel()
    bins = np.minimum((scores * num_bins).astype(int), num_bins - 1)
    return (
        pl.DataFrame({"bin": bins, "x": scores, "value": hits.astype(float)})
        .group_by("bin")
        .agg(pl.col("x", "value").mean(), num_drafts=pl.len())
        .sort("bin")
    )


def by_position(runs: pl.DataFrame) -> pl.DataFrame:
    """Shares of steps and requests that verified and accepted a draft: policy, source, x (from 1), ..."""
    found = []
    for run in runs.iter_rows(named=True):
        per_request = run["keep_ratio"] * (run["draft_length"] + 1) - 1  # drafts kept a request and step
        if per_request > 1e-9:
            steps = sum(run["verified_by_position"]) / per_request
            counts = zip(run["verified_by_position"], run["accepted_by_position"], strict=True)
            for k, (verified, accepted) in enumerate(counts, start=1):
                found.append((run["source"], run["policy"], k, verified / steps, accepted / steps))
    return pl.DataFrame(found, schema=["source", "name", "x", "verified", "accepted"], orient="row")


def published(name: str) -> pl.DataFrame:
    """One of the tables of published figures that the package ships, as in analysis/published/README.md."""
    return pl.read_csv(PUBLISHED / f"{name}.csv")


def published_method(policy: str) -> str | None:
    """The published method that a policy predicts, None where there is none."""
    try:
        match parse_policy(policy):
            case Off():
                return "AR"
            case Full():
                return "DFlash-B16"
            case Ratio(ratio=0.75):
                return "D-Cut-Fixed-R75"
            case Ratio(ratio=0.5):
                return "D-Cut-Fixed-R50"
            case DCut(buckets=(0.25, 0.5, 0.75, 1.0), bonus=False):
                return "D-Cut-B16"
    except InputError:
        pass
    return None


def against_published(runs: pl.DataFrame) -> pl.DataFrame:
    """The runs of the published set-up, joined with the columns published_*, one row a run.

    published_keep is null but for D-Cut; published_speedup is relative to plain decoding and
    published_against_dcut to D-Cut.
    """
    same = runs.filter(trace=PUBLISHED_TRACE).filter(pl.col("cost").is_null())
    rows = published("throughput").filter(model="Qwen3-8B").rename({"bs": "batch_size"})
    rows = rows.rename({"steady_output_tok_s": "published_tps", "keep_ratio": "published_keep"}).drop("model")
    tps = pl.col("published_tps")
    rows = rows.with_columns(
        (tps / tps.filter(pl.col("method") == base).first().over("batch_size")).alias(name)
        for name, base in (("published_speedup", "AR"), ("published_against_dcut", "D-Cut-B16"))
    )
    method = pl.Series("method", [published_method(policy) for policy in same["policy"]], dtype=pl.String)
    return same.with_columns(method).join(
        rows, on=["method", "batch_size"], how="inner", maintain_order="left"
    )
