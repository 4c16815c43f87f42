"""How two peers of one stage rearrange what they hold: the moves of local search, and when to take them.

Two kinds of move, between any two places: exchange what follows (the ways home change hands), or exchange all (each
peer takes the other's part in its lane; one of the two may be an empty or an unused place). A move that joins more
lanes is taken; one that joins fewer never; among the others the objective decides, and below a temperature chance
(Metropolis). Judged by the largest of the lanes concerned, ties by their sum, the sorted costs of all lanes only
ever fall without a temperature, so this ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from talkoot.plan.flow_messages import End, Link, Place

Objective: TypeAlias = Literal["max", "sum"]
Value: TypeAlias = tuple[
    int, float
]  # of a place: 0 = not joined, 1 = joined, 2 = a whole lane, and its cost in seconds
NOTHING: Value = (0, 0.0)
WARM_SWEEPS = 3
EPSILON_S = 1e-9  # costs nearer than this are equal


class Side(NamedTuple):
    """One of the two peers: its link costs in seconds, and its places (changed in place)."""

    peer: str
    costs: Mapping[str, float]
    places: list[Place]

    def value(self, place: Place) -> Value | None:
        """What a place would be worth here; None where it cannot stand here."""
        up, down = place.up, place.down
        before = 0.0 if up is None else self.costs.get(up.up.peer)
        after = 0.0 if down is None else self.costs.get(down.down.peer)
        if before is None or after is None:
            return None
        if up is None or down is None:
            return NOTHING
        if up.target != down.target:
            return None
        if up.up.cost_s is None or down.down.cost_s is None:
            return 1, 0.0
        return 2, up.up.cost_s + before + after + down.down.cost_s


class Taste(NamedTuple):
    """What is wanted: the objective, the temperature in seconds (0 = only improvements), and whose dice."""

    objective: Objective
    temperature_s: float
    chance: random.Random

    def accepts(self, old: tuple[Value, Value], new: tuple[Value, Value]) -> bool:
        """Whether two places should become two others."""
        (was_a, old_a_s), (was_b, old_b_s) = old
        (is_a, new_a_s), (is_b, new_b_s) = new
        joined = (is_a > 0) + (is_b > 0) - (was_a > 0) - (was_b > 0)
        whole = (is_a > 1) + (is_b > 1) - (was_a > 1) - (was_b > 1)
        if joined or whole:
            return (joined, whole) > (0, 0)
        gain = old_a_s + old_b_s - new_a_s - new_b_s
        if self.objective == "max":
            of_max = max(old_a_s, old_b_s) - max(new_a_s, new_b_s)
            gain = gain if abs(of_max) <= EPSILON_S else of_max
        if abs(gain) <= EPSILON_S:
            return False
        if gain > 0 or not self.temperature_s:
            return gain > 0
        return self.chance.random() < math.exp(gain / self.temperature_s)


def rearrange(sides: list[Side], taste: Taste) -> bool:
    """Try all moves among the places of all ``sides``, in random order; whether anything changed.

    :data:`WARM_SWEEPS` times if there is a temperature, else until no move helps.
    """
    changed, sweeps = False, 0
    while True:
        units = [(side, index) for side in sides for index in _distinct(side.places)]
        moves = [
            (a, b, whole)
            for at, a in enumerate(units)
            for b in units[:at]
            for whole in ((False, True) if a[0] is not b[0] else (False,))
        ]
        taste.chance.shuffle(moves)
        accepted, sweeps = sum(_try(*move, taste) for move in moves), sweeps + 1
        changed = changed or accepted > 0
        if not accepted or (taste.temperature_s and sweeps == WARM_SWEEPS):
            return changed


def pair_up(side: Side, taste: Taste) -> bool:
    """The same within one peer: which way in goes with which way out."""
    units = [(side, index) for index in _distinct(side.places)]
    return sum(_try(a, b, False, taste) for at, a in enumerate(units) for b in units[:at]) > 0


def _distinct(places: list[Place]) -> list[int]:
    """Indices of all places but repeated empty ones."""
    empty = [index for index, place in enumerate(places) if place == Place()]
    return [index for index in range(len(places)) if index not in empty[1:]]


def _try(a: tuple[Side, int], b: tuple[Side, int], whole: bool, taste: Taste) -> bool:
    (side_a, at_a), (side_b, at_b) = a, b
    old_a, old_b = side_a.places[at_a], side_b.places[at_b]
    if whole:
        new_a, new_b = old_b, old_a
    elif old_a.down is old_b.down:
        return False
    else:
        new_a, new_b = Place(old_a.up, old_b.down), Place(old_b.up, old_a.down)
    is_a, is_b = side_a.value(new_a), side_b.value(new_b)
    if is_a is None or is_b is None:
        return False
    if taste.accepts((side_a.value(old_a) or NOTHING, side_b.value(old_b) or NOTHING), (is_a, is_b)):
        side_a.places[at_a], side_b.places[at_b] = new_a, new_b
        return True
    return False


def through(place: Place, up: bool, costs: Mapping[str, float]) -> float | None:
    """What belongs into the register of a relay's upper (lower) end: the way from (to) the data node, in seconds."""
    other = place.side(not up)
    if other is None:
        return None
    far = other.end(up)
    hop = costs.get(far.peer)
    return None if hop is None or far.cost_s is None else far.cost_s + hop


def same(a: float | None, b: float | None) -> bool:
    """Whether two registers say the same."""
    return a == b or (a is not None and b is not None and abs(a - b) <= EPSILON_S)


def claimed(side: Side) -> list[Place]:
    """The places with this peer and its costs written into its ends of the links."""

    def end(place: Place, up: bool) -> Link | None:
        link = place.side(up)
        if link is None:
            return None
        old, cost = link.end(up), through(place, up, side.costs)
        if old.peer == side.peer and same(old.cost_s, cost):
            return link
        return link.moved(up, End(side.peer, old.version + 1, cost))

    return [Place(end(place, False), end(place, True)) for place in side.places]
