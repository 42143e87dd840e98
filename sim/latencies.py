"""What serving traffic comes to: latencies, goodput under promised ones, queues, and all of it on disk."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dcut.cost import CostTable
from dcut.errors import InputError
from sim.results import run_name, run_names
from sim.scheduler import gap_quantile
from sim.serving import LOAD, Service
from traces.schema import REQUESTS, STEPS, Trace
from traces.store import TRAFFIC, read_directory, whole_directory, write_directory

_FILES = ("runs.parquet", "cost.json")
LOADS = {"replica": pl.Int64, **{name: pl.Int64 for name in LOAD.names or () if name not in STEPS}}
"""Columns of steps.parquet beside those of every run."""
TIMES = {
    "scheduled_s": pl.Float64,
    "first_token_s": pl.Float64,
    "finish_s": pl.Float64,
    "replica": pl.Int64,
    "num_preempted": pl.Int64,
    "cached_tokens": pl.Int64,  # of the prompt, found in memory
    "source_id": pl.Int64,  # the recorded request whose anchors it met
}
"""Columns of requests.parquet beside those of every run."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is promised, seconds; None: nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From "ttft=0.5,tpot=0.05". Raises InputError on anything else."""
        found: dict[str, float] = {}
        for piece in text.split(","):
            name, _, value = piece.strip().partition("=")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if name not in cls.__slots__ or not found[name] > 0:
                raise InputError(
                    f"--slo {text!r}: {piece!r} is not a promise in seconds such as ttft=0.5,tpot=0.05,e2e=30"
                )
        return cls(**found)


@dataclass(slots=True)
class StepLog:
    """Sums over the steps of a run as they come and, where a folder is given, their rows, piece by piece."""

    labels: Sequence[str]
    folder: Path | None = None
    num_steps: dict[int, int] = field(default_factory=dict)  # by replica
    busy_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    buckets: dict[int, int] = field(default_factory=dict)
    pieces: list[Path] = field(default_factory=list)

    def add(self, replica: int, steps: np.ndarray, loads: np.ndarray) -> None:
        """Take in consecutive steps of a replica."""
        if not len(steps):
            return
        first = self.num_steps.get(replica, 0)
        self.num_steps[replica] = first + len(steps)
        seconds = steps["step_s"]
        self.busy_s += float(seconds.sum())
        for name, values in (
            ("running", loads["num_running"] * seconds),
            ("waiting", loads["num_waiting"] * seconds),
            ("kv_blocks", loads["kv_blocks"] * seconds),
            ("num_preempted", loads["num_preempted"]),
            ("num_emitted", steps["num_emitted"] + loads["num_prompts"]),
            ("prefill_tokens", loads["prefill_tokens"]),
            ("num_decode_steps", steps["batch_size"] > 0),
        ):
            self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
        for name in ("num_waiting", "kv_blocks", "num_running"):
            self.peaks[name] = max(self.peaks.get(name, 0), int(loads[name].max()))
        chosen, num = np.unique(steps["bucket"][steps["bucket"] >= 0], return_counts=True)
        for bucket, count in zip(chosen.tolist(), num.tolist(), strict=True):
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        if self.folder is not None:
            piece = self.folder / f"{len(self.pieces)}.parquet"
            _steps_table(replica, first, steps, loads, self.labels).write_parquet(piece)
            self.pieces.append(piece)

    def table(self) -> pl.LazyFrame:
        """All rows, as they lie on disk."""
        return pl.scan_parquet(self.pieces)


def _steps_table(
    replica: int, first: int, steps: np.ndarray, loads: np.ndarray, labels: Sequence[str]
) -> pl.DataFrame:
    num = len(steps)
    columns = {name: steps[name] for name in steps.dtype.names or ()}
    columns |= {name: loads[name] for name in loads.dtype.names or ()}
    names = np.array([*labels, None], object)  # the last where nothing decoded
    return pl.DataFrame(
        {
            **columns,
            "step": np.arange(first, first + num),
            "select_s": np.zeros(num),
            "graph_tokens": pl.repeat(None, num, dtype=pl.Int64, eager=True),
            "bucket": pl.Series(names[columns["bucket"]].tolist(), dtype=pl.String),
            "replica": np.full(num, replica),
        }
    ).select([*STEPS, *LOADS])


def _statistics(name: str, values: np.ndarray) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_{key}": None for key in ("mean", "p50", "p90", "p99")}
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p50": p50,
        f"{name}_p90": p90,
        f"{name}_p99": p99,
    }


def figures(service: Service, log: StepLog, slo: Slo) -> dict[str, Any]:
    """The figures of a run of traffic, over all requests and all steps.

    ttft_s, e2e_s: from a request's arrival to its first and last token. tpot_s: (finish - first token) /
    (n - 1), of requests with more than one token. itl_s: from one verification of a request to the next,
    counted in bins 0.5 % wide. token_goodput_tps, request_goodput_rps: of requests that kept every promise
    of `slo`. Seconds run from the first arrival to the last token. keep_ratio, mean_acceptance_length,
    wasted_verify_ratio, bucket_share: as of a replay, over all steps that decode. *_mean of requests and
    blocks: over the time in which steps ran. num_reused_anchors: requests longer than what was recorded, so
    that they met anchors again.
    """
    books = service.ledger.books
    start, first, end = books["arrival_s"], books["first_token_s"], books["finish_s"]
    output = books["output_tokens"]
    many = output > 1
    tpot = np.where(many, (end - first) / np.maximum(output - 1, 1), 0.0)
    kept = np.ones(len(books), bool)
    for promise, took in ((slo.ttft, first - start), (slo.tpot, tpot), (slo.e2e, end - start)):
        kept &= True if promise is None else took <= promise
    seconds = float(end.max() - start.min())
    depths = np.arange(service.draft_length + 1)
    num_request_steps = max(1, int(service.kept.sum()))
    num_kept, num_accepted = int(service.kept @ depths), int(service.accepted @ depths)
    decoded = max(1.0, log.sums["num_decode_steps"])
    usable = service.limits.usable_blocks
    blocks = None if service.limits.kv_blocks is None else usable
    return {
        "num_requests": len(books),
        "simulated_s": seconds,
        "request_rps": len(books) / seconds,
        "throughput_tps": float(output.sum()) / seconds,
        **_statistics("ttft_s", first - start),
        **_statistics("tpot_s", tpot[many]),
        **{f"itl_s_p{q}": gap_quantile(service.gaps, q / 100) for q in (50, 90, 99)},
        **_statistics("e2e_s", end - start),
        "kept_share": float(kept.mean()),
        "token_goodput_tps": float(output[kept].sum()) / seconds,
        "request_goodput_rps": float(kept.sum()) / seconds,
        "keep_ratio": (num_kept / num_request_steps + 1) / (service.draft_length + 1),
        "mean_acceptance_length": num_accepted / num_request_steps + 1,
        "wasted_verify_ratio": (num_kept - num_accepted) / (num_kept + num_request_steps),
        "bucket_share": {label: log.buckets.get(at, 0) / decoded for at, label in enumerate(service.labels)},
        "num_steps": sum(log.num_steps.values()),
        "num_tokens": int(log.sums["num_emitted"]),
        "busy_s": log.busy_s,
        "num_running_mean": log.sums["running"] / log.busy_s,
        "num_running_max": log.peaks["num_running"],
        "num_waiting_mean": log.sums["waiting"] / log.busy_s,
        "num_waiting_max": log.peaks["num_waiting"],
        "kv_share_mean": None if blocks is None else log.sums["kv_blocks"] / log.busy_s / blocks,
        "kv_share_max": None if blocks is None else log.peaks["kv_blocks"] / blocks,
        "num_preempted": int(log.sums["num_preempted"]),
        "prefill_tokens": int(log.sums["prefill_tokens"]),
        "cached_tokens": int(books["cached_tokens"].sum()),
        "num_reused_anchors": int((output - 1 > service.ledger.num_rows).sum()),
    }


def requests_table(service: Service, trace: Trace) -> pl.DataFrame:
    """Every request, in the columns of traces.schema and TIMES; request_id is its number in the run."""
    books, source = service.ledger.books, service.ledger.source
    found = {name: books[name] for name in (*REQUESTS, *TIMES) if name in (books.dtype.names or ())}
    return pl.DataFrame(
        {
            **found,
            "request_id": np.arange(len(books)),
            "domain": trace.requests["domain"][source],
            "finish_reason": pl.repeat("length", len(books), dtype=pl.String, eager=True),
            "source_id": trace.arrays.request_id[source],
        }
    ).select([*REQUESTS, *TIMES])


def new_directory(path: str | Path, runs: Sequence[tuple[str, int]]) -> AbstractContextManager[Path]:
    """A fresh directory for `write`, which becomes `path` when the block ends well.

    runs: the policy and batch size of each run to come. Raises InputError where two of them would share a
    sub-directory, or where `path` is not free, empty or wholly written by `write`, or cannot be written.
    """
    run_names(runs)
    return whole_directory(path, lambda old: [*_FILES, *read_directory(old, TRAFFIC)[0]["runs"]])


def write_run(folder: Path, row: Mapping[str, Any], service: Service, log: StepLog, trace: Trace) -> None:
    """Write a run's steps and requests below `folder`, where `write` finds them; row: as `write` takes it."""
    about = {key: row[key] for key in ("policy", "batch_size")}
    tables = {"steps": log.table(), "requests": requests_table(service, trace)}
    name = run_name(row["policy"], row["batch_size"])
    write_directory(folder / name, "service", {**trace.meta, **about}, tables, {})
    for piece in log.pieces:
        piece.unlink()


def write(
    directory: Path, folder: Path, rows: Sequence[Mapping[str, Any]], cost: CostTable, meta: Mapping[str, Any]
) -> None:
    """Fill an empty directory: runs.parquet (`rows`, one a run), cost.json, meta.json, and the runs' own.

    rows: figures and configuration of each run, `policy` and `batch_size` among them. folder: where
    `write_run` left the runs; they are moved.
    """
    names = [run_name(row["policy"], row["batch_size"]) for row in rows]
    flat = []
    for name, row in zip(names, rows, strict=True):
        shares = [{"bucket": label, "share": share} for label, share in row["bucket_share"].items()]
        flat.append({"run": name, **row, "bucket_share": shares})
    table = pl.DataFrame(flat, infer_schema_length=None).drop("sim_steps_per_s")
    write_directory(directory, TRAFFIC, {**meta, "runs": names}, {"runs": table}, {"cost": cost.to_dict()})
    for name in names:
        (folder / name).rename(directory / name)
