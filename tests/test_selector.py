"""The selector keeps exactly the best drafts: checked against brute force and against a full sort."""

import itertools

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut.errors import InputError
from dcut.scores import check_confidences, survival
from dcut.selector import select

# Few distinct values, so that ties, zeros and ones are the rule rather than the exception.
TIED = st.sampled_from([0.0, 0.25, 0.5, 1.0])
SMOOTH = st.floats(0, 1, width=32)


@st.composite
def batches(draw: st.DrawFn, most_requests: int = 12, most_drafts: int = 8) -> np.ndarray:
    shape = draw(st.integers(1, most_requests)), draw(st.integers(1, most_drafts))
    values = draw(st.one_of(st.just(TIED), st.just(SMOOTH), st.just(st.one_of(TIED, SMOOTH))))
    flat = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(flat, np.float32).reshape(shape)


def test_survival_is_the_product_of_the_confidences_up_to_each_draft() -> None:
    assert survival(np.array([[0.5, 0.5, 0.0], [1.0, 0.25, 1.0]])).tolist() == [
        [0.5, 0.25, 0.0],
        [1.0, 0.25, 0.25],
    ]


@given(batches(most_requests=3, most_drafts=3), st.data())
def test_no_set_of_prefixes_of_the_same_size_expects_more_tokens(
    confidences: np.ndarray, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(0, confidences.size))
    chosen = select(confidences, np.array([budget]), np.ones(1))
    values = np.pad(np.cumsum(survival(confidences), axis=1), ((0, 0), (1, 0)))
    depths = itertools.product(range(confidences.shape[1] + 1), repeat=len(confidences))
    best = max(sum(values[i, n] for i, n in enumerate(depth)) for depth in depths if sum(depth) == budget)
    assert chosen.expected_tokens - len(confidences) == pytest.approx(best)
    assert sum(values[i, n] for i, n in enumerate(chosen.keep_depth)) == pytest.approx(best)


@settings(max_examples=300)
@given(batches(), st.booleans(), st.data())
def test_the_selector_agrees_with_a_full_sort(
    confidences: np.ndarray, bonus: bool, data: st.DataObject
) -> None:
    budgets = np.array(data.draw(st.lists(st.integers(0, confidences.size), min_size=1, max_size=6)))
    prices = st.floats(0.001, 1000)
    seconds = np.array(data.draw(st.lists(prices, min_size=len(budgets), max_size=len(budgets))))
    chosen, wanted = (f(confidences, budgets, seconds, bonus) for f in (select, reference.select))
    assert chosen.expected_tokens == pytest.approx(
        float(np.sort(survival(confidences).ravel())[::-1][: budgets[chosen.bucket]].sum()) + len(confidences)
    )
    if chosen.bucket == wanted.bucket:
        assert chosen.keep_depth.tolist() == wanted.keep_depth.tolist()
    else:  # two utilities that differ only by the order of summation
        utility = [
            (c.expected_tokens - (not bonus) * len(confidences)) / seconds[c.bucket] for c in (chosen, wanted)
        ]
        assert utility[0] == pytest.approx(utility[1], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("batch", [1, 64, 1024])
@pytest.mark.parametrize("kind", ["spread", "tied", "ones", "zeros", "tiny"])
def test_large_batches_keep_the_slots_that_a_full_sort_keeps(batch: int, kind: str) -> None:
    rng = np.random.default_rng(batch)
    confidences = {
        "spread": rng.beta(2, 0.7, (batch, 15)),
        "tied": rng.integers(0, 5, (batch, 15)) / 4,
        "ones": np.ones((batch, 15)),
        "zeros": np.zeros((batch, 15)),
        "tiny": rng.uniform(0, 1e-6, (batch, 15)),
    }[kind].astype(np.float32)
    for budget in {0, 1, batch, batch * 7 + 3, batch * 15 - 1, batch * 15}:
        if budget <= confidences.size:
            keep = select(confidences, np.array([budget]), np.ones(1)).keep_depth
            requests, _ = reference.ranked_slots(confidences)
            assert (keep == np.bincount(requests[:budget], minlength=batch)).all()


@given(batches(), st.data())
def test_exactly_the_budget_is_kept(confidences: np.ndarray, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, confidences.size))
    chosen = select(confidences, np.array([budget]), np.ones(1))
    assert chosen.keep_depth.sum() == budget
    assert chosen.num_verify_tokens == budget + len(confidences)
    assert ((chosen.keep_depth >= 0) & (chosen.keep_depth <= confidences.shape[1])).all()


def test_ties_go_to_the_earlier_position_and_then_to_the_lower_request() -> None:
    ones = np.ones((3, 4), np.float32)
    kept = [select(ones, np.array([k]), np.ones(1)).keep_depth.tolist() for k in range(5)]
    assert kept == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]


def test_the_budget_with_the_most_expected_tokens_a_second_wins() -> None:
    confidences = np.array([[0.9, 0.9], [0.5, 0.1]])
    budgets = np.array([1, 2, 4])
    assert select(confidences, budgets, np.array([1.0, 1.2, 4.0])).bucket == 1  # .9/1, 1.71/1.2, 2.26/4
    assert select(confidences, budgets, np.array([1.0, 2.0, 4.0])).bucket == 0
    # with two bonus tokens the same budgets are worth 2.9/1, 3.71/1.2 and 4.26/1.3
    assert select(confidences, budgets, np.array([1.0, 1.2, 1.3]), bonus=True).bucket == 2
    assert select(confidences, budgets, np.array([1.0, 1.0, 1.0])).bucket == 2


@pytest.mark.parametrize(
    ("confidences", "budgets", "seconds", "message"),
    [
        ([[0.5, np.nan]], [1], [1.0], "confidence nan of request 0 at draft 1"),
        ([[0.5, 1.5]], [1], [1.0], r"confidence 1\.5 of request 0 at draft 1"),
        ([[-0.1, 0.5]], [1], [1.0], "is not a probability"),
        ([[0.5, np.inf]], [1], [1.0], "confidence inf"),
        ([0.5], [1], [1.0], r"shape \(1,\)"),
        (np.zeros((0, 3)), [0], [1.0], "not empty"),
        ([[0.5, 0.5]], [3], [1.0], r"budget of 3 drafts is outside 0\.\.2"),
        ([[0.5, 0.5]], [-1], [1.0], "budget of -1"),
        ([[0.5, 0.5]], [1], [0.0], "step time 0.0 s"),
        ([[0.5, 0.5]], [1], [np.nan], "step time nan s"),
        ([[0.5, 0.5]], [], [], "0 budgets"),
        ([[0.5, 0.5]], [1, 2], [1.0], "2 budgets and 1 step times"),
    ],
)
def test_what_cannot_be_selected_from_is_refused_by_name(
    confidences: list, budgets: list, seconds: list, message: str
) -> None:
    for dtype in (np.float64, np.float32):
        with pytest.raises(InputError, match=message):
            select(np.array(confidences, dtype), np.array(budgets, int), np.array(seconds))


def test_checked_confidences_are_c_ordered_float32() -> None:
    checked = check_confidences(np.asfortranarray(np.full((3, 2), 0.5)))
    assert checked.dtype == np.float32
    assert checked.flags.c_contiguous
