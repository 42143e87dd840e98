"""The live engine: lossless under every drafter and policy, in the order that replays expect."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from scipy import stats
from scripted import ScriptedDrafter, ScriptedVerifier, plain_text, serve, tiny_pair

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import BudgetPolicy, Full, parse_policy
from dcut.selector import Selection
from runtime import drafter as drafter_module
from runtime import engine as engine_module
from runtime.drafter import DFlashDrafter, Drafter, Drafts, Seen
from runtime.engine import Engine, Request
from runtime.pair import weights
from runtime.pair.dense import generate
from runtime.recorder import read_prompts
from runtime.text import Codec
from runtime.verifier import open_pair

COST = CostTable.from_samples(
    [Sample("verify", b, b * n, 0.002 + 0.001 * b * n) for b in (1, 64) for n in (1, 16)]
    + [Sample("draft", b, None, 0.002) for b in (1, 64)]
)
POLICIES = ("off", "full", "fixed:2", "ratio:0.5", "dcut", "dcut:form=paper", "dcut-plus")


class EveryOther(BudgetPolicy):
    """Plain decoding in every second step."""

    def __init__(self) -> None:
        self.num_steps = 0

    @property
    def labels(self) -> tuple[str, ...]:
        return ("now and then",)

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        self.num_steps += 1
        return longest if self.num_steps % 2 else 0

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        return Full().select(confidences, cost)


def remember(drafter: Drafter, found: dict[tuple[int, int], Drafts]) -> Callable[..., Drafts]:
    """The drafter's own `draft`, which also keeps what it proposes at each (slot, length)."""
    propose = drafter.draft

    def draft(slots: np.ndarray, lengths: np.ndarray, *rest: Any) -> Drafts:
        drafts = propose(slots, lengths, *rest)
        for i, place in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            found[place] = Drafts(drafts.tokens[i], drafts.confidences[i])
        return drafts

    return draft


def requests(count: int, vocab: int, seed: int = 0, **options: Any) -> list[Request]:
    """Prompts of 1..9 tokens that ask for 1..20 more."""
    rng = np.random.default_rng(seed)
    return [
        Request(i, rng.integers(0, vocab, rng.integers(1, 10)).tolist(), int(rng.integers(1, 21)), **options)
        for i in range(count)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_policy_and_batch_size_says_what_plain_decoding_says(policy: str, batch_size: int) -> None:
    verifier = ScriptedVerifier()
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy(policy), COST, batch_size)
    asked = requests(20, verifier.vocab)
    assert serve(engine, asked) == {r.request_id: verifier.say(r.prompt, r.max_tokens) for r in asked}


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp", "draft", "ngram"])
@pytest.mark.parametrize("policy", ["off", "full", "ratio:0.5"])
def test_every_drafter_says_what_the_target_says_alone(kind: str, policy: str) -> None:
    verifier, drafter = tiny_pair(kind)
    asked = requests(8, 17, seed=3)
    outputs = serve(Engine(verifier, drafter, parse_policy(policy), COST, 3), asked)
    assert outputs == {r.request_id: plain_text(verifier.model, r.prompt, r.max_tokens) for r in asked}


def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    verifier, drafter = tiny_pair("draft")
    engine = Engine(verifier, drafter, EveryOther(), COST, 3)
    for request in requests(6, 17, seed=4):
        engine.add(request)
    kept = accepted = 0
    while step := engine.step():
        kept += step.selection.keep_depth.sum()
        accepted += step.num_accepted.sum()
    assert kept == accepted > 20


def test_a_stop_token_ends_an_output_and_belongs_to_it() -> None:
    verifier = ScriptedVerifier()
    verifier.eos_token_ids = (3, 7)
    asked = requests(20, verifier.vocab)
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy("full"), COST)
    assert serve(engine, asked) == {
        r.request_id: verifier.say(r.prompt, r.max_tokens, stops=(3, 7)) for r in asked
    }


def test_plain_steps_leave_the_drafter_alone_and_it_catches_up() -> None:
    verifier = ScriptedVerifier()
    drafter = ScriptedDrafter(verifier)
    asked = requests(12, verifier.vocab)
    policy = EveryOther()
    assert serve(Engine(verifier, drafter, policy, COST), asked) == {
        r.request_id: verifier.say(r.prompt, r.max_tokens) for r in asked
    }
    assert drafter.num_calls == -(-policy.num_steps // 2)


def test_a_drafter_at_work_reads_a_prompt_with_its_admission_and_one_at_rest_lets_it_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for policy, at_once in (("full", True), ("off", False)):
        verifier, drafter = tiny_pair()
        assert isinstance(drafter, DFlashDrafter)
        taken: list[Seen] = []
        take_in = drafter._take_in
        monkeypatch.setattr(
            drafter, "_take_in", lambda seen, to=taken, do=take_in: (to.append(seen), do(seen))
        )
        engine = Engine(verifier, drafter, parse_policy(policy), COST, 1)
        engine.add(Request(0, [3, 1, 4], 6, stop_token_ids=()))
        engine.add(Request(1, [1, 5, 9, 2, 6], 6, stop_token_ids=()))
        while not (engine.batch and engine.batch[0].finish_reason):
            engine.step()
        taken.clear()
        engine.admit()
        assert [seen.tokens.tolist() for seen in taken] == ([[1, 5, 9, 2, 6]] if at_once else [])


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "draft"])
@pytest.mark.parametrize("most_waiting", [0, 2**30])
def test_slots_that_changed_hands_while_the_drafter_rested_hold_the_newer_text(
    kind: str, most_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_module, "MOST_WAITING", most_waiting)
    verifier, drafter = tiny_pair(kind)
    engine = Engine(verifier, drafter, parse_policy("off"), COST, 2)
    serve(engine, requests(7, 17, seed=6))
    late = Request(9, [3, 8, 2, 2], 9)
    engine.policy = parse_policy("full")
    engine.add(late)
    engine.step()
    fresh_verifier, fresh = tiny_pair(kind)
    other = Engine(fresh_verifier, fresh, parse_policy("full"), COST, 2)
    other.add(late)
    other.step()
    place = np.array([engine.batch[0].slot]), np.array([4]), np.array([engine.batch[0].output[0]])
    drafts, expected = drafter.draft(*place, 4), fresh.draft(*place, 4)
    np.testing.assert_array_equal(drafts.tokens, expected.tokens)
    np.testing.assert_allclose(drafts.confidences, expected.confidences, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp", "draft", "ngram"])
def test_a_drafter_that_caught_up_proposes_what_one_that_never_rested_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed = []
    for policy in (parse_policy("fixed:0"), EveryOther()):
        verifier, drafter = tiny_pair(kind)
        engine = Engine(verifier, drafter, policy, COST, 2)
        asked = [Request(i, [2 + i, 5, 9, 5, 9], 14) for i in range(2)]
        found: dict[tuple[int, int], Drafts] = {}
        monkeypatch.setattr(drafter, "draft", remember(drafter, found))
        serve(engine, asked)
        proposed.append(found)
    both = proposed[0].keys() & proposed[1].keys()
    assert len(both) >= 6
    for place in both:
        np.testing.assert_array_equal(proposed[0][place].tokens, proposed[1][place].tokens)
        np.testing.assert_allclose(proposed[0][place].confidences, proposed[1][place].confidences, rtol=1e-4)


class Lagging(BudgetPolicy):
    """Verifies everything, and writes down what it is told about the step before."""

    lag = 1

    def __init__(self) -> None:
        self.stale: list[np.ndarray] = []

    @property
    def labels(self) -> tuple[str, ...]:
        return ("full",)

    def select_lagged(
        self,
        confidences: np.ndarray,
        stale: np.ndarray,
        cost: CostTable | None,
        context_tokens: float | None = None,
    ) -> Selection:
        self.stale.append(stale)
        return Full().select(confidences, cost, context_tokens)


def test_a_policy_that_lags_is_told_the_confidences_of_the_step_before() -> None:
    verifier = ScriptedVerifier()
    drafter = ScriptedDrafter(verifier)
    policy = Lagging()
    engine = Engine(verifier, drafter, policy, COST, 2)
    for i, max_tokens in enumerate((30, 3, 30)):
        engine.add(Request(i, [i, 2], max_tokens))
    told: dict[int, np.ndarray] = {}
    for _ in range(5):
        anchors = engine.step()
        assert anchors
        for i, request_id in enumerate(anchors.request_id):
            expected = told.get(request_id, np.ones(5))
            np.testing.assert_array_equal(policy.stale[-1][i], expected)
        told = {r.request.request_id: engine.chooser.history[0][r.slot] for r in engine.batch}
    assert len(told) == 2


def test_a_newcomer_takes_the_first_free_place_and_empty_places_close_up() -> None:
    verifier = ScriptedVerifier()
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy("off"), COST, 3)
    for i, max_tokens in enumerate([4, 2, 3, 1, 4, 2]):  # request 3 ends with its first token
        engine.add(Request(i, [i], max_tokens))
    batches = []
    while step := engine.step():
        batches.append(step.request_id.tolist())
    assert batches == [[0, 1, 2], [0, 4, 2], [0, 4, 5], [4]]


def test_a_step_counts_what_it_did() -> None:
    verifier = ScriptedVerifier()
    ticks = iter(range(1000))
    engine = Engine(
        verifier, ScriptedDrafter(verifier), parse_policy("full"), COST, clock=lambda: next(ticks)
    )
    engine.add(Request(0, [1, 2, 3], 20))
    engine.add(Request(1, [4], 20))
    step = engine.step()
    assert step
    assert step.prefill_tokens == 4
    assert step.context_tokens == 4 + 2  # the prompts and the tokens of their prefill
    assert step.selection.num_verify_tokens == 2 * 6
    assert step.num_emitted == step.num_accepted.sum() + 2
    assert [len(e.tokens) for e in step.emissions] == [1, 1, *(step.num_accepted + 1)]
    assert step.position.tolist() == [0, 0]
    assert (step.prefill_s, step.draft_s, step.select_s, step.verify_s, step.step_s) == (1, 1, 1, 1, 4)


def test_requests_that_all_end_with_their_first_token_make_an_empty_step() -> None:
    verifier = ScriptedVerifier()
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy("dcut"), COST, 2)
    for i in range(3):
        engine.add(Request(i, [i], 1))
    step = engine.step()
    assert step
    assert len(step.request_id) == 0
    assert [e.finish_reason for e in step.emissions] == ["length"] * 3
    assert not engine.busy
    assert engine.step() is None


def test_a_cancelled_request_frees_its_slot_and_disturbs_nobody() -> None:
    verifier = ScriptedVerifier(num_slots=2)
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy("full"), COST)
    asked = [Request(i, [i, 3], 12) for i in range(4)]
    for request in asked:
        engine.add(request)
    outputs: dict[int, list[int]] = {i: [] for i in range(4)}
    for number in range(100):
        if number == 1:
            engine.cancel(0)  # runs
            engine.cancel(2)  # waits
            engine.cancel(99)  # unknown
        step = engine.step()
        if step is None:
            break
        for emission in step.emissions:
            outputs[emission.request_id] += emission.tokens
    assert outputs[1] == verifier.say([1, 3], 12)
    assert outputs[3] == verifier.say([3, 3], 12)
    assert len(outputs[0]) < 12
    assert outputs[2] == []
    engine.add(Request(5, [1], 3))
    engine.step()
    assert len(engine.free_slots) + len(engine.batch) == 2


def test_prompts_are_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOST_PREFILL", 5)
    verifier, drafter = tiny_pair("eagle3")
    asked = requests(6, 17, seed=7)
    outputs = serve(Engine(verifier, drafter, parse_policy("full"), COST, 4), asked)
    assert outputs == {r.request_id: plain_text(verifier.model, r.prompt, r.max_tokens) for r in asked}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(0, [], 3), "the prompt is empty"),
        (Request(0, [1], 0), "max_tokens 0"),
        (Request(0, [1], 3, temperature=-1.0), "temperature -1"),
        (Request(0, [1] * 50, 30), "50 prompt tokens and 30 to come exceed the 59"),
    ],
)
def test_what_cannot_be_served_is_refused(request_: Request, reason: str) -> None:
    verifier = ScriptedVerifier()
    engine = Engine(verifier, ScriptedDrafter(verifier), parse_policy("full"))
    with pytest.raises(InputError, match=reason):
        engine.add(request_)


def test_an_oracle_and_a_batch_beyond_the_slots_are_refused() -> None:
    verifier = ScriptedVerifier()
    with pytest.raises(InputError, match=r"outside 1\.\.8"):
        Engine(verifier, ScriptedDrafter(verifier), parse_policy("full"), max_batch_size=9)
    with pytest.raises(InputError, match="only a replay"):
        Engine(verifier, ScriptedDrafter(verifier), parse_policy("oracle"))


def test_drafts_of_a_drafter_that_follows_its_own_draws_are_never_sampled() -> None:
    verifier, drafter = tiny_pair("eagle3")
    with pytest.raises(InputError, match="only from a block drafter"):
        Engine(verifier, drafter, parse_policy("full"), sample_drafts=True)


def test_a_seed_decides_the_output_whatever_else_runs() -> None:
    verifier = ScriptedVerifier(sharpness=1.0)
    asked = [Request(i, [i, 2], 12, temperature=1.0, seed=i // 2) for i in range(10)]
    alone = [
        serve(Engine(verifier, ScriptedDrafter(verifier), parse_policy("full")), [request])[
            request.request_id
        ]
        for request in asked
    ]
    together = serve(Engine(verifier, ScriptedDrafter(verifier), parse_policy("full"), seed=9), asked)
    assert alone == [together[i] for i in range(10)]
    other = Request(0, [0, 2], 12, temperature=1.0, seed=77)
    assert serve(Engine(verifier, ScriptedDrafter(verifier), parse_policy("full")), [other])[0] != alone[0]


def sampled_p_value(policy: str, sample_drafts: bool, by_drawn: bool = False) -> float:
    """Of a chi-square test that outputs of 4 tokens follow the law of plain sampling."""
    verifier = ScriptedVerifier(vocab=3, num_slots=100, max_tokens=12, sharpness=0.8)
    drafter = ScriptedDrafter(verifier, draft_length=3, by_drawn=by_drawn)
    engine = Engine(verifier, drafter, parse_policy(policy), COST, sample_drafts=sample_drafts)
    asked = [Request(i, [2, 1], 4, temperature=0.9) for i in range(4000)]
    seen = Counter(map(tuple, serve(engine, asked).values()))
    law = verifier.law([2, 1], 4, 0.9)
    assert seen.keys() <= law.keys()
    expected = np.array(list(law.values())) * len(asked)
    found = np.array([seen[output] for output in law])
    rare = expected < 5
    found = np.append(found[~rare], found[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(found, expected).pvalue)


@pytest.mark.parametrize("policy", ["full", "fixed:2", "ratio:0.5", "dcut"])
@pytest.mark.parametrize("sample_drafts", [False, True])
def test_sampled_output_follows_the_law_of_plain_sampling(policy: str, sample_drafts: bool) -> None:
    assert sampled_p_value(policy, sample_drafts) > 1e-3


def test_ranking_by_the_drawn_token_would_bend_the_law() -> None:
    assert sampled_p_value("ratio:0.5", sample_drafts=True, by_drawn=True) < 1e-9


BUILT_IN = ("dflash16", "dflash8", "eagle3", "mtp", "draft", "ngram")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_drafters_are_lossless_on_200_held_out_prompts(name: str) -> None:
    """Against `runtime.pair.dense.generate`, which shares neither cache, attention nor packing."""
    directory = weights.HERE / "weights"
    if not (directory / "target" / "model.safetensors").exists():
        pytest.skip("the built-in pair is not here")
    torch.set_num_threads(1)
    prompts = read_prompts(weights.PROMPTS, Codec.load(directory / "target"), 200)
    assert len(prompts) == 200
    longest = max(len(prompt.tokens) for prompt in prompts) + 48
    drafter_place = name if name == "ngram" else directory / name
    verifier, drafter = open_pair(directory / "target", drafter_place, 32, longest)
    (end,) = verifier.eos_token_ids
    texts = [prompt.tokens for prompt in prompts]
    expected = [
        answer
        for start in range(0, 200, 50)
        for answer in generate(verifier.model, texts[start : start + 50], 48, end)
    ]
    asked = [Request(i, prompt.tokens, 48) for i, prompt in enumerate(prompts)]
    for policy, batch_size in (("off", 7), ("full", 32), ("ratio:0.5", 16), ("dcut", 32), ("dcut-plus", 5)):
        outputs = serve(Engine(verifier, drafter, parse_policy(policy), COST, batch_size), asked)
        differ = [i for i in range(200) if outputs[i] != expected[i]]
        assert not differ, f"{policy} at batch {batch_size}: {len(differ)} of 200 differ, first {differ[0]}"
