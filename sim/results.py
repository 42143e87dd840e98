"""What a replay leaves behind: the figures of each run, and a directory in the trace's own columns."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dcut.cost import CostTable
from dcut.errors import InputError
from sim.engine import Run
from traces.schema import DECISIONS, REQUESTS, STEPS, Trace
from traces.store import RESULTS, RUN, read_directory, whole_directory, write_directory

_FILES = ("runs.parquet", "cost.json")


def figures(run: Run) -> dict[str, Any]:
    """The figures of a run over its steady state (num_steps, num_tokens and simulated_s: over all of it).

    throughput_tps: tokens emitted a second. keep_ratio: verified positions, anchors included, of
    batch * D; 1 / D for plain decoding. mean_acceptance_length: accepted drafts + 1 of a request's step.
    wasted_verify_ratio: rejected drafts of all verified positions. bucket_share: label to share of steps.
    verified_by_position[k], accepted_by_position[k]: request-steps that verified, accepted draft k.
    """
    steps = run.steps[run.steady]
    depths = np.arange(run.draft_length + 1)
    num_request_steps = int(run.kept.sum())
    num_kept, num_accepted = int(run.kept @ depths), int(run.accepted @ depths)
    chosen = np.bincount(steps["bucket"], minlength=len(run.labels)) / len(steps)
    return {
        "throughput_tps": float(steps["num_emitted"].sum() / steps["step_s"].sum()),
        "keep_ratio": (num_kept / num_request_steps + 1) / (run.draft_length + 1),
        "mean_acceptance_length": num_accepted / num_request_steps + 1,
        "wasted_verify_ratio": (num_kept - num_accepted) / (num_kept + num_request_steps),
        "bucket_share": dict(zip(run.labels, chosen.tolist(), strict=True)),
        "mean_step_s": float(steps["step_s"].mean()),
        "num_steps": len(run.steps),
        "num_steady_steps": len(steps),
        "num_requests": len(run.order),
        "num_tokens": int(run.steps["num_emitted"].sum()),
        "simulated_s": float(run.spans["finish_s"].max()),
        "verified_by_position": np.cumsum(run.kept[:0:-1])[::-1].tolist(),
        "accepted_by_position": np.cumsum(run.accepted[:0:-1])[::-1].tolist(),
    }


def tables(run: Run, trace: Trace) -> dict[str, pl.DataFrame]:
    """A run's steps, requests and (where recorded) decisions, in the columns of traces.schema.

    A request served in the first pass over the trace keeps its request_id; each further pass adds the
    largest id + 1, so ids are unique. requests has one more column, finish_s; its arrival_s is the moment
    of admission. select_s is 0: a replay does not charge the policy's own time.
    """
    passes = np.arange(len(run.order)) // len(trace.requests)
    ids = trace.requests["request_id"].to_numpy()
    request_id = ids[run.order] + passes * (ids.max() + 1)
    rows = run.steps
    labels = np.array(run.labels)
    columns = {name: rows[name] for name in rows.dtype.names or ()}
    steps = pl.DataFrame(
        {
            **columns,
            "step": np.arange(len(rows)),
            "prefill_tokens": np.zeros(len(rows), np.int64),
            "select_s": np.zeros(len(rows)),
            "graph_tokens": pl.repeat(None, len(rows), dtype=pl.Int64, eager=True),
            "bucket": pl.Series(labels[rows["bucket"]], dtype=pl.String),
        }
    ).select(list(STEPS))
    requests = (
        trace.requests[run.order]
        .with_columns(request_id=request_id, arrival_s=run.spans["start_s"])
        .select(list(REQUESTS))
        .with_columns(finish_s=run.spans["finish_s"])
    )
    found = {"steps": steps, "requests": requests}
    if run.decisions is not None:
        made = {name: run.decisions[name] for name in run.decisions.dtype.names or ()}
        made["request_id"] = request_id[made.pop("request")]
        found["decisions"] = pl.DataFrame(made).select(list(DECISIONS))
    return found


def run_name(policy: str, batch_size: int) -> str:
    """The name of a run's sub-directory: "dcut:form=paper" at batch 8 becomes "dcut_form=paper-8"."""
    return f"{re.sub(r'[^A-Za-z0-9.=]+', '_', policy)}-{batch_size}"


def run_names(runs: Sequence[tuple[str, int]]) -> list[str]:
    """The sub-directories of runs (policy, batch size); InputError where two would share one."""
    names = [run_name(policy, batch_size) for policy, batch_size in runs]
    for at, name in enumerate(names):
        if name in names[:at]:
            one, other = runs[names.index(name)][0], runs[at][0]
            raise InputError(f"policies {one} and {other} would both be written to {name}: give one of them")
    return names


def new_directory(path: str | Path, runs: Sequence[tuple[str, int]]) -> AbstractContextManager[Path]:
    """A fresh directory for `write` to fill, which becomes `path` when the block ends without an error.

    runs: the policy and batch size of each run to come. Raises InputError where two of them would share a
    sub-directory, where `path` is not free, empty or wholly written by `write`, or where it cannot be
    written: before the block, so before the work.
    """
    run_names(runs)
    return whole_directory(path, lambda old: [*_FILES, *read_directory(old, RESULTS)[0]["runs"]])


def write(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, pl.DataFrame]],
    cost: CostTable,
    meta: Mapping[str, Any],
) -> None:
    """Fill an empty directory: runs.parquet (`rows`, one a run), cost.json, meta.json, a directory a run.

    rows: figures and configuration of each run, `policy` and `batch_size` among them. runs: its `tables`.
    """
    names = run_names([(row["policy"], row["batch_size"]) for row in rows])
    about = {key: meta[key] for key in ("trace", "cost", "seed", "draft_length")}
    flat = []
    for name, row in zip(names, rows, strict=True):
        shares = [{"bucket": label, "share": share} for label, share in row["bucket_share"].items()]
        flat.append({"run": name, **row, "bucket_share": shares, **about})
    table = pl.DataFrame(flat, schema_overrides={"cost": pl.String}).drop("sim_steps_per_s")
    write_directory(directory, RESULTS, {**meta, "runs": names}, {"runs": table}, {"cost": cost.to_dict()})
    for name, row, found in zip(names, rows, runs, strict=True):
        chosen = {key: row[key] for key in ("policy", "batch_size")}
        write_directory(directory / name, RUN, {**meta, **chosen}, found, {})
