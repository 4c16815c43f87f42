"""The shape of a model: one small value that every peer agrees on before any weight exists.

The decoder is the Llama family's (Touvron et al. 2023): RMSNorm, rotary embedding, grouped-query attention,
SwiGLU. Mistral adds a sliding window, Qwen2 biases on queries, keys and values, Qwen3 a norm on queries and
keys. This module counts and names everything without importing torch, so that planners and ``--help`` stay
light.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal, NoReturn

import msgspec

from talkoot.core.errors import TalkootError, nearest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")

# Far above any dense model of today; a hostile config.json must not be able to ask for more.
_LIMITS = {
    "vocab_size": 1 << 24,
    "width": 1 << 17,
    "layers": 4096,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "hidden": 1 << 20,
    "max_positions": 1 << 28,
}


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="linear"):
    """Rotary positions divided by ``factor`` (position interpolation, Chen et al. 2023)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="llama3"):
    """Llama 3.1's rule: long wavelengths are divided by ``factor``, short ones kept, others blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that fixes a model's parameters and its function.

    A model is a list of ``layers + 2`` layers: the embedding (0), the blocks (1 to ``layers``) and the final
    norm with the head (``layers + 1``). Sizes are counts of numbers, positions are tokens.

    Fields beyond the usual: ``hidden`` is the width inside SwiGLU; ``sliding_window`` is how many positions a
    query sees, itself included, and ``full_layers`` are the indices (1 to ``layers``) of blocks that ignore
    it; ``dtype`` is the one in which a checkpoint is stored, so that import and export give the same bits.

    Raises:
        TalkootError: the numbers contradict each other or the family.
    """

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope_theta: float = 10_000.0
    rope_scaling: LinearScaling | Llama3Scaling | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            _refuse("family", f"{self.family!r} is unknown; {nearest(self.family, FAMILIES)}")
        if self.dtype not in DTYPES:
            _refuse("dtype", f"{self.dtype!r} is not a stored type; {nearest(self.dtype, DTYPES)}")
        for name, limit in _LIMITS.items():
            if not 1 <= getattr(self, name) <= limit:
                _refuse(name, f"{getattr(self, name)} is outside 1 to {limit}")
        if self.heads % self.kv_heads:
            _refuse("kv_heads", f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        if self.family == "llama" and self.width % self.heads:
            _refuse("width", f"transformers loads a Llama only if its {self.heads} heads divide {self.width}")
        if self.head_dim % 2:
            _refuse("head_dim", f"rotary embedding turns pairs of numbers, and {self.head_dim} is odd")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < float("inf"):
                _refuse(name, f"{getattr(self, name)} is not a positive number")
        self._check_scaling()
        self._check_window()
        self._check_tokens()

    def _check_scaling(self) -> None:
        rule = self.rope_scaling
        if rule is None:
            return
        if not 0 < rule.factor < float("inf"):
            _refuse("rope_scaling.factor", f"{rule.factor} is not a positive number")
        if isinstance(rule, Llama3Scaling):
            if not 0 < rule.low_freq_factor < rule.high_freq_factor < float("inf"):
                _refuse("rope_scaling", "low_freq_factor must lie between 0 and high_freq_factor")
            if rule.original_positions < 1:
                _refuse("rope_scaling.original_positions", f"{rule.original_positions} is not positive")

    def _check_window(self) -> None:
        if self.sliding_window is None:
            if self.full_layers:
                _refuse("full_layers", "only a model with a sliding window has exceptions from it")
            return
        if self.sliding_window < 1:
            _refuse("sliding_window", f"{self.sliding_window} leaves a query nothing to see")
        if self.family == "llama":
            _refuse("sliding_window", "Llama attends to everything; use family 'mistral'")
        if self.family == "mistral" and self.full_layers:
            _refuse("full_layers", "Mistral slides in every block; use family 'qwen2' or 'qwen3'")
        if any(not 1 <= index <= self.layers for index in self.full_layers):
            _refuse("full_layers", f"blocks are numbered 1 to {self.layers}")

    def _check_tokens(self) -> None:
        # Token ids may lie beyond vocab_size: published checkpoints declare such padding tokens.
        named = [
            ("bos_id", self.bos_id),
            ("pad_id", self.pad_id),
            *(("eos_ids", one) for one in self.eos_ids),
        ]
        for name, value in named:
            if value is not None and not -1 <= value < 1 << 31:
                _refuse(name, f"{value} is not a token id")

    @classmethod
    def from_depth(
        cls,
        layers: int,
        vocab_size: int,
        *,
        family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama",
        tied: bool = False,
        max_positions: int = 2048,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
    ) -> ModelConfig:
        """A model from one dial, its number of blocks; ``derivation`` prints what follows and why."""
        if not 1 <= layers <= _LIMITS["layers"]:
            _refuse("layers", f"{layers} is outside 1 to {_LIMITS['layers']}")
        sizes: dict[str, Any] = {name: value for name, value, _ in _dial(layers)}
        return cls(
            family=family,
            vocab_size=vocab_size,
            layers=layers,
            tied=tied,
            max_positions=max_positions,
            bos_id=bos_id,
            eos_ids=eos_ids,
            **sizes,
        )

    def derivation(self) -> list[tuple[str, int, str]]:
        """Each derived number with its reason, ``(name, value, reason)``, the parameter count last."""
        rows = []
        for name, dial, reason in _dial(self.layers):
            value = getattr(self, name)
            rows.append((name, value, reason if value == dial else f"given; the dial would say {dial}"))
        blocks = sum(self.layer_parameters()[1:-1])
        rows.append(("parameters", self.num_parameters(), f"{blocks:,} in the blocks, the rest in embedding and head"))
        return rows

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections carry biases (Qwen2)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is normalised before rotation (Qwen3)."""
        return self.family == "qwen3"

    @property
    def layer_count(self) -> int:
        """Length of the list of layers: embedding, blocks, head."""
        return self.layers + 2

    def held(self, first: int, last: int) -> list[int]:
        """Indices of the layers in the range ``[first, last)`` of the list, seen as a ring.

        A range that begins at -1 begins with the head: such a stage opens and closes a ring of stages.
        """
        return [index % self.layer_count for index in range(first, last)]

    def window(self, index: int) -> int | None:
        """Positions that block ``index`` (1 to ``layers``) sees back, itself included; None for all."""
        return None if index in self.full_layers else self.sliding_window

    def layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Canonical (Hugging Face) name to shape for one layer of the list, names ascending."""
        if not 0 <= index < self.layer_count:
            _refuse("layer index", f"{index} is outside 0 to {self.layer_count - 1}")
        if index == 0:
            return {"model.embed_tokens.weight": (self.vocab_size, self.width)}
        if index == self.layers + 1:
            return {"lm_head.weight": (self.vocab_size, self.width), "model.norm.weight": (self.width,)}
        return {f"model.layers.{index - 1}.{name}": shape for name, shape in sorted(self._block_shapes())}

    def _block_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        outputs = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        for one, count in outputs.items():
            yield f"self_attn.{one}_proj.weight", (count * self.head_dim, self.width)
            if self.qkv_bias:
                yield f"self_attn.{one}_proj.bias", (count * self.head_dim,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "self_attn.o_proj.weight", (self.width, self.heads * self.head_dim)
        yield "mlp.gate_proj.weight", (self.hidden, self.width)
        yield "mlp.up_proj.weight", (self.hidden, self.width)
        yield "mlp.down_proj.weight", (self.width, self.hidden)
        yield "input_layernorm.weight", (self.width,)
        yield "post_attention_layernorm.weight", (self.width,)

    def layer_parameters(self) -> list[int]:
        """Parameters that a holder of each layer stores, one number per layer of the list.

        A tied model's head keeps a copy of the embedding, so the sum exceeds ``num_parameters`` by that copy.
        """
        ends = [sum(map(prod, self.layer_shapes(index).values())) for index in (0, 1, self.layers + 1)]
        return [ends[0], *[ends[1]] * self.layers, ends[2]]

    def num_parameters(self) -> int:
        """Distinct parameters of the model; a tied embedding counts once."""
        copies = self.vocab_size * self.width if self.tied else 0
        return sum(self.layer_parameters()) - copies

    def layer_flops(self, context: int) -> list[int]:
        """Floating-point operations of one token's forward pass through each layer, mean over a text.

        Counts the multiplications and additions of matrix products and of attention over the positions that a
        causal query really sees; norms, rotation and softmax are left out, as is usual (Kaplan et al. 2020).

        Args:
            context: length of the text in tokens, at least 1.
        """
        if context < 1:
            _refuse("context", f"a text of {context} tokens has no cost per token")
        matrices = sum(prod(shape) for shape in self.layer_shapes(1).values() if len(shape) == 2)
        flops = [0]
        for index in range(1, self.layers + 1):
            reach = min(self.window(index) or context, context)
            seen = reach * (reach + 1) / 2 + (context - reach) * reach
            flops.append(2 * matrices + round(4 * self.heads * self.head_dim * seen / context))
        return [*flops, 2 * self.vocab_size * self.width]

    def flops_per_token(self, context: int) -> int:
        """Forward operations per token of a text of ``context`` tokens; training costs three times that."""
        return sum(self.layer_flops(context))


def tied_names(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Pairs of canonical names ``(owner, copy)`` that must stay equal; the trainer sums their gradients."""
    return (("model.embed_tokens.weight", "lm_head.weight"),) if config.tied else ()


def _dial(layers: int) -> list[tuple[str, int, str]]:
    """The scaling rule: every size from the number of blocks."""
    head_dim = 32 if layers < 8 else 64
    width = -(-32 * layers // head_dim) * head_dim
    heads = width // head_dim
    group = next((size for size in (4, 3, 2) if heads % size == 0 and heads // size >= 2), 1)
    hidden = -(-8 * width // (3 * 32)) * 32
    return [
        ("head_dim", head_dim, "64 is usual; 32 below 8 blocks, where 64 would leave too few heads"),
        (
            "width",
            width,
            "32 per block, in whole heads: below 1B deep and thin wins (MobileLLM, Liu et al. 2024)",
        ),
        ("heads", heads, "width / head_dim"),
        (
            "kv_heads",
            heads // group,
            "largest group of up to 4 queries that leaves two key heads (GQA, 2023)",
        ),
        (
            "hidden",
            hidden,
            "8/3 width in steps of 32: three SwiGLU matrices cost what two of 4 did (Shazeer 2020)",
        ),
    ]


def _refuse(field: str, why: str) -> NoReturn:
    raise TalkootError(
        f"the model's {field} cannot be used",
        where=f"ModelConfig.{field}",
        why=why,
        next="correct the value, or derive all sizes with ModelConfig.from_depth(layers, vocab_size)",
    )
