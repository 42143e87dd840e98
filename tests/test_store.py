"""Traces on disk: what is saved is loaded, what is damaged is refused, and nothing is left half-written."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from tests.scenes import make_trace
from traces import store
from traces.schema import DECISIONS, REQUESTS, STEPS, Trace, anchors_schema

PROBABILITY = st.floats(0, 1, width=32)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace that the format allows: requests without anchors, unknown tokens, extremes of confidence."""
    length = draw(st.integers(1, 4))
    num_rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    ids = draw(st.lists(st.integers(0, 2**40), min_size=len(num_rows), max_size=len(num_rows), unique=True))
    rows = sum(num_rows)
    slots = st.lists(st.lists(PROBABILITY, min_size=length, max_size=length), min_size=rows, max_size=rows)
    requests = {
        "request_id": ids,
        "domain": draw(st.lists(st.text(max_size=3), min_size=len(ids), max_size=len(ids))),
        "prompt_tokens": [draw(st.integers(0, 9)) for _ in ids],
        "output_tokens": [draw(st.integers(1, n + 1)) for n in num_rows],
        "arrival_s": [draw(st.floats(0, 1e6)) for _ in ids],
        "finish_reason": ["stop" for _ in ids],
    }
    anchors = {
        "request_id": np.repeat(ids, num_rows),
        "position": [p for n in num_rows for p in range(n)],
        "token_id": draw(st.lists(st.none() | st.integers(0, 9), min_size=rows, max_size=rows)),
        "num_accepted": [draw(st.integers(0, length)) for _ in range(rows)],
        "confidences": draw(slots),
    }
    sampled = draw(st.booleans())
    if sampled:
        anchors["accept_probs"] = draw(slots)
    decision = dict.fromkeys(DECISIONS, 0)
    step = {name: 1 if kind == pl.Int64 else 0.5 for name, kind in STEPS.items()} | {"bucket": "0.25"}
    return Trace(
        meta={"draft_length": length, "engine": draw(st.text(max_size=5)), "temperature": 0.0},
        requests=pl.DataFrame(requests, schema=REQUESTS),
        anchors=pl.DataFrame(anchors, schema=anchors_schema(length, sampled)),
        cost=draw(st.none() | st.just(CostTable.from_samples([Sample("verify", 2, 4, 0.1)]))),
        steps=pl.DataFrame([step] * draw(st.integers(0, 2)), schema=STEPS),
        decisions=pl.DataFrame([decision] * draw(st.integers(0, 2)), schema=DECISIONS),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small good trace on disk."""
    store.save(make_trace([5, 4], draft_length=3), tmp_path / "good")
    return tmp_path / "good"


def left_over(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@given(traces())
def test_a_saved_trace_is_loaded_equal(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("traces") / "deep" / "down"
    store.save(trace, path)
    found = store.load(path)
    assert found.meta == trace.meta
    for name in ("requests", "anchors", "steps", "decisions"):
        assert getattr(found, name).equals(getattr(trace, name))
        assert getattr(found, name).schema == getattr(trace, name).schema
    assert (found.cost and found.cost.to_dict()) == (trace.cost and trace.cost.to_dict())


def test_the_same_trace_is_written_with_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        store.save(make_trace([9, 4], 3), tmp_path / name)
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two


def truncate(path: Path) -> None:
    file = path / "anchors.parquet"
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "requests.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "requests.parquet").write_bytes(bytes(data))


def edit_meta(**changes: Any) -> Any:
    def damage(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        (path / "meta.json").write_text(json.dumps({**meta, **changes}))

    return damage


def forget_rows(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    meta["rows"]["anchors.parquet"] += 1
    (path / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "anchors.parquet is damaged or truncated"),
        (flip_a_bit, "requests.parquet is damaged or truncated"),
        (lambda path: (path / "anchors.parquet").unlink(), "anchors.parquet is missing"),
        (lambda path: (path / "cost.json").write_text("{}"), "cost.json is damaged"),
        (lambda path: (path / "meta.json").unlink(), "meta.json is missing"),
        (lambda path: (path / "meta.json").write_text('{"format": 1'), "meta.json is damaged"),
        (lambda path: (path / "meta.json").write_bytes(b"\xff\xfe\x00"), "meta.json is damaged"),
        (lambda path: (path / "meta.json").write_text("[]"), "meta.json lacks"),
        (lambda path: (path / "meta.json").write_text('{"draft_length": 3}'), "meta.json lacks"),
        (edit_meta(format=2), "meta.json: format 2 is not 1"),
        (edit_meta(kind="replay"), "good is a single run of a results directory, not a trace"),
        (edit_meta(sha256=["x"]), "meta.json is damaged"),
        (edit_meta(draft_length=0), "meta.json: draft_length 0"),
        (edit_meta(draft_length=4), "anchors.parquet: column 'confidences'"),
        (forget_rows, "anchors.parquet has 7 rows"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_file_and_the_reason(
    saved: Path, damage: Any, message: str
) -> None:
    damage(saved)
    with pytest.raises(InputError, match=message) as error:
        store.load(saved)
    assert "\n" not in str(error.value)


def test_a_place_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is there"):
        store.load(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="a file there"):
        store.load(tmp_path / "file")


def slots(*values: list[float]) -> pl.Series:
    return pl.Series(list(values), dtype=pl.Array(pl.Float32, 2))


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("anchors", {"confidences": slots([0.5, 1.5], [0, 1], [0, 1])}, "confidences 1.5 at position 0"),
        ("anchors", {"confidences": slots([0, 0], [0, np.nan], [0, 1])}, "confidences nan at position 1"),
        ("anchors", {"accept_probs": slots([0, 0], [0, 1], [0, -1])}, "accept_probs -1 at position 0 of req"),
        ("anchors", {"num_accepted": [0, 3, 0]}, r"num_accepted 3 at position 1 .* outside 0..2"),
        ("anchors", {"num_accepted": [0, -1, 0]}, "num_accepted -1"),
        ("anchors", {"num_accepted": [0, None, 0]}, "column 'num_accepted' has missing values"),
        ("anchors", {"position": [0, 2, 0]}, "position 2 of request 10 is out of place"),
        ("anchors", {"position": [1, 2, 0]}, "position 1 of request 10 is out of place"),
        ("anchors", {"request_id": [13, 10, 10]}, "out of place"),
        ("anchors", {"request_id": [10, 10, 99]}, "request 99 is not in requests.parquet"),
        ("anchors", {"num_accepted": [0.0, 1.0, 2.0]}, "column 'num_accepted' is Float64, not Int64"),
        ("anchors", {"notes": ["a", "b", "c"]}, "does not know: notes"),
        ("requests", {"request_id": [10, 10]}, "request_id appears twice"),
        ("requests", {"output_tokens": [4, 2]}, "request 10 has 4 output tokens but anchors for 2"),
        ("requests", {"output_tokens": [0, 2]}, "output_tokens 0 is less than 1"),
        ("requests", {"prompt_tokens": [-1, 2]}, "prompt_tokens -1 is less than 0"),
    ],
)
def test_values_that_cannot_be_are_refused_on_the_way_out_and_in(
    tmp_path: Path, table: str, change: dict[str, Any], message: str
) -> None:
    good = make_trace([3, 2], draft_length=2)
    bad = dataclasses.replace(good, **{table: getattr(good, table).with_columns(**_series(change))})
    with pytest.raises(InputError, match=f"{table}.parquet.*{message}"):
        store.save(bad, tmp_path / "trace")
    assert left_over(tmp_path) == []
    tables = {"requests": bad.requests, "anchors": bad.anchors}
    store.write_directory(tmp_path / "trace", "trace", bad.meta, tables, {})
    with pytest.raises(InputError, match=f"{table}.parquet.*{message}"):
        store.load(tmp_path / "trace")


def _series(change: dict[str, Any]) -> dict[str, pl.Series]:
    return {name: pl.Series(name, values) for name, values in change.items()}


def test_a_missing_column_and_an_empty_trace_are_refused(tmp_path: Path) -> None:
    good = make_trace([3], draft_length=2)
    with pytest.raises(InputError, match=r"anchors.parquet has no column 'token_id'; found request_id"):
        store.save(dataclasses.replace(good, anchors=good.anchors.drop("token_id")), tmp_path / "x")
    with pytest.raises(InputError, match=r"anchors.parquet holds no anchors"):
        store.save(dataclasses.replace(good, anchors=good.anchors.clear()), tmp_path / "x")


def test_only_what_this_program_wrote_is_replaced(saved: Path, tmp_path: Path) -> None:
    other = make_trace([7], draft_length=2)
    store.save(other, saved)
    assert store.load(saved).anchors.equals(other.anchors)
    (tmp_path / "empty").mkdir()
    store.save(other, tmp_path / "empty")
    (saved / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"did not write \(thesis.txt\)"):
        store.save(make_trace([5], 3), saved)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "meta.json").write_text("{}")
    with pytest.raises(InputError, match="did not write"):
        store.save(other, tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a directory"):
        store.save(other, tmp_path / "file")
    assert left_over(tmp_path) == ["empty", "file", "good", "mine"]
    assert store.load(saved).anchors.equals(other.anchors)


def results_at(path: Path) -> None:
    """A results directory with one run inside."""
    with store.whole_directory(path, lambda old: ["runs.parquet", "run-4"]) as part:
        store.write_directory(part, store.RESULTS, {}, {"runs": pl.DataFrame({"run": ["run-4"]})}, {})
        store.write_directory(part / "run-4", store.RUN, {}, {"steps": pl.DataFrame({"step": [0]})}, {})


@pytest.mark.parametrize("place", ["notes.txt", "run-4/notes.txt", "run-4/more/notes.txt"])
def test_what_a_person_put_into_results_is_kept_however_deep(tmp_path: Path, place: str) -> None:
    results, notes = tmp_path / "good", tmp_path / "good" / place
    results_at(results)
    results_at(results)  # nothing foreign: replaced
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("years of work")
    first = place.removesuffix("/notes.txt") if "more" in place else place
    with pytest.raises(InputError, match=rf"did not write \({first}\): give another place"):
        results_at(results)
    assert notes.read_text() == "years of work"
    assert left_over(tmp_path) == ["good"]


def test_what_arrives_while_a_run_works_is_kept_and_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=rf"{tmp_path / 'two'} was taken .* give another place"),
        store.whole_directory(tmp_path / "two"),
    ):
        (tmp_path / "two" / "quicker").mkdir(parents=True)
    assert left_over(tmp_path / "two") == ["quicker"]
    (tmp_path / "two" / "quicker").rmdir()
    results_at(tmp_path / "two")
    with (
        pytest.raises(InputError, match=r"did not write \(notes.txt\)"),
        store.whole_directory(tmp_path / "two", lambda old: ["runs.parquet", "run-4"]),
    ):
        (tmp_path / "two" / "notes.txt").write_text("mine")
    assert left_over(tmp_path / "two") == ["meta.json", "notes.txt", "run-4", "runs.parquet"]
    assert left_over(tmp_path) == ["two"]


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "", tmp_path / "here", "..", "/"):
        with pytest.raises(
            InputError, match="is the working directory or a mount point: give a directory in"
        ):
            store.save(make_trace([5], 3), place)
    store.save(make_trace([5], 3), "inside")
    assert left_over(tmp_path / "here") == ["inside"]


def test_a_name_outside_ascii_is_written_and_read_in_the_posix_locale(tmp_path: Path) -> None:
    code = "import sys; from traces.store import load, save; save(load(sys.argv[1]), sys.argv[2])"
    store.save(make_trace([5], 3), tmp_path / "Größe")
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "Größe", tmp_path / "naïve"],
        env={"PATH": "", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        check=True,
    )
    assert store.load(tmp_path / "naïve").anchors.equals(store.load(tmp_path / "Größe").anchors)


def interrupted(path: Path) -> None:
    with store.whole_directory(path, lambda _: []) as part:
        (part / "half").write_text("half")
        raise KeyboardInterrupt


def test_nothing_is_left_where_writing_fails(saved: Path, tmp_path: Path) -> None:
    before = store.load(saved)
    with pytest.raises(InputError, match=r"cost.json cannot be written"):
        store.write_directory(saved, "trace", {}, {}, {"cost": float("nan")})
    with pytest.raises(InputError, match=r"cost.json cannot be written"):
        store.write_directory(tmp_path / "a" / "b", "trace", {}, {}, {"cost": float("nan")})
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "c" / "d")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        store.save(before, tmp_path / "file" / "trace")
    assert left_over(tmp_path) == ["file", "good"]
    assert store.load(saved).anchors.equals(before.anchors)


def test_a_trace_is_opened_by_name_or_by_directory(saved: Path) -> None:
    assert store.open_trace(str(saved)).draft_length == 3
    with pytest.raises(
        InputError, match=r"did you mean 'tiny-pair'\? Give a .*: h20-allocation, h20-qwen3-8b, tiny"
    ):
        store.open_trace("tiny-pear")
    for name in ("zzz", ""):
        with pytest.raises(InputError, match=f"no trace '{name}': give a directory or a built-in name"):
            store.open_trace(name)


def test_every_built_in_trace_holds_what_the_format_asks(tmp_path: Path) -> None:
    for folder in store.BUILTIN.iterdir():
        trace = store.open_trace(folder.name)
        store.save(trace, tmp_path / folder.name)
        assert trace.cost is not None
        for batch in (4, 64):
            trace.cost.seconds(batch, batch)
            trace.cost.seconds(batch, batch * (trace.draft_length + 1))


def test_the_tiny_pair_is_the_recording(shared: Path) -> None:
    source = pl.read_parquet(shared / "pair-trial" / "dense-trace.parquet").filter(pl.col("nfut") == 15)
    trace = store.open_trace("tiny-pair")
    if "trial pair" not in str(trace.meta.get("target")):
        pytest.skip("tiny-pair was replaced by a newer recording")
    rows = source.sort("seq", "out_index")
    assert trace.anchors["num_accepted"].to_list() == rows["acc"].to_list()
    assert trace.anchors["token_id"].to_list() == rows["token"].to_list()
    assert (trace.arrays.confidences == np.array(rows["conf"].to_list(), np.float32)).all()
    # An accepted draft is the token that the next position's anchor holds.
    first = rows.with_columns(next_token=pl.col("token").shift(-1).over("seq")).drop_nulls("next_token")
    right = first["draft"].list.first() == first["next_token"]
    assert (right == (first["acc"] > 0)).all()
