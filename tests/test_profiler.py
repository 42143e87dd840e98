"""The start-up profile: it measures what steps cost, is kept, and notices when it no longer fits."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from scripted import ScriptedDrafter, ScriptedVerifier, tiny_pair

from dcut.errors import InputError
from dcut.policies import parse_policy
from runtime.engine import Engine, Request
from runtime.profiler import Drift, Profile, cached, cached_profile, profile

PROMPTS = [[1, 5, 2], [4, 4, 8, 1, 0, 3, 9], [7]]


class Clock:
    """Moves only while a model runs, by what `verify` and `draft` say."""

    def __init__(self, num_slots: int = 8, factor: float = 1.0) -> None:
        self.now_s, self.factor = 0.0, factor
        self.verifier = ScriptedVerifier(num_slots=num_slots, max_tokens=80, spend=self.verify)
        self.drafter = ScriptedDrafter(self.verifier, draft_length=7)
        self.drafter.spend = self.draft

    def __call__(self) -> float:
        return self.now_s

    def verify(self, batch: int, rows: int, context: int) -> None:
        self.now_s += self.factor * verify_s(batch, rows, context)

    def draft(self, batch: int, context: int) -> None:
        self.now_s += self.factor * draft_s(batch, context)


def verify_s(batch: int, rows: int, context: int) -> float:
    return 2e-3 + 1e-3 * rows + 1e-5 * context + 4e-6 * rows * context / batch


def draft_s(batch: int, context: int) -> float:
    return 3e-3 + 5e-4 * batch + 2e-5 * context


@pytest.fixture(scope="module")
def measured() -> Profile:
    clock = Clock()
    return profile(clock.verifier, clock.drafter, PROMPTS, context=40, budget_s=0.0, clock=clock)


def test_the_profile_finds_the_cost_of_every_step(measured: Profile) -> None:
    cost = measured.cost
    for batch, length in itertools.product((1, 3, 8), (20, 40, 60)):
        context = length * batch
        for rows in (2 * batch, 5 * batch, 8 * batch):
            assert cost.seconds(batch, rows, context) == pytest.approx(
                verify_s(batch, rows, context), rel=0.02
            )
        assert cost.draft_seconds(batch, context) == pytest.approx(draft_s(batch, context), rel=0.02)
        assert cost.plain_seconds(batch, context) == pytest.approx(verify_s(batch, batch, context), rel=0.02)
    assert cost.context_token_s == pytest.approx(1e-5, rel=0.05)
    assert cost.context_pair_s == pytest.approx(4e-6, rel=0.05)
    assert cost.draft_context_token_s == pytest.approx(2e-5, rel=0.05)
    assert cost.prefill_token_s == pytest.approx(1e-3, rel=0.05)
    assert measured.spread < 0.05


def test_the_grid_spans_the_slots_and_the_draft_length(measured: Profile) -> None:
    assert measured.cost.batch_sizes is not None
    assert measured.cost.batch_sizes.tolist() == [1, 2, 4, 8]
    assert measured.cost.verify_tokens[-1].tolist() == [8, 16, 32, 64]
    assert measured.cost.max_graph_tokens == 0


def test_profiling_leaves_no_request_and_no_slot_behind() -> None:
    clock = Clock(num_slots=2)
    profile(clock.verifier, clock.drafter, PROMPTS, context=20, budget_s=0.0, clock=clock)
    assert clock.drafter.texts == [[], []]
    engine = Engine(clock.verifier, clock.drafter, parse_policy("full"))
    engine.add(Request(0, [3, 1], 9))
    tokens: list[int] = []
    while step := engine.step():
        tokens += [token for emission in step.emissions for token in emission.tokens]
    assert tokens == clock.verifier.say([3, 1], 9)


def test_a_context_too_short_to_measure_steps_is_refused() -> None:
    verifier, drafter = tiny_pair(max_tokens=19)  # two steps may take 12
    with pytest.raises(InputError, match="19 tokens is too short to measure steps: 20 do"):
        profile(verifier, drafter, [[1, 2, 3]], 64)
    verifier, drafter = tiny_pair(max_tokens=20)
    assert profile(verifier, drafter, [[1, 2, 3]], 1, budget_s=0.0).cost.plain_seconds(2) > 0


def test_drift_tells_how_far_steps_are_from_the_profile(measured: Profile) -> None:
    for factor, policy in ((1.0, "full"), (1.0, "off"), (1.5, "full"), (0.6, "ratio:0.5")):
        clock = Clock(factor=factor)
        drift = Drift(measured.cost)
        engine = Engine(clock.verifier, clock.drafter, parse_policy(policy), measured.cost, 3, clock=clock)
        for i in range(6):
            engine.add(Request(i, [i] * 30, 20))
        while step := engine.step():
            drift.add(step)
        assert drift.ratio == pytest.approx(factor, rel=0.02)
        assert bool(str(drift)) == (factor != 1)


def test_no_step_is_no_drift(measured: Profile) -> None:
    assert Drift(measured.cost).ratio == 1
    assert str(Drift(measured.cost)) == ""


def test_a_profile_is_measured_once_for_the_same_models_and_context(tmp_path: Path) -> None:
    verifier, drafter = tiny_pair(num_slots=2)
    ticks = itertools.count().__next__  # every step takes as long: a profile without noise
    options = {"directory": tmp_path / "new", "budget_s": 0.0, "clock": ticks}
    first = cached_profile(verifier, drafter, PROMPTS, 20, **options)
    again = cached_profile(verifier, drafter, PROMPTS, 21, **options)
    assert (first.cached, again.cached) == (False, True)
    assert again.cost.to_dict() == first.cost.to_dict()
    assert "measured in" in str(first)
    assert "from the cache" in str(again)
    assert not cached_profile(verifier, drafter, PROMPTS, 64, **options).cached
    other, its_drafter = tiny_pair("eagle3", num_slots=2)
    assert not cached_profile(other, its_drafter, PROMPTS, 20, **options).cached
    assert len(list((tmp_path / "new").glob("*.json"))) == 3


def test_a_cache_that_cannot_be_read_or_written_is_done_without(
    measured: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached({}, lambda: measured, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text(encoding="utf-8")
    for damage in (whole[:50], "[]", "\0"):
        file.write_text(damage, encoding="utf-8")
        assert not cached({}, lambda: measured, tmp_path).cached
        assert file.read_text(encoding="utf-8") == whole
    assert cached({}, lambda: measured, file / "below") is measured
    assert "the cost profile is not kept" in capsys.readouterr().err


def test_a_noisy_profile_is_used_once_and_said_so(
    measured: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = iter([replace(measured, spread=0.5), replace(measured, spread=0.4), measured])
    for said in ("spread by 50%", "spread by 40%", "", ""):
        found = cached({"machine": "busy"}, lambda: next(noisy), tmp_path)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == bool(said)
        assert all(said in line and "--profile-s" in line and "not kept" in line for line in lines)
        assert bool(list(tmp_path.iterdir())) == (not said)
    assert found.cached


def test_a_padded_verifier_is_profiled_as_a_staircase() -> None:
    verifier, drafter = tiny_pair(num_slots=4, padded=True)
    cost = profile(verifier, drafter, PROMPTS, 12, budget_s=0.0).cost
    assert cost.max_graph_tokens == 4 * 5
    assert cost.seconds(3, 7) == cost.seconds(4, 8) == cost.seconds(4, 5)
