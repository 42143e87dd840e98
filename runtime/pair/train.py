"""Command that rebuilds the built-in pair: tokenizer, target, and every drafter, stage by stage.

    python -m runtime.pair.train --work out/pair

Each stage leaves its result in the work folder and is skipped when that exists, so a broken run resumes
(the target from its last checkpoint). `--documentation` adds reST prose; without it the prose is docstrings
and the language reference. The pair as shipped used it, and the figures in README.md hold for that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from dcut.errors import Parser, guard
from runtime.models import (
    MTP,
    CausalLM,
    DecoderLayer,
    DFlash,
    Drafter,
    Eagle3,
    ModelConfig,
    causal,
    load_target,
    save_model,
)
from runtime.pair import data, weights
from runtime.pair.dense import block_logits, distinct_4grams, generate, pad, rollout_logits

SPECIAL = ("<|pad|>", "<|bos|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, MASK, USER, ASSISTANT, END = range(len(SPECIAL))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}<|end|>{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAPS = (1, 3, 4)  # a feature is the residual stream after these layers of the target
TARGET = ModelConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=576,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    bos_token_id=BOS,
    eos_token_ids=(END,),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result; copy_rows is a share of the rows of text, the rest are counts."""

    seed: int = 0
    corpus_samples: int = 110_000
    row_tokens: int = 320
    copy_rows: float = 0.25
    target_steps: int = 4700
    target_rows: int = 12
    unloop_rounds: int = 1
    unloop_steps: int = 80
    held_out_each: int = 64
    greedy_each: int = 3000
    greedy_tokens: int = 192
    dflash16_steps: int = 16_500
    dflash8_steps: int = 900
    eagle3_steps: int = 550
    mtp_steps: int = 350
    draft_steps: int = 350


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json and the configs that go with it, as transformers and vLLM read them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": SPECIAL[PAD], "bos_token": SPECIAL[BOS], "mask_token": SPECIAL[MASK]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "eos_token": SPECIAL[END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TARGET.max_position_embeddings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def encode_prompts(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """What the chat template makes of one user message, as ids ending in `<|assistant|>`."""
    return [[BOS, USER, *encoding.ids, ASSISTANT] for encoding in tokenizer.encode_batch(prompts)]


def build_corpus(recipe: Recipe, pools: data.Pools, work: Path) -> None:
    """Draw the samples, train the tokenizer on some of them, and write rows of tokens for the target."""
    drawn = list(
        tqdm(data.samples(pools, recipe.corpus_samples, recipe.seed), "samples", recipe.corpus_samples)
    )
    if not (work / "target" / "tokenizer.json").exists():
        texts = (text for sample in drawn[:16_000] for text in (sample.prompt, sample.answer))
        save_tokenizer(train_tokenizer(texts, TARGET.vocab_size), work / "target")
    tokenizer = Tokenizer.from_file(str(work / "target" / "tokenizer.json"))
    rows, left = [], []
    for start in tqdm(range(0, len(drawn), 1000), "tokens"):
        part = drawn[start : start + 1000]
        prompts = encode_prompts(tokenizer, [sample.prompt for sample in part])
        answers = tokenizer.encode_batch([sample.answer for sample in part])
        for prompt, answer in zip(prompts, answers, strict=True):
            left += [*prompt, *answer.ids, END]
        whole = len(left) // recipe.row_tokens * recipe.row_tokens
        rows.append(np.array(left[:whole], dtype=np.uint16).reshape(-1, recipe.row_tokens))
        left = left[whole:]
    text = np.concatenate(rows)
    ask = tokenizer.encode("Repeat:").ids
    copies = copy_rows(text, ask, round(len(text) * recipe.copy_rows), np.random.default_rng(recipe.seed))
    np.save(work / "rows.npy", np.concatenate((text, copies)))


def copy_rows(
    text: NDArray[np.uint16], ask: list[int], count: int, rng: np.random.Generator
) -> NDArray[np.uint16]:
    """Rows of requests to repeat tokens drawn at random from the text.

    Nothing but the prompt tells what comes next: this makes small models learn to carry words over from it.
    """
    words = text[text >= len(SPECIAL)]
    row, rows = [], []
    while len(rows) < count:
        drawn = rng.choice(words, rng.integers(4, 49)).tolist()
        row += [BOS, USER, *ask, *drawn, ASSISTANT, *drawn, END]
        if len(row) >= text.shape[1]:
            rows.append(row[: text.shape[1]])
            row = []
    return np.array(rows, dtype=np.uint16)


def optimizers(model: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for embeddings, heads and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0)
    return [muon, torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0)]


def initialize(model: nn.Module) -> None:
    """Normal matrices; what writes to the residual starts at zero, so that each layer starts as identity."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.zeros_(parameter) if silent else nn.init.normal_(parameter, std=0.02)


def learning_rate(progress: float, step: int) -> float:
    """Factor on the learning rate: 40 steps up, flat to 45 %, then linearly down."""
    return min(1.0, (step + 1) / 40, max(0.02, (1 - progress) / 0.55))


def fit(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: int,
    optimizer: list[torch.optim.Optimizer],
    checkpoint: Path,
    title: str,
) -> None:
    """Run the steps with clipping and schedule, resuming from and leaving a checkpoint every 100."""
    base = [group["lr"] for part in optimizer for group in part.param_groups]
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        first = state["step"]
        for part, saved in zip(optimizer, state["optimizer"], strict=True):
            part.load_state_dict(saved)
    bar, smooth = tqdm(range(first, steps), title, steps, initial=first, mininterval=5), None
    for step in bar:
        factor = learning_rate(step / steps, step)
        for group, lr in zip((group for part in optimizer for group in part.param_groups), base, strict=True):
            group["lr"] = lr * factor
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in optimizer:
            part.step()
            part.zero_grad()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
        if (step + 1) % 100 == 0:
            saved = [part.state_dict() for part in optimizer]
            torch.save({"model": model.state_dict(), "optimizer": saved, "step": step + 1}, checkpoint)


def next_token_loss(model: CausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ids [rows, length] under the model, computed in bf16."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(model(ids, positions, causal)[0])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_target(recipe: Recipe, pools: data.Pools, work: Path, compiled: bool) -> None:
    """Train the language model on the rows and write it, rounded to bf16, to work/target."""
    torch.manual_seed(recipe.seed)
    rows = torch.from_numpy(np.load(work / "rows.npy").astype(np.int64))
    order = torch.randperm(len(rows))
    model = CausalLM(TARGET)
    initialize(model)
    loss = torch.compile(next_token_loss) if compiled else next_token_loss

    def loss_of(step: int) -> Tensor:
        picked = torch.arange(step * recipe.target_rows, (step + 1) * recipe.target_rows) % len(rows)
        return loss(model, rows[order[picked]])

    fit(model, loss_of, recipe.target_steps, optimizers(model, 0.02, 3e-3), work / "target.pt", "target")
    for step in range(recipe.unloop_rounds):
        unlearn_loops(model, recipe, pools, rows, work, step)
    save_model(model, work / "target", target_config(TARGET))


def unlearn_loops(
    model: CausalLM, recipe: Recipe, pools: data.Pools, rows: Tensor, work: Path, number: int
) -> None:
    """One round of sequence-level unlikelihood training (Welleck et al., 2020) beside the usual loss.

    The model answers fresh training prompts of the domains of real text greedily; in answers that loop,
    tokens that complete a 4-gram seen before in the same answer become less likely. Generated material is
    left out: it repeats itself for good reasons, such as the keys of a list of records.
    """
    rng = Random(recipe.seed + 10 + number)
    tokenizer = Tokenizer.from_file(str(work / "target" / "tokenizer.json"))
    drawn = [data.sample(domain, pools, rng).prompt for domain in ("code", "prose") for _ in range(120)]
    prompts = encode_prompts(tokenizer, drawn)
    looping = []
    for start in tqdm(range(0, len(prompts), 60), f"answers {number}"):
        asked = prompts[start : start + 60]
        for prompt, answer in zip(asked, generate(model, asked, recipe.greedy_tokens, END), strict=True):
            if distinct_4grams(answer) < 0.65:
                looping.append((prompt, answer))

    def loss_of(step: int) -> Tensor:
        rng = Random(step)
        picked = rng.sample(looping, min(10, len(looping)))
        ids = pad([prompt + answer for prompt, answer in picked])
        repeated = pad([[0] * len(prompt) + repeats_4gram(answer) for prompt, answer in picked])[:, 1:].bool()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(model(ids, positions, causal)[0])
        chance = logits[:, :-1].float().softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        unlikely = -torch.log1p(-chance.clamp(max=0.999))[repeated].mean()
        text = rows[rng.sample(range(len(rows)), recipe.target_rows)]
        return next_token_loss(model, text) + unlikely

    parts = optimizers(model, 0.0016, 2.5e-4)
    fit(model, loss_of, recipe.unloop_steps, parts, work / f"unloop{number}.pt", f"unloop {number}")


def repeats_4gram(tokens: list[int]) -> list[int]:
    """1 where a token completes a 4-gram that occurred before in the list, else 0."""
    seen, marks = set(), []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[max(0, end - 4) : end])
        marks.append(int(len(gram) == 4 and gram in seen))
        seen.add(gram)
    return marks


def target_config(config: ModelConfig) -> dict[str, object]:
    """config.json of a Qwen3 model as transformers and vLLM read it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }


def make_greedy(recipe: Recipe, pools: data.Pools, work: Path) -> None:
    """Let the rounded target answer fresh training prompts; a JSON line per sequence, resumable."""
    target = load_target(work / "target")
    tokenizer = Tokenizer.from_file(str(work / "target" / "tokenizer.json"))
    path, batch, rng = work / "greedy.jsonl", 100, Random(recipe.seed + 1)
    done = path.read_text().count("\n") if path.exists() else 0
    held_out = {json.loads(line)["prompt"] for line in (work / "prompts.jsonl").read_text().splitlines()}
    turns = [domain for _ in range(0, recipe.greedy_each, batch) for domain in data.DOMAINS]
    with path.open("a") as file:
        for turn, domain in enumerate(tqdm(turns, "greedy text")):
            fresh = (data.sample(domain, pools, rng).prompt for _ in itertools.count())
            drawn = list(itertools.islice((prompt for prompt in fresh if prompt not in held_out), batch))
            if turn * batch < done:
                continue
            asked = encode_prompts(tokenizer, drawn)
            answers = generate(target, asked, recipe.greedy_tokens, END)
            lines = [
                json.dumps({"prompt_tokens": len(prompt), "ids": prompt + answer}) + "\n"
                for prompt, answer in zip(asked, answers, strict=True)
            ]
            file.write("".join(lines))
            file.flush()


def make_prompts(recipe: Recipe, pools: data.Pools, held_out: data.Pools, work: Path) -> None:
    """Write held-out prompts, none of which the target was trained on."""
    known = {sample.prompt for sample in data.samples(pools, recipe.corpus_samples, recipe.seed)}
    drawn = data.held_out_samples(held_out, recipe.held_out_each, recipe.seed + 2, known)
    lines = [json.dumps({"prompt": sample.prompt, "domain": sample.domain}) + "\n" for sample in drawn]
    (work / "prompts.jsonl").write_text("".join(lines))


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences for one drafter step with what the target makes of them."""

    ids: Tensor  # [rows, length], right-padded
    prompt_tokens: Tensor  # [rows]
    lengths: Tensor  # [rows], prompt and answer
    hidden: Tensor  # [rows, length, hidden], after the last norm
    features: Tensor  # [rows, length, taps * hidden]

    def answers(self, places: Tensor) -> Tensor:
        """True where a position [rows, ...] lies in its row's answer."""
        shape = (-1, *[1] * (places.ndim - 1))
        return (places >= self.prompt_tokens.view(shape)) & (places < self.lengths.view(shape))


class Batches:
    """Random batches of greedy sequences, by step number; what the target makes of each is kept."""

    def __init__(self, work: Path, target: CausalLM, rows: int, taps: tuple[int, ...]) -> None:
        lines = [json.loads(line) for line in (work / "greedy.jsonl").read_text().splitlines()]
        self.lines = [line for line in lines if len(line["ids"]) - line["prompt_tokens"] >= 4]
        self.target, self.rows, self.taps = target, rows, taps
        self.read: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Hidden and features of one sequence, bf16 [length, ...]; without taps the features are empty."""
        if index not in self.read:
            ids = torch.tensor(self.lines[index]["ids"])
            with torch.autocast("cpu", torch.bfloat16):
                hidden, features = self.target(ids[None], torch.arange(len(ids))[None], causal, self.taps)
            empty = hidden.new_zeros(len(ids), 0)
            self.read[index] = (hidden[0].bfloat16(), empty if features is None else features[0].bfloat16())
        return self.read[index]

    def __call__(self, step: int) -> Batch:
        picked = Random(step).sample(range(len(self.lines)), self.rows)
        hidden, features = zip(*(self.states(index) for index in picked), strict=True)
        lines = [self.lines[index] for index in picked]
        return Batch(
            ids=pad([line["ids"] for line in lines]),
            prompt_tokens=torch.tensor([line["prompt_tokens"] for line in lines]),
            lengths=torch.tensor([len(line["ids"]) for line in lines]),
            hidden=nn.utils.rnn.pad_sequence(list(hidden), batch_first=True).float(),
            features=nn.utils.rnn.pad_sequence(list(features), batch_first=True).float(),
        )


def random_blocks(batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, features and lengths of a batch, and `count` random anchors in each answer: [rows, count].

    Rows are padded to a multiple of 64 tokens: few shapes, so that a compiled loss is compiled a few times.
    """
    span = (batch.lengths - 1 - batch.prompt_tokens)[:, None]  # every anchor has at least one draft to hit
    anchors = batch.prompt_tokens[:, None] + (torch.rand(len(span), count) * span).long()
    more = -batch.ids.shape[1] % 64
    return F.pad(batch.ids, (0, more)), F.pad(batch.features, (0, 0, 0, more)), batch.lengths, anchors


def block_loss(
    drafter: DFlash, target: CausalLM, ids: Tensor, features: Tensor, lengths: Tensor, anchors: Tensor
) -> Tensor:
    """Cross-entropy of blocks at anchors [rows, blocks], weighted by what each draft can bring.

    Draft k weighs exp(-(k - 1) / 7), and a tenth of that behind a draft that misses: verification never gets
    there. So a confidence learns the chance of a hit after hits, whose product survival is.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = block_logits(drafter, target, ids, features, anchors)
    ahead = torch.arange(1, drafter.config.block_size)
    places = anchors[..., None] + ahead
    inside = places < lengths[:, None, None]
    labels = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view(places.shape)
    hits = (logits.argmax(-1) == labels) & inside
    reached = F.pad(hits.int().cumprod(-1)[..., :-1], (1, 0), value=1)
    weight = torch.exp(-(ahead - 1) / 7) * (0.1 + 0.9 * reached) * inside
    losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
    return (losses.view(places.shape) * weight).sum() / weight.sum()


def rollout_loss(drafter: Eagle3 | MTP | CausalLM, target: CausalLM, batch: Batch, depths: int) -> Tensor:
    """Cross-entropy of an autoregressive drafter over `depths` steps of its own states, depth k by 0.8^k."""
    total, rows = torch.zeros(()), torch.arange(batch.ids.shape[1] - 1)
    with torch.autocast("cpu", torch.bfloat16):
        drafts = rollout_logits(drafter, target, batch.ids, batch.hidden, batch.features, depths, follow=True)
        for depth, logits in enumerate(drafts):
            places = (rows + 2 + depth).expand(len(batch.ids), -1)
            inside = batch.answers(places) & batch.answers(places - 1 - depth)
            labels = batch.ids.gather(1, places.clamp(max=batch.ids.shape[1] - 1))
            total = total + 0.8**depth * F.cross_entropy(logits[inside].float(), labels[inside])
    return total


def drafter_config(name: str) -> ModelConfig:
    """The shape of each drafter; all live in the target's hidden space."""
    if name == "draft":
        return replace(TARGET, num_hidden_layers=2)
    common = replace(TARGET, num_hidden_layers=1, tie_word_embeddings=False, target_layer_ids=TAPS)
    if name == "eagle3":
        return replace(common, model_type="llama")
    if name == "mtp":
        return replace(common, target_layer_ids=())
    return replace(
        common, num_hidden_layers=3, block_size=int(name.removeprefix("dflash")), mask_token_id=MASK
    )


def drafter_json(name: str, config: ModelConfig) -> dict[str, object]:
    """config.json of a drafter in the layout of public checkpoints of its kind."""
    raw = target_config(config)
    if name == "draft":
        return raw
    raw |= {"num_target_layers": TARGET.num_hidden_layers}
    if name == "eagle3":
        taps = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS]}
        return (
            raw
            | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
            | taps
            | {"draft_vocab_size": config.vocab_size}
        )
    if name == "mtp":
        return raw | {"architectures": ["Qwen3MTP"], "num_nextn_predict_layers": 1}
    dflash = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    return raw | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": dflash,
    }


def warm_start(name: str, target: CausalLM, work: Path) -> Drafter:
    """A drafter that begins with the target's last layers and passes the last feature straight on."""
    config = drafter_config(name)
    size, model = config.hidden_size, target.model
    if name == "draft":
        drafter = CausalLM(config)
        drafter.model.embed_tokens.load_state_dict(model.embed_tokens.state_dict())
        drafter.model.norm.load_state_dict(model.norm.state_dict())
        for own, theirs in zip(drafter.model.layers, (model.layers[0], model.layers[-1]), strict=True):
            own.load_state_dict(theirs.state_dict())
        return drafter
    if name == "eagle3":
        drafter = Eagle3(config)
        initialize(drafter)
        drafter.lm_head.load_state_dict(target.lm_head.state_dict())
        drafter.midlayer.mlp.load_state_dict(cast(DecoderLayer, model.layers[-1]).mlp.state_dict())
        fc, layers = drafter.fc, []
    elif name == "mtp":
        drafter = MTP(config, target.lm_head)
        fc, layers = drafter.mtp.fc, drafter.mtp.layers
        drafter.mtp.norm.load_state_dict(model.norm.state_dict())
    else:
        drafter = DFlash(config)
        fc, layers = drafter.fc, drafter.layers
        drafter.norm.load_state_dict(model.norm.state_dict())
    for own, theirs in zip(layers, model.layers[-len(layers) :] if layers else [], strict=True):
        own.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        fc.weight.mul_(0.3)[:, -size:] += torch.eye(size)
    if name == "dflash8" and (work / "dflash16.pt").exists():
        drafter.load_state_dict(torch.load(work / "dflash16.pt")["model"])
    return drafter


def train_drafter(name: str, recipe: Recipe, work: Path, compiled: bool) -> None:
    """Train one drafter on the rounded target's greedy text and write it to work/name."""
    torch.manual_seed(recipe.seed)
    target = load_target(work / "target").requires_grad_(False)
    drafter = warm_start(name, target, work)
    taps = () if isinstance(drafter, CausalLM) else drafter.taps
    batches = Batches(work, target, 8 if isinstance(drafter, DFlash) else 12, taps)
    loss_of_blocks = torch.compile(block_loss) if compiled else block_loss

    def loss_of(step: int) -> Tensor:
        if isinstance(drafter, DFlash):
            blocks = random_blocks(batches(step), 32 * 16 // drafter.config.block_size)
            return loss_of_blocks(drafter, target, *blocks)
        return rollout_loss(drafter, target, batches(step), 1 if name == "draft" else 4)

    steps = getattr(recipe, f"{name}_steps")
    parts = optimizers(drafter, 0.008, 6e-4) if name == "dflash8" else optimizers(drafter, 0.02, 1.5e-3)
    fit(drafter, loss_of, steps, parts, work / f"{name}.pt", name)
    save_model(drafter, work / name, drafter_json(name, drafter_config(name)))


def install(work: Path) -> None:
    """Put the finished models and prompts where the package looks for them."""
    for name in weights.NAMES:
        if (work / name / "model.safetensors").exists():
            shutil.copytree(work / name, weights.path(name), dirs_exist_ok=True)
    shutil.copy(work / "prompts.jsonl", weights.PROMPTS)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/pair"), help="folder for all results")
    parser.add_argument("--documentation", type=Path, help="folder of reST sources (python3-doc's _sources)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the steps, twice as fast (needs a C++ compiler)"
    )
    parser.add_argument("--install", action="store_true", help="copy the results into the package")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafters", nargs="*", choices=weights.NAMES[1:], default=weights.NAMES[1:])
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    args.work.mkdir(parents=True, exist_ok=True)
    pools = functools.cache(lambda: data.read_pools(False, args.documentation))  # takes half a minute
    if not (args.work / "rows.npy").exists():
        build_corpus(recipe, pools(), args.work)
    if not (args.work / "target" / "model.safetensors").exists():
        train_target(recipe, pools(), args.work, args.compile)
    if not (args.work / "prompts.jsonl").exists():
        make_prompts(recipe, pools(), data.read_pools(True, args.documentation), args.work)
    if not (args.work / "greedy.done").exists():
        make_greedy(recipe, pools(), args.work)
        (args.work / "greedy.done").touch()
    for name in args.drafters:
        if not (args.work / name / "model.safetensors").exists():
            train_drafter(name, recipe, args.work, args.compile)
    if args.install:
        install(args.work)


if __name__ == "__main__":
    sys.exit(guard(main))
