"""The shape of a mixture of experts: a dense model's, with several feed-forward layers in every block and a choice.

Nothing here imports torch. Canonical names are those that Qwen's mixtures have on disk:
``model.layers.0.mlp.experts.1.gate_proj.weight``, ``model.layers.0.mlp.gate.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NoReturn

from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.names import TABLES
from talkoot.blend.mixture.trunk import trunks
from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig


class MixtureConfig(ModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that fixes a mixture's parameters and its function; ``hidden`` is the widest expert's.

    Attributes:
        experts: their names, in the order of the gates' outputs.
        widths: inside SwiGLU, of each expert; the same in every block.
        gate: how a token finds its experts; a name in `talkoot.blend.mixture.gates`.
        top_k: how many experts each token visits.
        temperature: the gate's scores are divided by it before the softmax; without meaning where ``top_k`` is 1.
        bias: whether a block's gate has an intercept. Only talkoot's own format can store one.
        renormalised: the weights of the experts visited add up to 1; else they are shares of a softmax over all.
        trunk: where everything but experts and gates came from; a name in `talkoot.blend.mixture.trunk`.

    Raises:
        TalkootError: the numbers contradict each other.
    """

    experts: tuple[str, ...]
    widths: tuple[int, ...]
    gate: str = "token"
    top_k: int = 1
    temperature: float = 1.0
    bias: bool = False
    renormalised: bool = True
    trunk: str = "pinned"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = gates[self.gate], trunks[self.trunk]  # misspelt names are refused here
        count = len(self.experts)
        if count < 2:
            _refuse("experts", f"there is {count}, and a choice needs two")
        if count > 1024 or len(set(self.experts)) < count:
            _refuse("experts", "a name stands twice" if count <= 1024 else f"{count} are more than 1024")
        if len(self.widths) != count or min(self.widths) < 1 or max(self.widths) != self.hidden:
            _refuse("widths", f"{self.widths} do not belong to {count} experts of at most {self.hidden}")
        if not 1 <= self.top_k <= count:
            _refuse("top_k", f"{self.top_k} is outside 1 to {count}, the number of experts")
        if not 0 < self.temperature < float("inf"):
            _refuse("temperature", f"{self.temperature} is not a positive number")

    @classmethod
    def of(cls, dense: ModelConfig, experts: Sequence[str], widths: Sequence[int], **more: Any) -> MixtureConfig:
        """The mixture of experts that have ``dense``'s shape, but each its own width inside SwiGLU."""
        fields = {name: getattr(dense, name) for name in ModelConfig.__struct_fields__}
        fields |= {"hidden": max(widths, default=0), "experts": tuple(experts), "widths": tuple(widths), **more}
        return cls(**fields)

    def dense(self, expert: int) -> ModelConfig:
        """The shape of one expert as a model of its own."""
        fields = {name: getattr(self, name) for name in ModelConfig.__struct_fields__}
        return ModelConfig(**{**fields, "hidden": self.widths[expert]})

    def index(self, name: str) -> int:
        """Place of an expert.

        Raises:
            TalkootError: there is none of that name.
        """
        if name not in self.experts:
            _refuse("experts", f"{name!r} is none of them; known: {', '.join(self.experts)}")
        return self.experts.index(name)

    def layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        shapes = super().layer_shapes(index)
        if index == 0:
            tables = gates[self.gate].tables(self.vocab_size, len(self.experts))
            shapes = {TABLES + name: tables[name] for name in sorted(tables)} | shapes
        return shapes

    def _block_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((name, shape) for name, shape in super()._block_shapes() if not name.startswith("mlp."))
        for expert, hidden in enumerate(self.widths):
            for part in ("gate_proj", "up_proj"):
                yield f"mlp.experts.{expert}.{part}.weight", (hidden, self.width)
            yield f"mlp.experts.{expert}.down_proj.weight", (self.width, hidden)
        if gates[self.gate].reads_states:
            yield "mlp.gate.weight", (len(self.experts), self.width)
            if self.bias:
                yield "mlp.gate.bias", (len(self.experts),)

    def layer_flops(self, context: int) -> list[int]:
        """As of a dense model, counting only the experts that a token visits (of mean width)."""
        idle = sum(2 * prod(shape) for name, shape in self.layer_shapes(1).items() if ".experts." in name)
        idle = idle * (len(self.experts) - self.top_k) // len(self.experts)
        first, *blocks, last = super().layer_flops(context)
        return [first, *(block - idle for block in blocks), last]


def _refuse(field: str, why: str) -> NoReturn:
    raise TalkootError(
        f"the mixture's {field} cannot be used", where=f"MixtureConfig.{field}", why=why, next="correct the value"
    )
