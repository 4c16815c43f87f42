"""The layers of the decoder, each a small module whose parameters carry Hugging Face's names.

RMSNorm (Zhang and Sennrich 2019), rotary embedding (Su et al. 2021), grouped-query attention (Ainslie et al.
2023), SwiGLU (Shazeer 2020), sliding window (Jiang et al. 2023), query and key norm (Henry et al. 2020).
Shapes: B texts, T new tokens, D width, H query heads, K key heads, d numbers per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from talkoot.model.config import Llama3Scaling, ModelConfig


class Cache:
    """Keys and values of the tokens seen so far, for generation; one per stage and batch of texts.

    ``length`` is the number of columns that every block has seen. Memory grows by doubling, so that appending one
    token costs a copy of one token.

    Args:
        padding: columns of padding in front of each text, int64 (B,), for texts of unlike length in one batch; None for
            none. A text's positions count from its first token, and no token looks at padding.
        room: columns to allocate at first, where the final length is known.
    """

    def __init__(self, padding: Tensor | None = None, room: int = 64) -> None:
        self.length = 0
        self.padding = padding
        self._room = room
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        self.carried: dict[int, Tensor] = {}  # what else a block of that slot remembers of each text, (B, ...)

    def append(self, slot: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new (B, K, T, d) keys and values behind the old ones and return all of them."""
        end = self.length + keys.shape[2]
        grown = tuple(
            self._with_room(old, new, end)
            for old, new in zip(self._slots.get(slot, (None, None)), (keys, values), strict=True)
        )
        self._slots[slot] = (grown[0], grown[1])
        return grown[0][:, :, :end], grown[1][:, :, :end]

    def _with_room(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        if old is None or old.shape[2] < end:
            columns = self._room if end <= self._room else 2 * end
            room = new.new_empty(*new.shape[:2], columns, new.shape[3])
            if old is not None:
                room[:, :, : self.length] = old[:, :, : self.length]
            old = room
        old[:, :, self.length : end] = new
        return old

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, int64: fewer (some texts have ended), or some of them several times (one prompt, many
        continuations)."""
        self._slots = {
            slot: (self._selected(keys, rows), self._selected(values, rows))
            for slot, (keys, values) in self._slots.items()
        }
        self.carried = {slot: value[rows] for slot, value in self.carried.items()}
        if self.padding is not None:
            self.padding = self.padding[rows]

    def _selected(self, old: Tensor, rows: Tensor) -> Tensor:
        room = old.new_empty(len(rows), *old.shape[1:])
        room[:, :, : self.length] = old[:, :, : self.length][rows]
        return room


@dataclass(slots=True)
class Positions:
    """What all blocks of one forward pass share: rotary tables, (T, d/2) or (B, 1, T, d/2) where texts are padded in
    front, and attention masks by window."""

    past: int
    length: int
    cos: Tensor
    sin: Tensor
    padding: Tensor | None = None
    scores: Tensor | None = None  # of a mixture's experts, (B, T, D), where they follow from the tokens alone
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @classmethod
    def after(cls, past: int, length: int, frequencies: Tensor, padding: Tensor | None = None) -> Positions:
        """Tables for ``length`` tokens that follow ``past`` cached ones, behind ``padding`` columns of each row."""
        steps = torch.arange(past, past + length, device=frequencies.device, dtype=torch.float32)
        if padding is not None:
            steps = (steps - padding[:, None, None]).clamp(min=0)
        angles = steps[..., None] * frequencies
        return cls(past, length, angles.cos(), angles.sin(), padding)

    def mask(self, window: int | None) -> Tensor | None:
        """True where a query may look, (T, past + T) or (B, 1, T, past + T); None where plain causal order says it."""
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        total = self.past + self.length
        plain = (window is None or total <= window) and (self.past == 0 or self.length == 1)
        if plain and self.padding is None:
            return None
        keys = torch.arange(total, device=self.cos.device)
        queries = keys[self.past :, None]
        seen = keys <= queries
        if window is not None:
            seen = seen & (keys > queries - window)
        if self.padding is None:
            return seen
        # Padding sees itself, because a query that sees nothing has no softmax; nobody reads what it becomes.
        return (seen & (keys >= self.padding[:, None, None]) | (keys == queries))[:, None]


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotated pair, (d/2,) in float32, with the configured scaling applied."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    plain = 1.0 / config.rope_theta**steps
    rule = config.rope_scaling
    if rule is None:
        return plain
    if not isinstance(rule, Llama3Scaling):
        return plain / rule.factor
    turns = rule.original_positions * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rule.factor


def rotate(x: Tensor, positions: Positions) -> Tensor:
    """Turn the pairs (x[i], x[i + d/2]) of (B, H, T, d) by their position's angle."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = positions.cos, positions.sin
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide by the root mean square, in float32 whatever the input, and scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention of one block: (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim, self.window = config.head_dim, config.window(index)
        self.grouped = config.heads != config.kv_heads
        self.q_proj = nn.Linear(config.width, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), positions)
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), positions)
        values = self._heads(self.v_proj(x))
        if cache is not None:
            keys, values = cache.append(slot, keys, values)
        mask = positions.mask(self.window)
        causal = mask is None and positions.past == 0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated feed-forward layer: (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then feed-forward, each normalised first and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, cache, slot)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    """Tokens (B, T) to activations (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Final norm and projection: activations (B, T, D) to float32 logits (B, T, vocabulary)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x)).float()


def build_layer(config: ModelConfig, index: int) -> nn.Module:
    """Layer ``index`` of the list, on torch's current default device and type, values not yet set."""
    if index == 0:
        return Embedding(config)
    return Head(config) if index == config.layers + 1 else Block(config, index)


def canonical_name(config: ModelConfig, index: int, local: str) -> str:
    """Hugging Face's name of the parameter that layer ``index`` calls ``local``."""
    if index == 0:
        return f"model.embed_tokens.{local}"
    if index <= config.layers:
        return f"model.layers.{index - 1}.{local}"
    return f"model.{local}" if local.startswith("norm.") else local
