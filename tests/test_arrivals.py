"""Traffic: processes against their moments, and requests against the trace and workload they come from."""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import make_trace

from dcut.errors import InputError
from sim.arrivals import (
    PROCESSES,
    Bursty,
    Closed,
    Constant,
    Poisson,
    Process,
    Requests,
    Traffic,
    add_arguments,
    open_traffic,
)
from traces.workloads import Workload, read_workload

TRACE = make_trace([20, 9, 33, 14, 6, 25], 3, spare=1)  # math, code, chat, math, code, chat


def workload(num: int, seed: int = 0, blocks: bool = False, domains: bool = False) -> Workload:
    """A workload of random lengths, some beyond any recorded one."""
    rng = np.random.default_rng(seed)
    starts = np.append(0, np.cumsum(rng.integers(1, 4, num)))
    return Workload(
        "load.csv",
        2,
        np.sort(rng.uniform(0, 9, num)),
        rng.permutation(num) + 1,
        rng.integers(1, 60, num),
        pl.Series(rng.choice(["math", "chat"], num)) if domains else None,
        rng.integers(0, 99, starts[-1]).astype(np.int32) if blocks else None,
        starts if blocks else None,
    )


def drawn(traffic: Traffic, size: int = 65_536) -> dict[str, np.ndarray]:
    """All chunks as one, column by column; of a column with starts, the counts."""
    chunks = list(traffic.chunks(size))
    columns = {}
    for field in dataclasses.fields(Requests):
        pieces = [getattr(chunk, field.name) for chunk in chunks]
        if pieces[0] is not None:
            counts = field.name == "block_starts"
            columns[field.name] = np.concatenate([np.diff(p) if counts else p for p in pieces])
    return columns


@pytest.mark.parametrize(
    ("process", "spread"),
    [(Poisson(8), 1.0), (Bursty(8, cv=2.5), 2.5), (Bursty(8, cv=0.5), 0.5), (Constant(8), 0.0)],
)
def test_gaps_have_the_rate_and_the_spread_asked_for(process: Process, spread: float) -> None:
    gaps = process.gaps(np.random.default_rng(0), 200_000)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.02, abs=1e-9)


processes = st.sampled_from([None, Poisson(3), Bursty(3), Constant(3), Closed(4, 2.0)])


@given(
    processes,
    st.one_of(st.none(), st.builds(workload, st.just(40), blocks=st.booleans(), domains=st.booleans())),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 5),
)
def test_requests_do_not_depend_on_how_many_are_drawn_at_once(
    process: Process | None, load: Workload | None, num: int, size: int, seed: int
) -> None:
    if process is None and load is None:
        load = workload(40)
    traffic = Traffic(TRACE, num, seed, process, load)
    whole, pieces = drawn(traffic), drawn(traffic, size)
    assert whole.keys() == pieces.keys()
    for name, column in whole.items():
        np.testing.assert_array_equal(column, pieces[name], strict=True)
    assert len(whole["arrival_s"]) == len(traffic) == num
    known = whole["arrival_s"][: traffic.users or num]
    assert (np.diff(known) >= 0).all()
    assert np.isnan(whole["arrival_s"][len(known) :]).all()
    assert (whole["think_s"] >= 0).all()


@given(st.integers(0, 9), st.booleans())
def test_anchors_are_of_the_domain_and_reach_as_far_as_any_of_it(seed: int, named: bool) -> None:
    load = workload(60, seed, domains=named)
    found = drawn(Traffic(TRACE, 60, seed, None, load))
    arrays, domains = TRACE.arrays, TRACE.requests["domain"].to_numpy()
    np.testing.assert_array_equal(found["output_tokens"], load.output_tokens)
    np.testing.assert_array_equal(found["first_row"], arrays.first_row[found["source"]])
    np.testing.assert_array_equal(found["num_rows"], arrays.num_rows[found["source"]])
    if load.domain is not None:
        np.testing.assert_array_equal(domains[found["source"]], load.domain.to_numpy())
    for source, needed in zip(found["source"], load.output_tokens - 1, strict=True):
        longest = arrays.num_rows[domains == domains[source]].max()
        assert arrays.num_rows[source] >= min(needed, longest / 2)
        assert arrays.num_rows[source] >= needed or needed > longest
    chunks = list(Traffic(TRACE, 60, seed, None, load).chunks())
    np.testing.assert_array_equal(chunks[0].reuses, load.output_tokens - 1 > found["num_rows"])


def test_every_recorded_request_that_is_long_enough_is_as_likely() -> None:
    load = dataclasses.replace(workload(30_000), output_tokens=np.full(30_000, 8))
    source = drawn(Traffic(TRACE, 30_000, 0, None, load))["source"]
    # 7 anchors: both of math and of chat, and of code only the longer, which takes all of its third
    shares = np.bincount(source, minlength=6) / len(source)
    np.testing.assert_allclose(shares, [1 / 6, 1 / 3, 1 / 6, 1 / 6, 0, 1 / 6], atol=0.01)


def test_without_a_workload_the_trace_s_own_requests_come_in_whole_passes() -> None:
    found = drawn(Traffic(TRACE, 12, 3, Poisson(1)))
    for start in (0, 6):
        assert sorted(found["source"][start : start + 6]) == list(range(6))
    np.testing.assert_array_equal(found["output_tokens"], TRACE.arrays.output_tokens[found["source"]])
    np.testing.assert_array_equal(found["prompt_tokens"], TRACE.arrays.prompt_tokens[found["source"]])


def test_a_rate_changes_the_times_and_nothing_else() -> None:
    slow, fast, bursty = (
        drawn(Traffic(TRACE, 50, 1, process, workload(40))) for process in (Poisson(2), Poisson(8), Bursty(8))
    )
    np.testing.assert_allclose(slow["arrival_s"], 4 * fast["arrival_s"])
    for name in slow.keys() - {"arrival_s"}:
        np.testing.assert_array_equal(slow[name], fast[name])
        np.testing.assert_array_equal(slow[name], bursty[name])
    other = drawn(Traffic(TRACE, 50, 2, Poisson(2), workload(40)))
    assert (other["arrival_s"] != slow["arrival_s"]).any()


def test_a_workload_s_blocks_go_with_their_request() -> None:
    load = workload(40, blocks=True)
    assert load.blocks is not None
    assert load.block_starts is not None
    owner = {tokens: at for at, tokens in enumerate(load.prompt_tokens)}  # no two alike
    for process in (None, Poisson(2)):
        for chunk in Traffic(TRACE, 40, 0, process, load).chunks(7):
            assert chunk.blocks is not None
            assert chunk.block_starts is not None
            for at in range(len(chunk)):
                row = owner[chunk.prompt_tokens[at]]
                np.testing.assert_array_equal(
                    chunk.blocks[chunk.block_starts[at] : chunk.block_starts[at + 1]],
                    load.blocks[load.block_starts[row] : load.block_starts[row + 1]],
                )


def test_a_file_or_a_process_is_asked_for_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,5,6\n3,7,8\n4,9,9\n", encoding="utf-8")
    own = open_traffic(TRACE, str(path), rate_scale=0.5, limit=2)
    assert drawn(own)["arrival_s"].tolist() == [0, 4]
    assert len(open_traffic(TRACE, str(path), limit=99)) == 3
    lent = open_traffic(TRACE, "poisson", rate=4, lengths=str(path), limit=20)
    assert lent.process == Poisson(4)
    assert set(drawn(lent)["prompt_tokens"]) == {5, 7, 9}
    assert open_traffic(TRACE, "poisson:4").process == Poisson(4)
    assert open_traffic(TRACE, "bursty:cv=2", rate=4).process == Bursty(4, 2)
    assert open_traffic(TRACE, "closed:users=9,think_s=1.5").process == Closed(9, 1.5)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--arrivals", "constant", "--rate", "5", "--limit", "4"])
    np.testing.assert_allclose(drawn(open_traffic(TRACE, **vars(args)))["arrival_s"], [0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arrivals": "poison"}, "unknown arrivals 'poison', did you mean 'poisson'"),
        ({"arrivals": "poisson"}, "arrivals poisson needs a rate"),
        ({"arrivals": "poisson", "rate": 0}, "rate 0 is not a number above 0"),
        ({"arrivals": "bursty:cv=-1", "rate": 2}, "cv -1 is not a number above 0"),
        ({"arrivals": "constant", "rate": float("nan")}, "rate nan is not"),
        ({"arrivals": "closed:0"}, "users 0"),
        ({"arrivals": "closed:2,think_s=-1"}, "think_s -1"),
        ({"arrivals": "closed:2", "rate": 3}, "--rate 3: a closed loop has no rate"),
        ({"arrivals": "poisson", "rate": 3, "rate_scale": 0}, "--rate-scale 0 is not a number above 0"),
        ({"arrivals": "poisson", "rate": 3, "limit": 0}, "--limit 0"),
    ],
)
def test_bad_traffic_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        open_traffic(TRACE, **options)  # pyright: ignore[reportArgumentType]


def test_a_rate_or_lengths_beside_a_file_and_an_unknown_domain_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,domain\n1,5,6,math\n3,7,8,law\n", encoding="utf-8")
    for option in ({"rate": 3.0}, {"lengths": str(path)}):
        with pytest.raises(InputError, match="has its own arrivals and lengths"):
            open_traffic(TRACE, str(path), **option)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="line 3: the trace has no domain 'law'; it has chat, code, math"):
        drawn(Traffic(TRACE, 2, 0, None, read_workload(path)))


def test_every_process_is_known_by_its_name() -> None:
    assert [kind.__name__.lower() for kind in PROCESSES.values()] == list(PROCESSES)
