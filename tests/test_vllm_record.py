# pyright: reportMissingImports=false
"""Recording through vLLM: the same trace as our own engine's, and live runs that a replay follows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_vllm  # noqa: F401
import numpy as np
import polars as pl
import pytest

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.record import Config
from dcut.selector import Selection
from runtime import recorder as ours
from runtime.drafter import open_drafter
from runtime.engine import Request, Step
from runtime.pair import weights
from runtime.recorder import SLOTS, Log, Recorded, read_prompts, run_closed, write_live
from runtime.text import Codec
from runtime.verifier import open_target
from runtime.vllm import recorder
from runtime.vllm.session import Session
from sim.validate import compare, read_live
from traces.schema import Trace
from traces.store import load

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
REQUESTS, BATCH, MAX_TOKENS = 24, 8, 40


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(weights.path("target"), weights.path("dflash16"), BATCH, 400)


@pytest.fixture(scope="module", autouse=True)
def _one_engine(session: Session) -> Iterator[None]:
    """Recordings use the module's engine: starting one takes longer than using it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "Session", lambda *_: session)
        yield


def config(out: Path, **options: Any) -> Config:
    settings = {"concurrency": BATCH, "max_tokens": MAX_TOKENS, "requests": REQUESTS, "profile_s": 0.0}
    return Config(str(out), engine="vllm", cpu_time=True, **settings | options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def trace(place: Path) -> Trace:
    return recorder.record(config(place / "trace"))


def test_vllm_and_our_own_engine_record_the_same(trace: Trace, place: Path) -> None:
    check_alike(trace, ours.record(config(place / "ours")))
    assert load(place / "trace").anchors.equals(trace.anchors)


def check_alike(trace: Trace, other: Trace) -> None:
    """vLLM's recording beside our own engine's."""
    assert trace.meta["contradicted_decisions"] == 0
    columns = ["request_id", "domain", "prompt_tokens", "output_tokens", "finish_reason"]
    assert (
        trace.requests.select(columns)
        .sort("request_id")
        .equals(other.requests.select(columns).sort("request_id"))
    )
    order = ["request_id", "position"]
    mine, theirs = trace.anchors.sort(order), other.anchors.sort(order)
    assert mine.select(*order, "token_id").equals(theirs.select(*order, "token_id"))
    equal = mine["num_accepted"].to_numpy() == theirs["num_accepted"].to_numpy()
    assert equal.mean() >= 0.999
    np.testing.assert_allclose(mine["confidences"].to_numpy(), theirs["confidences"].to_numpy(), atol=2e-3)


def test_every_token_comes_from_a_step_or_a_prompt(trace: Trace) -> None:
    steps, requests = trace.steps, trace.requests
    assert steps["num_emitted"].sum() + len(requests) == requests["output_tokens"].sum()
    assert (steps["draft_s"] + steps["select_s"] + steps["verify_s"] <= steps["step_s"]).all()
    assert steps["batch_size"].max() == BATCH
    assert len(trace.decisions) == steps["batch_size"].sum()
    first = requests.filter(pl.col("arrival_s") > 0)  # the first batch's prompts have a step of their own
    assert 0 < steps["prefill_tokens"].sum() <= first["prompt_tokens"].sum()


@pytest.mark.parametrize("policy", ["full", "ratio:0.5", "dcut", "off"])
def test_a_replay_follows_the_live_run_decision_by_decision(
    policy: str, session: Session, trace: Trace, place: Path
) -> None:
    prompts = read_prompts(weights.PROMPTS, Codec.load(weights.path("target")), REQUESTS)
    session.cost = trace.cost
    session.policy = parse_policy(policy)
    log = Log()
    run_closed(session, [(Request(i, p.tokens, MAX_TOKENS), p.domain) for i, p in enumerate(prompts)], log)
    assert trace.cost is not None
    meta = trace.meta | {"policy": policy}
    write_live(place / policy, log, meta, trace.cost)
    (run,) = read_live(place / policy)
    found = compare(trace, run)
    assert found.num_equal_tokens == found.num_tokens == trace.requests["output_tokens"].sum()
    assert found.num_equal_decisions >= 0.999 * found.num_decisions
    assert abs(found.error) < 0.5  # of its times; how good they are is for a quiet machine to say
    depths = set(run.decisions["keep_depth"])
    assert {"full": depths == {15}, "off": depths == {0}}.get(policy, len(depths) > 3)


def test_the_dense_pass_says_again_what_the_engine_would_not(session: Session, trace: Trace) -> None:
    prompts = read_prompts(weights.PROMPTS, Codec.load(weights.path("target")), REQUESTS)
    texts = []
    for i in range(4):
        output = trace.anchors.filter(pl.col("request_id") == i)["token_id"].to_list()
        output[len(output) // 2] += 1  # from here on the text is not the target's own
        output[-1] += 1
        texts.append(Recorded(Request(i, prompts[i].tokens, MAX_TOKENS), None, output=output))
    dense = recorder.DensePass(session)
    found = pl.concat(dense.anchors(texts))
    target = open_target(weights.path("target"), "cpu", "float32")
    drafter = open_drafter(weights.path("dflash16"), target, SLOTS + 1, 420)
    expected = pl.concat(ours.DensePass(target, drafter, 400).anchors(texts))
    exact = ["request_id", "position", "token_id", "num_accepted"]
    assert found.select(exact).equals(expected.select(exact))
    np.testing.assert_allclose(found["confidences"].to_numpy(), expected["confidences"].to_numpy(), atol=2e-3)
    assert dense.num_forced >= 8  # the two changed tokens of each, and what follows them by chance
    assert not session.busy


def test_an_interrupted_recording_is_carried_on(
    trace: Trace, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    countdown = iter(range(40))
    step = session.step

    def interrupted() -> Step | None:
        if next(countdown, None) == 20:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(session, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(config(tmp_path))
    part = load(tmp_path)
    assert part.meta["partial"]
    assert 0 < len(part.requests) < REQUESTS
    monkeypatch.undo()
    monkeypatch.setattr(recorder, "Session", lambda *_: session)
    whole = recorder.record(config(tmp_path, resume=True))
    order = ["request_id", "position"]
    exact = trace.anchors.sort(order).drop("confidences")
    assert whole.anchors.sort(order).drop("confidences").equals(exact)
    assert not whole.meta["partial"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.5}, "greedy runs"),
        ({"device": "cuda"}, "leave it out"),
        ({"drafter": "ngram"}, "no confidences"),
        ({"drafter": "nowhere"}, "nowhere/config.json is missing"),
        ({"target": "nowhere", "drafter": "nowhere"}, "nowhere/tokenizer.json is missing"),
        ({"max_tokens": 5000}, "more than the 2048"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "Session", Session)
    with pytest.raises(InputError, match=says) as refused:
        recorder.record(config(tmp_path, **options))
    assert "\n" not in str(refused.value)


def test_costs_beyond_the_profile_are_found_in_the_steps() -> None:
    cost = CostTable.from_samples(
        [Sample("verify", b, b * n, 0.002 + 0.001 * b * n) for b in (1, 4) for n in (1, 5)]
        + [Sample("draft", b, None, 0.002) for b in (1, 4)]
        + [Sample("plain", b, None, 0.001 * b) for b in (1, 4)],
        context_token_s=1e-6,
        context_per_request=20.0,
    )
    truth = replace(cost, prefill_token_s=3e-5)
    rng = np.random.default_rng(1)
    steps = []
    for number in range(40):
        batch = int(rng.integers(1, 5))
        depth, prefill_tokens = rng.integers(0, 5, batch), int(rng.integers(1, 50)) if number % 3 == 0 else 0
        tokens = int(depth.sum()) + batch
        context = int(rng.integers(10, 60)) * batch
        verify_s = truth.seconds(batch, tokens, context, prefill_tokens) + 1e-4 * batch
        noise_s = 0.1 if number % 7 == 0 else 0.0  # something else on the machine, now and then
        selection = Selection(depth, tokens, 0, float(batch))
        times = 0.0, prefill_tokens, 0.0, context, 0.003, 0.0, verify_s, 0.003 + verify_s + noise_s, None
        ids = np.arange(batch)
        steps.append(Step(*times, ids, ids, selection, depth, batch, []))
    found = recorder.calibrated(cost, steps)
    assert found.prefill_token_s == pytest.approx(3e-5, rel=0.01)
    assert found.seconds(3, 9) - cost.seconds(3, 9) == pytest.approx(3e-4)
    assert found.plain_seconds(2) - cost.plain_seconds(2) == pytest.approx(2e-4)
    assert found.draft_seconds(2) == pytest.approx(1.5 * cost.draft_seconds(2))


def test_what_vllm_itself_refuses_is_told_as_bad_input() -> None:
    with pytest.raises(InputError, match=r"vLLM does not start: (.|\n)*float7"):
        Session(weights.path("target"), None, 1, 64, dtype="float7")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "draft"])  # last: their engines take what the module's shares
def test_with_other_drafters_too_both_record_the_same(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "Session", Session)
    options = {"drafter": str(weights.path(drafter)), "requests": 16}
    trace = recorder.record(config(tmp_path / "vllm", **options))
    check_alike(trace, ours.record(config(tmp_path / "ours", **options)))
    assert trace.draft_length == 7
