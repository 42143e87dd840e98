"""Workloads on disk: when requests arrive and how long they are, from the public formats or one's own."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dcut.errors import InputError

BLOCK_TOKENS = 512
"""Tokens of a prompt behind each of its blocks, as the Mooncake format has it."""

_LINES = 50_000  # of a JSONL file parsed at once, so that memory does not grow with the file


class Format(NamedTuple):
    """A known set of columns."""

    name: str
    arrival: str
    prompt_tokens: str
    output_tokens: str
    unit: str  # of the arrivals
    a_second: float  # that many of them


FORMATS = (
    Format("plain", "arrival_s", "prompt_tokens", "output_tokens", "seconds", 1),
    Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "dates", 1e9),
    Format("Mooncake", "timestamp", "input_length", "output_length", "milliseconds", 1e3),
    Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", "seconds", 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival, as arrays; a million of them take 24 MB, and 4 bytes a block."""

    source: str  # the file
    first_line: int  # of the first request in it: 2 below a CSV's header, else 1
    arrival_s: np.ndarray  # float64 [requests], seconds since the first request, never falling
    prompt_tokens: np.ndarray  # int64 [requests], at least 1
    output_tokens: np.ndarray  # int64 [requests], at least 1
    domain: pl.Series | None = None  # str [requests]
    blocks: np.ndarray | None = None  # int32 [blocks], small; equal where prompts are up to there
    block_starts: np.ndarray | None = None  # int64 [requests + 1], where each request's begin, and the end

    def __len__(self) -> int:
        return len(self.arrival_s)

    def where(self, request: int) -> str:
        """The place that a request was read from, for a message."""
        return f"{self.source}: line {self.first_line + request}"


def read_workload(path: str | Path, timed: bool = True) -> Workload:
    """Read a workload; its columns tell the format, its ending the encoding (.jsonl, .parquet, else CSV).

    Columns, beside which others are ignored: arrival_s, prompt_tokens, output_tokens and, if one likes,
    domain; Azure's TIMESTAMP, ContextTokens, GeneratedTokens; Mooncake's timestamp (ms), input_length,
    output_length and, if there, hash_ids, one for each 512 tokens of the prompt; Vidur's arrived_at (s),
    num_prefill_tokens, num_decode_tokens.
    timed: False where only the lengths are wanted: a file without arrivals then has all of them at 0.
    Raises InputError, naming the row and the remedy, for missing columns or values, times that fall or
    change their unit, lengths below 1, a hash too few or too many, and a file without requests.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        tables, first_line = _read_parquet(path), 1
    elif path.suffix in (".jsonl", ".ndjson"):
        tables, first_line = _read_lines(path), 1
    else:
        tables, first_line = _read_csv(path), 2
    form, line = None, first_line
    parts = []
    for table in tables:
        form = form or _format(path, table.columns, timed)
        parts.append(_Rows(path, line, table, form).arrays())
        line += len(table)
    if form is None or line == first_line:
        raise InputError(f"{path} holds no requests: give a row for each")
    arrival, prompt_tokens, output_tokens, hashes, domains = zip(*parts, strict=True)
    arrival, prompt_tokens = np.concatenate(arrival), np.concatenate(prompt_tokens)
    _check_times(path, first_line, arrival, form)
    blocks = starts = None
    if hashes[0] is not None:
        blocks = _small(np.concatenate(hashes))
        starts = np.concatenate(([0], np.cumsum(_num_blocks(prompt_tokens))))
    return Workload(
        str(path),
        first_line,
        (arrival - arrival[0]) / form.a_second,
        prompt_tokens,
        np.concatenate(output_tokens),
        None if domains[0] is None else pl.concat(domains),
        blocks,
        starts,
    )


def check_memory(workload: Workload, kv_tokens: int) -> None:
    """Raise InputError, naming the row, where one request alone outgrows a KV memory of `kv_tokens`."""
    needed = workload.prompt_tokens + workload.output_tokens
    if (needed > kv_tokens).any():
        at = int(np.argmax(needed > kv_tokens))
        raise InputError(
            f"{workload.where(at)}: {workload.prompt_tokens[at]} prompt and {workload.output_tokens[at]} "
            f"output tokens outgrow the KV memory of {kv_tokens} tokens: give more memory or drop the row"
        )


# ---- files ----------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> Iterator[pl.DataFrame]:
    """The rows as text, blank ones at the end dropped."""
    with path.open("rb") as stream:
        if not stream.read(1):
            return
        stream.seek(0)
        try:
            table = pl.read_csv(stream, infer_schema=False)
        except pl.exceptions.PolarsError as error:
            reason = _uneven(path) or str(error).splitlines()[0]
            raise InputError(f"{path} is not readable as CSV: {reason}") from error
    filled = table.select(pl.any_horizontal(pl.all().is_not_null()).arg_true().max()).item()
    yield table.head(0 if filled is None else filled + 1)


def _uneven(path: Path) -> str:
    """Where a CSV first has more fields than its header, in words."""
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        rows = csv.reader(stream)
        width = len(next(rows))
        line = next((rows.line_num for row in rows if len(row) > width), None)
        return f"line {line} has more fields than the header" if line else ""


def _read_parquet(path: Path) -> Iterator[pl.DataFrame]:
    with path.open("rb") as stream:
        try:
            yield pl.read_parquet(stream)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{path} is not readable as parquet: {error}") from error


def _read_lines(path: Path) -> Iterator[pl.DataFrame]:
    """The objects of a JSONL file as text (hash_ids as numbers), some thousand at a time."""
    schema: dict[str, pl.DataType] = {}
    line = 1
    with path.open("rb") as stream:
        while lines := list(islice(stream, _LINES)):
            while lines and not lines[-1].strip():
                lines.pop()
            for at, text in enumerate(lines):
                if not text.strip():
                    raise InputError(f"{path}: line {line + at} is blank: drop it")
            if not lines:
                return
            schema = schema or _schema(path, lines[0])
            try:
                yield pl.read_ndjson(b"".join(lines), schema=schema)
            except pl.exceptions.PolarsError as error:
                line += next(at for at, text in enumerate(lines) if not _is_object(text, schema))
                raise InputError(f"{path}: line {line} is not a JSON object like the first") from error
            line += len(lines)


def _schema(path: Path, text: bytes) -> dict[str, pl.DataType]:
    try:
        names = json.loads(text).keys()
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: line 1 is not a JSON object") from error
    return {name: pl.List(pl.Int64) if name == "hash_ids" else pl.String() for name in names}


def _is_object(text: bytes, schema: dict[str, pl.DataType]) -> bool:
    try:
        return len(pl.read_ndjson(text, schema=schema)) == 1
    except pl.exceptions.PolarsError:
        return False


# ---- columns --------------------------------------------------------------------------------------------


def _format(path: Path, columns: list[str], timed: bool) -> Format:
    """The format that a file's columns make, all of them."""
    form = max(FORMATS, key=lambda form: len({*form[1:4]} & {*columns}))
    missing = [name for name in form[1:4] if name not in columns]
    if not missing or (missing == [form.arrival] and not timed):
        return form
    found = ", ".join(columns[:8]) or "nothing"
    if missing == [form.arrival]:
        raise InputError(
            f"{path} holds lengths but no {form.arrival} ({form.unit}); found {found}: add it, or take the "
            "lengths alone with --lengths and let --arrivals and --rate say when requests come"
        )
    raise InputError(
        f"{path} has no column {', '.join(missing)}; found {found}: give {', '.join(FORMATS[0][1:4])}, or "
        f"the columns of {', '.join(form.name for form in FORMATS[1:])}"
    )


class _Rows(NamedTuple):
    """Some rows of a file, and the line of the first."""

    path: Path
    line: int
    table: pl.DataFrame
    form: Format

    def arrays(
        self,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, pl.Series | None]:
        """Arrivals in the format's own unit, prompt tokens, output tokens, hashes, domains."""
        form = self.form
        if form.arrival not in self.table.columns:
            arrival = np.zeros(len(self.table))
        elif form.unit == "dates":
            arrival = self.dates(form.arrival)
        else:
            arrival = self.numbers(form.arrival, f"a number of {form.unit}, 0 or more")
        prompt_tokens, output_tokens = self.lengths(form.prompt_tokens), self.lengths(form.output_tokens)
        hashes = self.hashes(prompt_tokens) if "hash_ids" in self.table.columns else None
        return arrival, prompt_tokens, output_tokens, hashes, self.domain()

    def numbers(self, name: str, what: str) -> np.ndarray:
        """A column as finite numbers of at least 0, float64 [rows]."""
        column = self.table[name]
        text = column.str.strip_chars() if column.dtype == pl.String else column
        values = text.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
        self.refuse(name, ~((values >= 0) & (values < np.inf)), what)
        return values

    def lengths(self, name: str) -> np.ndarray:
        """A column as whole numbers of at least 1, int64 [rows]."""
        what = "a whole number of tokens, 1 or more"
        values = self.numbers(name, what)
        self.refuse(name, (values < 1) | (values % 1 > 0) | (values >= 2**53), what)
        return values.astype(np.int64)

    def dates(self, name: str) -> np.ndarray:
        """A column of dates and times in UTC as nanoseconds, int64 [rows]."""
        column = self.table[name]
        if column.dtype == pl.String:
            text = column.str.strip_chars().str.replace("T", " ", literal=True)
            text = text.str.replace(r"(Z|\+00:00)$", "")
            column = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
        bad = column.is_null().to_numpy() | (not column.dtype.is_temporal())
        self.refuse(name, bad, "a date and time such as 2023-11-16 18:15:46.680590")
        return column.dt.epoch("ns").to_numpy()

    def hashes(self, prompt_tokens: np.ndarray) -> np.ndarray:
        """The hashes of the prompts' blocks, request after request, int64 [blocks]."""
        column = self.table["hash_ids"]
        found = column.list.drop_nulls().list.len().fill_null(0).to_numpy()
        bad = found != _num_blocks(prompt_tokens)
        self.refuse("hash_ids", bad, f"one number for each {BLOCK_TOKENS} tokens of the prompt")
        return column.explode().to_numpy()

    def domain(self) -> pl.Series | None:
        """The domains, where the file names them."""
        if "domain" not in self.table.columns:
            return None
        self.refuse("domain", self.table["domain"].is_null().to_numpy(), "the name of a domain")
        return self.table["domain"].cast(pl.String)

    def refuse(self, name: str, bad: np.ndarray, what: str) -> None:
        """Raise InputError for the first bad row, if there is one, saying what its column must hold."""
        if bad.any():
            at = int(np.argmax(bad))
            value = self.table[name].slice(at, 1).to_list()[0]
            found = "missing" if value is None else f"{value!r}"
            raise InputError(
                f"{self.path}: line {self.line + at}: {name} is {found}, not {what}: correct or drop the row"
            )


def _num_blocks(prompt_tokens: np.ndarray) -> np.ndarray:
    return -(-prompt_tokens // BLOCK_TOKENS)


def _small(hashes: np.ndarray) -> np.ndarray:
    """Hashes as numbers below four times their count, int32: themselves where they are that already."""
    if hashes.min() >= 0 and hashes.max() < 4 * len(hashes):
        return hashes.astype(np.int32)
    known = np.sort(hashes)
    known = known[np.append(True, known[1:] > known[:-1])]
    return np.searchsorted(known, hashes).astype(np.int32)


def _check_times(path: Path, first_line: int, arrival: np.ndarray, form: Format) -> None:
    """Raise InputError, naming the row, where arrivals fall or turn into another unit."""
    gaps = np.diff(arrival)
    unit = f"give every row in {form.unit}"
    if (gaps < 0).any():
        at = int(np.argmax(gaps < 0)) + 1
        before, here = arrival[at - 1], arrival[at]
        if form.unit == "dates":
            what = f"{(before - here) / form.a_second:g} s before the row above"
        else:
            what = f"{here:.10g}, before the {before:.10g} of the row above"
        remedy = f"{unit}, or sort the rows" if 500 < before / max(here, 1e-9) < 2000 else "sort the rows"
        raise InputError(f"{path}: line {first_line + at}: {form.arrival} is {what}: {remedy}")
    # A clock that turns from seconds to milliseconds goes on where it was, only with all numbers a thousand
    # times as large. Gaps of half a minute and more on the far side keep real pauses from looking like that.
    for at in np.flatnonzero(arrival[1:] > 100 * arrival[:-1]) + 1:
        before, after = gaps[: at - 1], gaps[at:]
        if len(before) < 2 or not len(after) or not np.median(before) > 0:
            continue
        goes_on = 0 <= arrival[at] / 1000 - arrival[at - 1] <= 10 * before.max()
        if goes_on and np.median(after) > 30 and 100 < np.median(after) / np.median(before) < 10_000:
            raise InputError(
                f"{path}: line {first_line + at}: {form.arrival} jumps from {arrival[at - 1]:.10g} to "
                f"{arrival[at]:.10g}, and goes on a thousand times as fast: {unit}"
            )
