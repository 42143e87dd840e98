"""Qwen3 and Llama targets and the drafters that read them, under the weight names of public checkpoints.

One definition serves training and serving. A module never decides how to attend: its forward takes

    attend(layer, q, k, v) -> out        q, out [*tokens, num_heads, head_dim]
                                         k, v   [*tokens, num_kv_heads, head_dim], rotary already applied

and `tokens` may be any leading shape: [batch, length] for a dense batch, [num_tokens] for ragged rows packed
one after another. Training passes `causal`; an engine passes a closure over its key-value cache.
Submodules carry the names found in public Hugging Face checkpoints, so loading is `load_state_dict`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model; the fields keep their names from `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    model_type: str = "qwen3"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 0
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int | None = None

    @property
    def draft_length(self) -> int:
        """Drafts per DFlash block: the anchor takes one of its `block_size` places."""
        return self.block_size - 1

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`; ValueError on anything but Qwen3 or Llama."""
        model_type = raw.get("model_type")
        if model_type not in ("qwen3", "llama"):
            raise ValueError(f"model_type {model_type!r}: only qwen3 and llama are supported")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3"):
            raise ValueError(f"rope scaling {rope!r}: only default and llama3 are supported")
        if raw.get("use_sliding_window"):
            raise ValueError("use_sliding_window: sliding-window attention is not supported")
        eos = raw.get("eos_token_id")
        dflash = raw.get("dflash_config") or {}
        # EAGLE-3 configs name the layer that reads the tapped stream, DFlash configs the one that wrote it.
        eagle = [index - 1 for index in raw.get("eagle_aux_hidden_state_layer_ids") or ()]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
            rope_scaling=dict(rope) if rope.get("rope_type", rope.get("type")) == "llama3" else None,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            model_type=model_type,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            block_size=raw.get("block_size", 0),
            mask_token_id=dflash.get("mask_token_id", 0),
            target_layer_ids=tuple(dflash.get("target_layer_ids") or eagle),
            draft_vocab_size=raw.get("draft_vocab_size"),
        )


class Rotary(nn.Module):
    """Rotary position angles, half-split layout (llama3 frequency scaling when the config asks for it)."""

    inverse_frequency: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        if config.rope_scaling:
            frequency = _llama3_frequencies(frequency, config.rope_scaling)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [*tokens] -> cos, sin, each [*tokens, 1, head_dim / 2] (the 1 spans the heads)."""
        angles = (positions[..., None].float() * self.inverse_frequency).unsqueeze(-2)
        return angles.cos(), angles.sin()


def _llama3_frequencies(frequency: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Stretch wavelengths beyond the original context, blending in between (Llama 3.1's published rule)."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (blend + (1 - blend) / scaling["factor"])


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [*tokens, heads, head_dim] by its positions' angles, pairing dims i and i + head_dim / 2."""
    cos, sin = (angle.to(x.dtype) for angle in rotary)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention around a pluggable `attend`; Qwen3 normalises q and k per head."""

    def __init__(self, config: ModelConfig, input_size: int | None = None) -> None:
        super().__init__()
        size, head_dim = input_size or config.hidden_size, config.head_dim
        width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def query(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x [*tokens, input_size] -> q [*tokens, num_heads, head_dim]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)

    def key_value(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [*tokens, input_size] -> k, v, each [*tokens, num_kv_heads, head_dim]."""
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        out = attend(layer, self.query(x, rotary), *self.key_value(x, rotary))
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then the feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(layer, self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embeddings, layers and the last norm: the `model.` part of a causal language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A Qwen3 or Llama language model: the target, or a small autoregressive draft model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = Rotary(config)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [*tokens] -> embeddings [*tokens, hidden]."""
        return self.model.embed_tokens(ids)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [*tokens] -> hidden after the last norm [*tokens, hidden], and the features:

        the residual stream after each layer in `taps`, side by side [*tokens, len(taps) * hidden], or None.
        `logits(hidden)` is separate so that a caller may project only the rows it needs.
        """
        x, rotary, tapped = self.embed(ids), self.rotary(positions), {}
        for index, layer in enumerate(self.model.layers):
            x = layer(index, x, rotary, attend)
            if index in taps:
                tapped[index] = x
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None
        return self.model.norm(x), features

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [*rows, hidden_size] -> logits [*rows, vocab_size]."""
        return self.lm_head(hidden)


class DFlash(nn.Module):
    """DFlash block drafter: an anchor and mask tokens, denoised in one non-causal pass over target features.

    Every context token enters through its target features alone: `context` fuses them and returns the keys
    and values each layer attends to (cache these). The context of a block is strictly before its anchor,
    whose own features do not exist yet. The mask at place k is turned into the token at anchor + k.
    Embeddings and head are the target's: `target.embed(block)` in, `target.logits(out)` back.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """features [*tokens, taps * hidden], positions [*tokens] -> k, v [*tokens, kv_heads, dim] of each."""
        fused, rotary = self.hidden_norm(self.fc(features)), self.rotary(positions)
        layers = cast(list[DecoderLayer], self.layers)
        return [layer.self_attn.key_value(fused, rotary) for layer in layers]

    def block(self, anchors: Tensor) -> Tensor:
        """anchors [*blocks] -> ids [*blocks, block_size]: the anchor, then masks."""
        masks = anchors.new_full((*anchors.shape, self.config.draft_length), self.config.mask_token_id)
        return torch.cat((anchors[..., None], masks), dim=-1)

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Embedded blocks and positions [*blocks, block_size, ...] -> hidden [*blocks, block_size, hidden].

        `attend` must join the block's own keys (no causal mask) to the cached context before the anchor.
        """
        x, rotary = embeddings, self.rotary(positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, rotary, attend)
        return self.norm(x)


class EagleLayer(nn.Module):
    """EAGLE-3's layer: attention reads the token embedding beside the hidden state (twice the width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeddings: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        beside = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(x)), dim=-1)
        x = x + self.self_attn(0, beside, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """EAGLE-3 head: one autoregressive layer over fused target features, with a head of its own.

    Row t holds the token at t + 1 and the state at t, and predicts the token at t + 2. The state is
    `fuse(features)` where the target has run, and the head's own earlier output after that.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.midlayer = EagleLayer(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.d2t: Tensor | None = None
        if rows != config.vocab_size:  # draft id + d2t[draft id] is the target's id
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.long))
        self.rotary = Rotary(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def fuse(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """The target's hidden (unused) and features [*tokens, taps * hidden] -> state [*tokens, hidden]."""
        return self.fc(features)

    def forward(self, embeddings: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Token embeddings and states [*tokens, hidden] -> the next states [*tokens, hidden]."""
        return self.midlayer(embeddings, state, self.rotary(positions), attend)

    def logits(self, state: Tensor) -> Tensor:
        """states [*rows, hidden] -> logits [*rows, vocab], -inf outside a reduced draft vocabulary."""
        logits = self.lm_head(self.norm(state))
        if self.d2t is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        full[..., torch.arange(len(self.d2t), device=logits.device) + self.d2t] = logits
        return full


class MTPModule(nn.Module):
    """The `mtp.` part of a multi-token-prediction head, as Qwen3-Next names it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTP(nn.Module):
    """Multi-token-prediction head: like `Eagle3`, but on the target's last hidden state and its own head.

    Embedding and head are the target's; the state fed back is the output after `mtp.norm`.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, lm_head: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.mtp = MTPModule(config)
        self.rotary = Rotary(config)
        self._head = [lm_head]  # in a list: shared, so neither registered nor saved here

    def fuse(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """The target's hidden after its last norm [*tokens, hidden] is the state as it stands."""
        return hidden

    def forward(self, embeddings: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Token embeddings and states [*tokens, hidden] -> the next states [*tokens, hidden]."""
        beside = (self.mtp.pre_fc_norm_embedding(embeddings), self.mtp.pre_fc_norm_hidden(state))
        x, rotary = self.mtp.fc(torch.cat(beside, dim=-1)), self.rotary(positions)
        for index, layer in enumerate(self.mtp.layers):
            x = layer(index, x, rotary, attend)
        return self.mtp.norm(x)

    def logits(self, state: Tensor) -> Tensor:
        """states [*rows, hidden] -> logits [*rows, vocab]."""
        return self._head[0](state)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Plain grouped-query attention, faster on a CPU at small sizes than the fused kernels.

    q [batch, queries, heads, dim], k, v [batch, keys, kv_heads, dim], visible [batch or 1, queries, keys]
    (True where a query may look; None: everywhere) -> [batch, queries, heads, dim].
    """
    batch, queries, heads, dim = q.shape
    groups = k.shape[2]
    # Queries of one key-value head are stacked, so the product is one matmul per key-value head.
    grouped = q.view(batch, queries, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ k.permute(0, 2, 3, 1) * dim**-0.5
    scores = scores.unflatten(2, (heads // groups, queries))
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype).flatten(2, 3)
    out = (weights @ v.transpose(1, 2)).unflatten(2, (heads // groups, queries))
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, dim)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend` for a dense batch from position 0: each token sees itself and what came before."""
    length = q.shape[1]
    visible = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
    return attention(q, k, v, visible)


Drafter = DFlash | Eagle3 | MTP | CausalLM


def read_config(directory: Path) -> dict[str, Any]:
    """The raw `config.json` of a local Hugging Face directory."""
    return json.loads((directory / "config.json").read_text())


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's `*.safetensors`, sharded or not.

    FileNotFoundError when there are none, ValueError for a damaged file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: no *.safetensors file")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"damaged weights: {error}") from error


def load_target(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> CausalLM:
    """A Qwen3 or Llama model from a local Hugging Face directory, in evaluation mode."""
    model = CausalLM(ModelConfig.from_dict(read_config(directory)))
    return _filled(model, directory, device, dtype)


def load_drafter(
    directory: Path,
    target: CausalLM,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """The drafter in `directory`, its kind told by `architectures`; ValueError when it does not fit."""
    raw = read_config(directory)
    config = ModelConfig.from_dict(raw)
    architecture = raw["architectures"][0]
    if config.vocab_size != target.config.vocab_size:
        raise ValueError(f"{directory}: vocabulary {config.vocab_size}, target's {target.config.vocab_size}")
    if architecture == "DFlashDraftModel":
        model = DFlash(config)
    elif "Eagle3" in architecture:
        layers = target.config.num_hidden_layers  # the taps of the EAGLE-3 paper, unless the config has some
        taps = config.target_layer_ids or (1, layers // 2 - 1, layers - 4)
        model = Eagle3(replace(config, target_layer_ids=taps))
    elif "MTP" in architecture:
        model = MTP(config, target.lm_head)
    else:
        return load_target(directory, device, dtype)
    return _filled(model, directory, device, dtype)


def _filled(model: M, directory: Path, device: str | torch.device, dtype: torch.dtype) -> M:
    weights = read_weights(directory)
    if isinstance(model, CausalLM) and model.config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    if isinstance(model, Eagle3):  # published heads carry the target's embedding and the inverse of d2t
        for spare in ("embed_tokens.weight", "t2d", *(("d2t",) if model.d2t is None else ())):
            weights.pop(spare, None)
    model.load_state_dict(weights)
    frequencies = [part.inverse_frequency for part in model.modules() if isinstance(part, Rotary)]
    model = model.to(device, dtype).eval()
    for part in model.modules():
        if isinstance(part, Rotary):  # angles stay float32, whatever the weights are
            part.inverse_frequency = frequencies.pop(0).to(device)
    return model


def save_model(model: nn.Module, directory: Path, config: dict[str, Any]) -> None:
    """Write bf16 `model.safetensors` and `config.json`; a tied head is not written twice."""
    directory.mkdir(parents=True, exist_ok=True)
    tied = isinstance(model, CausalLM) and model.config.tie_word_embeddings
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
