"""CostTable: the measured time of a step, by batch size and number of tokens verified."""

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from dcut.errors import InputError
from dcut.jit import compiled

FORMAT = 1


class Sample(NamedTuple):
    """One measured time. kind is "verify" (target forward), "draft" (drafter) or "plain" (no speculation)."""

    kind: str
    batch_size: int | None  # None: a verify time that depends on the tokens alone
    num_verify_tokens: int | None  # None for draft and plain
    seconds: float


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: policies cache prices by table
class CostTable:
    """Measured step times and their look-up.

    Verify times form a grid: one row a batch size, `verify_tokens[row, knot]` and `verify_s[row, knot]`.
    Between knots, and between rows at equal tokens a request, times are interpolated (bilinear). A table
    without batch sizes has a single row: its time depends on the tokens alone.

    Up to `max_graph_tokens` the knots are captured CUDA graphs: execution pads the tokens up to the next
    knot and the batch up to the next row (a staircase). Above it the step runs without a graph: the time is
    interpolated among the knots beyond alone, so the cliff at the largest graph stays a cliff.

    Draft and plain times are separate and interpolated over the batch size. Where the drafter can also be
    asked for fewer drafts than its longest, `draft_lengths` holds those numbers, rising, and the share of
    the time that each takes.

    All of this was measured at contexts of `context_per_request` tokens a request. A step takes longer for
    each context token beyond: the target `context_token_s`, and for each row that attends to it
    `context_pair_s`; the drafter `draft_context_token_s`.

    A step with prompt tokens takes `prefill_s` longer, `prefill_token_s` for each of them, and
    `prefill_pair_s` for each pair of one and a token that it attends to. In a table without batch sizes
    prompt tokens are also rows of the pass like any others, since its time depends on rows alone.
    """

    verify_tokens: np.ndarray  # float64 [rows, knots], increasing along a row
    verify_s: np.ndarray  # float64 [rows, knots]
    batch_sizes: np.ndarray | None = None  # float64 [rows], increasing; None: tokens alone decide
    draft: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # [n, 2] batch size, seconds
    plain: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # [n, 2] batch size, seconds
    draft_lengths: tuple[tuple[int, float], ...] = ()  # drafts, share of the longest's time
    max_graph_tokens: int = 0  # 0: no graphs, interpolate everywhere
    context_token_s: float = 0.0
    context_pair_s: float = 0.0
    draft_context_token_s: float = 0.0
    context_per_request: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_s: float = 0.0

    # ---- look-up ----------------------------------------------------------------------------------------

    def seconds(
        self,
        batch_size: int,
        num_verify_tokens: float,
        context_tokens: float | None = None,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
        extrapolate: bool = False,
    ) -> float:
        """Time of the target's forward pass over `num_verify_tokens` of `batch_size` requests, seconds.

        context_tokens: total length of the contexts; None means as measured.
        prefill_tokens, prefill_pairs: of prompts that share the pass; with them batch_size may be 0.
        extrapolate: outside the measured range use the nearest edge below it and the last slope above it,
        instead of raising InputError with the range.
        """
        context_s = self.context_seconds(batch_size, context_tokens, num_verify_tokens)
        if self.batch_sizes is None:
            num_verify_tokens += prefill_tokens
        elif not batch_size:  # the weights are read as for one request
            batch_size = num_verify_tokens = 1
        code, value = _verify_seconds(
            float(batch_size), float(num_verify_tokens), *self._packed, bool(extrapolate)
        )
        if code:
            raise InputError(self._outside(code, batch_size, num_verify_tokens))
        return value + context_s + self.prefill_seconds(prefill_tokens, prefill_pairs)

    def prefill_seconds(self, prefill_tokens: int, prefill_pairs: float = 0.0) -> float:
        """What prompt tokens add to the step that they share."""
        if not prefill_tokens:
            return 0.0
        return self.prefill_s + self.prefill_token_s * prefill_tokens + self.prefill_pair_s * prefill_pairs

    def curve(self, batch_size: int, most_tokens: int, extrapolate: bool = False) -> np.ndarray:
        """`seconds` for every number of tokens 0..most_tokens at once; NaN below one token a request."""
        values = np.full(most_tokens + 1, math.nan)
        code, tokens = _verify_curve(float(batch_size), values, *self._packed, bool(extrapolate))
        if code:
            raise InputError(self._outside(code, batch_size, tokens))
        return values

    def draft_seconds(
        self,
        batch_size: int,
        context_tokens: float | None = None,
        drafts: int | None = None,
        extrapolate: bool = False,
    ) -> float:
        """Time of the drafter for one step, seconds; 0 where the table holds no draft times.

        drafts: how many it is asked for; less time only where they are among `draft_lengths`. See `seconds`.
        """
        if not len(self.draft):
            return 0.0
        longest_s = self._line("draft", self.draft, batch_size, extrapolate)
        return longest_s * self._share(drafts) + self.draft_context_seconds(
            batch_size, context_tokens, drafts
        )

    def draft_context_seconds(
        self, batch_size: int, context_tokens: float | None, drafts: int | None = None
    ) -> float:
        """What the drafter takes more (or less) than measured because contexts are longer (or shorter)."""
        return self.draft_context_token_s * self._share(drafts) * self._further(batch_size, context_tokens)

    def _share(self, drafts: int | None) -> float:
        """The time of so many drafts over that of the most."""
        return next((share for length, share in self.draft_lengths if length == drafts), 1.0)

    def plain_seconds(
        self,
        batch_size: int,
        context_tokens: float | None = None,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
        extrapolate: bool = False,
    ) -> float:
        """Time of a step of plain decoding (one token a request, no drafter), seconds; see `seconds`."""
        prefill = prefill_tokens, prefill_pairs
        if not len(self.plain):
            try:
                return self.seconds(batch_size, batch_size, context_tokens, *prefill, extrapolate=extrapolate)
            except InputError as error:
                raise InputError(
                    f"no time of plain decoding at batch size {batch_size} (a row of kind plain, or of kind "
                    f"verify with {batch_size} tokens): {error}"
                ) from error
        measured = self._line("plain", self.plain, batch_size, extrapolate)
        context_s = self.context_seconds(batch_size, context_tokens, batch_size)
        return measured + context_s + self.prefill_seconds(*prefill)

    @overload
    def context_seconds(
        self, batch_size: int, context_tokens: float | None, num_verify_tokens: float
    ) -> float: ...

    @overload
    def context_seconds(
        self, batch_size: int, context_tokens: float | None, num_verify_tokens: np.ndarray
    ) -> np.ndarray: ...

    def context_seconds(
        self, batch_size: int, context_tokens: float | None, num_verify_tokens: float | np.ndarray
    ) -> float | np.ndarray:
        """What the target takes more (or less) than measured because contexts are longer (or shorter).

        Of one number of verified tokens, or of several at once. The rows of a step look at the mean context.
        """
        rows = num_verify_tokens / max(1, batch_size)
        slope_s = self.context_token_s + self.context_pair_s * rows
        return slope_s * self._further(batch_size, context_tokens)

    def _further(self, batch_size: int, context_tokens: float | None) -> float:
        """Context tokens beyond those of the measurements."""
        return 0.0 if context_tokens is None else context_tokens - self.context_per_request * batch_size

    def check_batch_size(self, batch_size: int) -> None:
        """Raise InputError with the measured range unless it holds `batch_size`."""
        if self.batch_sizes is not None and not self.batch_sizes[0] <= batch_size <= self.batch_sizes[-1]:
            raise InputError(self._outside(1, batch_size, batch_size))
        for name, points in (("draft", self.draft), ("plain", self.plain)):
            if len(points):
                self._line(name, points, batch_size, False)

    @cached_property
    def _packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        rows = np.zeros(0) if self.batch_sizes is None else self.batch_sizes
        return rows, self.verify_tokens, self.verify_s, float(self.max_graph_tokens)

    @staticmethod
    def _line(name: str, points: np.ndarray, batch_size: int, extrapolate: bool) -> float:
        low, high = points[0, 0], points[-1, 0]
        if not (low <= batch_size <= high or extrapolate):
            raise InputError(
                f"batch size {batch_size} is outside the measured range {low:g}..{high:g} of {name} times"
            )
        if batch_size > high and len(points) > 1:
            (x0, y0), (x1, y1) = points[-2:]
            return float(y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (batch_size - x1))
        return float(np.interp(batch_size, points[:, 0], points[:, 1]))

    def _outside(self, code: int, batch_size: float, num_verify_tokens: float) -> str:
        if code == 1 and self.batch_sizes is not None:
            low, high = self.batch_sizes[0], self.batch_sizes[-1]
            return f"batch size {batch_size:g} is outside the measured range {low:g}..{high:g}"
        if self.batch_sizes is None:
            low, high = self.verify_tokens[0, 0], self.verify_tokens[0, -1]
        else:
            a_request = self.verify_tokens / self.batch_sizes[:, None]
            low, high = a_request[:, 0].max() * batch_size, a_request[:, -1].min() * batch_size
        return (
            f"{num_verify_tokens:g} verified tokens at batch size {batch_size:g} are outside "
            f"the measured range {low:g}..{high:g}"
        )

    # ---- building ---------------------------------------------------------------------------------------

    @classmethod
    def from_samples(
        cls, samples: Iterable[Sample], draft_lengths: Iterable[tuple[int, float]] = (), **options: Any
    ) -> "CostTable":
        """Build a table from measured samples; repeated measurements of one point are taken at their median.

        Where plain times are given and a row's smallest measurement has more than one token a request, the
        plain time of that batch size becomes the row's first knot: verifying no draft is a plain step.
        Raises InputError on a negative or missing time, an unknown kind, or a hole in the grid.
        """
        points: dict[tuple[str, int | None, int | None], list[float]] = {}
        for kind, batch_size, tokens, seconds in samples:
            where = f"{kind} time at batch size {batch_size}" + (f", {tokens} tokens" if tokens else "")
            if kind not in ("verify", "draft", "plain"):
                raise InputError(f"unknown kind of time {kind!r}: use verify, draft or plain")
            if isinstance(seconds, bool) or not (isinstance(seconds, float | int) and 0 < seconds <= _MOST):
                raise InputError(f"{where} is {seconds} s; a step time must be positive and finite")
            if batch_size is not None and batch_size < 1:
                raise InputError(f"{where}: a batch holds at least one request")
            if max(batch_size or 0, tokens or 0) > _MOST:
                raise InputError(f"a {kind} time at more than {_MOST:g} requests or tokens is a slip")
            if kind == "verify" and (tokens is None or tokens < (batch_size or 1)):
                raise InputError(f"{where}: {tokens} tokens are fewer than one for each request")
            if kind != "verify" and batch_size is None:
                raise InputError(f"{where}: draft and plain times need a batch size")
            points.setdefault((kind, batch_size, tokens if kind == "verify" else None), []).append(seconds)
        medians = {key: float(np.median(times)) for key, times in points.items()}
        lines = {
            name: np.array(sorted((b, s) for (kind, b, _), s in medians.items() if kind == name)).reshape(
                -1, 2
            )
            for name in ("draft", "plain")
        }
        rows: dict[int | None, dict[int, float]] = {}
        for (kind, batch_size, tokens), seconds in medians.items():
            if kind == "verify" and tokens is not None:
                rows.setdefault(batch_size, {})[tokens] = seconds
        if not rows:
            raise InputError("the cost table holds no verify times")
        if None in rows and len(rows) > 1:
            raise InputError("some verify times name a batch size and some do not: give it to all or to none")
        plain = {int(batch_size): float(seconds) for batch_size, seconds in lines["plain"]}
        above = [b for b, row in rows.items() if b is not None and min(row) > b]
        if plain and (bare := [b for b in above if b not in plain]) and len(bare) < len(above):
            raise InputError(
                f"plain times for some batch sizes but not for {bare[0]}: add a row of kind plain"
            )
        for batch_size in above:
            if batch_size in plain:
                rows[batch_size][batch_size] = plain[batch_size]
        for name, value in options.items():
            if isinstance(value, bool) or not (isinstance(value, float | int) and 0 <= value <= _MOST):
                raise InputError(f"{name} is {value!r}; it must be a number of at least 0")
        lengths = tuple((length, float(share)) for length, share in draft_lengths)
        numbers = [length for length, _ in lengths]
        if numbers != sorted(set(numbers)) or not all(n >= 1 and 0 < share <= 1 for n, share in lengths):
            raise InputError(
                f"draft_lengths are {list(lengths)}; they must be rising numbers of drafts from 1, "
                "each with the share in (0, 1] of the longest's time"
            )
        return cls(
            **_grid(rows), draft=lines["draft"], plain=lines["plain"], draft_lengths=lengths, **options
        )

    # ---- files ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Read a table from .json (as `save` writes it) or .csv.

        CSV columns: batch_size, num_verify_tokens, step_s or step_ms, and optionally kind
        (verify, draft or plain; verify where absent). Raises InputError naming the file and the line.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a text file; give a cost table as .csv or .json") from error
        try:
            if path.suffix.lower() == ".json":
                return cls.from_dict(json.loads(text))
            return cls._from_csv(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{path} is not valid JSON: {error}") from error
        except csv.Error as error:
            raise InputError(f"{path} is not valid CSV: {error}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    @classmethod
    def _from_csv(cls, text: str) -> "CostTable":
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        unit = next((name for name in ("step_s", "step_ms") if name in columns), None)
        missing = [name for name in ("batch_size", "num_verify_tokens") if name not in columns]
        if unit is None:
            missing.append("step_s or step_ms")
        if missing:
            raise InputError(f"no column {', '.join(missing)}; found {', '.join(columns) or 'nothing'}")
        samples = []
        for line, row in enumerate(reader, start=2):
            if row[str(unit)] is None:
                raise InputError(f"line {line} has fewer values than the {len(columns)} columns")
            try:
                samples.append(
                    Sample(
                        row.get("kind") or "verify",
                        int(row["batch_size"]) if row["batch_size"] else None,
                        int(row["num_verify_tokens"]) if row["num_verify_tokens"] else None,
                        float(row[str(unit)]) / (1000 if unit == "step_ms" else 1),
                    )
                )
            except ValueError as error:
                raise InputError(f"line {line}: {error}") from error
        return cls.from_samples(samples)

    @classmethod
    def from_dict(cls, data: Any) -> "CostTable":
        """Rebuild a table from `to_dict`'s plain values, through the same checks as new samples."""
        if not isinstance(data, dict) or "verify" not in data:
            raise InputError("not a cost table: no 'verify' entry")
        if data.get("format") != FORMAT:
            raise InputError(f"cost table format {data.get('format')!r}; this version reads format {FORMAT}")
        try:
            samples = [
                Sample(kind, _whole(b), _whole(tokens), seconds)
                for kind in ("verify", "draft", "plain")
                for b, tokens, seconds in (
                    row if kind == "verify" else (row[0], None, row[1]) for row in data.get(kind, [])
                )
            ]
            lengths = [(int(length), float(share)) for length, share in data.get("draft_lengths", [])]
            options = {name: data[name] for name in _OPTIONS if name in data}
        except (TypeError, ValueError, IndexError) as error:
            raise InputError(f"a cost table's entries are malformed: {error}") from error
        return cls.from_samples(samples, lengths, **options)

    def to_dict(self) -> dict[str, Any]:
        """The table as plain values: verify rows [batch size, tokens, seconds], draft and plain points."""
        rows = [None] if self.batch_sizes is None else [int(b) for b in self.batch_sizes]
        return {
            "format": FORMAT,
            "verify": [
                [b, int(tokens), float(seconds)]
                for b, row, times in zip(rows, self.verify_tokens, self.verify_s, strict=True)
                for tokens, seconds in zip(row, times, strict=True)
            ],
            "draft": [[int(b), float(s)] for b, s in self.draft],
            "plain": [[int(b), float(s)] for b, s in self.plain],
            "draft_lengths": [list(pair) for pair in self.draft_lengths],
            **{name: getattr(self, name) for name in _OPTIONS},
        }

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, complete or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


_OPTIONS = (
    "max_graph_tokens",
    "context_token_s",
    "context_pair_s",
    "draft_context_token_s",
    "context_per_request",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_s",
)


_MOST = 1e9  # seconds, requests and tokens alike: beyond it a value is a slip


def _whole(value: float | None) -> int | None:
    """A count read from JSON, or None; ValueError where it is not a whole number."""
    if value is None or (not isinstance(value, bool) and abs(value) < math.inf and value == int(value)):
        return value if value is None else int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _grid(rows: dict[int | None, dict[int, float]]) -> dict[str, np.ndarray | None]:
    """Rows of {tokens: seconds} as the arrays of a table; every row must hold the same tokens a request."""
    if None in rows:
        tokens = sorted(rows[None])
        times = [[rows[None][n] for n in tokens]]
        return {"verify_tokens": np.array([tokens], float), "verify_s": np.array(times), "batch_sizes": None}
    batch_sizes = sorted(b for b in rows if b is not None)
    a_request = sorted({round(n / b, 9) for b in batch_sizes for n in rows[b]})
    tokens, times = [], []
    for b in batch_sizes:
        found = {round(n / b, 9): n for n in rows[b]}
        hole = next((q for q in a_request if q not in found), None)
        if hole is not None:
            raise InputError(
                f"the cost table has a hole: no verify time at batch size {b} for {hole * b:g} tokens "
                f"({hole:g} a request), which other batch sizes have"
            )
        tokens.append([found[q] for q in a_request])
        times.append([rows[b][n] for n in tokens[-1]])
    return {
        "verify_tokens": np.array(tokens, float),
        "verify_s": np.array(times),
        "batch_sizes": np.array(batch_sizes, float),
    }


@compiled
def _verify_curve(
    batch_size: float,
    values: np.ndarray,
    batch_sizes: np.ndarray,
    verify_tokens: np.ndarray,
    verify_s: np.ndarray,
    max_graph_tokens: float,
    extrapolate: bool,
) -> tuple[int, int]:
    """Fill values[n] for n from batch_size up; (0, 0), or the code and tokens of the first refusal."""
    for n in range(int(batch_size), len(values)):
        code, values[n] = _verify_seconds(
            batch_size, float(n), batch_sizes, verify_tokens, verify_s, max_graph_tokens, extrapolate
        )
        if code:
            return code, n
    return 0, 0


@compiled
def _verify_seconds(
    batch_size: float,
    tokens: float,
    batch_sizes: np.ndarray,
    verify_tokens: np.ndarray,
    verify_s: np.ndarray,
    max_graph_tokens: float,
    extrapolate: bool,
) -> tuple[int, float]:
    """(0, seconds), or (1, 0) for a batch size and (2, 0) for a number of tokens outside the table."""
    rows = len(batch_sizes)
    if rows == 0:
        return _row_seconds(tokens, verify_tokens[0], verify_s[0], max_graph_tokens, extrapolate)
    if not (batch_sizes[0] <= batch_size <= batch_sizes[-1] or extrapolate):
        return 1, 0.0
    above = min(np.searchsorted(batch_sizes, batch_size), rows - 1)
    if tokens <= max_graph_tokens or batch_sizes[above] == batch_size:
        return _row_seconds(tokens, verify_tokens[above], verify_s[above], max_graph_tokens, extrapolate)
    if rows == 1 or batch_size < batch_sizes[0]:
        scale = batch_sizes[0] / batch_size
        code, value = _row_seconds(
            tokens * scale, verify_tokens[0], verify_s[0], max_graph_tokens, extrapolate
        )
        return code, value * max(1.0, batch_size / batch_sizes[0])
    above = max(above, 1)
    low, high = batch_sizes[above - 1], batch_sizes[above]
    per_request = tokens / batch_size
    code_low, at_low = _row_seconds(
        per_request * low, verify_tokens[above - 1], verify_s[above - 1], max_graph_tokens, extrapolate
    )
    code_high, at_high = _row_seconds(
        per_request * high, verify_tokens[above], verify_s[above], max_graph_tokens, extrapolate
    )
    return max(code_low, code_high), at_low + (at_high - at_low) * (batch_size - low) / (high - low)


@compiled
def _row_seconds(
    tokens: float, knots: np.ndarray, times: np.ndarray, max_graph_tokens: float, extrapolate: bool
) -> tuple[int, float]:
    """(0, seconds) at `tokens` on one row: a staircase up to the largest graph, a line above, else (2, 0)."""
    last = len(knots) - 1
    if tokens <= max_graph_tokens:
        step = np.searchsorted(knots, tokens)
        if step <= last and knots[step] <= max_graph_tokens:
            return 0, times[step]
    first = np.searchsorted(knots, max_graph_tokens, side="right") if max_graph_tokens > 0 else 0
    if first > last:
        first = last
    slack = 1e-9 * knots[last]
    if not extrapolate and (
        tokens > knots[last] + slack or (max_graph_tokens == 0 and tokens < knots[0] - slack)
    ):
        return 2, 0.0
    if tokens <= knots[first]:
        return 0, times[first]
    above = min(np.searchsorted(knots, tokens), last)
    if above == first:  # a single knot beyond the graphs, and tokens past it
        return 0, times[last] * tokens / knots[last]
    slope = (times[above] - times[above - 1]) / (knots[above] - knots[above - 1])
    if tokens > knots[last]:
        return 0, times[last] + max(slope, 0.0) * (tokens - knots[last])
    return 0, times[above - 1] + slope * (tokens - knots[above - 1])
