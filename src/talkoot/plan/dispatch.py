"""How many microbatches each lane of a ring carries, where they queue at full peers and not at their origins.

Every path visits the same stages in the same order, so nothing can wait in a circle: whatever holds a slot of the last
stage gets its gradient, then whatever holds one of the stage before, and so on. Therefore a microbatch need not wait
until the one before it on its lane is back: it sets out when its origin has a free slot, waits wherever a peer has
none, and slots are as busy as they can be. A lane's cost alone does not tell how many it should carry, as lanes share
peers: the counts are those for which an iteration, played through, is shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from talkoot.plan.routes import present_ways
from talkoot.plan.steps import Path, Seat, StepPlan, View, planners

MAX_TRIALS = 400  # iterations played in search of better counts


@planners.register("flow")
def flow(view: View) -> StepPlan:
    """Along negotiated lanes; implements :class:`talkoot.plan.steps.Planner`.

    Raises:
        ValueError: as :func:`talkoot.plan.routes.present_ways`.
    """
    ways = present_ways(view)
    launch = launch_order([route.count for route in view.routes])
    return StepPlan(tuple(Path(m, ways[lane]) for m, lane in enumerate(launch)), ring=True)


def lane_counts(view: View, lanes: Sequence[Sequence[Seat]]) -> list[int]:
    """Microbatches of each lane, ``view.num_microbatches`` together, whichever origins they leave from.

    Microbatch by microbatch to the lane with which the iteration gets longest least; then one at a time moves to
    another lane while that makes the iteration shorter. Deterministic.

    Args:
        lanes: an origin, then a peer of every other stage in order. ValueError when there is none.
    """
    if not lanes:
        raise ValueError("there are no lanes")
    queues = Queues(view, lanes)
    counts = [0] * len(lanes)
    for _ in range(view.num_microbatches):
        _, best = min((queues.seconds(_moved(counts, None, lane)), lane) for lane in range(len(lanes)))
        counts[best] += 1
    seconds, trials, improved = queues.seconds(counts), 0, True
    while improved:
        improved = False
        for giver in range(len(lanes)):
            for taker in range(len(lanes)):
                if giver == taker or not counts[giver] or trials >= MAX_TRIALS:
                    continue
                trials += 1
                found = queues.seconds(moved := _moved(counts, giver, taker))
                if found < seconds - 1e-9:
                    counts, seconds, improved = moved, found, True
    return counts


def launch_order(counts: Sequence[int]) -> list[int]:
    """The lane of each microbatch: turn by turn, lane by lane within a turn."""
    return [lane for turn in range(max(counts, default=0)) for lane, count in enumerate(counts) if turn < count]


def _moved(counts: Sequence[int], giver: int | None, taker: int) -> list[int]:
    return [count - (lane == giver) + (lane == taker) for lane, count in enumerate(counts)]


class Queues:
    """Plays iterations by the rules of a peer's desk (:mod:`talkoot.train.desk`) and of links that carry one at a time.

    A backward takes two forwards; mixing is left out.
    """

    def __init__(self, view: View, lanes: Sequence[Sequence[Seat]]) -> None:
        seats = list({seat.peer: seat for lane in lanes for seat in lane}.values())
        index = {seat.peer: node for node, seat in enumerate(seats)}
        ways = [[index[seat.peer] for seat in lane] for lane in lanes]
        self.ways = [[*way, way[0], *reversed(way)] for way in ways]  # out, loss, back
        self.forward_s = [view.forward_s(seat) for seat in seats]
        self.loss_s = [view.loss_s / seat.speed for seat in seats]
        self.slots = [seat.slots or view.num_microbatches for seat in seats]
        links = [[view.network.link(one.name, other.name) for other in seats] for one in seats]
        self.latency_s = [[link.latency_s for link in row] for row in links]
        self.busy_s = [[view.hop_bytes / link.bytes_per_s for link in row] for row in links]

    def seconds(self, counts: Sequence[int]) -> float:
        """How long an iteration takes in which lanes carry so many microbatches."""
        return _Iteration(self, [self.ways[lane] for lane in launch_order(counts)]).seconds()


class _Iteration:
    """One play: what waits, works, is held and is under way."""

    def __init__(self, queues: Queues, ways: Sequence[Sequence[int]]) -> None:
        self.queues, self.ways = queues, ways
        self.turn = len(ways[0]) // 2 if ways else 0  # the visit at which the loss is computed
        size = len(queues.forward_s)
        self.events: list[tuple[float, int, int]] = [(0.0, m, 0) for m in range(len(ways))]  # when, microbatch, visit
        self.waiting: list[list[tuple[bool, int, int]]] = [[] for _ in range(size)]  # forward, visit, microbatch
        self.doing: list[tuple[int, int] | None] = [None] * size
        self.held = [0] * size
        self.link_free: dict[tuple[int, int], float] = {}

    def seconds(self) -> float:
        now = 0.0
        while self.events:
            now, m, visit = heappop(self.events)
            node = ~m if m < 0 else self.ways[m][visit]
            if m < 0:
                self._finish(node, now)
            else:
                self.waiting[node].append((visit < self.turn, visit, m))
            if self.doing[node] is None:
                self._begin(node, now)
        return now

    def _begin(self, node: int, now: float) -> None:
        """Take backwards first, then what has the longest way to go; a forward only into a free slot."""
        queues, waiting = self.queues, self.waiting[node]
        full = self.held[node] >= queues.slots[node]
        best = min((work for work in waiting if not (work[0] and full)), default=None)
        if best is None:
            return
        waiting.remove(best)
        forward, visit, m = best
        self.held[node] += forward
        self.doing[node] = m, visit
        forward_s = queues.forward_s[node]
        seconds = forward_s if forward else queues.loss_s[node] if visit == self.turn else 2 * forward_s
        heappush(self.events, (now + seconds, ~node, 0))

    def _finish(self, node: int, now: float) -> None:
        m, visit = self.doing[node] or (0, 0)
        self.doing[node] = None
        self.held[node] -= visit > self.turn
        visit += 1
        if visit == len(self.ways[m]):
            return
        there, queues = self.ways[m][visit], self.queues
        if there != node:
            sent = max(now, self.link_free.get((node, there), 0.0)) + queues.busy_s[node][there]
            self.link_free[node, there] = sent
            now = sent + queues.latency_s[node][there]
        heappush(self.events, (now, m, visit))
