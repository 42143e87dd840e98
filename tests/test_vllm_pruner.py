"""The policy beside vLLM, without vLLM: what is decided, what the log says, what is refused up front."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.protocol import BudgetPolicy
from dcut.selector import Selection
from runtime.vllm.options import Options, check
from runtime.vllm.pruner import Anchored, Decoded, Prefilled, Pruner, number, overhead

COST = CostTable.from_samples(
    [
        *(Sample("verify", b, b * n, 0.001 + 0.0001 * b * n) for b in (1, 2, 4) for n in (1, 2, 4)),
        *(Sample("draft", b, None, 0.002) for b in (1, 2, 4)),
        *(Sample("plain", b, None, 0.001 + 0.0001 * b) for b in (1, 2, 4)),
    ]
)
CONFIDENCES = np.array([[0.9, 0.8, 0.1], [0.95, 0.2, 0.9]], np.float32)
BATCH = [Anchored("7", 0, 4, 30), Anchored("9-a1b2", 1, 0, 12)]


class Clock:
    """Moves a second each time somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def pruner(policy: str = "ratio:0.625", cost: CostTable | None = None) -> Pruner:
    """ratio:0.625 keeps 3 of the 6 drafts of CONFIDENCES: 5 of 8 positions, the anchors among them."""
    return Pruner(parse_policy(policy), 3, cost, clock=Clock())


def proposed(of: Pruner, confidences: np.ndarray = CONFIDENCES) -> dict[str, int]:
    of.proposed(began_s=10.0, draft_s=0.5, collect_s=0.25, batch=BATCH, confidences=confidences)
    return dict(of.decide())


def verify(of: Pruner, decoded: list[Decoded], prefilled: list[Prefilled] = []) -> None:  # noqa: B006
    proposal, of.proposal = of.proposal, None
    of.verified(12.0, 15.0, proposal, decoded, prefilled)


def test_the_best_drafts_of_the_whole_batch_are_kept() -> None:
    depths = proposed(pruner())
    assert depths == {"7": 2, "9-a1b2": 1}
    assert pruner().decide() == {}


def test_dcut_decides_as_it_does_anywhere_else() -> None:
    of = pruner("dcut", COST)
    depths = proposed(of)
    expected = parse_policy("dcut").select(CONFIDENCES, COST, 42)
    assert list(depths.values()) == expected.keep_depth.tolist()


def test_a_step_holds_the_proposal_and_what_came_of_it() -> None:
    of = pruner()
    proposed(of)
    verify(
        of,
        [Decoded("9-a1b2", 0, 12, 1, [5, 6], 2), Decoded("7", 4, 30, 2, [8], 1)],
        [Prefilled("12", 33, [4]), Prefilled("13", 100, [])],
    )
    (step,) = of.take_steps()
    assert of.take_steps() == []
    assert step.request_id.tolist() == [7, 9], "in the order in which the policy saw them"
    assert step.position.tolist() == [4, 0]
    assert step.selection.keep_depth.tolist() == [2, 1]
    assert step.selection.num_verify_tokens == 5
    assert step.selection.expected_tokens == pytest.approx(2 + 0.9 + 0.72 + 0.95)
    assert step.num_accepted.tolist() == [0, 1]
    assert step.num_emitted == 3
    assert step.context_tokens == 42
    assert (step.start_s, step.draft_s, step.verify_s, step.step_s) == (10.0, 0.5, 3.0, 5.0)
    assert step.select_s == 0.25 + 1.0, "collecting, and one tick of the clock for choosing"
    assert step.prefill_tokens == 133
    assert [(e.request_id, e.tokens) for e in step.emissions] == [(12, [4]), (7, [8]), (9, [5, 6])]


def test_a_request_that_was_given_fewer_drafts_is_logged_with_those() -> None:
    of = pruner()
    proposed(of)
    verify(of, [Decoded("7", 4, 30, 1, [8, 9], 2), Decoded("9-a1b2", 0, 12, 1, [5], 1)])
    (step,) = of.take_steps()
    assert step.selection.keep_depth.tolist() == [1, 1]
    assert step.selection.num_verify_tokens == 4
    assert step.selection.expected_tokens == pytest.approx(2 + 0.9 + 0.95)


def test_a_request_that_was_aborted_or_preempted_drops_out_and_one_that_resumed_comes_last() -> None:
    of = pruner()
    proposed(of)
    verify(of, [Decoded("3", 8, 20, 0, [1], 1), Decoded("9-a1b2", 0, 12, 1, [5], 1)])
    (step,) = of.take_steps()
    assert step.request_id.tolist() == [9, 3]
    assert step.selection.keep_depth.tolist() == [1, 0]
    assert step.selection.expected_tokens == pytest.approx(2 + 0.95)


def test_the_end_of_an_output_is_told_and_its_surplus_tokens_are_not() -> None:
    of = pruner()
    proposed(of)
    verify(of, [Decoded("7", 4, 30, 2, [8, 2, 9], 2, "stop"), Decoded("9-a1b2", 0, 12, 1, [5], 1)])
    (step,) = of.take_steps()
    assert step.num_accepted.tolist() == [2, 0]
    assert step.num_emitted == 3
    assert [(e.tokens, e.finish_reason) for e in step.emissions] == [([8, 2], "stop"), ([5], None)]


def test_a_step_that_only_runs_prompts_has_no_batch() -> None:
    of = pruner()
    verify(of, [], [Prefilled("0", 8, [3], "stop")])
    (step,) = of.take_steps()
    assert len(step.request_id) == 0
    assert (step.prefill_tokens, step.prefill_s, step.step_s) == (8, 3.0, 0.0)
    verify(of, [], [])
    assert of.take_steps() == []


def test_a_policy_that_wants_no_drafts_makes_plain_steps() -> None:
    of = pruner("off", COST)
    assert of.width(2) == 0
    depths = proposed(of, np.zeros((2, 0), np.float32))
    assert depths == {"7": 0, "9-a1b2": 0}
    verify(of, [Decoded("7", 4, 30, 0, [8], 1), Decoded("9-a1b2", 0, 12, 0, [5], 1)])
    (step,) = of.take_steps()
    assert step.draft_s == 0.0, "what keeps the drafter's context is not drafting"
    assert step.num_accepted.tolist() == [0, 0]


def test_nothing_is_drafted_where_no_request_goes_on() -> None:
    assert pruner("full").width(0) == 0
    assert pruner("full").width(3) == 3


class Learning(BudgetPolicy):
    """Keeps everything, and what it hears."""

    learns = True

    def __init__(self) -> None:
        self.heard: list[tuple[list[int], list[int], float]] = []

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        return Selection(np.full(len(confidences), 3), 4 * len(confidences), 0, 0.0)

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.heard.append((keep_depth.tolist(), num_accepted.tolist(), seconds))


def test_a_policy_that_learns_hears_of_drafts_that_became_output() -> None:
    policy = Learning()
    of = Pruner(policy, 3, clock=Clock())
    proposed(of)
    verify(of, [Decoded("7", 4, 30, 3, [8, 2, 9], 2, "stop"), Decoded("9-a1b2", 0, 12, 2, [5], 1)])
    assert policy.heard[-1] == ([3, 2], [1, 0], 5.0), "before it was the rehearsal"


def test_a_lagging_policy_is_shown_the_step_before_and_forgets_who_ended() -> None:
    of = pruner("vllm-adaptive", COST)
    proposed(of)
    assert set(of.chooser.history[0]) == {"7", "9-a1b2"}
    of.forget("7")
    assert set(of.chooser.history[0]) == {"9-a1b2"}
    of.policy = parse_policy("vllm-adaptive")
    assert of.chooser.history[0] == {}


def test_drift_compares_steps_with_the_table_but_not_those_with_prompts() -> None:
    of = pruner("full", COST)
    assert of.drift
    decoded = [Decoded("7", 4, 30, 3, [8], 1), Decoded("9-a1b2", 0, 12, 3, [5], 1)]
    proposed(of)
    verify(of, decoded, [Prefilled("12", 33, [4])])
    assert of.drift.ratio == 1.0
    proposed(of)
    verify(of, decoded)
    assert of.drift.ratio == pytest.approx(5.0 / (0.001 + 0.0008 + 0.002))


def test_the_overhead_is_the_share_of_collecting_and_choosing() -> None:
    of = pruner()
    proposed(of)
    verify(of, [Decoded("7", 4, 30, 2, [8], 1), Decoded("9-a1b2", 0, 12, 1, [5], 1)])
    steps = of.take_steps()
    assert overhead(steps, 2) == 1.25 / 5.0
    with pytest.raises(InputError, match="held 3 requests"):
        overhead(steps, 3)


@pytest.mark.parametrize(("name", "found"), [("12", 12), ("12-9fe0", 12), ("cmpl-3", -1), ("", -1)])
def test_requests_are_known_by_their_numbers(name: str, found: int) -> None:
    assert number(name) == found


# ---- options and refusals -------------------------------------------------------------------------------


def test_additional_config_wins_over_the_environment() -> None:
    environment = {"DCUT_POLICY": "full", "DCUT_PROFILE_S": "5"}
    assert Options.read(None, environment) == Options("full", 5.0)
    assert Options.read({"dcut": {"policy": "dcut"}}, environment) == Options("dcut", 5.0)
    assert Options.read({}, {"DCUT_POLICY": "dcut"}) == Options("dcut", 30.0)
    assert Options.read({"dcut": {"policy": "off", "profile_s": 0}}, {}) == Options("off", 0.0)


@pytest.mark.parametrize(
    ("additional", "environment", "says"),
    [
        ({"dcut": {"polcy": "dcut"}}, {}, "no option 'polcy', did you mean 'policy'"),
        ({"dcut": "dcut"}, {}, "is no object"),
        ({"dcut": {"profile_s": 3}}, {}, "no policy is named"),
        ({}, {}, "no policy is named"),
        ({}, {"DCUT_POLICY": "dcut", "DCUT_PROFILE_S": "soon"}, "'soon' is not a number"),
        ({}, {"DCUT_POLICY": "dcut", "DCUT_PROFILE_S": "-1"}, "profile_s -1"),
    ],
)
def test_options_that_make_no_sense_are_named(additional: Any, environment: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Options.read(additional, environment)


def configuration(
    speculative: dict[str, Any] | None = None, max_model_len: int = 1024, **parallel: int
) -> Any:
    known = {
        "method": "dflash",
        "use_local_argmax_reduction": False,
        "draft_sample_method": "greedy",
        "parallel_drafting": False,
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": None,
    }
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        speculative_config=None if speculative is None else SimpleNamespace(**known | speculative),
        parallel_config=SimpleNamespace(**sizes | parallel),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


@pytest.mark.parametrize(
    ("policy", "config", "says"),
    [
        ("dcut", configuration(), "needs speculative decoding"),
        ("dcu", configuration({}), "unknown policy 'dcu', did you mean 'dcut'"),
        ("oracle", configuration({}), "must know the future"),
        ("fixed:8", configuration({}), "fixed:8 is more than the 7 drafts of the drafter: give 7 at most"),
        ("dcut", configuration({"method": "medusa"}), "does not know the speculative method 'medusa'"),
        ("dcut", configuration({"method": "ngram"}), "ngram drafts come without confidences.*fixed:K"),
        ("dcut", configuration({"use_local_argmax_reduction": True}), "set it to false"),
        ("dcut", configuration({"method": "eagle3", "draft_sample_method": "probabilistic"}), "a bias"),
        ("full", configuration({"num_speculative_tokens_per_batch_size": [(1, 4, 3)]}), "own policy"),
        ("smartspec", configuration({"method": "ngram"}), "ngram is not profiled"),
        ("dcut", configuration({}, max_model_len=63), "max_model_len 63 leaves no room.*give 64 or more"),
        ("dcut", configuration({}, pipeline_parallel_size=2), "pipeline_parallel_size 2"),
        ("dcut", configuration({}, data_parallel_size=2), "one server a replica"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(policy: str, config: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        check(Options(policy), config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("policy", ["dspark", "vllm-adaptive", "smartspec"])
def test_a_policy_that_lacks_costs_is_refused_up_front_and_leaves_the_old_one_at_work(policy: str) -> None:
    with pytest.raises(InputError, match="profile_s 0 measures none"):
        check(Options(policy, profile_s=0), configuration({}))
    check(Options(policy), configuration({}))
    of = pruner("full")
    with pytest.raises(InputError, match="cost table"):
        of.policy = parse_policy(policy)
    assert of.policy == parse_policy("full")


def test_a_policy_that_names_more_drafts_than_there_are_leaves_the_old_one_at_work() -> None:
    of = pruner("full")
    with pytest.raises(InputError, match="more than the"):
        of.policy = parse_policy(f"fixed:{of.draft_length + 1}")
    assert of.policy == parse_policy("full")


@pytest.mark.parametrize(
    ("policy", "speculative"),
    [
        ("dcut", {}),
        ("dcut", {"draft_sample_method": "probabilistic"}),  # of a block, whose draws bend nothing
        ("dcut-plus", {"method": "mtp"}),
        ("full", {"method": "ngram"}),
        ("ema", {"method": "ngram"}),
        ("dsd:1x7/16x3", {"method": "ngram"}),
        ("fixed:3", {"method": "eagle3", "draft_sample_method": "probabilistic"}),
    ],
)
def test_what_can_run_is_let_through(policy: str, speculative: dict[str, Any]) -> None:
    check(Options(policy), configuration(speculative))


def test_every_option_has_a_default_but_the_policy() -> None:
    required = [f.name for f in dataclasses.fields(Options) if f.default is dataclasses.MISSING]
    assert required == ["policy"]
