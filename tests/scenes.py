"""Small traces and cost tables, made up for the tests of the replay."""

import numpy as np
import polars as pl

from dcut.cost import CostTable, Sample
from traces.schema import Trace


def make_trace(lengths: list[int], draft_length: int, seed: int = 0, spare: int = 0) -> Trace:
    """A trace of random anchors; `spare` more of them than each request needs."""
    rng = np.random.default_rng(seed)
    rows = [length - 1 + spare for length in lengths]
    confidences = rng.beta(4, 1.5, (sum(rows), draft_length)).astype(np.float32)
    accepted = np.cumprod(rng.random(confidences.shape) < confidences, axis=1).sum(axis=1)
    ids = [10 + 3 * at for at in range(len(lengths))]
    requests = pl.DataFrame(
        {
            "request_id": ids,
            "domain": [("math", "code", "chat")[at % 3] for at in range(len(lengths))],
            "prompt_tokens": rng.integers(1, 50, len(lengths)),
            "output_tokens": lengths,
            "arrival_s": [None] * len(lengths),
            "finish_reason": ["length"] * len(lengths),
        },
        schema_overrides={"arrival_s": pl.Float64},
    )
    anchors = pl.DataFrame(
        {
            "request_id": np.repeat(ids, rows),
            "position": np.concatenate([np.arange(n) for n in rows]),
            "token_id": [None] * sum(rows),
            "num_accepted": accepted,
            "confidences": confidences,
        },
        schema_overrides={"token_id": pl.Int64, "confidences": pl.Array(pl.Float32, draft_length)},
    )
    return Trace({"draft_length": draft_length}, requests, anchors, make_cost(draft_length + 1))


def make_cost(block: int, most: int = 8, context_token_s: float = 0.0) -> CostTable:
    """A table of batch sizes 2..most, plain steps, drafter, and contexts that cost something if asked."""
    samples = []
    for batch in range(2, most + 1, 2):
        samples += [Sample("plain", batch, None, 0.010 + batch * 1e-4), Sample("draft", batch, None, 0.001)]
        samples += [Sample("verify", batch, batch * n, 0.011 + batch * n * 3e-4) for n in range(1, block + 1)]
    slopes = {"context_token_s": context_token_s, "context_per_request": 20}
    slopes |= {"context_pair_s": context_token_s / 4, "draft_context_token_s": context_token_s / 2}
    return CostTable.from_samples(samples, **slopes)
