"""Traces on disk: written whole or not at all, checked on the way in, opened by name or by directory."""

import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dcut.cost import CostTable
from dcut.errors import InputError
from traces.published import generate_builtin
from traces.schema import DECISIONS, FORMAT, REQUESTS, STEPS, Trace, anchors_schema

BUILTIN = Path(__file__).parent / "builtin"
RESULTS = "replays"  # the kind of a directory of runs with their figures, which analysis.report reads
RUN = "replay"  # the kind of each run inside it
TRAFFIC = "services"  # the kind of a directory of runs under traffic, which it reads too
_LEDGER = ("format", "kind", "rows", "sha256")  # what meta.json holds for this module
_WORDS = {  # kinds as people call them; a trace is a trace
    RESULTS: "results directory",
    RUN: "single run of a results directory",
    TRAFFIC: "results directory of traffic",
    "service": "single run under traffic",
    "live": "recorded live run",
}


def open_trace(name_or_path: str, seed: int = 0) -> Trace:
    """Open a built-in trace by its name, or a recorded one by its directory.

    seed: of the anchors of a generated built-in trace; a recorded trace is what it is. A name wins over a
    directory of the same name (write ./name for that one).
    Raises InputError where there is neither, with the built-in names, and as `load` does.
    """
    directory = BUILTIN / name_or_path
    names = sorted(p.name for p in BUILTIN.iterdir() if p.is_dir())
    if name_or_path in names:
        return load(directory) if (directory / "meta.json").exists() else generate_builtin(directory, seed)
    if name_or_path and Path(name_or_path).exists():
        return load(name_or_path)
    close = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.4)
    remedy = f"did you mean {close[0]!r}? Give" if close else "give"
    raise InputError(
        f"no trace {name_or_path!r}: {remedy} a directory or a built-in name: {', '.join(names)}"
    )


def save(trace: Trace, path: str | Path) -> None:
    """Write `trace` as a directory that `load` reads back equal; see `write_directory` for what it replaces.

    Raises InputError where the trace breaks the format, so that nothing unreadable is written.
    """
    _check(trace, Path(path))
    tables = {"requests": trace.requests, "anchors": trace.anchors}
    tables |= {k: t for k, t in (("steps", trace.steps), ("decisions", trace.decisions)) if len(t)}
    documents = {} if trace.cost is None else {"cost": trace.cost.to_dict()}
    write_directory(path, "trace", trace.meta, tables, documents)


def load(path: str | Path) -> Trace:
    """Read a trace's directory.

    Raises InputError, naming the file and the reason, for a missing, damaged, truncated or newer trace, for
    missing or wrong columns, and for values that cannot be: confidences outside [0, 1], more accepted than
    drafted, positions with a gap, requests that do not exist or that outgrow their anchors.
    """
    path = Path(path)
    meta, tables, documents = read_directory(path, "trace")
    for name in ("requests", "anchors"):
        if name not in tables:
            raise InputError(f"{path / name}.parquet is missing: not a complete trace")
    cost = None
    if "cost" in documents:
        try:
            cost = CostTable.from_dict(documents["cost"])
        except InputError as error:
            raise InputError(f"{path / 'cost.json'}: {error}") from error
    rest = {name: tables[name] for name in ("steps", "decisions") if name in tables}
    trace = Trace(meta, tables["requests"], tables["anchors"], cost, **rest)
    _check(trace, path)
    return trace


def write_directory(
    path: str | Path,
    kind: str,
    meta: Mapping[str, Any],
    tables: Mapping[str, pl.DataFrame | pl.LazyFrame],
    documents: Mapping[str, Any],
) -> None:
    """Write tables as <name>.parquet, documents as <name>.json and meta.json, complete or not at all.

    A lazy table is written piece by piece, without ever being in memory.
    kind: what `read_directory` is asked for, such as "trace". meta.json holds `meta`, the format, the kind,
    and the number of rows and the SHA-256 of every file. An existing directory is replaced if it is empty or
    holds nothing but what this function wrote.
    Raises InputError where `path` holds anything else or cannot be written.
    """
    with whole_directory(path) as part:
        for name, table in tables.items():
            write = table.write_parquet if isinstance(table, pl.DataFrame) else table.sink_parquet
            with (part / f"{name}.parquet").open("wb") as file:  # polars takes no name that is not UTF-8
                write(file, compression="zstd")
        for name, document in documents.items():
            _write_json(part / f"{name}.json", document)
        ledger = {
            "format": FORMAT,
            "kind": kind,
            "rows": {f"{name}.parquet": _num_rows(part / f"{name}.parquet") for name in tables},
            "sha256": {file.name: _sha256(file) for file in sorted(part.iterdir())},
        }
        _write_json(part / "meta.json", {**meta, **ledger})


def _num_rows(file: Path) -> int:
    with file.open("rb") as stream:
        return pl.scan_parquet(stream).select(pl.len()).collect().item()


def _written(directory: Path) -> Iterable[str]:
    """The files, beside meta.json, that `write_directory` left in a directory."""
    return _read_json(directory / "meta.json", "")["sha256"]


@contextmanager
def whole_directory(path: str | Path, written: Callable[[Path], Iterable[str]] = _written) -> Iterator[Path]:
    """A fresh directory beside `path` that takes its place when the block ends without an error.

    written: names, beside meta.json, of what this program wrote into the directory it is given; it may raise
    InputError, KeyError or TypeError where that is not one of ours. A directory among them must be one that
    `write_directory` wrote. Parents are made; after an error nothing is left.
    Raises InputError where `path` is not free, empty or wholly written by this program, is the working
    directory or a mount point, or cannot be written: before the block, so before the work; and after it
    where something has come there in the meantime.
    """
    given, path = path, Path(path).absolute()
    replaced = _replaceable(path, written)
    made = [parent for parent in path.parents if not parent.exists()]
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    old = part.with_suffix(".old")
    try:
        try:
            part.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{given} cannot be written: {error.strerror}") from error
        yield part
        try:
            if replaced and _replaceable(path, written):  # asked again: the work took its time
                path.rename(old)
            part.rename(path)
        except OSError as error:
            raise InputError(
                f"{given} was taken by something else during this run ({error.strerror}): nothing was "
                "written, give another place"
            ) from error
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def read_directory(
    path: str | Path, kind: str
) -> tuple[dict[str, Any], dict[str, pl.DataFrame], dict[str, Any]]:
    """Read what `write_directory` wrote: (meta without the ledger, tables by name, documents by name).

    Raises InputError naming the file for anything missing, damaged, truncated, newer, or of another kind.
    """
    path, noun = Path(path), _noun(kind)
    if not path.is_dir():
        raise InputError(f"{path} is not a {noun}: {'a file' if path.exists() else 'nothing is'} there")
    meta = _read_json(path / "meta.json", f"not a {noun} of this program")
    if not isinstance(meta, dict) or any(name not in meta for name in _LEDGER):
        raise InputError(f"{path / 'meta.json'} lacks one of {', '.join(_LEDGER)}: not a {noun}")
    if meta["format"] != FORMAT:
        raise InputError(
            f"{path / 'meta.json'}: format {meta['format']} is not {FORMAT}, which this version reads; "
            "use the version of dcut that wrote it"
        )
    if not isinstance(meta["rows"], dict) or not isinstance(meta["sha256"], dict):
        raise InputError(f"{path / 'meta.json'} is damaged: rows and sha256 must list files")
    if meta["kind"] != kind:
        raise InputError(f"{path} is a {_noun(meta['kind'])}, not a {noun}")
    tables: dict[str, pl.DataFrame] = {}
    documents: dict[str, Any] = {}
    for name, digest in meta["sha256"].items():
        file = path / Path(name).name
        if not file.is_file():
            raise InputError(f"{file} is missing: the {noun} is not complete")
        if _sha256(file) != digest:
            raise InputError(f"{file} is damaged or truncated: its checksum is not the one in meta.json")
        if file.suffix == ".json":
            documents[file.stem] = _read_json(file, "missing")
            continue
        try:
            with file.open("rb") as stream:
                tables[file.stem] = pl.read_parquet(stream)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{file} is not readable as parquet: {error}") from error
        if len(tables[file.stem]) != meta["rows"].get(name):
            raise InputError(
                f"{file} has {len(tables[file.stem])} rows, meta.json says {meta['rows'].get(name)}"
            )
    return {key: value for key, value in meta.items() if key not in _LEDGER}, tables, documents


def kind_of(path: str | Path) -> str | None:
    """What a directory holds, as `write_directory` was told; None where it holds nothing of this program."""
    try:
        return _read_json(Path(path) / "meta.json", "nothing is there")["kind"]
    except (InputError, OSError, TypeError, KeyError):
        return None


def _check_columns(file: Path, table: pl.DataFrame, columns: Mapping[str, Any]) -> None:
    """Raise InputError, naming `file`, unless `table` has these columns (and types), and no others."""
    found = dict(table.schema)
    for name, kind in columns.items():
        if name not in found:
            raise InputError(f"{file} has no column {name!r}; found {', '.join(found)}")
        if found[name] != kind:
            raise InputError(f"{file}: column {name!r} is {found[name]}, not {kind}")
    extra = [name for name in found if name not in columns]
    if extra:
        raise InputError(f"{file} has columns that the format does not know: {', '.join(extra)}")


def _check(trace: Trace, path: Path) -> None:
    """Raise InputError, naming the file, unless the trace is what the format says."""
    length = trace.meta.get("draft_length")
    if not isinstance(length, int) or length < 1:
        raise InputError(f"{path / 'meta.json'}: draft_length {length!r} is not a whole number of at least 1")
    narrower = trace.meta.get("narrower", [])
    whole = isinstance(narrower, list | tuple) and all(isinstance(width, int) for width in narrower)
    if not whole or list(narrower) != sorted({*narrower} & {*range(1, length)}):
        raise InputError(
            f"{path / 'meta.json'}: narrower {narrower!r} is not a rising list of widths below {length}"
        )
    sampled = "accept_probs" in trace.anchors.columns
    if sampled and narrower:
        raise InputError(f"{path / 'anchors.parquet'}: accept_probs of one drafter among several")
    for name, table, columns, nullable in (
        ("requests", trace.requests, REQUESTS, ("arrival_s", "finish_reason", "domain")),
        ("anchors", trace.anchors, anchors_schema(length, sampled, narrower), ("token_id",)),
        ("steps", trace.steps, STEPS, tuple(STEPS)),
        ("decisions", trace.decisions, DECISIONS, ()),
    ):
        _check_columns(path / f"{name}.parquet", table, columns)
        for column in columns:
            if column not in nullable and table[column].null_count():
                raise InputError(f"{path / name}.parquet: column {column!r} has missing values")
    _check_anchors(trace, path / "requests.parquet", path / "anchors.parquet")


def _check_anchors(trace: Trace, requests_file: Path, anchors_file: Path) -> None:
    ids = trace.requests["request_id"].to_numpy()
    if len(np.unique(ids)) < len(ids):
        raise InputError(f"{requests_file}: a request_id appears twice")
    if not len(trace.anchors):
        raise InputError(f"{anchors_file} holds no anchors")
    owner = trace.anchors["request_id"].to_numpy()
    if len(unknown := np.setdiff1d(owner, ids)):
        raise InputError(f"{anchors_file}: request {unknown[0]} is not in {requests_file.name}")
    arrays = trace.arrays
    wrong = (owner != np.repeat(ids, arrays.num_rows)) | (
        trace.anchors["position"].to_numpy()
        != np.arange(len(owner)) - np.repeat(arrays.first_row, arrays.num_rows)
    )
    if wrong.any():
        row = trace.anchors.row(int(np.argmax(wrong)), named=True)
        raise InputError(
            f"{anchors_file}: position {row['position']} of request {row['request_id']} is out of place; "
            f"requests come in the order of {requests_file.name}, positions rise from 0 without a gap"
        )
    checked = {
        "num_accepted": (arrays.num_accepted, trace.draft_length),
        "confidences": (arrays.confidences, 1),
        "accept_probs": (arrays.accept_probs, 1),
    }
    for width, drafts in arrays.narrower.items():
        checked |= {f"num_accepted_{width}": (drafts.num_accepted, width)}
        checked |= {f"confidences_{width}": (drafts.confidences, 1)}
    for name, (values, most) in checked.items():
        if values is not None and not (within := (values >= 0) & (values <= most)).all():
            at = tuple(np.argwhere(~within)[0])
            row = trace.anchors.row(int(at[0]), named=True)
            bounds = "[0, 1]" if values.ndim > 1 else f"0..{most}"
            raise InputError(
                f"{anchors_file}: {name} {values[at]:g} at position {row['position']} of request "
                f"{row['request_id']} is outside {bounds}"
            )
    for column, low in (("prompt_tokens", 0), ("output_tokens", 1)):
        if (least := trace.requests[column].to_numpy().min()) < low:
            raise InputError(f"{requests_file}: {column} {least} is less than {low}")
    outgrown = arrays.output_tokens > arrays.num_rows + 1
    if outgrown.any():
        at = int(np.argmax(outgrown))
        raise InputError(
            f"{requests_file}: request {ids[at]} has {arrays.output_tokens[at]} output tokens but anchors "
            f"for {arrays.num_rows[at]} positions: too few"
        )


def _replaceable(path: Path, written: Callable[[Path], Iterable[str]]) -> bool:
    """Whether a directory is there that may be replaced; InputError where something else is."""
    if not path.exists() and not path.is_symlink():
        return False
    if not path.is_dir() or path.is_symlink():
        raise InputError(f"{path} exists and is not a directory: give another place")
    if path.is_mount() or Path.cwd().is_relative_to(path.resolve()):
        raise InputError(f"{path} is the working directory or a mount point: give a directory inside it")
    if foreign := next(_foreign(path, written), None):
        raise InputError(
            f"{path} exists and holds what this program did not write ({foreign.relative_to(path)}): "
            "give another place"
        )
    return True


def _foreign(directory: Path, written: Callable[[Path], Iterable[str]]) -> Iterator[Path]:
    """What this program did not write in a directory, and below."""
    try:
        ours = {"meta.json", *written(directory)}
    except (InputError, KeyError, TypeError, OSError):
        ours = set()
    for entry in sorted(directory.iterdir()):
        if entry.name not in ours:
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            yield from _foreign(entry, _written)


def _noun(kind: object) -> str:
    """A kind as people call it."""
    return _WORDS.get(str(kind), str(kind))


def _write_json(file: Path, document: Any) -> None:
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
    except ValueError as error:
        raise InputError(f"{file.name} cannot be written: {error}") from error
    file.write_text(text + "\n", encoding="utf-8")


def _read_json(file: Path, absent: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing: {absent}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{file} is damaged: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
