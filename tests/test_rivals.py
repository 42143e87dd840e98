"""Each rival follows its published rule: against the rule written plainly, and against vLLM's own code."""

from types import SimpleNamespace

import numpy as np
import pytest

from dcut.cost import CostTable, Sample
from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.rivals import AcceptanceEstimator, Dsd, Ema, SmartSpec, VllmAdaptive, dsd_table, step_seconds
from sim.engine import acceptance_lengths
from sim.replay import Config, replay
from traces.store import open_trace

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
TAIL = (96, 128, 256)


def drafts(batch: int, width: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).beta(2, 0.7, (batch, width)).clip(0.001, 0.999).astype(np.float32)


def graphs(seed: int = 0) -> CostTable:
    """Measured noise on a staircase of graphs up to 64 tokens, slower beyond."""
    rng = np.random.default_rng(seed)
    verify = [(n, 5 + 0.05 * n + 0.3 * rng.random()) for n in SIZES]
    verify += [(n, 9 + 0.12 * n + rng.random()) for n in TAIL]
    samples = [Sample("verify", None, n, s / 1000) for n, s in verify]
    return CostTable.from_samples(
        samples + [Sample("draft", b, None, (1 + 0.01 * b) / 1000) for b in range(1, 17)], max_graph_tokens=64
    )


def plain_rates(confidences: np.ndarray, cost: CostTable) -> list[float]:
    """Tokens per second for every number of drafts, summed one by one."""
    batch = len(confidences)
    worth = sorted(np.cumprod(confidences, axis=1, dtype=float).ravel(), reverse=True)
    seconds = [s for s, _ in zip(step_seconds(cost, *confidences.shape), range(len(worth) + 1), strict=True)]
    return [(batch + sum(worth[:k])) / s for k, s in enumerate(seconds)]


@pytest.mark.parametrize("seed", range(10))
def test_vllm_takes_the_best_of_all_budgets_and_dspark_the_first_peak(seed: int) -> None:
    confidences, cost = drafts(6, seed=seed), graphs(seed)
    rates = plain_rates(confidences, cost)
    assert VllmAdaptive().budget(confidences, cost) == int(np.argmax(rates))
    peak = next((k for k in range(len(rates) - 1) if rates[k + 1] <= rates[k]), len(rates) - 1)
    assert parse_policy("dspark").select(confidences, cost).keep_depth.sum() == peak


def test_vllm_settles_the_budget_on_old_confidences_and_shares_it_by_new_ones() -> None:
    cost, fresh, stale = graphs(), drafts(6, seed=1), drafts(6, seed=2) ** 4
    policy = VllmAdaptive().start()
    assert policy.lag == 1
    chosen = policy.select_lagged(fresh, stale, cost)
    assert chosen.keep_depth.sum() == VllmAdaptive().budget(stale, cost) != VllmAdaptive().budget(fresh, cost)
    kept = np.arange(7) < chosen.keep_depth[:, None]
    worth = np.cumprod(fresh, axis=1, dtype=float)
    assert worth[kept].min() >= worth[~kept].max()


@pytest.mark.parametrize("seed", range(8))
def test_vllm_itself_gives_the_same_tables_the_same_budget_and_the_same_depths(seed: int) -> None:
    module = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    torch = pytest.importorskip("torch")

    rng = np.random.default_rng(seed)
    batch, width, cost = int(rng.integers(1, 17)), 7, graphs(seed)
    fresh, stale = drafts(batch, width, seed), drafts(batch, width, seed + 100)
    draft_table, verify_table = module.build_cost_tables_from_curves(
        [(int(b), 1000 * s) for b, s in cost.draft],
        [(int(n), 1000 * s) for n, s in zip(cost.verify_tokens[0], cost.verify_s[0], strict=True)],
        16,
        400,
        64,
    )
    ours = 1000 * step_seconds(cost, batch, width)
    theirs = draft_table[batch] + verify_table[batch : batch * (1 + width) + 1]
    assert ours == pytest.approx(theirs, rel=1e-12)

    manager = object.__new__(module.AdaptiveVerificationManager)
    manager.num_speculative_steps, manager.num_bonus_tokens = width, 1
    manager._max_total_logits = 10**6
    manager._stale_idx, manager._stale_confidences = 0, [SimpleNamespace(np=stale)]
    manager.cost_tables = draft_table, verify_table
    names = [f"r{i}" for i in range(batch)]
    manager.req_states = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(names)},
        num_computed_tokens_np=np.full(batch, 9, np.int32),
        prefill_len=SimpleNamespace(np=np.ones(batch, np.int32)),
    )
    total = manager.get_num_tokens(dict.fromkeys(names, 1 + width), {n: [1] * width for n in names})
    chosen = VllmAdaptive().select_lagged(fresh, stale, cost)
    assert chosen.num_verify_tokens == total

    depths = torch.full((batch,), width, dtype=torch.int32)
    if 0 < total - batch < batch * width:
        module._assign_draft_token_budget(
            torch.from_numpy(fresh), torch.arange(batch), depths, total - batch, width
        )
        assert chosen.keep_depth.tolist() == depths.tolist()
    else:
        assert chosen.keep_depth.tolist() == [(total - batch) // batch] * batch


def test_the_estimator_of_vllm_starts_where_it_says_and_refits_every_hundred_steps() -> None:
    estimator, confidences = AcceptanceEstimator(7), drafts(32)
    assert estimator.probabilities(np.full((1, 7), 0.5, np.float32))[0] == pytest.approx(
        1 / (1 + np.exp(0.2))
    )
    rng = np.random.default_rng(0)
    for step in range(400):
        confidences = drafts(32, seed=step)
        odds = np.log(confidences / (1 - confidences.astype(float)))
        hits = rng.random(confidences.shape) < 1 / (1 + np.exp(-0.9 * odds - 0.5))
        before = estimator.slope
        estimator.observe(
            confidences, np.full(32, 7), np.logical_and.accumulate(hits, axis=1).sum(axis=1).astype(np.int64)
        )
        assert (estimator.slope != before) == (step % 100 == 99)
    assert estimator.slope == pytest.approx(0.9, abs=0.1)
    assert estimator.bias[:3] == pytest.approx(0.5, abs=0.2)


def test_thresholds_cut_each_request_or_set_the_batch_s_mean_every_so_often() -> None:
    confidences = np.array([[0.9, 0.9, 0.9, 0.9], [0.5, 0.9, 0.9, 0.9], [0.2, 0.9, 0.9, 0.9]], np.float32)
    assert parse_policy("threshold:0.42").select(confidences, None).keep_depth.tolist() == [4, 2, 0]
    averaged = parse_policy("threshold:0.42,refresh=3,initial=3").start()
    depths = [averaged.select(confidences, None).keep_depth.tolist() for _ in range(5)]
    assert depths[:2] == [[4, 4, 1]] * 2  # 3 each: 1 for all, then the 6 best of the rest
    assert depths[2:] == [[4, 1, 1]] * 3  # mean 2, of each request: 3 besides the first ones


def test_tetris_keeps_the_likeliest_under_its_capacity() -> None:
    confidences = drafts(8)
    chosen = parse_policy("tetris:2").select(confidences, None)
    worth = np.cumprod(confidences, axis=1, dtype=float)
    best = np.sort(worth.ravel())[::-1][:16]
    assert chosen.keep_depth.sum() == 16
    assert chosen.expected_tokens == pytest.approx(8 + best.sum())
    assert parse_policy("tetris:99").select(confidences, None).keep_depth.tolist() == [7] * 8


def test_smartspec_weighs_a_geometric_acceptance_against_the_cost_of_each_length() -> None:
    cost, policy = graphs(), SmartSpec().start()
    for rate in (0.2, 0.5, 0.95):
        policy.rate = rate
        goodput = [8 / cost.plain_seconds(8)]
        goodput += [
            8 * (1 - rate ** (k + 1)) / (1 - rate) / step_seconds(cost, 8, 7)[8 * k] for k in range(1, 8)
        ]
        assert policy.draft_length(8, 7, cost) == int(np.argmax(goodput))
    policy.rate = 0.7
    policy.observe(np.full(4, 3), np.array([3, 1, 0, 2]), 1.0)  # 6 accepted, 3 rejected
    assert policy.rate == pytest.approx(0.7 + 0.15 * (6 / 9 - 0.7))


def test_dsd_reads_its_table_as_ranges() -> None:
    policy = Dsd(("4x15", "16x4", "64x0"))
    assert [policy.draft_length(b, 15) for b in (1, 4, 15, 16, 63, 64, 500)] == [15, 15, 15, 4, 4, 0, 0]
    assert policy.draft_length(1, 7) == 7
    with pytest.raises(InputError, match="batch sizes must rise"):
        parse_policy("dsd:16x4/4x2")
    with pytest.raises(InputError, match="is not a table such as dsd:1x15/16x4/64x0"):
        parse_policy("dsd:16-4")
    with pytest.raises(InputError, match="a replay can tune it"):
        parse_policy("dsd").draft_length(4, 15)


def test_the_tuned_table_is_the_best_fixed_length_at_every_batch_size() -> None:
    trace = open_trace("tiny-pair")
    assert trace.cost is not None
    table = {
        int(b): int(k) for b, k in (e.split("x") for e in dsd_table(acceptance_lengths(trace), trace.cost))
    }
    fixed = ",".join(["off", *(f"fixed:{k}" for k in range(1, 9))])
    for batch in (1, 8, 32):
        rows = replay(Config("tiny-pair", policy=f"{fixed},dsd", batch_sizes=[batch], requests=120))
        tps = {row["policy"]: row["throughput_tps"] for row in rows}
        assert tps["dsd"] >= 0.98 * max(tps.values())
        assert 0 <= table[batch] <= 15


def test_ema_climbs_with_acceptance_waits_for_its_interval_and_comes_back_from_nothing() -> None:
    policy = Ema((1, 3, 7)).start()
    lengths = []
    for _ in range(40):
        lengths.append(policy.draft_length(4, 15))
        policy.observe(np.full(4, lengths[-1]), np.full(4, lengths[-1]), 1.0)
    assert lengths[:15] == [3] * 15  # ten to warm up, then every five
    assert lengths[-1] == 7
    for _ in range(40):
        lengths.append(policy.draft_length(4, 15))
        policy.observe(np.full(4, lengths[-1]), np.zeros(4, np.int64), 1.0)
    assert lengths[-1] == 1
    off = Ema((0, 2)).start()
    seen = []
    for _ in range(60):
        seen.append(off.draft_length(4, 15))
        off.observe(np.full(4, seen[-1]), np.zeros(4, np.int64), 1.0)
    assert {0, 2} <= set(seen[20:])  # it tries again and again
    assert Ema().draft_length(64, 15) == 0  # SGLang's own table: no drafts from 64 on


def test_a_guard_keeps_cost_based_rivals_from_drafting_for_nothing() -> None:
    hopeless = np.full((8, 7), 0.05, np.float32)
    steep = CostTable.from_samples(
        [Sample("verify", b, b * k, 1.0 + 0.5 * b * k) for b in (1, 64) for k in (1, 8)]
    )
    for name in ("dcut", "dspark", "vllm-adaptive"):
        assert parse_policy(f"{name}:min_gain=0.1").select(hopeless, steep).keep_depth.sum() == 0
        with pytest.raises(InputError, match=f"{name}:min_gain=-1 is outside"):
            parse_policy(f"{name}:min_gain=-1")
    free = CostTable.from_samples([Sample("verify", b, b * k, 1.0) for b in (1, 64) for k in (1, 8)])
    sure = np.full((8, 7), 0.9, np.float32)
    for name in ("dcut", "dspark", "vllm-adaptive"):
        guarded, plain = parse_policy(f"{name}:min_gain=0.1"), parse_policy(name)
        assert guarded.select(sure, free).keep_depth.tolist() == plain.select(sure, free).keep_depth.tolist()


def test_policies_that_weigh_costs_say_that_they_need_them() -> None:
    for name in ("dspark", "vllm-adaptive"):
        with pytest.raises(InputError, match=f"policy {name} weighs measured step times"):
            parse_policy(name).select(drafts(2), None)
