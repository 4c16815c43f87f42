"""What one training iteration takes when every microbatch follows its lane: an event simulation in plain numbers.

The rules, all of them:

* A lane launches its microbatches one after another: the next forward is ready at the origin the moment the backward
  of the one before ends there. An origin's k-th lane is ready for the first time at k forwards of the origin.
* A microbatch goes origin, relays, origin (the loss), relays in reverse, origin. Between two visits lies
  ``hop_s[from][to]``, in the direction of travel; the diagonal is free.
* A node does one piece of work at a time and never interrupts it. Whenever it is free it takes, of what has arrived,
  a backward or a loss before a forward, then the one with the longest path ahead of it (in hops), then the one that
  comes first in ``Routes.turns``: the order of work of ``talkoot.train.desk``, so that peers take as long as predicted.
* Links carry any number of transfers at once. With ``contention``, a node's network card sends one transfer at a time
  and receives one at a time, each for ``busy_s``, first come first served; the rest of ``hop_s`` is propagation.
* A node is never on more lanes than it has slots, and a lane never has two microbatches in flight, so a forward
  always finds a free slot: nothing here can wait in a circle.
* The iteration ends with the last backward at an origin. The all-reduce inside the stages is not part of it.

The run order follows Blagoev et al., 2025 ("SkipPipe", arXiv 2502.19913), whose figures show nodes that choose between
forwards and backwards. Whether the longest path is measured in seconds or in hops makes no difference on average (less
than 0.1 % over 2,000 random placements and paths of 20 nodes on the gcp12 links); hops are what a peer knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from talkoot.plan.problem import Lane, Problem, Routes

NEVER = float("inf")

Row = tuple[float, float, int, int]  # an event, (when, key, ticket, step), or a record, (start, end, ticket, step)
Phase = Literal["forward", "loss", "backward"]


class Span(msgspec.Struct, frozen=True, gc=False):
    """A piece of work: which node did what for which microbatch, and when (seconds since the iteration began)."""

    node: int
    phase: Phase
    microbatch: int
    start_s: float
    end_s: float


class Iteration(msgspec.Struct, frozen=True):
    """One training iteration: how long it takes, and all pieces of work in the order of their starts."""

    seconds: float
    spans: tuple[Span, ...]

    def busy_share(self) -> dict[int, float]:
        """For each node that works: which share of the iteration it does."""
        busy: dict[int, float] = {}
        for span in self.spans:
            busy[span.node] = busy.get(span.node, 0.0) + span.end_s - span.start_s
        return {node: seconds / self.seconds for node, seconds in sorted(busy.items())}


class Course(NamedTuple):
    """A lane's visits, flattened: for each the node, its seconds, the transfer that follows, and its urgency.

    ``keys`` order waiting work, lowest first. A backward or loss has minus the visits ahead of it, which is
    negative; a forward has their inverse, which is positive and falls as they grow. ``hops[i]`` leads to visit i + 1.
    """

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    hops: tuple[float, ...]
    busy: tuple[float, ...]
    keys: tuple[float, ...]


class Player:
    """Plays routes over one placement, many times: what depends on a single path is computed once.

    Args:
        problem: costs in seconds.
        groups: nodes of each stage.
    """

    def __init__(self, problem: Problem, groups: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.stage_of = {node: stage for stage, group in enumerate(groups) for node in group}
        self._courses: dict[tuple[int, tuple[int, ...]], Course] = {}

    def makespan(self, lanes: Sequence[Lane], *, contention: bool = False) -> float:
        """Seconds of the iteration.

        Raises:
            ValueError: a lane visits a node that holds no stage, or a node is on more lanes than it has slots.
        """
        return self._run(lanes, contention, None)

    def play(self, lanes: Sequence[Lane], *, contention: bool = False) -> Iteration:
        """The iteration with all its work. Raises as `makespan` does."""
        routes = Routes(groups=(), lanes=tuple(lanes))
        number = {turn * len(lanes) + lane: number for number, lane, turn in routes.turns()}
        raw: list[Row] = []
        seconds = self._run(lanes, contention, raw)
        spans: list[Span] = []
        for start, end, ticket, step in raw:
            lane = lanes[ticket % len(lanes)]
            turn = len(lane.relays) + 1
            phase: Phase = "forward" if step < turn else "loss" if step == turn else "backward"
            node = self.course(lane).nodes[step]
            spans.append(Span(node, phase, number[ticket], start, end))
        spans.sort(key=lambda span: (span.start_s, span.node))
        return Iteration(seconds, tuple(spans))

    def course(self, lane: Lane) -> Course:
        """The visits of a lane's microbatches."""
        key = (lane.origin, lane.relays)
        course = self._courses.get(key)
        if course is None:
            course = self._courses[key] = self._new_course(*key)
        return course

    def _new_course(self, origin: int, relays: tuple[int, ...]) -> Course:
        problem, stage_of = self.problem, self.stage_of
        out = (origin, *relays)
        for node in out:
            if node not in stage_of:
                raise ValueError(f"a lane visits {problem.names[node]}, which holds no stage")
        nodes = (*out, origin, *reversed(out))
        forwards = [problem.forward_s(node, stage_of[node]) for node in out]
        backwards = [problem.backward_s(node, stage_of[node]) for node in reversed(out)]
        seconds = (*forwards, problem.loss_s(origin), *backwards)
        hops = (*(problem.hop_s[a][b] for a, b in pairwise(nodes)), 0.0)
        busy = (*(problem.busy_s[a][b] for a, b in pairwise(nodes)), 0.0)
        left = [len(nodes) - 1 - step for step in range(len(nodes))]
        forward = [1.0 / (1 + left[step]) for step in range(len(out))]
        return Course(
            nodes, seconds, hops, busy, (*forward, *(-1.0 - left[step] for step in range(len(out), len(nodes))))
        )

    def _run(self, lanes: Sequence[Lane], contention: bool, record: list[Row] | None) -> float:
        """The simulation. A microbatch is a ticket, turn * number of lanes + lane; tickets sort as ``turns`` does.

        Events are (time, key, ticket, step): a microbatch arrives for its step, or (step < 0, as complement) the
        head of its transfer reaches the receiver's card. A node to wake is (time, infinity, node, 0), after all that
        arrives at that time. Exactly one wake is booked for a node while anything waits there.
        """
        width, nodes = len(lanes), len(self.problem.names)
        courses, events = self._ready(lanes)
        ends = [lane.count * width for lane in lanes]
        waiting: list[list[tuple[float, int, int]]] = [[] for _ in range(nodes)]
        free_at, sender_free, receiver_free = [0.0] * nodes, [0.0] * nodes, [0.0] * nodes
        latest = 0.0
        while events:
            now, key, ticket, step = heappop(events)
            if key == NEVER:
                node = ticket
                queue = waiting[node]
                _, ticket, step = heappop(queue)
                course = courses[ticket % width]
            else:
                course = courses[ticket % width]
                if step < 0:
                    step = ~step
                    node = course.nodes[step]
                    arrived = max(now, receiver_free[node]) + course.busy[step - 1]
                    receiver_free[node] = arrived
                    heappush(events, (arrived, key, ticket, step))
                    continue
                node = course.nodes[step]
                queue = waiting[node]
                if queue:
                    heappush(queue, (key, ticket, step))
                    continue
                if free_at[node] > now:
                    queue.append((key, ticket, step))
                    heappush(events, (free_at[node], NEVER, node, 0))
                    continue
            end = now + course.seconds[step]
            free_at[node] = end
            if queue:
                heappush(events, (end, NEVER, node, 0))
            if record is not None:
                record.append((now, end, ticket, step))
            hop = course.hops[step]
            step += 1
            if step == len(course.nodes):
                latest = end if end > latest else latest
                if (ticket := ticket + width) < ends[ticket % width]:
                    heappush(events, (end, course.keys[0], ticket, 0))
            elif contention and course.nodes[step] != node:  # a node's transfers are booked in the order they begin
                busy = course.busy[step - 1]
                begin = max(end, sender_free[node])
                sender_free[node] = begin + busy
                heappush(events, (begin + max(hop - busy, 0.0), course.keys[step], ticket, ~step))
            else:
                heappush(events, (end + hop, course.keys[step], ticket, step))
        return latest

    def _ready(self, lanes: Sequence[Lane]) -> tuple[list[Course], list[Row]]:
        """Courses, and the first launches (a heap); checks the slots on the way."""
        problem = self.problem
        courses = [self.course(lane) for lane in lanes]
        events: list[Row] = []
        launched: dict[int, int] = {}
        used = [0] * len(problem.names)
        for index, (lane, course) in enumerate(zip(lanes, courses, strict=True)):
            if lane.count <= 0:
                continue
            for node in course.nodes[: len(lane.relays) + 1]:
                used[node] += 1
                if used[node] > problem.slots[node]:
                    raise ValueError(
                        f"{problem.names[node]} is on more lanes than its {problem.slots[node]} slots: a forward "
                        "would find no free slot"
                    )
            before = launched.get(lane.origin, 0)
            launched[lane.origin] = before + 1
            heappush(events, (before * course.seconds[0], course.keys[0], index, 0))
        return courses, events


def play(problem: Problem, routes: Routes, *, contention: bool = False) -> Iteration:
    """One training iteration over ``routes``, with every piece of work. Raises as `Player.makespan` does."""
    return Player(problem, routes.groups).play(routes.lanes, contention=contention)


def makespan(problem: Problem, routes: Routes, *, contention: bool = False) -> float:
    """Seconds of one training iteration. A search keeps a `Player` instead, which remembers the paths."""
    return Player(problem, routes.groups).makespan(routes.lanes, contention=contention)


def rtt(problem: Problem, groups: Sequence[Sequence[int]], origin: int, relays: Sequence[int]) -> float:
    """Seconds that a microbatch takes when it is alone: all its visits and transfers, in the order of travel."""
    course = Player(problem, groups).course(Lane(origin, tuple(relays), 1))
    total = 0.0
    for seconds, hop in zip(course.seconds, course.hops, strict=True):
        total = total + seconds + hop
    return total
