"""First valid routes: sets of stages that make skipping even, then nodes with slots left."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from talkoot.core.errors import TalkootError
from talkoot.plan.problem import Lane
from talkoot.plan.quotas import lane_counts
from talkoot.plan.routes_space import Lanes, Space

TRIES = 60


def first_lanes(space: Space, chance: Random, *, swaps: bool = True) -> Lanes:
    """Random valid lanes.

    Args:
        space: the problem.
        chance: decides everything that the constraints leave open.
        swaps: visit relays in the order that takes least; otherwise in the order of their stages.

    Raises:
        TalkootError: no even skipping was found within the slots.
    """
    most = most_lanes(space)
    for attempt in range(TRIES):
        # Fewer lanes of more microbatches may fit together where many do not.
        counts = lane_counts(space, chance, max(most - attempt // 4, 1))
        if attempt % 2:
            chance.shuffle(counts)
        lanes = _with_stages(space, counts, chance)
        if lanes is not None and (even := rebalance(space, lanes, chance, 400)) is not None:
            return [_in_order(space, lane, swaps) for lane in even]
    raise TalkootError(
        "no routes were found that visit all stages evenly",
        where="rules",
        why=f"{space.num_microbatches} microbatches on {most} lanes at most, {space.rules.visits} of "
        f"{len(space.groups)} stages each",
        next="change the number of microbatches to a multiple of the number of stages less one, or add slots",
    )


def most_lanes(space: Space) -> int:
    """The most lanes whose visits fit the relays' slots, were they spread at will over the stages."""
    slots = space.problem.slots
    room = [sum(slots[node] for node in group) for group in space.groups]
    lanes = min(room[0], space.num_microbatches)
    while lanes > 1 and sum(min(lanes, stage) for stage in room[1:]) < lanes * (space.rules.visits - 1):
        lanes -= 1
    return lanes


def _in_order(space: Space, lane: Lane, swaps: bool) -> Lane:
    if not lane.relays:
        return lane
    if swaps:
        return Lane(lane.origin, space.best_order(lane.origin, lane.relays), lane.count)
    return Lane(lane.origin, space.visiting_orders(lane.relays)[0], lane.count)


def _with_stages(space: Space, counts: list[tuple[int, int]], chance: Random) -> Lanes | None:
    """Each lane takes the stages that lack most visits, then random nodes of them; None when slots run out."""
    goal = space.num_microbatches * (space.rules.visits - 1) / max(len(space.groups) - 1, 1)
    lacking = [0.0, *[goal] * (len(space.groups) - 1)]
    used = [0] * len(space.problem.names)
    sets = space.some_sets(chance)
    lanes: Lanes = []
    for origin, count in counts:
        left = [len(space.spare(used, stage)) for stage in range(len(space.groups))]
        fitting = [some for some in sets if all(left[stage] for stage in some)]
        if not fitting:
            return None
        best = max(fitting, key=lambda some: (sum(lacking[stage] for stage in some), chance.random()))
        relays = tuple(chance.choice(space.spare(used, stage)) for stage in sorted(best))
        for stage in best:
            lacking[stage] -= count
        for node in (origin, *relays):
            used[node] += 1
        lanes.append(Lane(origin, relays, count))
    return lanes


def rebalance(space: Space, lanes: Lanes, chance: Random, steps: int) -> Lanes | None:
    """Exchange stages between lanes, or with free slots, until skipping is even; None when ``steps`` do not suffice.

    Every step shifts visits from a fuller stage to an emptier one, so that the sum of squares falls, or stays where
    nothing better exists.
    """
    lanes = list(lanes)
    stages = range(1, len(space.groups))
    for _ in range(steps):
        used, visits = space.load(lanes)
        if space.even(visits):
            return lanes
        pairs = [(a, b) for a in stages for b in stages if visits[a - 1] > visits[b - 1]]
        chance.shuffle(pairs)
        pairs.sort(key=lambda pair: visits[pair[1] - 1] - visits[pair[0] - 1])
        sideways: Lanes | None = None
        for a, b in pairs:
            gap = visits[a - 1] - visits[b - 1]
            shifts = [(abs(2 * d - gap), chance.random(), new) for d, new in _shifts(space, lanes, used, a, b, gap)]
            if shifts and min(shifts)[0] < gap:
                lanes = min(shifts)[2]
                break
            if shifts and sideways is None:
                sideways = min(shifts)[2]
        else:
            if sideways is None:
                return None
            lanes = sideways
    return lanes if space.even(space.load(lanes)[1]) else None


def _shifts(space: Space, lanes: Lanes, used: list[int], a: int, b: int, most: int) -> Iterator[tuple[int, Lanes]]:
    """(number, lanes) for every way to shift 1 to ``most`` visits from stage a to stage b."""
    at = [{space.stage_of[node]: node for node in lane.relays} for lane in lanes]
    spare = space.spare(used, b)
    for p, lane in enumerate(lanes):
        if a not in at[p] or b in at[p]:
            continue
        if spare and lane.count <= most and (new := replaced(space, lane, at[p][a], spare[0])):
            yield lane.count, [*lanes[:p], new, *lanes[p + 1 :]]
        for q, other in enumerate(lanes):
            if b in at[q] and a not in at[q] and 0 < lane.count - other.count <= most:
                first = replaced(space, lane, at[p][a], at[q][b])
                second = replaced(space, other, at[q][b], at[p][a])
                if first and second:
                    changed = list(lanes)
                    changed[p], changed[q] = first, second
                    yield lane.count - other.count, changed


def replaced(space: Space, lane: Lane, old: int, new: int) -> Lane | None:
    """The lane with relay ``new`` in the place of ``old``, in its cheapest order; None where no order is permitted."""
    relays = [new if node == old else node for node in lane.relays]
    if not space.orders(frozenset(space.stage_of[node] for node in relays)):
        return None
    return Lane(lane.origin, space.best_order(lane.origin, relays), lane.count)
