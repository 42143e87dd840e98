"""Generated traces: the process is what it says, seeds decide, and the published rows come out of them."""

import csv
from pathlib import Path

import numpy as np
import pytest

from dcut.policies import BudgetPolicy, parse_policy
from traces.fit import acceptance_length
from traces.published import DOMAINS, AcceptanceProcess, generate, stratified
from traces.schema import Trace
from traces.store import open_trace

BATCH_SIZES = (4, 8, 16, 32, 64)


def rows(file: Path, **where: str) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if where.items() <= row.items()]


def replayed(trace: Trace, policy: BudgetPolicy, batch_size: int, steps: int) -> tuple[float, float, float]:
    """Tokens a second, keep ratio and tokens a step of a full batch: one closed loop, in plain numpy."""
    arrays, cost = trace.arrays, trace.cost
    assert cost is not None
    rng = np.random.default_rng(batch_size)
    request = rng.integers(0, len(arrays.num_rows), batch_size)
    position = (rng.random(batch_size) * arrays.num_rows[request]).astype(int)
    seconds = tokens = verified = 0.0
    for _ in range(steps):
        row = arrays.first_row[request] + position
        chosen = policy.select(arrays.confidences[row], cost)
        emitted = np.minimum(arrays.num_accepted[row], chosen.keep_depth) + 1
        emitted = np.minimum(emitted, arrays.num_rows[request] - position)
        seconds += cost.seconds(batch_size, chosen.num_verify_tokens)
        tokens += emitted.sum()
        verified += chosen.num_verify_tokens
        position += emitted
        done = position >= arrays.num_rows[request]
        request[done] = rng.integers(0, len(arrays.num_rows), done.sum())
        position[done] = 0
    positions = steps * batch_size * (trace.draft_length + 1)
    return tokens / seconds, verified / positions, tokens / steps


@pytest.fixture(scope="module")
def h20() -> Trace:
    return open_trace("h20-qwen3-8b")


def test_the_cost_table_is_the_published_one(h20: Trace, shared: Path) -> None:
    assert h20.cost is not None
    for row in rows(shared / "published/cost.csv", model="Qwen3-8B"):
        tokens = int(row["target_tokens_incl_anchor"])
        assert h20.cost.seconds(int(row["bs"]), tokens) == pytest.approx(float(row["cost_ms"]) / 1000)
    for row in rows(shared / "published/throughput.csv", model="Qwen3-8B", method="AR"):
        seconds = h20.cost.plain_seconds(int(row["bs"]))
        assert int(row["bs"]) / seconds == pytest.approx(float(row["steady_output_tok_s"]))


def test_the_published_rows_come_out_of_replaying_figures_that_do_not_contain_them(
    h20: Trace, shared: Path
) -> None:
    published = shared / "published/throughput.csv"
    names = {
        "full": "DFlash-B16",
        "ratio:0.75": "D-Cut-Fixed-R75",
        "ratio:0.5": "D-Cut-Fixed-R50",
        "dcut": "D-Cut-B16",
    }
    errors = {}
    for spec, method in names.items():
        for row in rows(published, model="Qwen3-8B", method=method):
            batch_size = int(row["bs"])
            tps, keep, _ = replayed(h20, parse_policy(spec), batch_size, max(1000, 16_000 // batch_size))
            errors[spec, batch_size] = tps / float(row["steady_output_tok_s"]) - 1
            assert abs(errors[spec, batch_size]) < 0.06, (spec, batch_size)
            if spec == "dcut":
                assert keep == pytest.approx(float(row["keep_ratio"]), abs=0.06)
    cut = [abs(error) for (spec, _), error in errors.items() if spec != "full"]
    assert len(cut) == 15
    assert np.mean(cut) < 0.03


def test_the_write_up_s_sentences_come_out(h20: Trace) -> None:
    assert h20.cost is not None
    full = {b: replayed(h20, parse_policy("full"), b, 1000) for b in BATCH_SIZES}
    plain = {b: b / h20.cost.plain_seconds(b) for b in BATCH_SIZES}
    assert full[64][0] / plain[64] == pytest.approx(0.42, abs=0.025)
    assert [full[b][0] > plain[b] for b in BATCH_SIZES] == [True, True, False, False, False]
    half = replayed(h20, parse_policy("ratio:0.5"), 32, 1000)
    assert half[2] / full[32][2] == pytest.approx(0.95, abs=0.015)


def test_the_paper_s_form_keeps_more_than_was_published_and_the_served_form_does_not(h20: Trace) -> None:
    for batch_size in (16, 32, 64):
        paper = replayed(h20, parse_policy("dcut:form=paper"), batch_size, 500)
        served = replayed(h20, parse_policy("dcut"), batch_size, 500)
        assert paper[1] == pytest.approx((0.25 * 15 + 1) / 16, abs=0.005)  # its floor; published .251-.256
        assert served[1] == pytest.approx(0.25, abs=0.005)
        assert paper[0] < served[0]


def test_ranking_the_batch_accepts_a_fifth_more_than_a_uniform_cut(shared: Path) -> None:
    trace = open_trace("h20-allocation")
    policies = {
        "fixed_4_per_req": "fixed:3",
        "conf_top25": "ratio:0.25",
        "fixed_8_per_req": "fixed:7",
        "conf_top50": "ratio:0.5",
        "fixed_12_per_req": "fixed:11",
        "conf_top75": "ratio:0.75",
        "full": "full",
    }
    accepted = {}
    for row in rows(shared / "published/allocation.csv"):
        name = row["strategy"]
        _, keep, accepted[name] = replayed(trace, parse_policy(policies[name]), 32, 1500)
        assert round(keep * 512) == int(row["verify_tokens"])
        assert accepted[name] == pytest.approx(float(row["accepted_tokens"]), rel=0.03), name
    assert 1.20 < accepted["conf_top25"] / accepted["fixed_4_per_req"] < 1.25
    assert 1.20 < accepted["conf_top50"] / accepted["fixed_8_per_req"] < 1.26


def test_the_seed_decides_the_trace() -> None:
    one, same, other = (open_trace("h20-qwen3-8b", seed) for seed in (7, 7, 8))
    assert one.anchors.equals(same.anchors)
    assert one.requests.equals(same.requests)
    assert not one.anchors.equals(other.anchors)
    assert acceptance_length(other) == pytest.approx(acceptance_length(one), rel=0.02)


def test_drafts_are_accepted_as_often_as_the_true_probabilities_say() -> None:
    process = AcceptanceProcess((1.0, 0.5, 0.0), 0.5, 0.5, 1.0, 2.0)
    arrays = generate(process, {}, num_requests=500, seed=3).arrays
    probs = arrays.accept_probs
    assert probs is not None
    for draft in range(3):
        alive = arrays.num_accepted >= draft
        accepted = arrays.num_accepted > draft
        for low in np.arange(0, 1, 0.2):
            within = alive & (probs[:, draft] >= low) & (probs[:, draft] < low + 0.2)
            error = 4 * np.sqrt(0.25 / within.sum())
            assert accepted[within].mean() == pytest.approx(probs[within, draft].mean(), abs=error)


def test_confidences_are_the_probabilities_less_their_drop() -> None:
    process = AcceptanceProcess((1.0, 0.5, 0.0), 0.5, 0.5, 1.0, confidence_sd=0.0, confidence_drop=0.3)
    accept, confidence = process.logits(stratified(100, 3))
    assert accept - confidence == pytest.approx(np.tile([0.0, 0.3, 0.3 * np.sqrt(2)], (500, 1)))


def test_every_domain_takes_an_equal_share_of_the_steps(h20: Trace) -> None:
    arrays = h20.arrays
    steps = dict.fromkeys(DOMAINS, 0)
    for at, domain in enumerate(h20.requests["domain"]):
        position = 0
        while position < arrays.num_rows[at]:
            position += arrays.num_accepted[arrays.first_row[at] + position] + 1
            steps[domain] += 1
    shares = np.array(list(steps.values())) / sum(steps.values())
    assert shares == pytest.approx(0.2, abs=0.005)


def test_stratified_draws_are_standard_normal_in_every_domain() -> None:
    draws = stratified(400, 3, seed=5)
    for domain in range(len(DOMAINS)):
        mine = draws.domain == domain
        assert mine.sum() == 400
        for numbers in (draws.step[mine], *draws.slot[mine].T, *draws.confidence[mine].T):
            assert numbers.mean() == pytest.approx(0, abs=1e-9)
            assert numbers.std() == pytest.approx(1, abs=0.01)
