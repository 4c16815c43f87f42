"""What a step's plan is: one path per microbatch, and, where a planner wants one, an order of work per peer.

Two layouts. In a *line* a path begins at a peer of the first stage and ends at one of the last, which computes the
loss. In a *ring* the first stage also holds the head: a path leaves its origin, visits peers of distinct other stages
(all of them, or some, or some swapped) and returns to the origin for the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry
from talkoot.world.links import Network

Phase: TypeAlias = Literal["forward", "loss", "backward"]


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A peer that can work: its stage, its relative speed, its name, and how many microbatches it can hold."""

    peer: PeerId
    stage: int
    speed: float = 1.0
    name: str = ""
    slots: int = 0


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """One visit of a path."""

    stage: int
    peer: PeerId


class Path(msgspec.Struct, frozen=True, array_like=True):
    """The stages, and the peers serving them, that one microbatch visits in order.

    ``after``: the microbatch of the same origin that must have come back before this one may leave.
    """

    microbatch: int
    hops: tuple[Hop, ...]
    after: int | None = None


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a peer's order."""

    phase: Phase
    microbatch: int


class Route(msgspec.Struct, frozen=True, array_like=True):
    """A way through a ring, by the peers' names, the origin first, and how many microbatches of a step take it."""

    peers: tuple[str, ...]
    count: int = 1


class StepPlan(msgspec.Struct, frozen=True):
    """Paths for all microbatches, each peer's order of work, and the layout.

    Where ``orders`` is empty, peers take what is ready: backward before forward, the longest way to go first.
    """

    paths: tuple[Path, ...]
    orders: dict[str, tuple[Work, ...]] = {}
    ring: bool = False

    def share_of(self, peer: str) -> tuple[int, ...]:
        """The microbatches that visit a peer, in ascending order."""
        return tuple(sorted(path.microbatch for path in self.paths if any(hop.peer == peer for hop in path.hops)))

    def visitors(self, stage: int) -> tuple[int, ...]:
        """The microbatches that visit a stage, in ascending order."""
        return tuple(sorted(path.microbatch for path in self.paths if any(hop.stage == stage for hop in path.hops)))


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner knows.

    Attributes:
        seats: who is present and holds what.
        num_stages, num_microbatches, ring: the job.
        step: of the run, for plans that change from step to step; ``seed``: of the run.
        visits: stages that a microbatch visits; 0 = all.
        routes: planned or negotiated ways by name, for planners that follow them; ``homes``: every name's stage.
        network: the links between peers, by name.
        hop_bytes: size of an activation.
        stage_s: seconds of one forward of each stage on a peer of speed 1; ``loss_s``: of a loss at an origin.
    """

    seats: Sequence[Seat]
    num_stages: int
    num_microbatches: int
    ring: bool = False
    step: int = 0
    seed: int = 0
    visits: int = 0
    routes: Sequence[Route] = ()
    homes: Mapping[str, int] = {}
    network: Network = Network()
    hop_bytes: int = 0
    stage_s: Sequence[float] = ()
    loss_s: float = 0.0

    def holders(self, stage: int) -> list[Seat]:
        """Seats of one stage; ValueError when there is none."""
        found = [seat for seat in self.seats if seat.stage == stage]
        if not found:
            raise ValueError(f"nobody holds stage {stage}")
        return found

    def hop_s(self, source: Seat, target: Seat) -> float:
        """Seconds of one activation's transfer."""
        if source.peer == target.peer:
            return 0.0
        link = self.network.link(source.name, target.name)
        return link.latency_s + self.hop_bytes / link.bytes_per_s

    def forward_s(self, seat: Seat) -> float:
        """Seconds of one forward of the seat's stage (of stages of equal cost where none is known)."""
        return (self.stage_s[seat.stage] if self.stage_s else 1.0) / seat.speed


class Planner(Protocol):
    """Chooses paths, and orders where it wants one, from what is known."""

    def __call__(self, view: View) -> StepPlan:
        """A valid plan; ValueError when some stage has no peer."""
        ...


planners: Registry[Planner] = Registry("planner")


def pace(origins: Mapping[int, PeerId], slots: Mapping[PeerId, int]) -> dict[int, int]:
    """For each microbatch that has to wait: the one of its origin that must be back before it leaves.

    Args:
        origins: by microbatch, in launch order.
        slots: how many of its own an origin may have under way; absent or 0 = any number.
    """
    sent: dict[PeerId, list[int]] = {}
    waits: dict[int, int] = {}
    for microbatch, origin in origins.items():
        before, limit = sent.setdefault(origin, []), slots.get(origin, 0)
        if limit and len(before) >= limit:
            waits[microbatch] = before[-limit]
        before.append(microbatch)
    return waits


def validate(plan: StepPlan, view: View) -> None:
    """Check that a plan does each microbatch once, with peers that hold what it visits, along permitted paths.

    Raises:
        ValueError: naming the first violation.
    """
    held = {(seat.peer, seat.stage) for seat in view.seats}
    if sorted(path.microbatch for path in plan.paths) != list(range(view.num_microbatches)):
        raise ValueError("the paths do not cover each microbatch exactly once")
    if plan.ring != view.ring:
        raise ValueError("the plan is for another layout than the job's")
    expected: dict[str, list[tuple[str, int]]] = {}
    for path in plan.paths:
        _validate_path(path, plan, view)
        for place, hop in enumerate(path.hops):
            if (hop.peer, hop.stage) not in held:
                raise ValueError(f"microbatch {path.microbatch} visits {hop.peer[:8]}, which lacks stage {hop.stage}")
            phases = ("forward", "loss", "backward") if plan.ring and place == 0 else ("forward", "backward")
            expected.setdefault(hop.peer, []).extend((phase, path.microbatch) for phase in phases)
    for stage in range(view.num_stages):
        if not plan.visitors(stage):
            raise ValueError(f"no microbatch visits stage {stage}")
    if not plan.orders:
        return
    for peer, works in plan.orders.items():
        if sorted((work.phase, work.microbatch) for work in works) != sorted(expected.pop(peer, [])):
            raise ValueError(f"the order of {peer[:8]} is not what its paths ask for")
    if expected:
        raise ValueError(f"{next(iter(expected))[:8]} is on a path but has no order")


def _validate_path(path: Path, plan: StepPlan, view: View) -> None:
    stages = [hop.stage for hop in path.hops]
    if not plan.ring and stages != list(range(view.num_stages)):
        raise ValueError(f"microbatch {path.microbatch} does not visit the stages in order")
    if plan.ring and (stages[:1] != [0] or len(set(stages)) != len(stages)):
        raise ValueError(f"microbatch {path.microbatch} visits stages {stages}: the first once, then distinct others")
    if path.after is not None:
        before = next((other for other in plan.paths if other.microbatch == path.after), None)
        if before is None or before.hops[0] != path.hops[0] or path.after >= path.microbatch:
            raise ValueError(f"microbatch {path.microbatch} waits for {path.after}, no earlier one of its origin")
