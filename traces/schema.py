"""The nouns of a recorded run: the columns of its tables, and Trace, which holds them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dcut.cost import CostTable

FORMAT = 1

REQUESTS = {
    "request_id": pl.Int64,
    "domain": pl.String,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,  # tokens after the prompt; the first one comes from the prefill
    "arrival_s": pl.Float64,
    "finish_reason": pl.String,  # length | stop | cut (the run ended first)
}
STEPS = {
    "step": pl.Int64,
    "start_s": pl.Float64,
    "batch_size": pl.Int64,  # requests that decode in this step
    "num_verify_tokens": pl.Int64,  # rows of the target's forward pass that belong to them
    "context_tokens": pl.Int64,  # total length of their contexts
    "prefill_tokens": pl.Int64,  # prompt tokens that share the step
    "draft_s": pl.Float64,
    "select_s": pl.Float64,
    "verify_s": pl.Float64,
    "step_s": pl.Float64,
    "graph_tokens": pl.Int64,  # rows executed after padding; null without graphs
    "num_emitted": pl.Int64,  # tokens emitted by the step: accepted drafts and bonus tokens
    "bucket": pl.String,  # label of the budget that the policy chose
    "expected_tokens": pl.Float64,  # what the policy expected it to emit
}
DECISIONS = {
    "step": pl.Int64,
    "request_id": pl.Int64,
    "position": pl.Int64,  # output position of the anchor: 0 is the prefill's token
    "keep_depth": pl.Int64,
    "num_accepted": pl.Int64,  # accepted drafts, without the bonus token
}


def anchors_schema(draft_length: int, sampled: bool, narrower: Iterable[int] = ()) -> dict[str, Any]:
    """Columns of anchors.parquet: one row an output position from which a draft was made.

    `num_accepted` is what full verification accepts there, so a step that keeps n drafts accepts
    min(num_accepted, n). `accept_probs[k]`, present when sampled or generated, is the true probability that
    draft k is accepted given that all before it are; num_accepted is one draw of it.
    narrower: the widths of further drafters of the same target (traces/merge.py), which drafted from the same
    positions; `num_accepted_7` and `confidences_7` are those of one that drafts 7 tokens.
    """
    row = pl.Array(pl.Float32, draft_length)
    columns = {
        "request_id": pl.Int64,
        "position": pl.Int64,
        "token_id": pl.Int64,  # the anchor token; null where tokens were not recorded
        "num_accepted": pl.Int64,
        "confidences": row,
    }
    for width in narrower:
        columns |= {f"num_accepted_{width}": pl.Int64, f"confidences_{width}": pl.Array(pl.Float32, width)}
    return columns | ({"accept_probs": row} if sampled else {})


class Drafts(NamedTuple):
    """What one drafter proposed at every anchor."""

    num_accepted: np.ndarray  # int64 [rows]
    confidences: np.ndarray  # float32 [rows, width], C order


@dataclass(frozen=True)
class Anchors:
    """A trace's anchors as arrays, request after request, positions rising from 0 without a gap.

    Request r owns num_rows[r] rows; its position p is row first_row[r] + p.
    """

    request_id: np.ndarray  # int64 [requests]
    first_row: np.ndarray  # int64 [requests]
    num_rows: np.ndarray  # int64 [requests]
    prompt_tokens: np.ndarray  # int64 [requests]
    output_tokens: np.ndarray  # int64 [requests], at most num_rows + 1
    num_accepted: np.ndarray  # int64 [rows]
    confidences: np.ndarray  # float32 [rows, draft_length], C order
    accept_probs: np.ndarray | None  # float32 [rows, draft_length]
    narrower: dict[int, Drafts] = field(default_factory=dict)  # by width: of drafters with their own drafts

    def drafts(self, width: int) -> Drafts:
        """What was recorded for `width` drafts: by the drafter of that width, else by the widest."""
        return self.narrower.get(width) or Drafts(self.num_accepted, self.confidences)


@dataclass(frozen=True)
class Trace:
    """A recorded (or generated) run: metadata, requests, anchors, and where present steps and costs."""

    meta: dict[str, Any]  # engine, target, drafter, draft_length, temperature, dtype, device, versions
    requests: pl.DataFrame
    anchors: pl.DataFrame
    cost: CostTable | None = None
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEPS))
    decisions: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=DECISIONS))

    @property
    def draft_length(self) -> int:
        """Drafts proposed for each request and step, D - 1."""
        return int(self.meta["draft_length"])

    @property
    def narrower(self) -> tuple[int, ...]:
        """Widths of the further drafters that the anchors hold, rising."""
        return tuple(self.meta.get("narrower", ()))

    @cached_property
    def arrays(self) -> Anchors:
        """The anchors as arrays, in the order of `requests`."""
        anchors, requests = self.anchors, self.requests
        rows = anchors.group_by("request_id", maintain_order=True).len()
        counts = requests.select("request_id").join(rows, on="request_id", how="left", maintain_order="left")
        num_rows = counts["len"].fill_null(0).to_numpy().astype(np.int64)
        probs = anchors["accept_probs"].to_numpy() if "accept_probs" in anchors.columns else None
        return Anchors(
            request_id=requests["request_id"].to_numpy(),
            first_row=np.concatenate(([0], np.cumsum(num_rows)[:-1])).astype(np.int64),
            num_rows=num_rows,
            prompt_tokens=requests["prompt_tokens"].to_numpy(),
            output_tokens=requests["output_tokens"].to_numpy(),
            num_accepted=anchors["num_accepted"].to_numpy(),
            confidences=np.ascontiguousarray(anchors["confidences"].to_numpy(), dtype=np.float32),
            accept_probs=None if probs is None else np.ascontiguousarray(probs, dtype=np.float32),
            narrower={
                width: Drafts(
                    anchors[f"num_accepted_{width}"].to_numpy(),
                    np.ascontiguousarray(anchors[f"confidences_{width}"].to_numpy(), dtype=np.float32),
                )
                for width in self.narrower
            },
        )
