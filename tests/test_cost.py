"""A cost table gives back what was measured, interpolates between, pads where graphs do, refuses outside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut.cost import CostTable, Sample
from dcut.errors import InputError


def table(**options: Any) -> CostTable:
    """Batch 4 and 8, 2 and 4 tokens a request, with draft and plain times."""
    verify = {(4, 8): 10.0, (4, 16): 12.0, (8, 16): 14.0, (8, 32): 22.0}
    samples = [Sample("verify", b, n, s) for (b, n), s in verify.items()]
    samples += [Sample("draft", 4, None, 1.0), Sample("draft", 8, None, 3.0)]
    samples += [Sample("plain", 4, None, 8.0), Sample("plain", 8, None, 9.0)]
    return CostTable.from_samples(samples, **options)


def test_measured_points_come_back_exactly() -> None:
    assert [table().seconds(*at) for at in ((4, 8), (4, 16), (8, 16), (8, 32))] == [10, 12, 14, 22]


def test_verifying_nothing_but_anchors_costs_a_plain_step() -> None:
    assert table().seconds(4, 4) == 8.0
    assert table().seconds(8, 8) == 9.0


def test_between_points_the_time_is_bilinear_in_batch_size_and_tokens_a_request() -> None:
    assert table().seconds(4, 12) == pytest.approx(11)
    # batch 6, 3 tokens a request: halfway between 11 at batch 4 and 18 at batch 8
    assert table().seconds(6, 18) == pytest.approx(14.5)
    assert table().draft_seconds(6) == pytest.approx(2)
    assert table().plain_seconds(5) == pytest.approx(8.25)


@given(st.integers(4, 8), st.data())
def test_a_whole_curve_equals_single_look_ups(batch_size: int, data: st.DataObject) -> None:
    curve = table().curve(batch_size, 4 * batch_size)
    assert np.isnan(curve[:batch_size]).all()
    tokens = data.draw(st.integers(batch_size, 4 * batch_size))
    assert curve[tokens] == table().seconds(batch_size, tokens)


@pytest.mark.parametrize(
    ("batch_size", "tokens", "message"),
    [
        (3, 8, r"batch size 3 is outside the measured range 4\.\.8"),
        (9, 18, r"batch size 9 is outside the measured range 4\.\.8"),
        (4, 17, r"17 verified tokens at batch size 4 are outside the measured range 4\.\.16"),
        (6, 5, r"5 verified tokens at batch size 6 are outside the measured range 6\.\.24"),
    ],
)
def test_outside_the_measured_range_is_refused_with_the_range(
    batch_size: int, tokens: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        table().seconds(batch_size, tokens)
    assert table().seconds(batch_size, tokens, extrapolate=True) > 0


def test_extrapolation_goes_on_with_the_last_slope_and_stops_at_the_first_edge() -> None:
    assert table().seconds(4, 20, extrapolate=True) == pytest.approx(13)
    assert table().seconds(2, 8, extrapolate=True) == pytest.approx(12)  # as batch 4 with 4 tokens each
    assert table().draft_seconds(2, extrapolate=True) == 1
    assert table().draft_seconds(10, extrapolate=True) == pytest.approx(4)
    with pytest.raises(InputError, match=r"batch size 2 is outside the measured range 4\.\.8 of draft times"):
        table().draft_seconds(2)
    with pytest.raises(InputError, match="batch size 16"):
        table().check_batch_size(16)


def test_context_and_prompt_tokens_add_their_measured_seconds() -> None:
    slow = table(context_token_s=0.01, context_per_request=100, prefill_token_s=0.1)
    assert slow.seconds(4, 8, context_tokens=400) == pytest.approx(10)
    assert slow.seconds(4, 8, context_tokens=500, prefill_tokens=7) == pytest.approx(10 + 1 + 0.7)
    assert slow.plain_seconds(4, context_tokens=300) == pytest.approx(8 - 1)
    assert slow.draft_seconds(4, context_tokens=500) == 1


def test_every_verified_row_and_the_drafter_attend_to_the_context() -> None:
    slopes = {"context_token_s": 0.01, "context_pair_s": 0.002, "draft_context_token_s": 0.003}
    slow = table(**slopes, context_per_request=100, draft_lengths=[(3, 0.5), (15, 1.0)])
    # 100 tokens a request beyond: each of the rows attends to 100 more, whatever request it is of
    assert slow.seconds(4, 8, context_tokens=800) == pytest.approx(10 + 4 + 8 * 100 * 0.002)
    assert slow.seconds(4, 16, context_tokens=800) == pytest.approx(12 + 4 + 16 * 100 * 0.002)
    assert slow.plain_seconds(4, context_tokens=0) == pytest.approx(8 - 4 - 4 * 100 * 0.002)
    assert slow.draft_seconds(4, context_tokens=800) == pytest.approx(1 + 400 * 0.003)
    assert slow.draft_seconds(4, context_tokens=800, drafts=3) == pytest.approx((1 + 400 * 0.003) / 2)
    tokens = np.array([4, 8, 16])
    assert slow.context_seconds(4, 800, tokens) == pytest.approx([4 + n * 0.2 for n in tokens])
    assert slow.context_seconds(4, None, 8) == slow.draft_context_seconds(4, None) == 0


def staircase() -> CostTable:
    knots = {1: 1.0, 8: 2.0, 16: 3.0, 512: 10.0, 520: 50.0, 1024: 99.0}
    samples = [Sample("verify", None, n, s) for n, s in knots.items()]
    return CostTable.from_samples(samples, max_graph_tokens=512)


def test_below_the_largest_graph_tokens_pad_up_and_above_it_the_cliff_stays() -> None:
    times = [staircase().seconds(1, n) for n in (1, 2, 8, 9, 17, 512, 513, 520, 772, 1024)]
    assert times == pytest.approx([1, 2, 2, 3, 10, 10, 50, 50, 74.5, 99])
    with pytest.raises(InputError, match="1025 verified tokens"):
        staircase().seconds(1, 1025)


def test_graphs_of_several_batch_sizes_pad_the_batch_up_as_well() -> None:
    samples = [Sample("verify", b, b * k, b + k / 10) for b in (4, 8) for k in (1, 2, 4)]
    graphs = CostTable.from_samples(samples, max_graph_tokens=32)
    assert graphs.seconds(4, 5) == pytest.approx(4.2)
    assert graphs.seconds(5, 9) == pytest.approx(8.2)


def test_the_published_graph_staircase_is_read_as_a_table(shared: Path) -> None:
    rows = [line.split(",") for line in (shared / "published/graph-cost-curve.csv").read_text().split()[1:]]
    verify = {int(x): float(ms) / 1000 for curve, x, ms in rows if curve == "verify_vs_target_tokens"}
    samples = [Sample("verify", None, tokens, seconds) for tokens, seconds in verify.items()]
    curve = CostTable.from_samples(samples, max_graph_tokens=max(verify))
    assert curve.seconds(32, 257) == curve.seconds(32, 272) == verify[272]


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_saved_table_reads_back_the_same(context_s: float, pair_s: float, prefill_s: float) -> None:
    slopes = {"context_token_s": context_s, "context_pair_s": pair_s, "draft_context_token_s": pair_s / 2}
    original = table(**slopes, prefill_token_s=prefill_s)
    again = CostTable.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again.to_dict() == original.to_dict()
    assert again.seconds(5, 11) == original.seconds(5, 11)


def test_tables_are_read_from_csv_and_json(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    path.write_text(
        "kind,batch_size,num_verify_tokens,step_ms\nverify,4,8,10\nverify,4,16,12\nverify,4,16,14\n"
        "draft,4,,1\nplain,4,,8\n"
    )
    read = CostTable.load(path)
    assert read.seconds(4, 16) == pytest.approx(0.013)  # the median of two measurements
    assert read.draft_seconds(4) == pytest.approx(0.001)
    read.save(tmp_path / "cost.json")
    assert CostTable.load(tmp_path / "cost.json").to_dict() == read.to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "batch_size,num_verify_tokens,step_s\n4,8,1\n4,16,2\n8,16,2\n",
            "hole: no .* batch size 8 for 32 tokens",
        ),
        ("batch_size,num_verify_tokens,step_s\n4,8,-1\n", r"is -1\.0 s; a step time must be positive"),
        ("batch_size,num_verify_tokens,step_s\n4,8,nan\n", "is nan s"),
        ("batch_size,num_verify_tokens,step_s\n4,8,x\n", "line 2"),
        ("batch_size,num_verify_tokens,step_s\n4,8\n", "line 2 has fewer values than the 3 columns"),
        (f"batch_size,num_verify_tokens,step_s\n4,{'8' * 400},1\n", "is a slip"),
        (f"batch_size,num_verify_tokens,step_s\n4,8,{'8' * 400}\n", "is inf s"),
        (f"batch_size,num_verify_tokens,step_s\n4,8,{'8' * 200_000}\n", "not valid CSV"),
        ("kind,batch_size,num_verify_tokens,step_s\nverify,4,8,1\nverify,8,16,1\nplain,4,,1\n", "not for 8"),
        ("batch_size,num_verify_tokens,step_s\n4,3,1\n", "3 tokens are fewer than one for each request"),
        ("batch_size,num_verify_tokens,step_s\n0,3,1\n", "at least one request"),
        ("bs,tokens,ms\n4,8,1\n", "no column batch_size, num_verify_tokens, step_s or step_ms; found bs"),
        ("", "found nothing"),
        ("batch_size,num_verify_tokens,step_s\n", "holds no verify times"),
        ("kind,batch_size,num_verify_tokens,step_s\nverfy,4,8,1\n", "unknown kind of time 'verfy'"),
        ("kind,batch_size,num_verify_tokens,step_s\nverify,4,8,1\nverify,,8,1\n", "to all or to none"),
    ],
)
def test_a_bad_csv_is_refused_by_file_and_cause(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        CostTable.load(path)
    assert str(path) in str(refusal.value)


def test_a_csv_may_carry_a_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    path.write_text("\ufeffbatch_size, num_verify_tokens, step_s\n4, 8, 1\n", encoding="utf-8")
    assert CostTable.load(path).seconds(4, 8) == 1


def test_a_table_without_plain_times_says_what_to_add() -> None:
    bare = CostTable.from_samples([Sample("verify", 4, 16, 1.0)])
    with pytest.raises(InputError, match=r"no time of plain decoding at batch size 4 \(a row of kind"):
        bare.plain_seconds(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a cost table"),
        ('{"verify": [], "format": 99}', "format 99; this version reads format 1"),
        ('{"verify": [[4, 8]], "format": 1}', "malformed"),
        ('{"verify": [[4, 8, "fast"]], "format": 1}', "is fast s"),
        ('{"verify": [[4, 8, true]], "format": 1}', "is True s"),
        ('{"verify": [[4, 8.5, 1]], "format": 1}', "8.5 is not a whole number"),
        ('{"verify": [[1e400, 8, 1]], "format": 1}', "inf is not a whole number"),
        ('{"verify": [["4", 8, 1]], "format": 1}', "malformed"),
        ('{"verify": [[4, 8, 1]], "format": 1, "max_graph_tokens": "abc"}', "max_graph_tokens is 'abc'"),
        ('{"verify": [[4, 8, 1]], "format": 1, "context_token_s": NaN}', "context_token_s is nan"),
        ('{"verify": [[4, 8, 1]], "format": 1, "context_token_s": null}', "context_token_s is None"),
        ('{"verify": [[4, 8, 1]], "format": 1, "prefill_token_s": -1}', "prefill_token_s is -1"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_json_is_refused_by_file_and_cause(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        CostTable.load(path)


def test_fewer_drafts_take_their_share_of_the_drafter_s_time_and_survive_the_file(tmp_path: Path) -> None:
    samples = [Sample("verify", 4, 4 * k, 1.0 + k) for k in (1, 8)] + [Sample("draft", 4, None, 2.0)]
    table = CostTable.from_samples(samples, [(1, 0.25), (3, 0.5)])
    table.save(tmp_path / "cost.json")
    for read in (table, CostTable.load(tmp_path / "cost.json")):
        assert [read.draft_seconds(4, drafts=n) for n in (1, 3, 7)] == [0.5, 1.0, 2.0]
        assert read.draft_seconds(4) == 2.0
    for wrong in ([(3, 0.5), (1, 0.25)], [(0, 0.5)], [(2, 1.5)]):
        with pytest.raises(InputError, match="rising numbers of drafts from 1"):
            CostTable.from_samples(samples, wrong)
