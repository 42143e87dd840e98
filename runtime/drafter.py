"""Who proposes tokens: DFlash, EAGLE-3, MTP, a draft model or an n-gram look-up, behind one Protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dcut.errors import InputError
from runtime.graphs import Graphs, Shape, powers_of_two
from runtime.kv_cache import DeviceRows, GridCache, KVCache, Rows, make_cache
from runtime.models import MTP, CausalLM, DFlash, Eagle3, load_drafter

MOST_WAITING = 2**28  # bytes of target output that wait for the drafter before it takes them in unasked


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens that the target has run over and that are there to stay, row by row."""

    slots: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    tokens: np.ndarray  # int64 [rows]
    next_tokens: np.ndarray  # int64 [rows], the token that follows each in the text
    hidden: Tensor  # [rows, hidden], after the target's last norm
    features: Tensor | None  # [rows, taps * hidden], residual stream after the tapped layers

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        """Memory of hidden states and features."""
        return self.hidden.nbytes + (0 if self.features is None else self.features.nbytes)

    def take(self, index: np.ndarray) -> "Seen":
        """The rows that `index` names, in its order."""
        return Seen(
            self.slots[index],
            self.positions[index],
            self.tokens[index],
            self.next_tokens[index],
            self.hidden[index],
            None if self.features is None else self.features[index],
        )

    @staticmethod
    def join(parts: Sequence["Seen"]) -> "Seen":
        """All rows of `parts`, one after another."""
        if len(parts) == 1:
            return parts[0]
        features = [part.features for part in parts if part.features is not None]
        return Seen(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.next_tokens for part in parts]),
            torch.cat([part.hidden for part in parts]),
            torch.cat(features) if features else None,
        )


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a drafter proposes for a batch."""

    tokens: np.ndarray  # int64 [batch, width]
    confidences: np.ndarray  # float32 [batch, width], the LARGEST probability of each draft distribution
    probs: Tensor | None = None  # [batch, width, vocab], what the tokens were drawn from; None: the largest

    @classmethod
    def none(cls, batch: int) -> "Drafts":
        """No drafts for a batch: a step of plain decoding."""
        return cls(np.zeros((batch, 0), np.int64), np.zeros((batch, 0), np.float32))


class Drafter(Protocol):
    """Proposes up to `draft_length` tokens after the anchor of each request.

    `observe` hands over what the target ran over; it is cheap as the work waits for the next `draft`, so
    plain decoding pays nothing and drafting can resume at any step. A drafter is `parallel` if its
    distributions do not depend on tokens drawn in the same step; only then may drafts be sampled: a
    budget that sees how the draw went on would bias the output (see `runtime.verifier.accept`).
    """

    draft_length: int
    parallel: bool

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose output it reads."""
        ...

    def observe(self, seen: Seen, at_once: bool = False) -> None:
        """Tokens that the target ran over, each request's in order and without a gap.

        at_once: take them in now; nothing else of their requests waits.
        """
        ...

    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        """Propose `width` tokens after each anchor, all arrays [batch].

        lengths: tokens before the anchor, all of which were observed. temperatures [batch] with uniforms
        [batch, width] in [0, 1) draw the drafts; without them the likeliest token is proposed.
        """
        ...

    def catch_up(self) -> None:
        """Take in now what was observed."""
        ...

    def release(self, slot: int) -> None:
        """Forget what waits for a slot whose request is gone."""
        ...

    def fork(self, source: int, slots: np.ndarray, length: int) -> None:
        """Make `slots` know what slot `source` knows of its first `length` tokens."""
        ...


class _ModelDrafter:
    """What the drafters with a model share: rows that wait, and a cache of what was taken in."""

    parallel = False

    def __init__(
        self,
        model: Any,
        target: CausalLM,
        draft_length: int,
        num_slots: int,
        max_tokens: int,
        padded: bool = False,
    ) -> None:
        self.model, self.target, self.draft_length = model, target, draft_length
        weight = next(model.parameters())
        self.device = weight.device
        # Drafts are written behind the context and overwritten by the next one.
        room = max_tokens + draft_length + 1
        self.cache: KVCache = make_cache(model.config, num_slots, room, weight.device, weight.dtype, padded)
        self.waiting: list[Seen] = []
        self.waiting_bytes = 0
        self.released: dict[int, int] = {}  # slot -> how many parts then waited; its rows in them are void

    @property
    def taps(self) -> tuple[int, ...]:
        return getattr(self.model, "taps", ())

    def observe(self, seen: Seen, at_once: bool = False) -> None:
        if at_once:
            self._take_in(seen)
            return
        self.waiting.append(seen)
        self.waiting_bytes += seen.nbytes
        if self.waiting_bytes > MOST_WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        waiting, released = self.waiting, self.released
        self.waiting, self.waiting_bytes, self.released = [], 0, {}
        if not waiting:
            return
        seen = Seen.join(waiting)
        if released:
            part = np.repeat(np.arange(len(waiting)), [len(part) for part in waiting])
            first = np.zeros(self.cache.num_slots, np.int64)
            first[list(released)] = list(released.values())
            seen = seen.take(np.flatnonzero(part >= first[seen.slots]))
        if len(seen):
            self._take_in(seen)

    def release(self, slot: int) -> None:
        self.released[slot] = len(self.waiting)

    def fork(self, source: int, slots: np.ndarray, length: int) -> None:
        self.catch_up()
        self.cache.copy(source, slots, length)

    def _take_in(self, seen: Seen) -> None:
        raise NotImplementedError

    def _ids(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class DFlashDrafter(_ModelDrafter):
    """A whole block in one pass: the anchor and masks look at one another and at the cached context."""

    parallel = True
    model: DFlash

    def __init__(
        self, model: DFlash, target: CausalLM, num_slots: int, max_tokens: int, padded: bool | None = None
    ) -> None:
        """padded: as for `runtime.verifier.TorchVerifier`."""
        padded = target.lm_head.weight.device.type == "cuda" if padded is None else padded
        super().__init__(model, target, model.config.draft_length, num_slots, max_tokens, padded)
        self.graphs: Graphs | None = None
        if padded:
            sizes, width = powers_of_two(num_slots), self.draft_length + 1
            self.graphs = Graphs(self._run_padded, self.device, sizes, (width,), self.cache.max_tokens)

    @torch.inference_mode()
    def _take_in(self, seen: Seen) -> None:
        rows = Rows(seen.slots, seen.positions, seen.positions, seen.positions)
        assert seen.features is not None, "the target was not tapped"
        for layer, (k, v) in enumerate(self.model.context(seen.features, self._ids(seen.positions))):
            self.cache.write(layer, rows, k, v)

    @torch.inference_mode()
    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        self.catch_up()
        rows = Rows.blocks(slots, lengths, self.draft_length + 1)
        block = np.full((len(slots), self.draft_length + 1), self.model.config.mask_token_id)
        block[:, 0] = anchors
        shape = self.graphs.shape(rows) if self.graphs else None
        if self.graphs and shape:
            (hidden,) = self.graphs.run(block.ravel(), rows, shape)
            assert hidden is not None, "a block has an output"
        else:
            attend = self.cache.attend(rows)
            hidden = self.model(
                self.target.embed(self._ids(block.ravel())), self._ids(rows.positions), attend
            )
        # The masks after `width` were computed, for they shape the ones before, but are not projected.
        hidden = hidden.unflatten(0, block.shape)[:, 1 : width + 1]
        return propose(self.target.logits(hidden), temperatures, uniforms)

    def _run_padded(self, ids: Tensor, rows: DeviceRows, shape: Shape) -> tuple[Tensor]:
        assert isinstance(self.cache, GridCache), "fixed shapes need a cache on the grid"
        attend = self.cache.attend_grid(rows, shape.num_slots, shape.width, shape.longest)
        return (self.model(self.target.embed(ids), rows.positions, attend),)


class HeadDrafter(_ModelDrafter):
    """EAGLE-3 and MTP: a small head fed with the target's state, then with its own, token after token.

    Row t joins the token at t + 1 with the state at t and predicts the token at t + 2, so the row before
    the anchor gives the first draft. Its output is kept for every observed row.
    """

    model: Eagle3 | MTP

    def __init__(
        self, model: Eagle3 | MTP, target: CausalLM, draft_length: int, num_slots: int, max_tokens: int
    ) -> None:
        super().__init__(model, target, draft_length, num_slots, max_tokens)
        shape = num_slots, max_tokens, model.config.hidden_size
        self.states = torch.zeros(shape, device=self.device, dtype=next(model.parameters()).dtype)

    @torch.inference_mode()
    def _take_in(self, seen: Seen) -> None:
        order, rows = _by_request(seen)
        seen = seen.take(order)
        state = self.model.fuse(seen.hidden, seen.features)
        out = self._run(seen.next_tokens, state, rows)
        self.states[self._ids(seen.slots), self._ids(seen.positions)] = out

    def _run(self, tokens: np.ndarray, state: Tensor, rows: Rows) -> Tensor:
        embedded = self.target.embed(self._ids(tokens))
        return self.model(embedded, state, self._ids(rows.positions), self.cache.attend(rows))

    def fork(self, source: int, slots: np.ndarray, length: int) -> None:
        super().fork(source, slots, length)
        self.states[slots, :length] = self.states[source, :length].clone()

    @torch.inference_mode()
    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        self.catch_up()
        state = self.states[self._ids(slots), self._ids(lengths - 1)]
        parts = [propose(self.model.logits(state)[:, None])]
        for k in range(width - 1):
            rows = Rows.of(slots, lengths + k, np.ones_like(slots))
            state = self._run(parts[-1].tokens[:, 0], state, rows)
            parts.append(propose(self.model.logits(state)[:, None]))
        return _beside(parts)


class ModelDrafter(_ModelDrafter):
    """A small language model of its own, decoding greedily from the anchor."""

    model: CausalLM

    @torch.inference_mode()
    def _take_in(self, seen: Seen) -> None:
        order, rows = _by_request(seen)
        self._run(seen.tokens[order], rows)

    def _run(self, tokens: np.ndarray, rows: Rows) -> Tensor:
        return self.model(self._ids(tokens), self._ids(rows.positions), self.cache.attend(rows))[0]

    @torch.inference_mode()
    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        self.catch_up()
        parts: list[Drafts] = []
        tokens = anchors
        for k in range(width):
            hidden = self._run(tokens, Rows.of(slots, lengths + k, np.ones_like(slots)))
            parts.append(propose(self.model.logits(hidden)[:, None]))
            tokens = parts[-1].tokens[:, 0]
        return _beside(parts)


class NGramDrafter:
    """Copies what followed the last occurrence of the newest tokens, the longest match of 1..4 first.

    There is no distribution behind it: a match of n tokens counts as confidence n / (n + 1) for every
    draft, no match and nothing left to copy as 0.
    """

    parallel = False
    longest_match = 4

    def __init__(self, draft_length: int, num_slots: int, max_tokens: int) -> None:
        self.draft_length = draft_length
        self.texts = np.zeros((num_slots, max_tokens + 1), np.int64)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def observe(self, seen: Seen, at_once: bool = False) -> None:
        self.texts[seen.slots, seen.positions] = seen.tokens

    def catch_up(self) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def fork(self, source: int, slots: np.ndarray, length: int) -> None:
        self.texts[slots, :length] = self.texts[source, :length]

    def draft(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        anchors: np.ndarray,
        width: int,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> Drafts:
        drafts = Drafts(np.zeros((len(slots), width), np.int64), np.zeros((len(slots), width), np.float32))
        for i, (slot, length, anchor) in enumerate(zip(slots, lengths, anchors, strict=True)):
            text = self.texts[slot, : length + 1]
            text[length] = anchor
            match, copied = self._look_up(text, width)
            drafts.tokens[i, : len(copied)] = copied
            drafts.confidences[i, : len(copied)] = match / (match + 1)
        return drafts

    def _look_up(self, text: np.ndarray, width: int) -> tuple[int, np.ndarray]:
        """Length of the match, and the tokens that followed its last occurrence before the end."""
        for match in range(min(self.longest_match, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], match)
            found = np.flatnonzero((windows == text[-match:]).all(axis=1))
            if len(found):
                start = found[-1] + match
                return match, text[start : start + width]
        return 0, text[:0]


def _by_request(seen: Seen) -> tuple[np.ndarray, Rows]:
    """The order that puts each request's tokens together and in sequence, and the rows that they then are."""
    order = np.lexsort((seen.positions, seen.slots))
    slots, first, counts = np.unique(seen.slots[order], return_index=True, return_counts=True)
    return order, Rows.of(slots, seen.positions[order[first]], counts)


def propose(
    logits: Tensor, temperatures: np.ndarray | None = None, uniforms: np.ndarray | None = None
) -> Drafts:
    """Drafts from logits [batch, width, vocab]: the likeliest tokens, or drawn where uniforms are given.

    The confidence is always the largest probability at temperature 1, which no draw can change.
    """
    top, tokens = logits.float().max(-1)
    confidences = (top - logits.float().logsumexp(-1)).exp().clamp(max=1).cpu().numpy()
    if uniforms is None or temperatures is None:
        return Drafts(tokens.cpu().numpy(), confidences)
    heat = torch.from_numpy(temperatures).to(logits.device, torch.float32)[:, None, None]
    probs = (logits.float() / heat.clamp(min=1e-6)).softmax(-1)
    drawn = draw(probs, torch.from_numpy(uniforms).to(logits.device))
    tokens = torch.where(heat[..., 0] > 0, drawn, tokens)
    # A greedy request's distribution is a single token.
    single = torch.nn.functional.one_hot(tokens, logits.shape[-1]).to(probs.dtype)
    return Drafts(tokens.cpu().numpy(), confidences, torch.where(heat > 0, probs, single))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token in which each uniform [...] of [0, 1) falls; probs [..., vocab] need not sum to 1."""
    heights = probs.double().cumsum(-1)
    marks = uniforms.double()[..., None] * heights[..., -1:]
    return torch.searchsorted(heights, marks, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


def _beside(parts: list[Drafts]) -> Drafts:
    """Drafts of one token each, one after another."""
    return Drafts(
        np.concatenate([p.tokens for p in parts], axis=1),
        np.concatenate([p.confidences for p in parts], axis=1),
    )


def open_drafter(
    spec: str | Path,
    target: CausalLM,
    num_slots: int,
    max_tokens: int,
    draft_length: int | None = None,
    padded: bool | None = None,
) -> Drafter:
    """The drafter in a local Hugging Face directory, or "ngram".

    draft_length: for drafters that can go on as long as asked (7 unless given); a DFlash block is fixed.
    Raises InputError where the directory holds no drafter that fits the target.
    """
    if str(spec) == "ngram":
        return NGramDrafter(draft_length or 7, num_slots, max_tokens)
    weight = target.lm_head.weight
    try:
        model = load_drafter(Path(spec), target, weight.device, weight.dtype)
    except (ValueError, FileNotFoundError, KeyError, RuntimeError) as error:
        raise InputError(f"drafter {spec}: {error}") from error
    if isinstance(model, DFlash):
        if draft_length not in (None, model.config.draft_length):
            raise InputError(
                f"drafter {spec} drafts blocks of {model.config.draft_length}, not {draft_length}"
            )
        return DFlashDrafter(model, target, num_slots, max_tokens, padded)
    kind = ModelDrafter if isinstance(model, CausalLM) else HeadDrafter
    return kind(model, target, draft_length or 7, num_slots, max_tokens)  # pyright: ignore[reportArgumentType]
