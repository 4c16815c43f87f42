"""What a peer can do with its stage, apart from talking: the interface, and its form without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from talkoot.core.ids import PeerId
from talkoot.model.config import ModelConfig
from talkoot.train.recipe import Recipe
from talkoot.train.treesum import Node
from talkoot.world.api import Blank, Frame

Gradients = Sequence[tuple[Node, Frame]]  # partial sums by the microbatches they cover, each one flat vector


class StageCompute(Protocol):
    """A stage's arithmetic. Frames go in and out, so that a peer's conversation needs no tensor library."""

    forward_flops: float  # one microbatch; backward costs twice that
    num_values: int  # parameters held
    turns: int  # exchanges that the mixing rule needs per step

    def begin(self, step: int, num_microbatches: int, evaluate: bool) -> None:
        """Forget an unfinished step and prepare for this one."""
        ...

    def forward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Activations in (none at the first stage), activations out (none at the last, which keeps the loss)."""
        ...

    def backward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Gradient of the output in, gradient of the input out (none at the first stage)."""
        ...

    def outgoing(self, turn: int, me: PeerId, group: Sequence[PeerId]) -> Mapping[PeerId, Gradients]:
        """What the mixing rule sends in its ``turn``-th exchange."""
        ...

    def merge(self, turn: int, me: PeerId, group: Sequence[PeerId], received: Mapping[PeerId, Gradients]) -> None:
        """Take in what the others sent in that exchange."""
        ...

    def tied_gradient(self) -> Sequence[Frame]:
        """This side's gradient of the tied embedding."""
        ...

    def merge_tied(self, frames: Sequence[Frame]) -> None:
        """Add the other side's gradient of the tied embedding."""
        ...

    def finish(self) -> tuple[dict[int, float], tuple[float, ...]]:
        """Losses by microbatch (last stage) and squared gradient norms by tensor, after all mixing."""
        ...

    def apply(self, learning_rate: float, scale: float) -> None:
        """The optimizer's step, with gradients multiplied by ``scale``."""
        ...

    def save(self) -> tuple[bytes, dict[str, str]]:
        """The whole state as bytes, and the digest of every tensor in it."""
        ...

    def load(self, parts: Sequence[bytes], step: int) -> None:
        """Take the state from saved ``parts`` that together hold this stage's layers; ``step`` steps are done."""
        ...


class BlankStage:
    """A stage that computes nothing and knows only its costs: for rehearsing large swarms in virtual time.

    Args:
        config, first, last, recipe: as for a real stage; sizes and flops follow from them.
    """

    def __init__(self, config: ModelConfig, first: int, last: int, recipe: Recipe) -> None:
        tokens = recipe.train.microbatch_size * recipe.model.context
        self.turns = 2
        self.forward_flops = tokens * float(sum(config.layer_flops(recipe.model.context)[first:last]))
        self.num_values = sum(config.layer_parameters()[first:last])
        self._activation = [Blank(4 * tokens * config.width)]
        self._embedding = [Blank(4 * config.vocab_size * config.width)]
        self._is_first, self._is_last = first == 0, last == config.layer_count
        self._losses: dict[int, float] = {}

    def begin(self, step: int, num_microbatches: int, evaluate: bool) -> None:
        self._losses = {}

    def forward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        if self._is_last:
            self._losses[microbatch] = 0.0
            return []
        return self._activation

    def backward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        return [] if self._is_first else self._activation

    def outgoing(self, turn: int, me: PeerId, group: Sequence[PeerId]) -> Mapping[PeerId, Gradients]:
        share = Blank(4 * self.num_values // len(group))
        return {peer: [((0, 1), share)] for peer in group if peer != me}

    def merge(self, turn: int, me: PeerId, group: Sequence[PeerId], received: Mapping[PeerId, Gradients]) -> None:
        pass

    def tied_gradient(self) -> Sequence[Frame]:
        return self._embedding

    def merge_tied(self, frames: Sequence[Frame]) -> None:
        pass

    def finish(self) -> tuple[dict[int, float], tuple[float, ...]]:
        return self._losses, (1.0,)

    def apply(self, learning_rate: float, scale: float) -> None:
        pass

    def save(self) -> tuple[bytes, dict[str, str]]:
        return b"", {}

    def load(self, parts: Sequence[bytes], step: int) -> None:
        pass
