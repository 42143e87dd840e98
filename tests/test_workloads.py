"""Workloads: every format against its rows read by hand, and what is refused, by row and remedy."""

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut.errors import InputError
from traces import workloads
from traces.workloads import BLOCK_TOKENS, Workload, check_memory, read_workload

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

File = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path) -> File:
    """Write a text; JSONL where it begins like it."""

    def write(text: str) -> Path:
        path = tmp_path / ("load.jsonl" if text.startswith("{") else "load.csv")
        path.write_text(text, encoding="utf-8")
        return path

    return write


def plain(*rows: tuple[object, ...]) -> str:
    return HEADER + "".join(",".join(map(str, row)) + "\n" for row in rows)


def arrivals(*times: object) -> str:
    return plain(*((time, 5, 5) for time in times))


def mooncake(timestamp: object, prompt: object, hash_ids: object) -> str:
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": 3, "hash_ids": hash_ids}
    return json.dumps(row) + "\n"


def columns(workload: Workload) -> list[tuple[float, int, int]]:
    return list(
        zip(
            workload.arrival_s.tolist(),
            workload.prompt_tokens.tolist(),
            workload.output_tokens.tolist(),
            strict=True,
        )
    )


@given(rows=st.lists(st.tuples(st.floats(0, 29), st.integers(1, 9**9), st.integers(1, 9**9)), min_size=1))
def test_a_plain_file_is_its_rows_from_the_first_arrival_on(
    rows: list[tuple[float, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = sorted(rows)
    table = pl.DataFrame(rows, schema=["arrival_s", "prompt_tokens", "output_tokens"], orient="row")
    place = tmp_path_factory.mktemp("plain")
    table.write_csv(place / "load.csv")
    table.write_parquet(place / "load.parquet")
    for name in ("load.csv", "load.parquet"):
        assert columns(read_workload(place / name)) == [(t - rows[0][0], *lengths) for t, *lengths in rows]


@pytest.mark.parametrize("name", ["azure2023_conv", "azure2023_code"])
def test_the_azure_traces_are_their_rows(shared: Path, name: str) -> None:
    path = shared / "workloads" / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"no {name}.csv in ../shared/workloads")
    with path.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    found = read_workload(path)
    assert found.prompt_tokens.tolist() == [int(row["ContextTokens"]) for row in rows]
    assert found.output_tokens.tolist() == [int(row["GeneratedTokens"]) for row in rows]
    times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
    want = [(time - times[0]).total_seconds() for time in times]  # microseconds; the file has a digit more
    np.testing.assert_allclose(found.arrival_s, want, atol=1.1e-6)


def test_the_mooncake_trace_is_its_rows_and_its_blocks(shared: Path) -> None:
    path = shared / "workloads" / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip("no mooncake_conversation.jsonl in ../shared/workloads")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = read_workload(path)
    assert found.arrival_s.tolist() == [row["timestamp"] / 1000 for row in rows]
    assert found.prompt_tokens.tolist() == [row["input_length"] for row in rows]
    assert found.output_tokens.tolist() == [row["output_length"] for row in rows]
    assert found.blocks is not None
    assert found.block_starts is not None
    starts = found.block_starts.tolist()
    for row, start, stop in zip(rows, starts[:-1], starts[1:], strict=True):
        assert found.blocks[start:stop].tolist() == row["hash_ids"]


def test_vidur_s_columns_are_known_and_others_are_ignored(file: File) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio\n0.0,374,44,8.5\n4.314579,396,109,3.6\n"
    assert columns(read_workload(file(text))) == [(0, 374, 44), (4.314579, 396, 109)]


def test_lengths_alone_are_enough_where_times_are_not_asked_for(file: File) -> None:
    path = file("num_prefill_tokens,num_decode_tokens\n7,8\n9,10\n")
    assert columns(read_workload(path, timed=False)) == [(0, 7, 8), (0, 9, 10)]
    with pytest.raises(InputError, match=r"lengths but no arrived_at \(seconds\).*--lengths"):
        read_workload(path)


def test_dates_come_with_a_t_a_zone_or_no_fraction(file: File) -> None:
    dates = ("2024-05-10 00:00:00.25+00:00", "2024-05-10T00:00:01Z", "2024-05-10 00:00:02")
    found = read_workload(file(AZURE + "".join(f"{date},1,2\n" for date in dates)))
    assert found.arrival_s.tolist() == [0, 0.75, 1.75]


@given(prompts=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4), min_size=1))
def test_large_hashes_become_small_numbers_that_are_equal_where_they_are(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("hashes") / "load.jsonl"
    text = (mooncake(at, BLOCK_TOKENS * len(ids), ids) for at, ids in enumerate(prompts))
    path.write_text("".join(text), encoding="utf-8")
    found = read_workload(path)
    flat = [number for ids in prompts for number in ids]
    assert found.blocks is not None
    assert found.blocks.min() >= 0
    assert found.blocks.max() < 4 * len(flat)
    assert len({*zip(flat, found.blocks.tolist(), strict=True)}) == len({*flat}) == len({*found.blocks})
    assert found.block_starts is not None
    assert np.diff(found.block_starts).tolist() == [len(ids) for ids in prompts]


def test_a_long_jsonl_is_read_in_pieces_with_lines_counted_on(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(mooncake(at, 600, [at, 0]) for at in range(7))
    whole = read_workload(file(text))
    monkeypatch.setattr(workloads, "_LINES", 3)
    assert columns(read_workload(file(text + "\n"))) == columns(whole)
    with pytest.raises(InputError, match="line 8: input_length is '0', not a whole number"):
        read_workload(file(text + mooncake(9, 0, [])))


def test_rows_may_name_their_domain(file: File) -> None:
    head = HEADER.replace("\n", ",domain\n")
    found = read_workload(file(head + "0,1,2,math\n1,1,2,chat\n"))
    assert found.domain is not None
    assert found.domain.to_list() == ["math", "chat"]
    with pytest.raises(InputError, match="line 3: domain is missing"):
        read_workload(file(head + "0,1,2,math\n1,1,2,\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no requests"),
        (HEADER, "holds no requests"),
        ("a,b\n1,2\n", "no column arrival_s, prompt_tokens, output_tokens; found a, b"),
        ("arrival_s,prompt_tokens\n0,1\n", "no column output_tokens; found arrival_s, prompt_tokens"),
        (arrivals(0, 2, 1.5), "line 4: arrival_s is 1.5, before the 2 of the row above: sort the rows"),
        (plain((0, -1, 2)), "line 2: prompt_tokens is '-1', not a whole number of tokens, 1 or more"),
        (plain((0, 1, 2), (1, 1, 0)), "line 3: output_tokens is '0'"),
        (plain((0, 1.5, 2)), "line 2: prompt_tokens is '1.5'"),
        (plain((0, 10**20, 2)), "line 2: prompt_tokens is '100000000000000000000'"),
        (plain((0, "nan", 2)), "line 2: prompt_tokens is 'nan'"),
        (plain((0, "1k", 2)), "line 2: prompt_tokens is '1k'"),
        (arrivals(0, "nan"), "line 3: arrival_s is 'nan', not a number of seconds"),
        (arrivals("inf"), "line 2: arrival_s is 'inf'"),
        (arrivals(-3, 0), "line 2: arrival_s is '-3', not a number of seconds, 0 or more"),
        (arrivals(0, 1, "", 2), "line 4: arrival_s is missing"),
        (HEADER + "0,1,2\n1,1\n", "line 3: output_tokens is missing"),
        (HEADER + "0,1,2\n1,1,2,9\n", "line 3 has more fields than the header"),
        (HEADER + "0,1,2\n\n1,1,2\n", "line 3: arrival_s is missing"),
        # mixed units
        (arrivals(0, "500ms"), "line 3: arrival_s is '500ms', not a number of seconds"),
        (arrivals(0, "2023-11-16 18:17:03"), "line 3: arrival_s is '2023-11-16 18:17:03'"),
        (arrivals(0, 500, 1000, 1.5, 2), "line 5: .* before the 1000 .*: give every row in seconds, or sort"),
        (arrivals(0, 0.5, 1, 1500, 2000), "line 5: arrival_s jumps from 1 to 1500.*every row in seconds"),
        (AZURE + "2024-05-10 00:00:00,1,2\n12.5,1,2\n", "line 3: TIMESTAMP is '12.5', not a date and time"),
        (AZURE + "2024-05-10 00:00:03,1,2\n2024-05-10 00:00:02,1,2\n", "line 3: TIMESTAMP is 1 s before"),
        # JSONL
        (mooncake(0, 600, [1, 2]) + "{oops\n", "line 2 is not a JSON object"),
        (mooncake(0, 600, [1, 2]) + "\n" + mooncake(0, 600, [1, 2]), "line 2 is blank"),
        (mooncake(0, 600, [1, 2]) + mooncake(1, 600, [1]), r"line 2: hash_ids is \[1\], not one number for"),
        (mooncake(0, 600, [1, None]), r"line 1: hash_ids is \[1, None\]"),
        (mooncake(0, 600, [1, "x"]), "line 1 is not a JSON object"),
        (mooncake(9, 600, [1, 2]) + mooncake(8, 600, [1, 2]), "line 2: timestamp is 8, before the 9"),
        (mooncake(0, 600, [1, 2]) + '{"timestamp": 3}\n', "line 2: input_length is missing"),
        ("{}\n", "no column"),
        ("{1}\n", "line 1 is not a JSON object"),
    ],
)
def test_a_bad_workload_is_refused_in_one_line_that_names_the_row(file: File, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_workload(file(text))
    assert "\n" not in str(caught.value)
    assert "load." in str(caught.value)


def test_what_is_not_a_table_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.csv", b"\xff\xfe\x00,3\n\xff"),
        ("a.parquet", b"PAR1"),
        ("a.csv", b'x,y\n"abc'),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} is not readable as"):
            read_workload(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_workload(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    "times", [(0, 0.001, 0.002, 2.5, 5, 6), (0, 0.5, 1, 900, 900.5, 902), (0, 1, 2, 2500)]
)
def test_a_pause_is_not_taken_for_another_unit(file: File, times: tuple[float, ...]) -> None:
    assert read_workload(file(arrivals(*times))).arrival_s.tolist() == [*times]


def test_a_request_that_outgrows_the_memory_is_named(file: File) -> None:
    found = read_workload(file(plain((0, 5, 5), (1, 8, 3), (2, 90, 1))))
    check_memory(found, 91)
    with pytest.raises(InputError, match="line 3: 8 prompt and 3 output tokens outgrow the KV memory of 10"):
        check_memory(found, 10)
