"""What a peer can do with its stage, apart from talking: the interface, and its form without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from talkoot.core.ids import PeerId
from talkoot.model.config import ModelConfig
from talkoot.train.recipe import Recipe
from talkoot.train.treesum import Node
from talkoot.world.api import Blank, Frame

KINDS = ("weight", "first", "second", "count")  # of the tensors in a state: weights, both moments, updates if unusual
UPDATE_FLOPS = 12.0  # per parameter, of one optimizer step
CHUNK_BYTES = 256 * 2**20  # of a state on its way to another peer
Gradients = Sequence[tuple[Node, Frame]]  # partial sums by the microbatches they cover, each one flat vector


class Neighbour(NamedTuple):
    """A stage next to a lost one: its layers, the norm of its last gradient, and its state."""

    first: int
    last: int
    norm: float
    state: bytes


class StageCompute(Protocol):
    """A stage's arithmetic. Frames go in and out, so that a peer's conversation needs no tensor library."""

    forward_flops: float  # one microbatch, without the head of a ring's first stage; backward costs twice that
    loss_flops: float  # of that head with loss and gradient; 0 elsewhere
    num_values: int  # parameters held
    turns: int  # exchanges that the mixing rule needs per step

    def begin(self, step: int, num_microbatches: int, evaluate: bool, visitors: Sequence[int] | None = None) -> None:
        """Forget an unfinished step and prepare for this one, in which ``visitors`` (None = all) come by."""
        ...

    def amend(self, visitors: Sequence[int]) -> None:
        """Only these come by in the end: the mean is over them."""
        ...

    def forward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Activations in (none at the first stage), activations out (none at the last, which keeps the loss)."""
        ...

    def loss(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """At the origin of a ring: the path's last activations in, their gradient out (none in an evaluation)."""
        ...

    def backward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Gradient of the output in, gradient of the input out (none at the first stage).

        A microbatch that comes a second time, after a crash elsewhere, is computed again and counted once.
        """
        ...

    def start_mixing(self) -> None:
        """Go back to this peer's own partial sums; called before each attempt to mix."""
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

    def gradient(self) -> Sequence[Frame]:
        """The agreed gradient as it will be applied, rounded as the recipe says; after :meth:`finish`."""
        ...

    def adopt(self, frames: Sequence[Frame]) -> None:
        """Take another peer's :meth:`gradient` of this stage as one's own."""
        ...

    def apply(self, learning_rate: float, scale: float) -> None:
        """The optimizer's step, with gradients multiplied by ``scale``."""
        ...

    def save(self) -> tuple[bytes, dict[str, str]]:
        """The whole state as bytes, and the digest of every tensor in it."""
        ...

    def pack(self, kinds: Sequence[str] = KINDS) -> Sequence[Frame]:
        """The state, or some kinds of its tensors, to send to another peer; joined, :meth:`load` takes them."""
        ...

    def load(self, parts: Sequence[bytes], step: int) -> None:
        """Take the state from saved ``parts`` that together hold this stage's layers; ``step`` steps are done."""
        ...

    def finite(self) -> bool:
        """Whether every number of the state is."""
        ...

    def blend(self, neighbours: Sequence[Neighbour], step: int) -> None:
        """Take an approximation made of what neighbouring stages hold; see :mod:`talkoot.train.recovery.blending`."""
        ...


class BlankStage:
    """A stage that computes nothing and knows only its costs: for rehearsing large swarms in virtual time.

    Args:
        config, first, last, recipe: as for a real stage; sizes and flops follow from them.
        free_states: sending its state costs nothing.
    """

    def __init__(
        self, config: ModelConfig, first: int, last: int, recipe: Recipe, *, free_states: bool = False
    ) -> None:
        self._free_states = free_states
        self.turns = 2
        self.forward_flops, self.loss_flops = stage_flops(config, first, last, recipe)
        self.num_values = sum(config.layer_parameters()[index] for index in config.held(first, last))
        (self._gradient_bytes,) = gradient_bytes(config, [(first, last)], recipe.recovery.stream)
        self._activation = [Blank(hop_bytes(config, recipe))]
        self._embedding = [Blank(4 * config.vocab_size * config.width)]
        self._is_first, self._is_last = first <= 0, last == config.layer_count
        self._losses: dict[int, float] = {}

    def begin(self, step: int, num_microbatches: int, evaluate: bool, visitors: Sequence[int] | None = None) -> None:
        self._losses, self._evaluate = {}, evaluate

    def amend(self, visitors: Sequence[int]) -> None:
        pass

    def forward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        if self._is_last:
            self._losses[microbatch] = 0.0
            return []
        return self._activation

    def loss(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        self._losses[microbatch] = 0.0
        return [] if self._evaluate else self._activation

    def backward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        return [] if self._is_first else self._activation

    def start_mixing(self) -> None:
        pass

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

    def gradient(self) -> Sequence[Frame]:
        return [Blank(self._gradient_bytes)]

    def adopt(self, frames: Sequence[Frame]) -> None:
        pass

    def apply(self, learning_rate: float, scale: float) -> None:
        pass

    def pack(self, kinds: Sequence[str] = KINDS) -> Sequence[Frame]:
        return [Blank(0 if self._free_states else 4 * self.num_values * len(set(kinds) - {"count"}))]

    def finite(self) -> bool:
        return True

    def blend(self, neighbours: Sequence[Neighbour], step: int) -> None:
        pass

    def save(self) -> tuple[bytes, dict[str, str]]:
        return b"", {}

    def load(self, parts: Sequence[bytes], step: int) -> None:
        pass


def gradient_bytes(config: ModelConfig, stages: Sequence[tuple[int, int]], stream: str) -> list[int]:
    """Bytes of each stage's gradient as it is streamed to keepers."""
    numbers, width = config.layer_parameters(), 2 if stream == "bfloat16" else 4
    return [width * sum(numbers[index] for index in config.held(*cut)) for cut in stages]


def hop_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes of one microbatch's activations in float32."""
    return 4 * recipe.train.microbatch_size * recipe.model.context * config.width


def stage_flops(config: ModelConfig, first: int, last: int, recipe: Recipe) -> tuple[float, float]:
    """Floating-point operations of one microbatch: a stage's forward, and the whole loss where a ring's head is held.

    Head forward, and both gradients of it: three times its forward.
    """
    tokens, flops = recipe.train.microbatch_size * recipe.model.context, config.layer_flops(recipe.model.context)
    return tokens * float(sum(flops[max(first, 0) : last])), 3.0 * tokens * flops[-1] if first < 0 else 0.0
