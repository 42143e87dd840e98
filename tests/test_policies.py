"""Every policy keeps its promises, and its spelling on the command line is read or refused by name."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_selector import batches

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import POLICIES, BudgetPolicy, DCut, Fixed, Full, Off, Ratio, parse_policies, parse_policy
from dcut.selector import Selection

EXAMPLES = {
    "fixed": "fixed:3",
    "ratio": "ratio:0.5",
    "threshold": "threshold:0.4",
    "tetris": "tetris:2.5",
    "dsd": "dsd:1x4/8x2/12x0",
}
VARIANTS = [
    "dcut:bonus=true,form=paper",
    "dcut:min_gain=0.1",
    "threshold:0.3,refresh=2,initial=3",
    "dspark:min_gain=0.1",
    "vllm-adaptive:estimator=true",
    "vllm-adaptive:min_gain=0.1",
    "smartspec:min_gain=0.1",
    "ema:0/2/5",
]
SPECS = [EXAMPLES.get(name, name) for name in POLICIES] + VARIANTS


def linear(a_step: float = 1.0, a_token: float = 0.01, draft: float = 0.2) -> CostTable:
    """Step time a_step + a_token * tokens, batch 1-64, 1-16 tokens a request."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    samples = [Sample("verify", b, b * k, a_step + a_token * b * k) for b in sizes for k in (1, 4, 8, 12, 16)]
    return CostTable.from_samples(samples + [Sample("draft", b, None, draft) for b in sizes])


def staircase() -> CostTable:
    """Graphs of 4, 8, 16, 32 tokens, a cliff behind them, the same for every batch size."""
    steps = [(1, 1.0), (4, 1.1), (8, 1.3), (16, 1.9), (32, 3.0), (64, 8.0), (256, 25.0)]
    verify = [Sample("verify", None, tokens, seconds) for tokens, seconds in steps]
    return CostTable.from_samples(
        verify + [Sample("draft", b, None, 0.3) for b in (1, 64)], max_graph_tokens=32
    )


def play(policy: BudgetPolicy, steps: list[np.ndarray], cost: CostTable, lagged: bool) -> list[Selection]:
    """One run as an engine makes it: every draft with a confidence of at least one half is accepted."""
    policy, chosen = policy.start(), []
    for confidences in steps:
        batch, longest = confidences.shape
        width = policy.draft_length(batch, longest, cost)
        assert 0 <= width <= longest
        seen = np.ascontiguousarray(confidences[:, :width])
        if lagged and width:
            selection = policy.select_lagged(seen, np.ascontiguousarray(seen[::-1]), cost, 100.0 * batch)
        else:
            selection = policy.select(seen, cost, 100.0 * batch)
        right = np.logical_and.accumulate(seen >= 0.5, axis=1).sum(axis=1)
        policy.observe(selection.keep_depth, np.minimum(right, selection.keep_depth), 1.5)
        chosen.append(selection)
    return chosen


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=40)
@given(
    steps=st.lists(batches(), min_size=1, max_size=12),
    extreme=st.sampled_from([None, 0.0, 1.0]),
    lagged=st.booleans(),
    stairs=st.booleans(),
)
def test_every_policy_keeps_within_bounds_adds_up_and_repeats_itself(
    spec: str, steps: list[np.ndarray], extreme: float | None, lagged: bool, stairs: bool
) -> None:
    policy, cost = parse_policy(spec), staircase() if stairs else linear()
    if extreme is not None:
        steps = [np.full_like(confidences, extreme) for confidences in steps]
    first, again = (play(policy, steps, cost, lagged) for _ in range(2))
    for confidences, selection, same in zip(steps, first, again, strict=True):
        batch, longest = confidences.shape
        assert selection.keep_depth.shape == (batch,)
        assert selection.keep_depth.dtype == np.int64
        assert ((selection.keep_depth >= 0) & (selection.keep_depth <= longest)).all()
        assert selection.num_verify_tokens == selection.keep_depth.sum() + batch
        assert np.isfinite(selection.expected_tokens)
        assert batch <= selection.expected_tokens <= selection.num_verify_tokens + 1e-9
        assert 0 <= selection.bucket < len(policy.labels)
        assert selection.keep_depth.tolist() == same.keep_depth.tolist()
        assert selection.expected_tokens == same.expected_tokens


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("wrong", [np.nan, 1.5, -0.25])
def test_every_policy_that_drafts_refuses_what_is_no_probability(spec: str, wrong: float) -> None:
    policy = parse_policy(spec).start()
    confidences = np.full((4, policy.draft_length(4, 6, linear())), 0.5, np.float32)
    if not confidences.size:
        return
    confidences[3, -1] = wrong
    with pytest.raises(InputError, match=r"of request 3 at draft .* is not a probability"):
        policy.select(confidences, linear(), 100.0)


@pytest.mark.parametrize("batch", [1, 4, 32, 64])
@pytest.mark.parametrize("drafts", [1, 7, 15])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0])
def test_both_forms_keep_the_number_of_drafts_that_their_formula_says(
    batch: int, drafts: int, ratio: float
) -> None:
    confidences = np.full((batch, drafts), 0.9, np.float32)
    width = drafts + 1
    paper = Ratio(ratio, form="paper").select(confidences, None)
    served = Ratio(ratio, form="served").select(confidences, None)
    # exact arithmetic in quarters: ceil(q/4 * n) is -(-q*n // 4)
    quarters = int(ratio * 4)
    assert paper.keep_depth.sum() == -(-quarters * batch * drafts // 4)
    assert served.keep_depth.sum() == max(0, -(-quarters * batch * width // 4) - batch)


def test_dcut_weighs_expected_tokens_against_measured_time() -> None:
    rng = np.random.default_rng(0)
    confidences = rng.beta(2, 0.7, (32, 15)).astype(np.float32)
    flat, steep = linear(a_token=1e-6), linear(a_token=1.0)
    assert DCut().select(confidences, flat).bucket == 3  # tokens cost nothing: verify all
    assert DCut().select(confidences, steep).bucket == 0  # tokens cost all: verify the surest quarter


def test_dcut_chooses_the_bucket_with_the_best_utility_of_its_form() -> None:
    rng = np.random.default_rng(1)
    cost = linear()
    survivals = lambda c: np.sort(np.cumprod(c, axis=1, dtype=float).ravel())[::-1]  # noqa: E731
    for _ in range(50):
        confidences = rng.beta(rng.uniform(0.5, 4), 0.7, (16, 15)).astype(np.float32)
        for form in ("paper", "served"):
            kept, seconds = [], []
            for rho in (0.25, 0.5, 0.75, 1.0):
                if form == "paper":
                    kept.append(int(np.ceil(rho * 16 * 15)))
                    seconds.append(cost.seconds(16, rho * 16 * 16))
                else:
                    kept.append(int(rho * 16 * 16) - 16)
                    seconds.append(cost.seconds(16, rho * 16 * 16) + cost.draft_seconds(16))
            utility = [survivals(confidences)[:k].sum() / s for k, s in zip(kept, seconds, strict=True)]
            assert DCut(form=form).select(confidences, cost).bucket == int(np.argmax(utility))


def test_a_longer_context_makes_verification_relatively_cheaper() -> None:
    confidences = np.linspace(1, 0.5, 60, dtype=np.float32).reshape(4, 15)
    cost = dataclasses.replace(linear(a_token=0.05), context_token_s=0.01)
    assert DCut().select(confidences, cost, 0).bucket < DCut().select(confidences, cost, 4000).bucket


def test_without_a_profile_dcut_keeps_three_quarters() -> None:
    confidences = np.full((4, 15), 0.5, np.float32)
    assert DCut().select(confidences, None).num_verify_tokens == 48


def test_simple_policies_do_what_their_names_say() -> None:
    confidences = np.full((3, 5), 0.5, np.float32)
    assert Off().draft_length(3, 5) == 0
    assert Full().select(confidences, None).keep_depth.tolist() == [5, 5, 5]
    assert Fixed(2).select(confidences, None).keep_depth.tolist() == [2, 2, 2]
    assert Fixed(9).select(confidences, None).keep_depth.tolist() == [5, 5, 5]
    assert Fixed(2).select(confidences, None).expected_tokens == pytest.approx(3 * 1.75)


def test_a_list_of_policies_is_split_where_a_new_name_begins() -> None:
    read = parse_policies("off, full,fixed:3,dcut:bonus=true,form=paper,dcut:buckets=0.5/1,ratio:0.75")
    assert read == {
        "off": Off(),
        "full": Full(),
        "fixed:3": Fixed(3),
        "dcut:bonus=true,form=paper": DCut(bonus=True, form="paper"),
        "dcut:buckets=0.5/1": DCut(buckets=(0.5, 1.0)),
        "ratio:0.75": Ratio(0.75),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [("fixed:8", "fixed:8 is more than the 7 drafts"), ("dsd:1x8/4x2", "dsd:1x8/4x2 names 8 drafts")],
)
def test_more_drafts_than_there_are_are_refused_where_a_user_names_them(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_policy(text).check_drafts(7)
    parse_policy(text).check_drafts(8)
    for policy in SPECS:
        parse_policy(policy).check_drafts(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dcutt", "unknown policy 'dcutt', did you mean 'dcut'.; there are off, full, fixed, ratio, dcut"),
        ("xyzzy", "unknown policy 'xyzzy'; there are off"),
        ("dcut:bouns=true", "no option 'bouns', did you mean 'bonus'.; there are buckets, bonus, form"),
        ("dcut:bonus=yes", "dcut:bonus='yes' is not true or false"),
        ("dcut:form=papre", "is not one of paper, served"),
        ("dcut:buckets=1/0.5", "keep ratios must rise"),
        ("dcut:buckets=a/b", "is not a list such as"),
        ("fixed", "policy fixed needs a first, such as fixed:3"),
        ("fixed:-1", "a depth counts drafts"),
        ("fixed:1.5", "fixed:first='1.5' is not a whole number"),
        ("ratio:1.5", r"keep ratio 1\.5 is outside"),
        ("ratio:nan", "keep ratio nan is outside"),
        ("off:1", "policy off takes no options"),
        (" , ", "no policy named"),
        ("ratio:0.5,ratio:+0.5", r"ratio:\+0\.5 and ratio:0\.5 are the same policy"),
        ("full,off,full", "full and full are the same policy"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused_with_what_does(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_policies(text)
