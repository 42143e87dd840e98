"""The target at work: one forward pass over packed rows, and the lossless rule that accepts drafts."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dcut.errors import InputError
from runtime.drafter import Drafter, Drafts, draw, open_drafter
from runtime.graphs import Graphs, Shape, knots, powers_of_two
from runtime.kv_cache import DeviceRows, GridCache, Rows, make_cache
from runtime.models import CausalLM, load_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Output(NamedTuple):
    """What a forward pass gives, row by row."""

    hidden: Tensor  # [rows, hidden], after the last norm
    features: Tensor | None  # [rows, taps * hidden]
    logits: Tensor  # [rows asked for, vocab]


class Verifier(Protocol):
    """The target over a cache of `num_slots` requests of up to `max_tokens` tokens."""

    num_slots: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]

    def forward(self, tokens: np.ndarray, rows: Rows, wanted: np.ndarray | None = None) -> Output:
        """Run tokens int64 [rows], keeping their keys and values; logits of the rows `wanted`, or of all."""
        ...

    def graph_tokens(self, rows: Rows) -> int | None:
        """Rows that a captured graph executes for these, padding included; None where no graph serves."""
        ...


class TorchVerifier:
    """A target on a device. On a CPU in float32 every row costs its own attention and nothing more.

    On CUDA, and wherever `padded` asks for it, steps run at the fixed shapes of `runtime.graphs`; prompts
    run as they are.
    """

    def __init__(
        self,
        model: CausalLM,
        num_slots: int,
        max_tokens: int,
        taps: tuple[int, ...] = (),
        draft_length: int = 15,
        padded: bool | None = None,
    ) -> None:
        """draft_length: drafts of a request at most. padded: None means on CUDA."""
        weight = model.lm_head.weight
        self.model, self.taps, self.device = model, taps, weight.device
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.eos_token_ids = model.config.eos_token_ids
        padded = weight.device.type == "cuda" if padded is None else padded
        self.cache = make_cache(model.config, num_slots, max_tokens, weight.device, weight.dtype, padded)
        self.graphs: Graphs | None = None
        if padded:
            sizes = powers_of_two(num_slots), knots(draft_length)
            self.graphs = Graphs(self._run_padded, weight.device, *sizes, max_tokens)

    @torch.inference_mode()
    def forward(self, tokens: np.ndarray, rows: Rows, wanted: np.ndarray | None = None) -> Output:
        if self.graphs and wanted is None and (shape := self.graphs.shape(rows)):
            return Output(*self.graphs.run(tokens, rows, shape))  # pyright: ignore[reportArgumentType]
        ids, positions = (torch.from_numpy(a).to(self.device) for a in (tokens, rows.positions))
        hidden, features = self.model(ids, positions, self.cache.attend(rows), self.taps)
        return Output(hidden, features, self.model.logits(hidden if wanted is None else hidden[wanted]))

    def graph_tokens(self, rows: Rows) -> int | None:
        shape = self.graphs.shape(rows) if self.graphs else None
        return shape.rows if shape else None

    def _run_padded(self, ids: Tensor, rows: DeviceRows, shape: Shape) -> Output:
        assert isinstance(self.cache, GridCache), "fixed shapes need a cache on the grid"
        attend = self.cache.attend_grid(rows, shape.num_slots, shape.width, shape.longest)
        hidden, features = self.model(ids, rows.positions, attend, self.taps)
        return Output(hidden, features, self.model.logits(hidden))


class Verdict(NamedTuple):
    """What the target says to the drafts of a batch."""

    num_accepted: np.ndarray  # int64 [batch], accepted drafts, without the bonus token
    bonus_token: np.ndarray  # int64 [batch], the target's own token after them


def accept(
    logits: Tensor,
    drafts: Drafts,
    keep_depth: np.ndarray,
    temperatures: np.ndarray | None = None,
    uniforms: np.ndarray | None = None,
) -> Verdict:
    """Accept each request's longest good prefix of drafts, so that the output is the target's own.

    logits: [num_verify_tokens, vocab], keep_depth[i] + 1 rows a request: anchor, then drafts.
    temperatures: [batch], 0 for greedy; None: all greedy. uniforms: [batch, width + 1] in [0, 1): one a
    draft, then one for the bonus token; needed where any temperature is above 0.

    Greedy: a draft is right if it is the target's likeliest token. Sampled: draft d is accepted with
    probability min(1, p(d) / q(d)), else the token comes from max(p - q, 0), normalised (Leviathan et al.
    2023). q is what d was drawn from, or certainty of d where it was not drawn but chosen. This is exact if
    whether a draft is kept does not depend on which token was drawn there or later: hence rankings use the
    largest probability of a distribution, never that of the drawn token, and sampled drafts need a drafter
    whose distributions do not follow its draws.
    """
    counts = keep_depth + 1
    first = np.cumsum(counts) - counts
    width = int(keep_depth.max(initial=0))
    kept = np.arange(width) < keep_depth[:, None]  # [batch, width]
    row = np.minimum(first[:, None] + np.arange(width), len(logits) - 1)  # that judges draft k of request i
    best = logits.argmax(-1).cpu().numpy()
    good = kept & (best[row] == drafts.tokens[:, :width])
    if temperatures is None or not temperatures.any():
        num_accepted = np.cumprod(good, axis=1).sum(axis=1)
        return Verdict(num_accepted, best[first + num_accepted])
    assert uniforms is not None, "sampling needs uniforms"

    device, sampled = logits.device, np.flatnonzero(temperatures > 0)
    heat = np.repeat(np.where(temperatures > 0, temperatures, 1.0), counts)
    p = (logits.float() / torch.from_numpy(heat).to(device, torch.float32)[:, None]).softmax(-1)
    at, proposed = (torch.from_numpy(x).to(device) for x in (row, drafts.tokens[:, :width]))
    p_draft = p[at, proposed]
    q_draft = torch.ones_like(p_draft)
    if drafts.probs is not None:
        q_draft = drafts.probs[:, :width].gather(2, proposed[..., None])[..., 0]
    chance = torch.from_numpy(np.ascontiguousarray(uniforms[:, :width])).to(device)
    lucky = kept & (chance * q_draft < p_draft).cpu().numpy()
    good[sampled] = lucky[sampled]
    num_accepted = np.cumprod(good, axis=1).sum(axis=1)
    bonus_token = best[first + num_accepted]

    left = p[torch.from_numpy((first + num_accepted)[sampled]).to(device)]  # [sampled, vocab]
    refused = np.flatnonzero(num_accepted[sampled] < keep_depth[sampled])
    if len(refused):
        request = sampled[refused]
        k = num_accepted[request]
        if drafts.probs is None:
            q = torch.nn.functional.one_hot(
                torch.from_numpy(drafts.tokens[request, k]).to(device), p.shape[-1]
            ).to(p.dtype)
        else:
            q = drafts.probs[torch.from_numpy(request).to(device), torch.from_numpy(k).to(device)]
        rest = (left[refused] - q).clamp(min=0)
        left[refused] = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left[refused])
    last = torch.from_numpy(np.ascontiguousarray(uniforms[sampled, -1])).to(device)
    bonus_token[sampled] = draw(left, last).cpu().numpy()
    return Verdict(num_accepted, bonus_token)


def open_target(directory: str | Path, device: str = "cpu", dtype: str = "float32") -> CausalLM:
    """The target in a local Hugging Face directory; InputError where it holds none that can be run."""
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    try:
        kind = torch.device(device).type
        usable = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    except RuntimeError:
        usable = False
    if not usable:
        raise InputError(f"device {device!r} is not here: use cpu")
    try:
        return load_target(Path(directory), device, DTYPES[dtype])
    except (ValueError, FileNotFoundError, KeyError, RuntimeError) as error:
        raise InputError(f"target {directory}: {error}") from error


def open_pair(
    target: str | Path,
    drafter: str | Path,
    num_slots: int,
    max_context: int,
    device: str = "cpu",
    dtype: str = "float32",
    draft_length: int | None = None,
    padded: bool | None = None,
) -> tuple[TorchVerifier, Drafter]:
    """A target and its drafter, ready for an engine of up to `num_slots` requests of `max_context` tokens.

    drafter: a directory or "ngram"; draft_length, padded: as for open_drafter and TorchVerifier. Raises
    InputError on directories that hold no models of a kind that is known, or that do not fit.
    """
    model = open_target(target, device, dtype)
    proposer = open_drafter(drafter, model, num_slots, max_context, draft_length, padded)
    room, longest = max_context + proposer.draft_length, proposer.draft_length
    return TorchVerifier(model, num_slots, room, proposer.taps, longest, padded), proposer
