"""Routing by each origin's own view alone: it chooses the next peer of a microbatch, knowing nobody's load but its own.

``weighted``: interleaved weighted round-robin. An origin gives each peer of a stage work in proportion to how fast it
is answered from there: the next microbatch goes where the answers to all that it has sent there would be there first
(Ryabinin et al., 2023, "SWARM Parallelism", arXiv 2301.11913). Links count, not only the peers' own throughput, and an
origin's account covers whole stages: accounts of every sender by itself, or weights without links, give longer
iterations on unlike machines far apart (see the lab book).
``greedy``: always to the peer that answers soonest.
Both are what routing without agreement between peers can do, and baselines for those that do agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from talkoot.core.ids import PeerId
from talkoot.plan.steps import Hop, Path, Seat, StepPlan, View, pace, planners
from talkoot.plan.straight import share

Choice = Callable[[Seat, Seat, Seat], float]  # (origin, sender, candidate) -> the smaller the better


def answer_s(view: View, sender: Seat, target: Seat) -> float:
    """Seconds from sending an activation to having had its gradient, if nobody else asks: both ways and the work."""
    return view.hop_s(sender, target) + view.hop_s(target, sender) + 3 * view.forward_s(target)


@planners.register("weighted")
def weighted(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`."""
    sent: Counter[tuple[PeerId, PeerId]] = Counter()

    def choose(origin: Seat, sender: Seat, target: Seat) -> float:
        return (sent[origin.peer, target.peer] + 1) * answer_s(view, sender, target)

    return _route(view, choose, sent)


@planners.register("greedy")
def greedy(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`."""
    return _route(view, lambda _, sender, target: answer_s(view, sender, target), Counter())


def _route(view: View, cost: Choice, sent: Counter[tuple[PeerId, PeerId]]) -> StepPlan:
    origins = sorted(view.holders(0), key=lambda seat: seat.peer)
    stages = [sorted(view.holders(stage), key=lambda seat: seat.peer) for stage in range(1, view.num_stages)]
    counts = share(view.num_microbatches, [seat.speed for seat in origins])
    launch = [seat for turn in range(max(counts)) for seat, count in zip(origins, counts, strict=True) if turn < count]
    waits = pace({m: seat.peer for m, seat in enumerate(launch)}, {seat.peer: seat.slots for seat in origins})
    paths: list[Path] = []
    for m, seat in enumerate(launch):
        way = [seat]
        for candidates in stages:
            sender = way[-1]
            way.append(min(candidates, key=lambda target: (cost(seat, sender, target), target.peer)))
            sent[seat.peer, way[-1].peer] += 1
        paths.append(Path(m, tuple(Hop(hop.stage, hop.peer) for hop in way), waits.get(m)))
    return StepPlan(tuple(paths), ring=True)
