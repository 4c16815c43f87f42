"""Small changes of routes that keep every hard constraint: the neighbourhood of a local search.

Each move draws one change by chance and returns the new lanes, or None where the draw fits nothing. ``used`` and
``visits`` are what `Space.load` says of the lanes before the change.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from talkoot.plan.paths import cheap_paths
from talkoot.plan.problem import Lane
from talkoot.plan.routes_first import rebalance, replaced
from talkoot.plan.routes_space import Lanes, Space

Move: TypeAlias = Callable[[Space, Lanes, list[int], list[int], Random], Lanes | None]

REPAIR_STEPS = 4


def _put(lanes: Lanes, *changes: tuple[int, Lane | None]) -> Lanes | None:
    """The lanes with some replaced; None where a replacement is."""
    changed = list(lanes)
    for index, lane in changes:
        if lane is None:
            return None
        changed[index] = lane
    return changed


def other_node(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """A lane uses another node of a stage, and a lane from there takes its place if all slots are taken."""
    p = chance.randrange(len(lanes))
    if not lanes[p].relays:
        return None
    old = chance.choice(lanes[p].relays)
    group = space.groups[space.stage_of[old]]
    new = chance.choice(group)
    if new == old:
        return None
    if used[new] < space.problem.slots[new]:
        return _put(lanes, (p, replaced(space, lanes[p], old, new)))
    q = chance.choice([index for index, lane in enumerate(lanes) if new in lane.relays])
    return _put(lanes, (p, replaced(space, lanes[p], old, new)), (q, replaced(space, lanes[q], new, old)))


def other_stage(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """A lane visits stage b instead of a; a lane that visits b instead of a does the opposite, or a slot is free."""
    p = chance.randrange(len(lanes))
    lane, stages = lanes[p], {space.stage_of[node] for node in lanes[p].relays}
    unvisited = [stage for stage in range(1, len(space.groups)) if stage not in stages]
    if not unvisited or not stages:
        return None
    old, b = chance.choice(lane.relays), chance.choice(unvisited)
    a = space.stage_of[old]
    options = [(-1, node, 0) for node in space.spare(used, b)]
    for q, other in enumerate(lanes):
        at = {space.stage_of[node]: node for node in other.relays}
        if b in at and a not in at:
            options.append((q, at[b], other.count))
    low, high = min(visits), max(visits)

    def stays_even(count: int) -> bool:
        shift = lane.count - count
        after = (visits[a - 1] - shift, visits[b - 1] + shift)
        return max(high, *after) - min(low, *after) <= space.tolerance  # cautious: old extremes still count

    options = [option for option in options if stays_even(option[2])]
    if not options:
        return None
    q, new, _ = chance.choice(options)
    if q < 0:
        return _put(lanes, (p, replaced(space, lane, old, new)))
    return _put(lanes, (p, replaced(space, lane, old, new)), (q, replaced(space, lanes[q], new, old)))


def other_order(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """A lane visits its relays in another permitted order."""
    p = chance.randrange(len(lanes))
    lane = lanes[p]
    orders = [order for order in space.visiting_orders(lane.relays) if order != lane.relays]
    return _put(lanes, (p, Lane(lane.origin, chance.choice(orders), lane.count))) if orders else None


def exchange(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """Two lanes exchange their relays; also the counts, where that leaves the quotas.

    Between lanes of one origin this changes the order of launching only.
    """
    if len(lanes) < 2:
        return None
    p, q = chance.sample(range(len(lanes)), 2)
    one, two = lanes[p], lanes[q]
    if one.count != two.count and one.origin != two.origin and space.quotas == "equal":
        return None
    if one.relays == two.relays and one.count == two.count:
        return None
    return _put(
        lanes,
        (p, Lane(one.origin, _ordered(space, one.origin, two, chance), two.count)),
        (q, Lane(two.origin, _ordered(space, two.origin, one, chance), one.count)),
    )


def _ordered(space: Space, origin: int, lane: Lane, chance: Random) -> tuple[int, ...]:
    """The lane's relays as they are, or in the order that suits another origin best."""
    return lane.relays if chance.random() < 0.3 or not lane.relays else space.best_order(origin, lane.relays)


def shift_count(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """A lane hands one microbatch to another lane, or half of its own to a new one; then skipping is made even.

    With equal quotas both lanes belong to one origin, and the giver carries more than the taker.
    """
    p = chance.randrange(len(lanes))
    giver = lanes[p]
    takers: list[int] = []
    for q, lane in enumerate(lanes):
        if q == p:
            continue
        if space.quotas == "free" or (lane.origin == giver.origin and lane.count < giver.count):
            takers.append(q)
    starts = space.origins if space.quotas == "free" else (giver.origin,)
    starts = [origin for origin in starts if used[origin] < space.problem.slots[origin]]
    if starts and giver.count > 1 and chance.random() < 0.3:
        changed = _split(space, lanes, p, chance.choice(starts), used, chance)
    elif takers:
        q = chance.choice(takers)
        taker = lanes[q]
        changed = list(lanes)
        changed[p] = Lane(giver.origin, giver.relays, giver.count - 1)
        changed[q] = Lane(taker.origin, taker.relays, taker.count + 1)
        if giver.count == 1:
            del changed[p]
    else:
        return None
    return changed and rebalance(space, changed, chance, REPAIR_STEPS)


def _split(space: Space, lanes: Lanes, p: int, origin: int, used: list[int], chance: Random) -> Lanes | None:
    """Half of lane p goes over a new lane from ``origin``, through nodes of the same stages with a slot left."""
    giver = lanes[p]
    spares = [space.spare(used, space.stage_of[node]) for node in giver.relays]
    if not all(spares):
        return None
    moved = max(giver.count // 2, 1)
    relays = [chance.choice(spare) for spare in spares]
    new = Lane(origin, space.best_order(origin, relays) if relays else (), moved)
    return [*lanes[:p], Lane(giver.origin, giver.relays, giver.count - moved), *lanes[p + 1 :], new]


def other_origin(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """With free quotas: a lane starts at another origin that has a slot left."""
    starts = [origin for origin in space.origins if used[origin] < space.problem.slots[origin]]
    if space.quotas == "equal" or not starts:
        return None
    p, origin = chance.randrange(len(lanes)), chance.choice(starts)
    return _put(lanes, (p, Lane(origin, _ordered(space, origin, lanes[p], chance), lanes[p].count)))


def better_path(space: Space, lanes: Lanes, used: list[int], visits: list[int], chance: Random) -> Lanes | None:
    """A slow lane takes one of the cheapest paths of its origin; whoever is in the way takes what it leaves."""
    picks = [chance.randrange(len(lanes)) for _ in range(2)]
    p = max(picks, key=lambda index: lanes[index].count * space.rtt_s(lanes[index].origin, lanes[index].relays))
    paths = cheap_paths(space, lanes[p].origin)
    wanted = paths[int(len(paths) * chance.random() ** 2)] if paths else ()
    here, there = ({space.stage_of[node]: node for node in relays} for relays in (lanes[p].relays, wanted))
    if here == there:
        return None
    left, entered = [a for a in here if a not in there], [b for b in there if b not in here]
    chance.shuffle(left)
    changed, used = list(lanes), list(used)
    for a, b in [*zip(left, entered, strict=True), *((s, s) for s in here if here[s] != there.get(s, here[s]))]:
        if not _give_way(space, changed, used, p, here[a], there[b], chance):
            return None
    changed[p] = Lane(lanes[p].origin, wanted, lanes[p].count)
    return rebalance(space, changed, chance, REPAIR_STEPS)


def _give_way(space: Space, lanes: Lanes, used: list[int], p: int, old: int, new: int, chance: Random) -> bool:
    """Free a slot of ``new`` for lane p, which leaves ``old``: lanes and used slots are changed in place."""
    a, b = space.stage_of[old], space.stage_of[new]
    free = old
    if a != b:  # somebody who visits b visits a instead, best somebody on this very node with as many microbatches
        swapped = [
            (new not in lane.relays, chance.random(), q)
            for q, lane in enumerate(lanes)
            if q != p
            and old not in lane.relays
            and any(space.stage_of[node] == b for node in lane.relays)
            and not any(space.stage_of[node] == a for node in lane.relays)
            and lane.count == lanes[p].count
        ]
        if not swapped:
            return False
        q = min(swapped)[2]
        free = next(node for node in lanes[q].relays if space.stage_of[node] == b)
        if (lane := replaced(space, lanes[q], free, old)) is None:
            return False
        lanes[q] = lane
    if free != new and used[new] >= space.problem.slots[new]:
        q = chance.choice([q for q, lane in enumerate(lanes) if q != p and new in lane.relays])
        if (lane := replaced(space, lanes[q], new, free)) is None:
            return False
        lanes[q] = lane
    elif free != new:
        used[new] += 1
        used[free] -= 1
    return True


# Those that need to know nothing beyond the lanes.
CHEAP_MOVES: tuple[Move, ...] = (other_node, other_stage, other_order, exchange, shift_count, other_origin)
# By how often they are drawn.
MOVES: tuple[tuple[Move, int], ...] = (
    (better_path, 4),
    (other_node, 6),
    (other_stage, 6),
    (other_order, 1),
    (exchange, 4),
    (shift_count, 2),
    (other_origin, 1),
)
