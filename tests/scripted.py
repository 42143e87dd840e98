"""Scripted twins of target and drafter for fast tests, and a tiny random pair in torch."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.drafter import (
    DFlashDrafter,
    Drafter,
    Drafts,
    HeadDrafter,
    ModelDrafter,
    NGramDrafter,
    Seen,
    draw,
)
from runtime.engine import Engine, Request
from runtime.kv_cache import Rows
from runtime.models import MTP, CausalLM, DFlash, Eagle3, ModelConfig, causal, save_model
from runtime.verifier import Output, TorchVerifier

NUM_STATES = 997


class ScriptedVerifier:
    """A language in which the next token follows from a hash of the whole text so far.

    It keeps the hash of every prefix by slot, as a model keeps keys and values, and refuses to run over a
    position whose past it has not seen. `spend` is told (batch, rows, context tokens) of every pass.
    """

    def __init__(
        self,
        vocab: int = 11,
        num_slots: int = 8,
        max_tokens: int = 64,
        sharpness: float = 3.0,
        spend: Callable[[int, int, int], None] = lambda batch, rows, context: None,
    ) -> None:
        self.vocab, self.num_slots, self.max_tokens, self.spend = vocab, num_slots, max_tokens, spend
        self.eos_token_ids: tuple[int, ...] = ()
        table = np.random.default_rng(5).normal(size=(NUM_STATES, vocab)) * sharpness
        self.table = torch.from_numpy(table)
        self.states = np.full((num_slots, max_tokens), -1)

    @staticmethod
    def follow(state: int, token: int) -> int:
        return (state * 31 + token + 7) % NUM_STATES

    def state_of(self, text: Sequence[int]) -> int:
        state = 1
        for token in text:
            state = self.follow(state, token)
        return state

    def forward(self, tokens: np.ndarray, rows: Rows, wanted: np.ndarray | None = None) -> Output:
        batch = len(np.unique(rows.slots))
        self.spend(batch, len(tokens), int(rows.positions[rows.columns == 0].sum()) + batch)
        for token, slot, position in zip(tokens, rows.slots, rows.positions, strict=True):
            before = self.states[slot, position - 1] if position else 1
            assert before >= 0, f"slot {slot} was never run over position {position - 1}"
            self.states[slot, position] = self.follow(int(before), int(token))
            self.states[slot, position + 1 :] = -1
        logits = self.table[self.states[rows.slots, rows.positions]]
        hidden = torch.zeros(len(tokens), 1)
        return Output(hidden, None, logits if wanted is None else logits[wanted])

    def graph_tokens(self, rows: Rows) -> int | None:
        return None

    def say(self, prompt: Sequence[int], max_tokens: int, stops: Sequence[int] = ()) -> list[int]:
        """The oracle: greedy decoding without any machinery."""
        state, output = self.state_of(prompt), []
        while len(output) < max_tokens and not (output and output[-1] in stops):
            output.append(int(self.table[state].argmax()))
            state = self.follow(state, output[-1])
        return output

    def law(self, prompt: Sequence[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
        """The oracle: probability of every output of `length` tokens."""
        found = {}
        for output in itertools.product(range(self.vocab), repeat=length):
            state, chance = self.state_of(prompt), 1.0
            for token in output:
                chance *= float((self.table[state] / temperature).softmax(-1)[token])
                state = self.follow(state, token)
            found[output] = chance
        return found


class ScriptedDrafter:
    """Knows the verifier's language, and errs at places that follow from the text.

    It refuses to draft from a text that it was not shown as a whole. Sampled drafts come from distributions
    that depend on the anchor and the position alone.
    """

    parallel = True
    taps: tuple[int, ...] = ()

    def __init__(self, verifier: ScriptedVerifier, draft_length: int = 5, by_drawn: bool = False) -> None:
        self.verifier, self.draft_length, self.by_drawn = verifier, draft_length, by_drawn
        self.texts: list[list[int]] = [[] for _ in range(verifier.num_slots)]
        self.num_calls = 0
        self.spend: Callable[[int, int], None] = lambda batch, context: None
        logits = np.random.default_rng(6).normal(size=(NUM_STATES, draft_length, verifier.vocab)) * 2
        self.proposals = torch.from_numpy(logits).float().softmax(-1)

    def observe(self, seen: Seen, at_once: bool = False) -> None:
        for slot, position, token in zip(seen.slots, seen.positions, seen.tokens, strict=True):
            assert position <= len(self.texts[slot]), f"slot {slot}: a gap before position {position}"
            self.texts[slot][position:] = [int(token)]

    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        self.num_calls += 1
        self.spend(len(slots), int(lengths.sum()) + len(slots))
        states = []
        for slot, length, anchor in zip(slots, lengths, anchors, strict=True):
            assert len(self.texts[slot]) >= length, f"slot {slot}: {length} tokens, was shown fewer"
            states.append(self.verifier.state_of([*self.texts[slot][:length], int(anchor)]))
        if uniforms is not None:
            probs = self.proposals[states, :width]
            tokens = draw(probs, torch.from_numpy(uniforms))
            likeliest = probs.gather(2, tokens[..., None])[..., 0] if self.by_drawn else probs.max(-1).values
            return Drafts(tokens.numpy(), likeliest.float().numpy(), probs)
        tokens = np.zeros((len(slots), width), np.int64)
        confidences = np.zeros((len(slots), width), np.float32)
        for i, state in enumerate(states):
            for k in range(width):
                right = int(self.verifier.table[state].argmax())
                tokens[i, k] = right if state % 4 else (right + 1) % self.verifier.vocab
                confidences[i, k] = 0.5 + 0.5 * (state % 89) / 89
                state = self.verifier.follow(state, int(tokens[i, k]))
        return Drafts(tokens, confidences)

    def catch_up(self) -> None:
        pass

    def release(self, slot: int) -> None:
        self.texts[slot] = []

    def fork(self, source: int, slots: np.ndarray, length: int) -> None:
        for slot in slots:
            self.texts[slot] = self.texts[source][:length]


def serve(engine: Engine, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Every request's output, served to the end."""
    outputs: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while step := engine.step():
        for emission in step.emissions:
            outputs[emission.request_id] += emission.tokens
    return outputs


# ---- a tiny random pair in torch ---------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab_size=17,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=5,
    mask_token_id=1,
    target_layer_ids=(0, 2),
)


def tiny_target(seed: int = 0) -> CausalLM:
    """A random target whose greedy text is lively."""
    torch.manual_seed(seed)
    model = CausalLM(CONFIG).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def tiny_drafter(
    kind: str, target: CausalLM, num_slots: int, max_tokens: int, padded: bool = False
) -> Drafter:
    """A random drafter; kind "draft" is the target itself, so that all it proposes is right."""
    torch.manual_seed(1)
    one_layer = replace(CONFIG, num_hidden_layers=1)
    if kind == "dflash":
        block = DFlash(replace(CONFIG, num_hidden_layers=2)).eval()
        return DFlashDrafter(block, target, num_slots, max_tokens, padded)
    if kind == "eagle3":
        return HeadDrafter(Eagle3(one_layer).eval(), target, 4, num_slots, max_tokens)
    if kind == "mtp":
        return HeadDrafter(MTP(one_layer, target.lm_head).eval(), target, 4, num_slots, max_tokens)
    if kind == "draft":
        return ModelDrafter(target, target, 4, num_slots, max_tokens)
    return NGramDrafter(4, num_slots, max_tokens)


def tiny_pair(
    kind: str = "dflash", num_slots: int = 6, max_tokens: int = 80, padded: bool = False
) -> tuple[TorchVerifier, Drafter]:
    """A verifier and a drafter of the given kind, ready for an engine."""
    target = tiny_target()
    drafter = tiny_drafter(kind, target, num_slots, max_tokens, padded)
    room, longest = max_tokens + drafter.draft_length, drafter.draft_length
    return TorchVerifier(target, num_slots, room, drafter.taps, longest, padded), drafter


@torch.inference_mode()
def plain_text(target: CausalLM, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The oracle: greedy decoding that runs over the whole text anew for every token."""
    text = list(prompt)
    for _ in range(max_tokens):
        ids = torch.tensor([text])
        hidden, _ = target(ids, torch.arange(len(text))[None], causal)
        text.append(int(target.logits(hidden)[0, -1].argmax()))
    return text[len(prompt) :]


def write_tiny_pair(directory: Path) -> tuple[Path, Path]:
    """The tiny pair as Hugging Face directories, the target's with a tokenizer of letters."""
    target, drafter = directory / "target", directory / "drafter"
    raw: dict[str, Any] = {name: value for name, value in asdict(CONFIG).items() if value is not None}
    raw = {
        name: raw[name] for name in raw if name not in ("target_layer_ids", "mask_token_id", "eos_token_ids")
    }
    torch.manual_seed(1)
    block = DFlash(replace(CONFIG, num_hidden_layers=2))
    save_model(tiny_target(), target, raw | {"architectures": ["Qwen3ForCausalLM"]})
    extra = {"mask_token_id": CONFIG.mask_token_id, "target_layer_ids": list(CONFIG.target_layer_ids)}
    shape = raw | {"num_hidden_layers": 2, "architectures": ["DFlashDraftModel"], "dflash_config": extra}
    save_model(block, drafter, shape)
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopq")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(target / "tokenizer.json"))
    return target, drafter
