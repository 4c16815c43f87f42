"""Follow given routes: those that were planned beforehand for these peers, or negotiated among them.

A lane of a plan (:class:`talkoot.plan.problem.Lane`) is a :class:`talkoot.plan.steps.Route` here, by names: its
microbatches leave one after another, each when the one before is back. Where a peer of a route is missing, the peer of
the same stage with the shortest way stands in until it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from talkoot.core.ids import PeerId
from talkoot.plan.repair import choose
from talkoot.plan.steps import Hop, Path, Seat, StepPlan, View, planners


@planners.register("routes")
def routes(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`; raises as :func:`present_ways`."""
    ways = present_ways(view)
    paths: list[Path] = []
    before: dict[int, int] = {}
    for turn in range(max(route.count for route in view.routes)):
        for lane, route in enumerate(view.routes):
            if turn < route.count:
                paths.append(Path(len(paths), ways[lane], before.get(lane)))
                before[lane] = len(paths) - 1
    return StepPlan(tuple(paths), ring=True)


def present_ways(view: View) -> list[tuple[Hop, ...]]:
    """The hops of each of the view's routes, the missing stood in for.

    Raises:
        ValueError: there are no routes, or they carry another number of microbatches than the step has.
    """
    if sum(route.count for route in view.routes) != view.num_microbatches:
        raise ValueError(f"the routes do not carry {view.num_microbatches} microbatches")
    present = {seat.name: seat for seat in view.seats}
    load: Counter[PeerId] = Counter()
    return [_present(view, route.peers, present, load) for route in view.routes]


def _present(view: View, names: Sequence[str], present: Mapping[str, Seat], load: Counter[PeerId]) -> tuple[Hop, ...]:
    """A route's hops; whoever is missing is stood in for, the nearest places first."""
    hops = [Hop(view.homes[name], present[name].peer if name in present else PeerId("")) for name in names]
    for place, hop in enumerate(hops):
        if not hop.peer:
            hops[place] = Hop(hop.stage, choose(view, hops, place, load, ring=True))
        load[hops[place].peer] += 1
    return tuple(hops)
