"""The target at work: attention over rows of any raggedness, fixed shapes, and the rule that accepts."""

import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import CONFIG, plain_text, serve, tiny_pair
from torch import Tensor

from dcut.errors import InputError
from dcut.policies import parse_policy
from runtime.drafter import Drafts, propose
from runtime.engine import Engine, Request
from runtime.graphs import knots, powers_of_two
from runtime.kv_cache import GridCache, KVCache, RaggedCache, Rows, make_cache
from runtime.models import attention
from runtime.verifier import accept, open_pair, open_target

CPU = torch.device("cpu")


@pytest.fixture(params=["ragged", "grid"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    return make_cache(CONFIG, 4, 40, CPU, torch.float32, grid=request.param == "grid")


def random_rows(rng: np.random.Generator, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(len(rows), heads, CONFIG.head_dim) for heads in (4, 2, 2)]
    q, k, v = (torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    return q, k, v


def test_every_row_looks_at_its_own_past_alone(cache: KVCache) -> None:
    rng = np.random.default_rng(0)
    history: dict[int, tuple[Tensor, Tensor]] = {}
    for starts, counts in (([0, 0, 0], [7, 1, 12]), ([7, 1, 12], [1, 16, 3]), ([8, 4, 12], [5, 2, 9])):
        slots = np.array([2, 0, 3])
        rows = Rows.of(slots, np.array(starts), np.array(counts))
        q, k, v = random_rows(rng, rows)
        out = cache.attend(rows)(1, q, k, v)
        ends = np.cumsum(counts)
        for slot, start, count, end in zip(slots, starts, counts, ends, strict=True):
            mine = slice(end - count, end)
            before = history.get(slot, (k[:0], v[:0]))
            keys, values = (torch.cat((b[:start], new[mine])) for b, new in zip(before, (k, v), strict=True))
            history[slot] = keys, values
            visible = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
            expected = attention(q[mine][None], keys[None], values[None], visible[None])[0]
            torch.testing.assert_close(out[mine], expected, atol=2e-6, rtol=1e-5)


def test_the_rows_of_a_block_see_one_another(cache: KVCache) -> None:
    rng = np.random.default_rng(1)
    past = Rows.of(np.array([1]), np.array([0]), np.array([6]))
    _, k_past, v_past = random_rows(rng, past)
    cache.write(0, past, k_past, v_past)
    rows = Rows.blocks(np.array([1]), np.array([4]), 5)  # the last two of the past are overwritten
    q, k, v = random_rows(rng, rows)
    out = cache.attend(rows)(0, q, k, v)
    keys, values = torch.cat((k_past[:4], k))[None], torch.cat((v_past[:4], v))[None]
    torch.testing.assert_close(out, attention(q[None], keys, values)[0], atol=2e-6, rtol=1e-5)


def test_a_copied_slot_answers_like_its_source(cache: KVCache) -> None:
    rng = np.random.default_rng(2)
    past = Rows.of(np.array([0]), np.array([0]), np.array([9]))
    _, k, v = random_rows(rng, past)
    cache.write(2, past, k, v)
    cache.copy(0, np.array([1, 3]), 9)
    q, k, v = random_rows(rng, Rows.of(np.array([0]), np.array([9]), np.array([1])))
    outs = [cache.attend(Rows.of(np.array([s]), np.array([9]), np.array([1])))(2, q, k, v) for s in (0, 1, 3)]
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


def test_weights_of_far_apart_scores_stay_exact(cache: KVCache) -> None:
    rows = Rows.of(np.array([0]), np.array([0]), np.array([3]))
    q, k, v = random_rows(np.random.default_rng(3), rows)
    for scale in (30.0, 1e3):
        out = cache.attend(rows)(0, q * scale, k, v)
        visible = torch.ones(1, 3, 3, dtype=torch.bool).tril()
        expected = attention((q * scale)[None], k[None], v[None], visible)[0]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_the_cache_for_float32_on_a_cpu_is_ragged_and_any_other_a_grid() -> None:
    assert isinstance(make_cache(CONFIG, 1, 8, CPU, torch.float32), RaggedCache)
    assert isinstance(make_cache(CONFIG, 1, 8, CPU, torch.bfloat16), GridCache)


def test_rows_cut_into_pieces_keep_their_places() -> None:
    rows = Rows.of(np.array([5, 2]), np.array([3, 0]), np.array([4, 3]))
    piece = rows[2:6]
    assert piece.slots.tolist() == [5, 5, 2, 2]
    assert piece.positions.tolist() == [5, 6, 0, 1]
    assert piece.visible.tolist() == [6, 7, 1, 2]
    assert piece.columns.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("policy", ["off", "full", "ratio:0.5"])
def test_padded_shapes_change_nothing(policy: str) -> None:
    verifier, drafter = tiny_pair(num_slots=5, padded=True)
    engine = Engine(verifier, drafter, parse_policy(policy))
    asked = [Request(i, [i + 1, 4, i], 6 + 2 * i) for i in range(7)]
    assert serve(engine, asked) == {
        i: plain_text(verifier.model, r.prompt, r.max_tokens) for i, r in enumerate(asked)
    }
    assert verifier.graphs
    shapes = list(verifier.graphs.inputs)
    assert {shape.num_slots for shape in shapes} <= {1, 2, 4, 5}
    assert all(shape.rows // shape.num_slots in knots(4) for shape in shapes)


def test_a_step_pads_up_to_the_next_batch_and_the_next_number_of_tokens() -> None:
    verifier, _ = tiny_pair(num_slots=6, padded=True)
    rows = Rows.of(np.arange(3), np.array([2, 9, 4]), np.array([1, 5, 1]))
    assert verifier.graph_tokens(rows) == 4 * 2
    assert verifier.graph_tokens(Rows.of(np.arange(3), np.zeros(3, int), np.array([9, 1, 1]))) is None
    assert tiny_pair()[0].graph_tokens(rows) is None


def test_shapes_are_powers_of_two_and_steps_of_four() -> None:
    assert powers_of_two(6) == [1, 2, 4, 6]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert knots(15) == [1, 2, 4, 8, 12, 16]
    assert knots(7) == [1, 2, 4, 8]
    assert knots(1) == [1, 2]


# ---- the rule that accepts ------------------------------------------------------------------------------


@given(st.data())
def test_greedy_acceptance_is_the_longest_prefix_that_the_target_agrees_with(data: st.DataObject) -> None:
    batch, width, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)), 3
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    keep_depth = rng.integers(0, width + 1, batch)
    tokens = rng.integers(0, vocab, (batch, width))
    logits = torch.from_numpy(rng.normal(size=(int((keep_depth + 1).sum()), vocab)))
    verdict = accept(logits, Drafts(tokens, np.ones((batch, width), np.float32)), keep_depth)
    row = 0
    for i in range(batch):
        best = logits[row : row + keep_depth[i] + 1].argmax(-1).tolist()
        accepted = 0
        while accepted < keep_depth[i] and tokens[i, accepted] == best[accepted]:
            accepted += 1
        assert (verdict.num_accepted[i], verdict.bonus_token[i]) == (accepted, best[accepted])
        row += keep_depth[i] + 1


@pytest.mark.parametrize("drawn", [False, True])
def test_two_drafts_and_a_bonus_token_have_the_probability_of_plain_sampling(drawn: bool) -> None:
    count, vocab, heat = 60_000, 3, 0.7
    rng = np.random.default_rng(1)
    # The target's logits at each of three places follow from the tokens before.
    table = {
        text: rng.normal(size=vocab) for n in range(3) for text in itertools.product(range(vocab), repeat=n)
    }
    q = torch.from_numpy(rng.dirichlet(np.ones(vocab), size=2)).float()
    if drawn:
        tokens = np.column_stack(
            [rng.choice(vocab, count, p=row.double().numpy() / row.double().sum().item()) for row in q]
        )
        drafts = Drafts(tokens, np.ones((count, 2), np.float32), q.expand(count, 2, vocab))
    else:
        tokens = np.tile(q.argmax(-1).numpy(), (count, 1))
        drafts = Drafts(tokens, np.ones((count, 2), np.float32))
    rows = [table[tuple(text[:n])] for text in tokens.tolist() for n in range(3)]
    temperatures = np.full(count, heat)
    depth = np.full(count, 2)
    verdict = accept(torch.tensor(np.array(rows)), drafts, depth, temperatures, rng.random((count, 3)))
    law = {text: np.exp(x / heat) / np.exp(x / heat).sum() for text, x in table.items()}
    # Of the first two tokens, wherever the step reached them.
    second = np.where(verdict.num_accepted == 0, -1, tokens[:, 0])
    first = np.where(verdict.num_accepted == 0, verdict.bonus_token, tokens[:, 0])
    np.testing.assert_allclose(np.bincount(first, minlength=vocab) / count, law[()], atol=0.01)
    for token in np.unique(second[second >= 0]):
        reached = second == token
        follows = np.where(verdict.num_accepted == 1, verdict.bonus_token, tokens[:, 1])[reached]
        np.testing.assert_allclose(
            np.bincount(follows, minlength=vocab) / reached.sum(), law[(token,)], atol=0.02
        )


def test_greedy_requests_stay_greedy_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.2]])
    drafts = Drafts(np.array([[1], [1]]), np.ones((2, 1), np.float32))
    for uniform in (0.0, 0.5, 0.99):
        verdict = accept(logits, drafts, np.array([1, 1]), np.array([0.0, 1.0]), np.full((2, 2), uniform))
        assert (verdict.num_accepted[0], verdict.bonus_token[0]) == (1, 0)


def test_confidence_is_the_largest_probability_whichever_token_is_drawn() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]]]).expand(200, 1, 3)
    greedy = propose(logits)
    rng = np.random.default_rng(0)
    sampled = propose(logits, np.full(200, 1.0), rng.random((200, 1)))
    np.testing.assert_allclose(greedy.confidences, logits.softmax(-1).max(-1).values.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(sampled.confidences, greedy.confidences)
    assert sampled.probs is not None
    share = np.bincount(sampled.tokens[:, 0], minlength=3) / 200
    np.testing.assert_allclose(share, sampled.probs[0, 0].numpy(), atol=0.1)
    assert (greedy.tokens == 0).all()


# ---- models from directories ----------------------------------------------------------------------------


def test_what_holds_no_model_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="target"):
        open_target(tmp_path)
    with pytest.raises(InputError, match="use one of float32"):
        open_target(tmp_path, dtype="float8")


def test_the_trial_pair_generates_what_its_target_says_alone(shared: Path) -> None:
    pair = shared / "pair-trial"
    verifier, drafter = open_pair(pair / "target", pair / "drafter", 4, 120)
    asked = [Request(i, [1, 300 + 7 * i, 40 + i], 20, stop_token_ids=()) for i in range(4)]
    outputs = serve(Engine(verifier, drafter, parse_policy("full")), asked)
    assert outputs == {r.request_id: plain_text(verifier.model, r.prompt, r.max_tokens) for r in asked}
