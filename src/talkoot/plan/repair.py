"""What becomes of microbatches on the way when peers are lost within a step: pure policies, by name.

``repair``: another peer of the same stage takes the lost one's place on each of its paths. It recomputes that stage
alone, from the activation and the gradient that the neighbours kept (Blagoev et al., 2025, "GWTF", arXiv 2509.21221).
``skip``: where the lost stage had not been computed yet and even skipping has slack, the path leaves it out; elsewhere
it is repaired. (The rule of even skipping is SkipPipe's, arXiv 2502.19913; combining both is ours.)
``redo``: what routed pipelines without backward repair do (Ryabinin et al., 2023, "SWARM", arXiv 2301.11913): on the
way out the path is rerouted, on the way back the microbatch starts again from its origin.
``restart``: the whole step is done again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import msgspec

from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry
from talkoot.plan.steps import Hop, Path, Seat, StepPlan, View

MAX_ADVANCE = 4  # stages that one hop may leave behind
SLACK = 1  # microbatches by which the stages' visits may differ after skipping


class Progress(msgspec.Struct, frozen=True):
    """What a peer has done in this step, as (phase, microbatch), and what it could do because its input is there."""

    done: frozenset[tuple[str, int]]
    arrived: frozenset[int] = frozenset()

    def has(self, phase: str, microbatch: int) -> bool:
        """Whether it has had the input of that work."""
        return (phase, microbatch) in self.done or microbatch in self.arrived


class Wound(msgspec.Struct, frozen=True, kw_only=True):
    """A step in which peers were lost.

    Attributes:
        plan: the paths, which still lead through them.
        lost: who.
        view: who is left, and what links and computations cost.
        progress: of each peer that is left.
    """

    plan: StepPlan
    lost: frozenset[PeerId]
    view: View
    progress: Mapping[PeerId, Progress]


class Mending(msgspec.Struct, frozen=True, kw_only=True):
    """The way on.

    Attributes:
        plan: paths without the lost; orders of work no longer apply.
        repaired: (microbatch, stage) taken over by another peer.
        skipped: (microbatch, stage) left out.
        restarted: microbatches that begin again.
        repeated: forwards that are computed a second time.
    """

    plan: StepPlan
    repaired: tuple[tuple[int, int], ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()
    restarted: tuple[int, ...] = ()
    repeated: int = 0


class Repair(Protocol):
    """Decides; None = the step has to be done again."""

    def __call__(self, wound: Wound) -> Mending | None:
        """The way on; every stage still has a peer."""
        ...


repairs: Registry[Repair] = Registry("repair policy")


@repairs.register("restart")
def restart(wound: Wound) -> Mending | None:
    """See the module's text."""
    return None


@repairs.register("repair")
def repair(wound: Wound) -> Mending:
    """See the module's text."""
    return _mend(wound, skip=False, redo=False)


@repairs.register("skip")
def skip(wound: Wound) -> Mending:
    """See the module's text."""
    return _mend(wound, skip=True, redo=False)


@repairs.register("redo")
def redo(wound: Wound) -> Mending:
    """See the module's text."""
    return _mend(wound, skip=False, redo=True)


def _mend(wound: Wound, *, skip: bool, redo: bool) -> Mending:
    plan, view = wound.plan, wound.view
    load = Counter(hop.peer for path in plan.paths for hop in path.hops)
    visits = Counter(hop.stage for path in plan.paths for hop in path.hops)
    heirs: dict[int, PeerId] = {}  # of microbatches whose origin is lost: one that waits follows the one it waits for
    repaired: list[tuple[int, int]] = []
    skipped: list[tuple[int, int]] = []
    restarted: list[int] = []
    paths: list[Path] = []
    repeated = 0
    for path in sorted(plan.paths, key=lambda path: path.microbatch):
        hops, m = list(path.hops), path.microbatch
        for hop in path.hops:
            if hop.peer not in wound.lost:
                continue
            place = hops.index(hop)
            passed = _passed(wound, path, hops, place)
            if skip and place and not passed and _may_skip(view, plan, hops, place, visits):
                visits[hop.stage] -= 1
                skipped.append((m, hop.stage))
                del hops[place]
                continue
            heir = heirs.get(path.after) if place == 0 and path.after is not None else None
            peer = heir or choose(view, hops, place, load, plan.ring)
            load[peer] += 1
            hops[place] = Hop(hop.stage, peer)
            repaired.append((m, hop.stage))
            repeated += passed
            if place == 0:
                heirs[m] = peer
        if redo and hops != list(path.hops) and _on_the_way_back(wound, path):
            restarted.append(m)
            repeated += sum(("forward", m) in wound.progress[h.peer].done for h in hops if h.peer in wound.progress)
        paths.append(Path(m, tuple(hops), path.after))
    return Mending(
        plan=StepPlan(tuple(paths), {}, plan.ring),
        repaired=tuple(repaired),
        skipped=tuple(skipped),
        restarted=tuple(restarted),
        repeated=repeated,
    )


def choose(view: View, hops: list[Hop], place: int, load: Mapping[PeerId, int], ring: bool) -> PeerId:
    """Who takes over a visit: the peer of that stage with the shortest way to and from its neighbours, work too."""
    seats = {seat.peer: seat for seat in view.seats}
    last = len(hops) - 1
    before = hops[place - 1] if place else (hops[last] if ring else None)
    after = hops[place + 1] if place < last else (hops[0] if ring else None)

    def cost(seat: Seat) -> tuple[float, str]:
        ways = [view.hop_s(seats[end.peer], seat) for end in (before, after) if end is not None and end.peer in seats]
        return 2 * sum(ways) + 3 * view.forward_s(seat) * (1 + load.get(seat.peer, 0)), seat.peer

    return min(view.holders(hops[place].stage), key=cost).peer


def _passed(wound: Wound, path: Path, hops: list[Hop], place: int) -> bool:
    """Whether the lost peer had handed the microbatch on: then its stage's forward is done a second time.

    Whoever lives further on tells: the next one may be lost as well.
    """
    m = path.microbatch
    later = [(hop.peer, "forward") for hop in hops[place + 1 :]]
    if wound.plan.ring:
        later.append((hops[0].peer, "loss"))
    elif place == len(hops) - 1:  # the end of a line hands nothing on but gradients
        later = [(hop.peer, "backward") for hop in hops[:place]]
    return any(peer in wound.progress and wound.progress[peer].has(phase, m) for peer, phase in later)


def _on_the_way_back(wound: Wound, path: Path) -> bool:
    """Whether a microbatch has had its loss, and some work on its way back is still undone."""
    m, living = path.microbatch, [hop.peer for hop in path.hops if hop.peer in wound.progress]
    dones = [wound.progress[peer].done for peer in living]
    turned = any(("loss", m) in done or ("backward", m) in done for done in dones)
    return turned and not all(("backward", m) in done for done in dones)


def _may_skip(view: View, plan: StepPlan, hops: list[Hop], place: int, visits: Mapping[int, int]) -> bool:
    """Whether leaving out one more visit of this stage keeps the path permitted and skipping even."""
    if not plan.ring or len(hops) <= 2:
        return False
    frontier = 0
    for hop in hops[:place] + hops[place + 1 :]:
        if hop.stage > frontier + MAX_ADVANCE:
            return False
        frontier = max(frontier, hop.stage)
    others = [visits[stage] - (stage == hops[place].stage) for stage in range(1, view.num_stages)]
    return min(others) > 0 and max(others) - min(others) <= SLACK
