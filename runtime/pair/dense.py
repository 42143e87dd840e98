"""Dense passes over whole sequences: greedy text from the target, and drafts from every position at once.

Training reads the same passes as evaluation does, so that what is learned is what is measured.
A sequence is right-padded; row t is the token at position t. A draft made at anchor a knows the tokens up to
a and the target's features strictly before a (the anchor itself has not been through the target yet).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.models import MTP, CausalLM, DFlash, Eagle3, attention, causal


def pad(sequences: Sequence[Sequence[int]], value: int = 0) -> Tensor:
    """Token lists -> ids [len(sequences), longest], right-padded."""
    longest = max(map(len, sequences))
    return torch.tensor([[*tokens, *[value] * (longest - len(tokens))] for tokens in sequences])


def distinct_4grams(tokens: list[int]) -> float:
    """Different 4-grams as a share of all of one text: 1 without repetition, near 0 in a loop."""
    grams = [tuple(tokens[index : index + 4]) for index in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


@torch.no_grad()
def generate(
    target: CausalLM, prompts: Sequence[Sequence[int]], max_tokens: int, end: int
) -> list[list[int]]:
    """Greedy continuations of one batch of prompts, each up to and including `end`, prompts not repeated."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = pad(prompts)
    width = ids.shape[1] + max_tokens
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache[layer] = (F.pad(k, (0, 0, 0, 0, 0, max_tokens)), F.pad(v, (0, 0, 0, 0, 0, max_tokens)))
        return causal(layer, q, k, v)

    def step(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache[layer]
        rows, used = torch.arange(len(q)), int(lengths.max()) + 1
        keys[rows, lengths], values[rows, lengths] = k[:, 0], v[:, 0]
        return attention(q, keys[:, :used], values[:, :used], visible[:, None, :used])

    hidden, _ = target(ids, torch.arange(ids.shape[1]).expand_as(ids), prefill)
    newest = target.logits(hidden[torch.arange(len(prompts)), lengths - 1]).argmax(-1)
    out = [[token] for token in newest.tolist()]
    running = torch.arange(len(prompts))  # which answer each row of the batch continues
    for _ in range(max_tokens - 1):
        keep = newest != end
        if not keep.all():
            newest, lengths, running = newest[keep], lengths[keep], running[keep]
            cache.update({layer: (k[keep], v[keep]) for layer, (k, v) in cache.items()})
        if not len(running):
            break
        visible = torch.arange(width) <= lengths[:, None]
        hidden, _ = target(newest[:, None], lengths[:, None], step)
        newest = target.logits(hidden[:, 0]).argmax(-1)
        lengths = lengths + 1
        for answer, token in zip(running.tolist(), newest.tolist(), strict=True):
            out[answer].append(token)
    return out


def scored(q: Tensor, k: Tensor) -> Tensor:
    """q [batch, queries, heads, dim], k [batch, keys, kv_heads, dim] -> products [batch, heads, q, k]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5


def weighed(weights: Tensor, v: Tensor) -> Tensor:
    """weights [batch, heads, queries, keys], v [batch, keys, kv_heads, dim] -> like q."""
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
    return (weights @ v.transpose(1, 2)).transpose(1, 2)


class BlockAttend:
    """`attend` for DFlash blocks: a block sees itself in full, and the context strictly before its anchor.

    anchors [batch, blocks]; context: per layer k, v [batch, length, kv_heads, dim]. Queries come as
    [batch, blocks, block_size, heads, dim].
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor) -> None:
        self.context = context
        before = torch.arange(context[0][0].shape[1]) < anchors[..., None]
        self.hidden = ~before[:, None, :, None]  # [batch, 1, blocks, 1, length]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, blocks, size = q.shape[:3]
        context_k, context_v = self.context[layer]
        far = scored(q.flatten(1, 2), context_k).unflatten(2, (blocks, size))
        far = far.masked_fill(self.hidden, float("-inf")).flatten(2, 3)
        near = scored(q.flatten(0, 1), k.flatten(0, 1)).unflatten(0, (batch, blocks)).transpose(1, 2)
        joint = torch.cat((far, near.flatten(2, 3)), dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
        far, near = joint.split((context_k.shape[1], size), dim=-1)
        near = near.unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        own = weighed(near, v.flatten(0, 1)).unflatten(0, (batch, blocks))
        return weighed(far, context_v).unflatten(1, (blocks, size)) + own


class RolloutAttend:
    """`attend` for rows that each go their own way after a common first step.

    In step 0 row t sees rows up to t. In a later step row t sees the same step-0 rows and, of each step
    since, its own row only: the drafts made from t. Works for training (true tokens) and drafting alike.
    """

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = self.kept.setdefault(layer, [])
        past.append((k, v))
        (first_k, first_v), *later = past
        repeat = q.shape[2] // k.shape[2]
        future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scores = [scored(q, first_k).masked_fill(future, float("-inf"))]
        for own, _ in later:
            product = (q * own.repeat_interleave(repeat, dim=2)).sum(-1) * q.shape[-1] ** -0.5
            scores.append(product.transpose(1, 2)[..., None])
        joint = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weighed(joint[..., : q.shape[1]], first_v)
        for index, (_, own) in enumerate(later):
            weight = joint[..., q.shape[1] + index].transpose(1, 2)[..., None]
            out = out + weight * own.repeat_interleave(repeat, dim=2)
        return out


def block_logits(drafter: DFlash, target: CausalLM, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Draft logits of DFlash for blocks at `anchors` [batch, blocks] -> [batch, blocks, draft_length, vocab].

    ids [batch, length] and features [batch, length, taps * hidden] of the whole sequences.
    """
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    attend = BlockAttend(drafter.context(features, positions), anchors)
    block = drafter.block(ids.gather(1, anchors))
    places = anchors[..., None] + torch.arange(drafter.config.block_size)
    hidden = drafter(target.embed(block), places, attend)
    return target.logits(hidden[:, :, 1:])


def rollout_logits(
    drafter: Eagle3 | MTP | CausalLM,
    target: CausalLM,
    ids: Tensor,
    hidden: Tensor,
    features: Tensor | None,
    steps: int,
    follow: bool,
) -> Iterator[Tensor]:
    """Logits of an autoregressive drafter, one draft depth at a time, from every row: [batch, rows, vocab].

    Row t (of length - 1) drafts from anchor t + 1; depth k is about the token at t + 2 + k. With `follow`
    the true tokens are fed (training); otherwise each row feeds on its own drafts (drafting).
    ids [batch, length]; hidden, features: the target's, of the whole sequences.
    """
    attend = RolloutAttend()
    alone = isinstance(drafter, CausalLM)  # reads tokens only, so it has a row for position 0 as well
    tokens = ids if alone else ids[:, 1:]
    state = hidden if alone else drafter.fuse(hidden, features)[:, :-1]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for depth in range(steps):
        if alone:
            state, _ = drafter(tokens, positions + depth, attend)
        else:
            state = drafter(target.embed(tokens), state, positions + depth, attend)
        logits = drafter.logits(state)
        yield logits[:, 1:] if alone else logits
        ahead = F.pad(ids[:, ids.shape[1] - tokens.shape[1] + 1 + depth :], (0, 1 + depth))
        tokens = ahead if follow else logits.argmax(-1)
