"""The built-in pair: drafters see no future, checkpoints load, and the model card tells the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="the live runtime needs torch: pip install dcut[runtime]")
pytest.importorskip("tokenizers", reason="the pair needs tokenizers: pip install dcut[runtime]")
pytest.importorskip("jinja2", reason="the chat template needs jinja2: pip install dcut[runtime]")

import jinja2
import torch
from tokenizers import Tokenizer
from torch import Tensor

from runtime.models import (
    CausalLM,
    DFlash,
    Drafter,
    ModelConfig,
    causal,
    load_drafter,
    load_target,
    read_weights,
)
from runtime.pair import evaluate, weights
from runtime.pair.dense import block_logits, distinct_4grams, generate, pad, rollout_logits
from runtime.pair.train import block_loss, encode_prompts

Sequence = tuple[Tensor, Tensor, Tensor]  # ids [1, 60]; the target's hidden states and features over them
FIGURES = json.loads(evaluate.FIGURES.read_text())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target():
    return load_target(weights.path("target"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(weights.path("target") / "tokenizer.json"))


@pytest.fixture(scope="module")
def answers(target: CausalLM, tokenizer: Tokenizer):
    prompts = evaluate.read_prompts(weights.PROMPTS, limit=2)
    return evaluate.answer(target, tokenizer, prompts, FIGURES["max_tokens"])


@pytest.fixture(scope="module")
def sequence(target: CausalLM):
    ids = torch.randint(6, 2048, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, features = target(ids, torch.arange(60)[None], causal, (1, 3, 4))
    return ids, hidden, features


@pytest.fixture(params=weights.NAMES[1:])
def drafter(request: pytest.FixtureRequest, target: CausalLM):
    return load_drafter(weights.path(request.param), target)


def drafts_from(drafter: Drafter, target: CausalLM, sequence: Sequence, anchor: int) -> Tensor:
    """Logits of all drafts from one anchor [drafts, vocab]."""
    ids, hidden, features = sequence
    with torch.no_grad():
        if isinstance(drafter, DFlash):
            return block_logits(drafter, target, ids, features, torch.tensor([[anchor]]))[0, 0]
        steps = rollout_logits(drafter, target, ids, hidden, features, 5, follow=False)
        return torch.stack([step[0, anchor - 1] for step in steps])


def test_a_draft_sees_nothing_of_the_target_at_or_after_its_anchor(
    drafter: Drafter, target: CausalLM, sequence: Sequence
) -> None:
    anchor = 30
    expected = drafts_from(drafter, target, sequence, anchor)
    ids, hidden, features = (tensor.clone() for tensor in sequence)
    ids[:, anchor + 1 :] = 7
    hidden[:, anchor:] = features[:, anchor:] = 9.0
    changed = drafts_from(drafter, target, (ids, hidden, features), anchor)
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("place", [29, 30])
def test_a_draft_depends_on_its_anchor_and_on_the_token_before(
    drafter: Drafter, target: CausalLM, sequence: Sequence, place: int
) -> None:
    expected = drafts_from(drafter, target, sequence, 30)
    ids, hidden, features = (tensor.clone() for tensor in sequence)
    ids[:, place] = 7
    hidden[:, place] = features[:, place] = 9.0
    changed = drafts_from(drafter, target, (ids, hidden, features), 30)
    assert (changed - expected).abs().max() > 1e-3


def test_blocks_drafted_together_equal_each_drafted_alone_from_its_prefix(
    target: CausalLM, sequence: Sequence
):
    ids, _, features = sequence
    drafter = load_drafter(weights.path("dflash16"), target)
    assert isinstance(drafter, DFlash)
    anchors = torch.tensor([[5, 17, 40]])
    with torch.no_grad():
        together = block_logits(drafter, target, ids, features, anchors)[0]
        for index, anchor in enumerate(anchors[0].tolist()):
            prefix = ids[:, : anchor + 1], features[:, : anchor + 1]
            alone = block_logits(drafter, target, *prefix, torch.tensor([[anchor]]))[0, 0]
            torch.testing.assert_close(together[index], alone, rtol=1e-4, atol=1e-4)


def test_the_target_as_its_own_draft_model_is_always_right(target: CausalLM, answers: list[evaluate.Answer]):
    for drafted in evaluate.draft(target, target, answers[:3], 4):
        possible = np.arange(len(drafted.hits), 0, -1).clip(max=4)
        assert drafted.num_accepted.tolist() == possible.tolist()


def test_generation_with_a_cache_equals_recomputing_everything(
    target: CausalLM, answers: list[evaluate.Answer], tokenizer: Tokenizer
):
    prompts = encode_prompts(
        tokenizer, ["What is 12 + 30?", "Sort these alphabetically: Rome, Bern, Oslo, Lima."]
    )
    for prompt, text in zip(prompts, generate(target, prompts, 20, end=5), strict=True):
        ids = list(prompt)
        for token in text:
            with torch.no_grad():
                hidden, _ = target(pad([ids]), torch.arange(len(ids))[None], causal)
            assert int(target.logits(hidden[0, -1]).argmax()) == token
            ids.append(token)


def test_the_card_holds_for_a_fresh_sample_of_its_own_prompts(
    target: CausalLM, answers: list[evaluate.Answer]
):
    """The first two answers of each domain are drafted again and must match the stored figures."""
    drafter = load_drafter(weights.path("dflash16"), target)
    assert isinstance(drafter, DFlash)
    stored = FIGURES["drafters"]["dflash16"]
    fresh = evaluate.draft(drafter, target, answers, drafter.config.draft_length)
    firsts, start = [], 0
    for domain in FIGURES["target"].values():
        firsts += stored["tokens_per_step_by_answer"][start : start + 2]
        start += domain["answers"]
    measured = [(one.num_output - 1) / one.num_steps for one in fresh]
    assert measured == pytest.approx(firsts, rel=0.05)


def test_the_loss_of_blocks_counts_a_draft_behind_a_miss_a_tenth_and_none_past_the_end(target: CausalLM):
    drafter = load_drafter(weights.path("dflash8"), target)
    assert isinstance(drafter, DFlash)
    ids = torch.randint(6, 2048, (2, 40), generator=torch.Generator().manual_seed(1))
    lengths, anchors = torch.tensor([40, 25]), torch.tensor([[10, 20], [5, 22]])
    with torch.no_grad():
        _, features = target(ids, torch.arange(40).expand(2, -1), causal, drafter.taps)
        assert features is not None
        with torch.autocast("cpu", torch.bfloat16):
            logits = block_logits(drafter, target, ids, features, anchors).float()
            ids[:, 11], ids[:, 23] = logits[0, 0, 0].argmax(), logits[1, 1, 0].argmax()  # some hits
        loss = block_loss(drafter, target, ids, features, lengths, anchors)
    total = weights_sum = 0.0
    for row in range(2):
        for block in range(2):
            missed = False
            for draft in range(7):
                place = int(anchors[row, block]) + 1 + draft
                if place >= lengths[row]:
                    break
                label, scores = ids[row, place], logits[row, block, draft]
                weight = np.exp(-draft / 7) * (0.1 if missed else 1.0)
                total += weight * -scores.log_softmax(-1)[label].item()
                weights_sum += weight
                missed |= bool(scores.argmax() != label)
    assert loss.item() == pytest.approx(total / weights_sum, rel=1e-5)


def test_the_tables_in_the_card_are_the_stored_figures():
    assert evaluate.tables(FIGURES) in evaluate.CARD.read_text()
    for of in FIGURES["drafters"].values():
        mean = np.mean(of["tokens_per_step_by_answer"])
        assert of["tokens_per_step"]["all"] == pytest.approx(mean, abs=2e-3)


def test_weighted_auc_equals_counting_all_pairs():
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 6, 40) / 5
    hits = rng.random(40) < scores * 0.8 + 0.1
    weight = rng.random(40)
    won = total = 0.0
    for i in np.flatnonzero(hits):
        for j in np.flatnonzero(~hits):
            total += weight[i] * weight[j]
            won += weight[i] * weight[j] * (1.0 if scores[i] > scores[j] else 0.5 * (scores[i] == scores[j]))
    assert evaluate.weighted_auc(scores, hits, weight) == pytest.approx(won / total)


def test_distinct_4grams_tell_a_loop_from_text():
    assert distinct_4grams(list(range(40))) == 1.0
    assert distinct_4grams([1, 2] * 40) < 0.05


def test_the_chat_template_renders_what_the_models_were_trained_on(tokenizer: Tokenizer):
    config = json.loads((weights.path("target") / "tokenizer_config.json").read_text())
    text = jinja2.Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "What is 2 + 2?"}],
        bos_token=config["bos_token"],
        add_generation_prompt=True,
    )
    assert [tokenizer.encode(text).ids] == encode_prompts(tokenizer, ["What is 2 + 2?"])


def test_dflash_checkpoints_have_the_public_layout():
    for name, block_size in (("dflash16", 16), ("dflash8", 8)):
        raw = json.loads((weights.path(name) / "config.json").read_text())
        assert raw["architectures"] == ["DFlashDraftModel"]
        assert raw["block_size"] == block_size
        assert raw["dflash_config"].keys() == {"mask_token_id", "target_layer_ids"}
        tensors = read_weights(weights.path(name))
        assert {key.split(".")[0] for key in tensors} == {"layers", "fc", "hidden_norm", "norm"}
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


def test_everything_the_pair_ships_fits_in_20_mb():
    files = [file for file in weights.HERE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= 20e6


def test_held_out_prompts_are_many_and_different():
    prompts = evaluate.read_prompts(weights.PROMPTS)
    domains = [prompt["domain"] for prompt in prompts]
    assert len({prompt["prompt"] for prompt in prompts}) == len(prompts)
    assert all(domains.count(domain) >= 64 for domain in ("code", "prose", "chat", "math", "data"))


def test_a_config_that_is_not_supported_names_itself():
    with pytest.raises(ValueError, match="gemma"):
        ModelConfig.from_dict({"model_type": "gemma"})
    with pytest.raises(ValueError, match="no built-in model 'dflash9'"):
        weights.path("dflash9")
