"""A run as a Chrome trace, for Perfetto or chrome://tracing: steps, queues and each request's phases."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.scheduler import Ledger

_US = 1e6


class Timeline:
    """Writes events as they come; a context, at whose end the file is complete."""

    def __init__(self, path: str | Path) -> None:
        """path: .json, or .json.gz to compress it. Raises OSError where it cannot be written."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.part = self.path.with_name(f".{self.path.name}.part")
        self.file = (gzip.open if self.path.suffix == ".gz" else open)(self.part, "wt", encoding="utf-8")
        self.file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self.num_processes = 0

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.file.write("{}]}\n")
        self.file.close()
        self.part.unlink() if kind else self.part.replace(self.path)

    def start(self, policy: str, replicas: int) -> int:
        """Open a row for each replica of a run; the number of the first."""
        first = self.num_processes
        self.num_processes += replicas
        for replica in range(replicas):
            name = policy if replicas == 1 else f"{policy}, replica {replica}"
            self._write({"ph": "M", "name": "process_name", "pid": first + replica, "args": {"name": name}})
        return first

    def steps(self, process: int, steps: np.ndarray, loads: np.ndarray, labels: Sequence[str]) -> None:
        """A slice for each step, and counters of requests and KV blocks."""
        for step, load in zip(steps, loads, strict=True):
            at = {"pid": process, "ts": round(step["start_s"] * _US, 3)}
            batch, prompts = int(step["batch_size"]), int(load["prefill_tokens"])
            label = labels[step["bucket"]] if step["bucket"] >= 0 else None
            args = {
                "batch_size": batch,
                "num_verify_tokens": int(step["num_verify_tokens"]),
                "num_emitted": int(step["num_emitted"]),
                "prefill_tokens": prompts,
                "num_preempted": int(load["num_preempted"]),
                "draft_ms": round(step["draft_s"] * 1e3, 6),
                "budget": label,
            }
            name = "decode + prompts" if batch and prompts else "decode" if batch else "prompts"
            self._write(
                {**at, "ph": "X", "tid": 0, "name": name, "dur": round(step["step_s"] * _US, 3), "args": args}
            )
            counts = {"running": int(load["num_running"]), "waiting": int(load["num_waiting"])}
            self._write({**at, "ph": "C", "name": "requests", "args": counts})
            self._write({**at, "ph": "C", "name": "KV blocks", "args": {"used": int(load["kv_blocks"])}})

    def requests(self, first: int, ledger: Ledger) -> None:
        """Each request's phases: it waits, its prompt is computed, it decodes."""
        for request, book in enumerate(ledger.books):
            ends = [book[f"{name}_s"] for name in ("arrival", "scheduled", "first_token", "finish")]
            common = {"cat": "request", "id": request, "pid": first + int(book["replica"]), "tid": 1}
            lengths = {
                "prompt_tokens": int(book["prompt_tokens"]),
                "output_tokens": int(book["output_tokens"]),
            }
            for name, start, end in zip(("wait", "prompt", "decode"), ends, ends[1:], strict=False):
                self._write({**common, "ph": "b", "name": name, "ts": round(start * _US, 3), "args": lengths})
                self._write({**common, "ph": "e", "name": name, "ts": round(end * _US, 3)})

    def _write(self, event: dict[str, Any]) -> None:
        self.file.write(json.dumps(event) + ",\n")
