"""The best paths of one microbatch among what others have reserved: best-first search over partial paths (A*).

The low level of SkipPipe's scheduler (Blagoev et al., 2025, arXiv 2502.19913; Hart, Nilsson and Raphael, 1968, for A*).
A state is a node, the stages visited, the furthest of them and the swaps made; its priority is the time of arrival,
plus the way back so far, plus a lower bound of all that is still to come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from talkoot.plan.problem import Rules
from talkoot.plan.routes_space import Space

Interval = tuple[float, float]


class Visit(NamedTuple):
    """A node is busy for a microbatch from ``start_s`` to ``end_s``."""

    node: int
    start_s: float
    end_s: float
    backward: bool


class Trip(NamedTuple):
    """A path with its times: all visits of one microbatch, the origin's and the loss included, and its end."""

    relays: tuple[int, ...]
    visits: tuple[Visit, ...]
    finish_s: float


class Partial(NamedTuple):
    """A partial path in the queue; the first two fields order it."""

    least_s: float
    number: int
    done_s: float
    back_s: float
    relays: tuple[int, ...]
    stages: int
    frontier: int
    swaps: int
    swap_sum: int


def steps_s(space: Space, a: int, b: int) -> float:
    """From a to b and, as a gradient, from b to a; and all of b's work."""
    problem, stage = space.problem, space.stage_of[b]
    work_s = problem.forward_s(b, stage) + problem.backward_s(b, stage) if stage else 0.0
    return problem.hop_s[a][b] + problem.hop_s[b][a] + work_s


def ahead_s(space: Space, origin: int) -> list[dict[int, float]]:
    """``[k][node]``: at least so long from leaving ``node`` to returning there, with k more relays and the origin.

    Only that neighbours differ in their stage is heeded; loss and the origin's own work are not included. Remembered.
    """
    if (rows := space.ahead_s.get(origin)) is not None:
        return rows
    relays = [node for node, stage in space.stage_of.items() if stage]
    stage_of = space.stage_of
    rows = [{node: steps_s(space, node, origin) for node in relays}]
    for _ in range(space.rules.visits - 2):
        row = rows[-1]
        rows.append(
            {
                a: min(
                    (steps_s(space, a, b) + row[b] for b in relays if stage_of[a] != stage_of[b]),
                    default=float("inf"),
                )
                for a in relays
            }
        )
    space.ahead_s[origin] = rows
    return rows


def fastest_rtt_s(space: Space, origin: int) -> float:
    """A lower bound of an origin's round trip."""
    problem = space.problem
    own_s = problem.forward_s(origin, 0) + problem.backward_s(origin, 0) + problem.loss_s(origin)
    if space.rules.visits < 2:
        return own_s
    row = ahead_s(space, origin)[-1]
    return own_s + min(steps_s(space, origin, node) + seconds for node, seconds in row.items())


def trips(
    space: Space,
    origin: int,
    *,
    start_s: float = 0.0,
    reserved: Mapping[int, Sequence[Interval]] | None = None,
    closed: Collection[int] = (),
    most: int = 1,
) -> Iterator[Trip]:
    """Permitted paths from an origin and back, the earliest home first; exact where nothing is reserved.

    Args:
        space: problem, placement and rules.
        origin: where the path starts and ends.
        start_s: when its forward is ready there.
        reserved: by node, sorted intervals in which it is taken: the visit waits until they end.
        closed: nodes that must not be visited.
        most: how many paths are wanted at most; of the arrivals at a state, so many are followed.
    """
    problem, rules, stage_of = space.problem, space.rules, space.stage_of
    reserved = reserved or {}
    rows = ahead_s(space, origin)
    nodes = [node for node, stage in stage_of.items() if stage and node not in closed]
    tail_s = problem.loss_s(origin) + problem.backward_s(origin, 0)
    own_s = problem.forward_s(origin, 0)
    first_s = _free_from(reserved.get(origin, ()), start_s, own_s) + own_s
    queue = [Partial(first_s, 0, first_s, 0.0, (), 0, 0, 0, 0)]
    number, arrivals, found = 0, dict[tuple[int, ...], int](), 0
    while queue and found < most:
        part = heappop(queue)
        at = part.relays[-1] if part.relays else origin
        if len(part.relays) == rules.visits - 1:
            if part.back_s < 0:  # laid out below, and now the earliest of all
                found += 1
                yield _laid_out(space, origin, part.relays, start_s, reserved)
                continue
            number += 1
            finish_s = _laid_out(space, origin, part.relays, start_s, reserved).finish_s
            heappush(queue, part._replace(least_s=finish_s, number=number, back_s=-1.0))
            continue
        key = (at, part.stages, part.frontier, part.swaps, part.swap_sum)
        arrivals[key] = arrivals.get(key, 0) + 1
        if arrivals[key] > most:
            continue
        left = rules.visits - 2 - len(part.relays)
        for node in nodes:
            stage = stage_of[node]
            behind = max(part.frontier - stage, 0)
            swaps, swap_sum = part.swaps + (behind > 0), part.swap_sum + behind
            if part.stages >> stage & 1 or not _permitted(rules, stage - part.frontier, behind, swaps, swap_sum):
                continue
            work_s = problem.forward_s(node, stage)
            done_s = _free_from(reserved.get(node, ()), part.done_s + problem.hop_s[at][node], work_s) + work_s
            back_s = part.back_s + problem.backward_s(node, stage) + problem.hop_s[node][at]
            number += 1
            least_s = done_s + back_s + rows[left][node] + tail_s
            visited = (*part.relays, node), part.stages | 1 << stage, max(part.frontier, stage)
            heappush(queue, Partial(least_s, number, done_s, back_s, *visited, swaps, swap_sum))


def _permitted(rules: Rules, advance: int, behind: int, swaps: int, swap_sum: int) -> bool:
    """Whether a visit so far beyond or behind the frontier is, with the swaps that the path then has."""
    if not behind:
        return advance <= rules.max_advance
    return behind <= rules.max_swap and swaps <= rules.max_swaps and swap_sum <= rules.max_swap_sum


def cheap_paths(space: Space, origin: int, number: int = 24) -> list[tuple[int, ...]]:
    """The relays of the paths that bring a microbatch of this origin home earliest when it is alone; remembered."""
    found = space.cheap_paths.get(origin)
    if found is None:
        found = space.cheap_paths[origin] = [trip.relays for trip in trips(space, origin, most=number)]
    return found


def _free_from(taken: Sequence[Interval], ready_s: float, work_s: float) -> float:
    """The first time from ``ready_s`` on at which ``work_s`` fits between sorted intervals."""
    for begin_s, end_s in taken:
        if begin_s < ready_s + work_s and end_s > ready_s:
            ready_s = end_s
    return ready_s


def _laid_out(
    space: Space, origin: int, relays: tuple[int, ...], start_s: float, reserved: Mapping[int, Sequence[Interval]]
) -> Trip:
    """The whole trip over known relays: forward, loss, and the same way back, waiting where nodes are taken."""
    problem, stage_of = space.problem, space.stage_of
    out = (origin, *relays)
    nodes = (*out, origin, *reversed(out))
    visits: list[Visit] = []
    now_s = start_s
    for step, node in enumerate(nodes):
        if step:
            now_s += problem.hop_s[nodes[step - 1]][node]
        backward = step > len(relays)
        if step == len(out):
            work_s = problem.loss_s(node)
        else:
            work_s = (problem.backward_s if backward else problem.forward_s)(node, stage_of[node])
        begin_s = _free_from(reserved.get(node, ()), now_s, work_s)
        now_s = begin_s + work_s
        visits.append(Visit(node, begin_s, now_s, backward))
    return Trip(relays, tuple(visits), now_s)
