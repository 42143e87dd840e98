"""Traces generated from aggregate figures: a random process of accepted drafts and their confidences."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from scipy.special import expit, ndtri

from dcut.cost import CostTable
from traces.schema import REQUESTS, Trace, anchors_schema

MEAN_STEPS = 128  # of a request under full verification
DOMAINS = ("hardest", "hard", "middle", "easy", "easiest")
_DOMAIN_SCORES = ndtri((np.arange(5) + 0.5) / 5)  # a standard normal cut into fifths


class Draws(NamedTuple):
    """The standard normal numbers behind some steps; what a process makes of them is deterministic."""

    domain: np.ndarray  # int64 [steps], index into DOMAINS
    step: np.ndarray  # [steps]
    slot: np.ndarray  # [steps, draft_length]
    confidence: np.ndarray  # [steps, draft_length]


@dataclass(frozen=True, slots=True)
class AcceptanceProcess:
    """How likely each draft of a step is accepted, and what the drafter believes of it.

    On the logit scale, for a step of domain d and its draft k, with independent standard normals z:

        probability[k] = position_logit[k] + domain_sd * score[d] + step_sd * z + slot_sd * z[k]
        confidence[k]  = probability[k] - confidence_drop * sqrt(k) + confidence_sd * z'[k]

    `probability` is conditional on all earlier drafts being accepted; score[d] are the normal scores of five
    domains with equal shares of the steps. Steps are independent of each other. A block drafter rates all
    drafts at once, each without knowing that those before it hold, so its confidences fall behind with k.
    """

    position_logit: tuple[float, ...]  # [draft_length]
    domain_sd: float
    step_sd: float
    slot_sd: float
    confidence_sd: float
    confidence_drop: float = 0.0

    def logits(self, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the acceptance probabilities and of the confidences, each [steps, draft_length]."""
        kind = draws.slot.dtype
        quality = self.domain_sd * _DOMAIN_SCORES.astype(kind)[draws.domain] + self.step_sd * draws.step
        accept = np.asarray(self.position_logit, kind) + quality[:, None] + self.slot_sd * draws.slot
        behind = self.confidence_drop * np.sqrt(np.arange(accept.shape[1], dtype=kind))
        return accept, accept - behind + self.confidence_sd * draws.confidence

    def acceptance_lengths(self) -> np.ndarray:
        """Mean acceptance length (bonus token included) of each domain under full verification, [5]."""
        draws = stratified(2000, len(self.position_logit))
        accepted = np.cumprod(expit(self.logits(draws)[0]), axis=1).sum(axis=1)
        return 1 + np.bincount(draws.domain, accepted) / np.bincount(draws.domain)


def stratified(num_each: int, draft_length: int, seed: int = 0) -> Draws:
    """Draws for `num_each` steps of every domain, in random order.

    Within a domain every number is spread evenly over the normal distribution (a Latin hypercube), so that
    means over the draws are nearer to the process's own than those of plain random numbers.
    """
    rng = np.random.default_rng(seed)
    even = np.tile(ndtri((np.arange(num_each) + 0.5) / num_each)[:, None], 1 + 2 * draft_length)
    numbers = np.concatenate([rng.permuted(even, axis=0) for _ in DOMAINS])
    order = rng.permutation(len(numbers))
    return Draws(
        domain=np.repeat(np.arange(len(DOMAINS)), num_each)[order],
        step=numbers[order, 0],
        slot=numbers[order, 1 : 1 + draft_length],
        confidence=numbers[order, 1 + draft_length :],
    )


def generate(
    process: AcceptanceProcess,
    meta: dict[str, Any],
    cost: CostTable | None = None,
    num_requests: int = 320,
    seed: int = 0,
) -> Trace:
    """Draw a trace of `process`: the same seed gives the same trace.

    Requests take the domains in turn, and 64 to 192 steps each under full verification; their output is
    that many times their domain's mean acceptance length. So every domain has an equal share of the steps,
    which is how a server's counters weigh. Prompts have 32 to 512 tokens. `num_accepted` is
    one sample of `accept_probs`.
    """
    rng = np.random.default_rng(seed)
    draft_length = len(process.position_logit)
    domain = np.arange(num_requests) % len(DOMAINS)
    even = np.linspace(MEAN_STEPS / 2, MEAN_STEPS * 3 / 2, -(-num_requests // len(DOMAINS)))
    steps = rng.permuted(np.tile(even, (len(DOMAINS), 1)), axis=1).T.ravel()[:num_requests]
    output_tokens = 1 + np.rint(steps * process.acceptance_lengths()[domain]).astype(np.int64)
    num_rows = output_tokens - 1
    rows = int(num_rows.sum())
    accept, confidence = process.logits(
        Draws(
            domain=np.repeat(domain, num_rows),
            step=rng.standard_normal(rows, dtype=np.float32),
            slot=rng.standard_normal((rows, draft_length), dtype=np.float32),
            confidence=rng.standard_normal((rows, draft_length), dtype=np.float32),
        )
    )
    accept_probs = expit(accept)
    hits = rng.random((rows, draft_length), dtype=np.float32) < accept_probs
    ids = np.arange(num_requests)
    requests = {
        "request_id": ids,
        "domain": [DOMAINS[d] for d in domain],
        "prompt_tokens": rng.integers(32, 513, num_requests),
        "output_tokens": output_tokens,
        "arrival_s": np.zeros(num_requests),
        "finish_reason": ["length"] * num_requests,
    }
    anchors = {
        "request_id": np.repeat(ids, num_rows),
        "position": np.arange(rows) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows),
        "token_id": pl.repeat(None, rows, dtype=pl.Int64, eager=True),
        "num_accepted": np.logical_and.accumulate(hits, axis=1).sum(axis=1),
        "confidences": expit(confidence),
        "accept_probs": accept_probs,
    }
    return Trace(
        meta={**meta, "draft_length": draft_length, "seed": seed},
        requests=pl.DataFrame(requests, schema=REQUESTS),
        anchors=pl.DataFrame(anchors, schema=anchors_schema(draft_length, sampled=True)),
        cost=cost,
    )


def generate_builtin(directory: Path, seed: int) -> Trace:
    """Generate the built-in trace whose process.json and cost.json lie in `directory`."""
    stored = json.loads((directory / "process.json").read_text(encoding="utf-8"))
    process = AcceptanceProcess(**stored["process"])
    return generate(process, stored["meta"], CostTable.load(directory / "cost.json"), seed=seed)
