"""Forward passes padded up to a few fixed shapes, each of which CUDA captures once as a graph and replays."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.kv_cache import DeviceRows, Rows


class Shape(NamedTuple):
    """What must be known of a pass before it runs."""

    rows: int  # of the linear layers
    num_slots: int  # the grid of attention spans the first ones
    width: int  # rows a slot at most
    longest: int  # keys that attention looks at


Forward = Callable[[Tensor, DeviceRows, Shape], tuple[Tensor | None, ...]]


class Graphs:
    """Runs `forward` padded to fixed shapes; without CUDA the same passes run without graphs.

    Batches are padded up to one of `batch_sizes` (counted by the highest slot in use), rows up to that many
    times one of `tokens_a_request`, keys up to a power of two. A graph is captured when its shape first
    occurs. All share one memory pool, so a result is valid until the next pass.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        batch_sizes: Sequence[int],
        tokens_a_request: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.forward, self.device, self.max_tokens = forward, device, max_tokens
        self.batch_sizes, self.tokens_a_request = sorted(batch_sizes), sorted(tokens_a_request)
        self.inputs: dict[Shape, Tensor] = {}
        self.graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor | None, ...]]] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.capture_s, self.memory_bytes = 0.0, 0

    def shape(self, rows: Rows) -> Shape | None:
        """The shape that holds `rows`, or None where none does."""
        highest, columns = int(rows.slots.max()) + 1, int(rows.columns.max()) + 1
        batch = next((size for size in self.batch_sizes if size >= highest), None)
        most = self.tokens_a_request[-1]
        if batch is None or columns > most:
            return None
        num_rows = next((batch * q for q in self.tokens_a_request if batch * q >= len(rows)), None)
        if num_rows is None:
            return None
        width = 1 if columns == 1 else most  # plain decoding needs no grid
        longest = max(64, 1 << (int(rows.visible.max()) - 1).bit_length())
        return Shape(num_rows, batch, width, min(longest, self.max_tokens))

    def run(self, tokens: np.ndarray, rows: Rows, shape: Shape) -> tuple[Tensor | None, ...]:
        """The results of `forward` for the rows at hand; their first dimension counts them."""
        fresh = shape not in self.inputs
        if fresh:
            self.inputs[shape] = torch.zeros(5, shape.rows, dtype=torch.int64, device=self.device)
        # Padding reads and writes the cache's spare slot, which comes before all others: slot -1.
        filled = np.zeros((5, shape.rows), np.int64)
        filled[1], filled[3] = -1, 1
        filled[2] = filled[4] = np.arange(shape.rows) % shape.width
        columns = tokens, rows.slots, rows.positions, rows.visible, rows.columns
        filled[:, : len(rows)] = columns
        inputs = self.inputs[shape]
        inputs.copy_(torch.from_numpy(filled))
        if self.pool is None:
            results = self._forward(inputs, shape)
        else:
            if fresh:
                self._capture(inputs, shape)
            graph, results = self.graphs[shape]
            graph.replay()
        return tuple(None if x is None else x[: len(rows)] for x in results)

    def _forward(self, inputs: Tensor, shape: Shape) -> tuple[Tensor | None, ...]:
        tokens, *places = inputs.unbind()
        return self.forward(tokens, DeviceRows(*places), shape)

    def _capture(self, inputs: Tensor, shape: Shape) -> None:
        torch.cuda.synchronize(self.device)
        began, held = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):  # libraries choose and set up their kernels outside of the graph
            for _ in range(2):
                self._forward(inputs, shape)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            results = self._forward(inputs, shape)
        self.graphs[shape] = graph, results
        torch.cuda.synchronize(self.device)
        self.capture_s += time.perf_counter() - began
        self.memory_bytes += torch.cuda.memory_reserved(self.device) - held

    def __str__(self) -> str:
        held = self.memory_bytes / 2**20
        return f"{len(self.graphs)} CUDA graphs captured in {self.capture_s:.1f} s, {held:.0f} MiB"


def knots(draft_length: int) -> list[int]:
    """Tokens a request that steps are measured at and, on CUDA, padded up to: 1, 2, 4, 8, 12, 16, ... D."""
    return [n for n in (1, 2, *range(4, draft_length + 1, 4)) if n <= draft_length] + [draft_length + 1]


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return [2**n for n in range(most.bit_length()) if 2**n < most] + [most]
