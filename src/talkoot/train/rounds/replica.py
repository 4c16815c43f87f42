"""What a replica can do with its model, apart from talking: the interface, and its form without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from talkoot.plan.mixing import message_bytes
from talkoot.train.compute import UPDATE_FLOPS, stage_flops
from talkoot.train.job import Job
from talkoot.train.mixing import RoundRule, settled, wires
from talkoot.train.recipe import Recipe
from talkoot.world.api import Blank, Frame

SAMPLE = (16, 256, 256)  # for telemetry: at least, at most, and of how many numbers one
FAR = "it is too far away"  # why a message was not merged, where that says more about the one than about the other
Exchange = tuple[int, int]  # round and fragment


class Apart(NamedTuple):
    """How far two replicas are from each other: mean squared difference per parameter, from a sample."""

    slow: float
    progress: float


class Unmergeable(ValueError):
    """A message that is not merged: damaged, not finite, or too far away."""


class Diverged(ArithmeticError):
    """One's own numbers are not finite any more."""


class ReplicaCompute(Protocol):
    """One replica's arithmetic. Frames go in and out, so that its conversation needs no tensor library."""

    step_flops: float  # one inner step
    held_out_flops: float  # one held-out batch
    fragments: int
    num_values: int

    def step(self, step: int, rate: float) -> tuple[float, float]:
        """One inner step on this slot's batches of ``step``; its loss and gradient norm."""
        ...

    def evaluate(self, batches: int) -> float:
        """Mean loss of the slow weights on held-out batches."""
        ...

    def message(self, key: Exchange, weight: float) -> list[Frame]:
        """What the rule sends for a fragment now; it is remembered for the merge. See :class:`RoundRule`.

        Raises:
            Diverged: it is not finite.
        """
        ...

    def merge(self, key: Exchange, frames: Sequence[Frame] | None) -> Apart | None:
        """Move on with a partner's message, or alone (None). It can be taken back until it is settled.

        Raises:
            Unmergeable: nothing was changed.
        """
        ...

    def take_back(self, key: Exchange) -> None:
        """Turn a merge with a partner into one alone; what was learned since stays."""
        ...

    def settle(self, key: Exchange) -> None:
        """The merge stands."""
        ...

    def part(self, key: Exchange, index: int, count: int) -> list[Frame]:
        """The ``index``-th of ``count`` slices of the sum so far, at first one's own message."""
        ...

    def add(self, key: Exchange, index: int, count: int, frames: Sequence[Frame]) -> None:
        """Add to a slice of the sum; ValueError or TalkootError when the frames are no such slice."""
        ...

    def put(self, key: Exchange, index: int, count: int, frames: Sequence[Frame]) -> None:
        """Replace a slice of the sum; errors as above."""
        ...

    def total(self, key: Exchange) -> list[Frame]:
        """The whole sum, every bit of it, whatever the wire's precision."""
        ...

    def adopt(self, key: Exchange, frames: Sequence[Frame]) -> None:
        """Take such a sum for one's own; errors as above."""
        ...

    def clear(self, key: Exchange) -> None:
        """Set the sum to zero."""
        ...

    def restart(self, key: Exchange) -> None:
        """Set the sum to one's own message."""
        ...

    def finish(self, key: Exchange, members: int) -> None:
        """Merge the mean: the sum over that many; it is remembered until the fragment's next message.

        Raises:
            Diverged: it is not finite.
        """
        ...

    def donate(self) -> bytes:
        """What a newcomer needs: slow weights and the rule's own vectors."""
        ...

    def join(self, states: Sequence[bytes]) -> None:
        """Start from the mean of what donors gave; ValueError when they do not fit."""
        ...

    def save(self) -> bytes:
        """Everything that this replica is, between rounds."""
        ...

    def load(self, state: bytes, step: int) -> None:
        """The opposite, ``step`` inner steps into the run; ValueError when it does not fit."""
        ...

    def digest(self) -> str:
        """Of the slow weights."""
        ...

    def weights(self) -> list[Frame]:
        """The slow weights, to be averaged at the end."""
        ...

    def average(self, all_weights: Sequence[Sequence[Frame]]) -> int:
        """Take the mean of several replicas' weights for one's own; how many of them could be used.

        Raises:
            ValueError: none could.
        """
        ...

    def snapshot(self, step: int) -> tuple[bytes, dict[str, str]]:
        """The model in the form of a stage's saved state, and the digest of each tensor."""
        ...


def slots(recipe: Recipe) -> int:
    """How many shares the data is dealt out in: one for each replica that there may ever be at once."""
    return len(recipe.swarm.peers) + len(recipe.swarm.joiners)


def share(recipe: Recipe) -> int:
    """Microbatches per inner step of one replica: ``train.microbatches`` are those of all at the start."""
    return recipe.train.microbatches // len(recipe.swarm.peers)


def sampled(count: int) -> int:
    """How many of so many slow weights, and of outer gradients, travel with a message for telemetry."""
    least, most, of = SAMPLE
    return max(least, min(most, count // of))


class BlankReplica:
    """A replica that computes nothing and knows only its costs: for rehearsals in virtual time."""

    def __init__(self, job: Job, rule: RoundRule) -> None:
        recipe, config = job.recipe, job.config
        self._mixing, self._rule = settled(recipe.mixing), rule
        self.fragments = int(self._mixing.fragments or 1)
        self.num_values = sum(config.layer_parameters())
        self.step_flops, self.held_out_flops = costs(job, self.num_values)

    def step(self, step: int, rate: float) -> tuple[float, float]:
        return 0.0, 1.0

    def evaluate(self, batches: int) -> float:
        return 0.0

    def message(self, key: Exchange, weight: float) -> list[Frame]:
        return [*self.part(key, 0, 1), Blank(8 * sampled(self.num_values // self.fragments))]

    def merge(self, key: Exchange, frames: Sequence[Frame] | None) -> Apart | None:
        return None

    def take_back(self, key: Exchange) -> None:
        pass

    settle = clear = restart = take_back

    def part(self, key: Exchange, index: int, count: int) -> list[Frame]:
        size = self.num_values // self.fragments // count
        return [Blank(message_bytes(way, size, self._mixing.density)) for way in wires(self._rule, self._mixing)]

    def add(self, key: Exchange, index: int, count: int, frames: Sequence[Frame]) -> None:
        pass

    put = add

    def total(self, key: Exchange) -> list[Frame]:
        return [Blank(4 * self.num_values // self.fragments) for _ in self._rule.contents]

    def adopt(self, key: Exchange, frames: Sequence[Frame]) -> None:
        pass

    def finish(self, key: Exchange, members: int) -> None:
        pass

    def donate(self) -> bytes:
        return b""

    def join(self, states: Sequence[bytes]) -> None:
        pass

    def save(self) -> bytes:
        return b""

    def load(self, state: bytes, step: int) -> None:
        pass

    def digest(self) -> str:
        return ""

    def weights(self) -> list[Frame]:
        return [Blank(4 * self.num_values)]

    def average(self, all_weights: Sequence[Sequence[Frame]]) -> int:
        return len(all_weights)

    def snapshot(self, step: int) -> tuple[bytes, dict[str, str]]:
        return b"", {}


def costs(job: Job, num_values: int) -> tuple[float, float]:
    """Floating-point operations of an inner step, and of a held-out batch."""
    forward, _ = stage_flops(job.config, 0, job.config.layer_count, job.recipe)
    return 3 * forward * share(job.recipe) + UPDATE_FLOPS * num_values, forward


def make_replica(job: Job, rule: RoundRule, slot: int) -> ReplicaCompute:
    """A replica's arithmetic: with tensors, or without where the job has no text."""
    if job.tokens is None:
        return BlankReplica(job, rule)
    from talkoot.train.rounds.tensors import TensorReplica

    return TensorReplica(job, rule, slot)
