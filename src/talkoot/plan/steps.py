"""What a step's plan is: one path per microbatch, and one order of work per peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry

Phase: TypeAlias = Literal["forward", "backward"]


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A peer that can work: its stage and its relative speed."""

    peer: PeerId
    stage: int
    speed: float = 1.0


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """One visit of a path."""

    stage: int
    peer: PeerId


class Path(msgspec.Struct, frozen=True, array_like=True):
    """The stages, and the peers serving them, that one microbatch visits in order."""

    microbatch: int
    hops: tuple[Hop, ...]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a peer's order."""

    phase: Phase
    microbatch: int


class StepPlan(msgspec.Struct, frozen=True):
    """Paths for all microbatches, and each peer's order of work."""

    paths: tuple[Path, ...]
    orders: dict[str, tuple[Work, ...]]

    def share_of(self, peer: str) -> tuple[int, ...]:
        """The microbatches that visit a peer, in ascending order."""
        return tuple(sorted(path.microbatch for path in self.paths if any(hop.peer == peer for hop in path.hops)))


class Planner(Protocol):
    """Chooses paths and orders from who is present."""

    def __call__(self, seats: Sequence[Seat], num_stages: int, num_microbatches: int) -> StepPlan:
        """A valid plan; ValueError when some stage has no peer."""
        ...


planners: Registry[Planner] = Registry("planner")


def validate(plan: StepPlan, seats: Sequence[Seat], num_stages: int, num_microbatches: int) -> None:
    """Check that a plan does each microbatch once, through every stage in order, with peers that hold them.

    Raises:
        ValueError: naming the first violation.
    """
    held = {(seat.peer, seat.stage) for seat in seats}
    if sorted(path.microbatch for path in plan.paths) != list(range(num_microbatches)):
        raise ValueError("the paths do not cover each microbatch exactly once")
    expected: dict[str, list[tuple[str, int]]] = {}
    for path in plan.paths:
        if [hop.stage for hop in path.hops] != list(range(num_stages)):
            raise ValueError(f"microbatch {path.microbatch} does not visit the stages in order")
        for hop in path.hops:
            if (hop.peer, hop.stage) not in held:
                raise ValueError(f"microbatch {path.microbatch} visits {hop.peer[:8]}, which lacks stage {hop.stage}")
            expected.setdefault(hop.peer, []).append(("forward", path.microbatch))
            expected[hop.peer].append(("backward", path.microbatch))
    for peer, works in plan.orders.items():
        if sorted((work.phase, work.microbatch) for work in works) != sorted(expected.pop(peer, [])):
            raise ValueError(f"the order of {peer[:8]} is not what its paths ask for")
    if expected:
        raise ValueError(f"{next(iter(expected))[:8]} is on a path but has no order")
