"""What a running server tells Prometheus: steps, budgets, acceptance, and expectations against outcomes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.engine import Step

STEP_S = tuple(round(0.001 * 1.5**k, 6) for k in range(24))  # 1 ms .. 11 s
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RATIO = tuple(k / 20 for k in range(1, 21))


class StepMetrics:
    """The figures of an engine's steps."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """registry: where they are shown from; None in a process whose figures another one shows, by way of
        the files in $PROMETHEUS_MULTIPROC_DIR."""
        where: dict[str, Any] = {"registry": registry}
        self.step_s = Histogram("dcut_step_seconds", "Time of an engine step", buckets=STEP_S, **where)
        self.select_s = Counter("dcut_select_seconds", "Time that the policy took", **where)
        self.batch_size = Histogram("dcut_batch_size", "Requests in a step", buckets=BATCH, **where)
        self.keep_ratio = Histogram(
            "dcut_keep_ratio",
            "Positions verified in a step, as a share of batch * (draft length + 1)",
            buckets=RATIO,
            **where,
        )
        self.verified = Counter("dcut_verified_drafts", "Drafts verified, by position", ["position"], **where)
        self.accepted = Counter("dcut_accepted_drafts", "Drafts accepted, by position", ["position"], **where)
        self.bucket_steps = Counter("dcut_bucket_steps", "Steps that chose this budget", ["bucket"], **where)
        self.expected_tokens = Counter(
            "dcut_expected_tokens", "Tokens that the policy expected its steps to emit", **where
        )
        self.emitted_tokens = Counter("dcut_emitted_tokens", "Tokens emitted by steps", **where)
        self.prefill_s = Counter("dcut_prefill_seconds", "Time of admissions before steps", **where)
        self.prefill_tokens = Counter("dcut_prefill_tokens", "Prompt tokens run", **where)
        self.profile_drift = Gauge(
            "dcut_profile_drift",
            "Measured over profiled step time, recent steps",
            multiprocess_mode="mostrecent",
            **where,
        )

    def observe(self, step: Step, labels: Sequence[str], draft_length: int) -> None:
        """Count one step; labels: of the policy's budgets."""
        selection, batch_size = step.selection, len(step.request_id)
        self.prefill_s.inc(step.prefill_s)
        self.prefill_tokens.inc(step.prefill_tokens)
        if batch_size == 0:  # every request ended with the token of its prefill
            return
        self.step_s.observe(step.step_s)
        self.select_s.inc(step.select_s)
        self.batch_size.observe(batch_size)
        self.keep_ratio.observe(selection.num_verify_tokens / (batch_size * (draft_length + 1)))
        self.bucket_steps.labels(labels[selection.bucket]).inc()
        self.expected_tokens.inc(selection.expected_tokens)
        self.emitted_tokens.inc(step.num_emitted)
        for counter, depth in ((self.verified, selection.keep_depth), (self.accepted, step.num_accepted)):
            reached = np.bincount(depth)[::-1].cumsum()[::-1]  # [k]: requests with at least k drafts
            for position, count in enumerate(reached[1:]):
                counter.labels(position).inc(int(count))


class Metrics(StepMetrics):
    """The figures of one server and its engine, on a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        super().__init__(registry)
        self.running = Gauge("dcut_requests_running", "Requests in the batch", registry=registry)
        self.waiting = Gauge("dcut_requests_waiting", "Requests waiting for a place", registry=registry)
        self.requests = Counter(
            "dcut_requests",
            "Requests ended, by how: stop, length, cancelled, failed",
            ["end"],
            registry=registry,
        )
        self.refused = Counter("dcut_refused_requests", "Requests refused by overload", registry=registry)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
