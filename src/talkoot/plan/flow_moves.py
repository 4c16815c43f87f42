"""How two peers of one stage rearrange what they hold: the moves of local search, and when to take them.

Two kinds of move, between any two places: exchange what follows (the ways home change hands), or exchange all (each
peer takes the other's part in its lane; one of the two may be an empty or an unused place). A move that joins more
lanes is taken; one that joins fewer never; among the others the objective decides, and below a temperature chance
(Metropolis). Judged by the largest of the lanes concerned, ties by their sum, the sorted costs of all lanes only
ever fall without a temperature, so this ends.

Data nodes among each other only exchange all: a whole lane sets out from, and comes home to, another one. What they
then write into its ends takes a while to reach its relays; a lane that meanwhile got the continuation of one that
leads elsewhere goes *astray*, and gets another as soon as there is one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from talkoot.plan.flow_messages import End, Link, Place, Way, age

Objective: TypeAlias = Literal["max", "sum"]
WARM_SWEEPS = 3
EPSILON_S = 1e-9  # costs nearer than this are equal


class Value(NamedTuple):
    """Of a place: whether it joins two links, whether into a whole lane, whether that leads astray, and its cost."""

    joined: bool = False
    whole: bool = False
    astray: bool = False
    cost_s: float = 0.0


NOTHING = Value()


class Side(NamedTuple):
    """One of the two peers: its link costs in seconds, and its places (changed in place).

    Of data nodes, ``middles`` tells what each lane costs from its first to its last relay, by name of its last link.
    """

    peer: str
    costs: Mapping[str, float]
    places: list[Place]
    middles: Mapping[str, float] | None = None

    def value(self, place: Place) -> Value | None:
        """What a place would be worth here; None where it cannot stand here."""
        up, down = place.up, place.down
        before = 0.0 if up is None else self.costs.get(up.up.peer)
        after = 0.0 if down is None else self.costs.get(down.down.peer)
        if before is None or after is None:
            return None
        if up is None or down is None:
            return NOTHING
        if self.middles is not None:
            middle = self.middles.get(up.name)
            return NOTHING if middle is None else Value(True, True, False, before + middle + after)
        astray = astray_here(place)
        if up.up.cost_s is None or down.down.cost_s is None:
            return Value(True, False, astray)
        return Value(True, True, astray, up.up.cost_s + before + after + down.down.cost_s)

    def movable(self) -> list[int]:
        """Indices of places that moves may concern: of empty ones, one; of a data node's ways out, whole lanes only."""
        empty = [index for index, place in enumerate(self.places) if place == Place()]
        return [
            index
            for index, place in enumerate(self.places)
            if index not in empty[1:]
            and (self.middles is None or place.down is None or (place.up is not None and place.up.name in self.middles))
        ]


def middles_of(sides: Iterable[tuple[Mapping[str, float], Iterable[Place]]]) -> dict[str, float]:
    """Costs of data nodes' lanes without first and last hop, by name of the last link; of those that are complete."""
    return {
        up.name: up.up.cost_s - costs[down.down.peer]
        for costs, places in sides
        for up, down in ((place.up, place.down) for place in places)
        if up is not None and down is not None and down.down.gate == up.name
        if up.up.cost_s is not None and down.down.peer in costs
    }


def paired(places: list[Place]) -> list[Place]:
    """A data node's places, each way out beside the way home to which it leads."""
    rest = [place.down for place in places if place.down is not None]
    downs: list[Link | None] = []
    for place in places:
        own = next((link for link in rest if place.up is not None and link.down.gate == place.up.name), None)
        downs.append(own)
        rest = [link for link in rest if link is not own]
    for index in sorted(range(len(places)), key=lambda index: places[index].up is not None):
        if downs[index] is None and rest:
            downs[index] = rest.pop()
    return [Place(place.up, down) for place, down in zip(places, downs, strict=True)]


def astray_here(place: Place) -> bool:
    """Whether a lane through this place starts at one data node and ends at another."""
    up, down = place.up, place.down
    return up is not None and down is not None and up.up.home != down.down.home and bool(up.up.home and down.down.home)


class Taste(NamedTuple):
    """What is wanted: the objective, the temperature in seconds (0 = only improvements), and whose dice."""

    objective: Objective
    temperature_s: float
    chance: random.Random

    def accepts(self, old: tuple[Value, Value], new: tuple[Value, Value]) -> bool:
        """Whether two places should become two others."""
        a, b = old
        c, d = new
        strayed = c.astray + d.astray - a.astray - b.astray
        if strayed > 0:
            return False
        joined = c.joined + d.joined - a.joined - b.joined
        whole = c.whole + d.whole - a.whole - b.whole
        if joined or whole or strayed:
            return (joined, whole, -strayed) > (0, 0, 0)
        old_s, new_s = (a.cost_s, b.cost_s), (c.cost_s, d.cost_s)
        gain = sum(old_s) - sum(new_s)
        if self.objective == "max":
            of_max = max(old_s) - max(new_s)
            gain = gain if abs(of_max) <= EPSILON_S else of_max
        if abs(gain) <= EPSILON_S:
            return False
        if gain > 0 or not self.temperature_s:
            return gain > 0
        return self.chance.random() < math.exp(gain / self.temperature_s)


def undouble(sides: list[Side]) -> bool:
    """Empty all but one of the places that hold the same end of a link; whether there were any.

    A peer that waited in vain for a host's answer keeps what the host gave away. The copies of both ends tell in time
    who wrote last, but if both holders lay open their places before that, it would be moved about twice.
    """
    ends = [
        (link.end(up), side, index, up, link.name)
        for side in sides
        for index, place in enumerate(side.places)
        for up, link in ((False, place.up), (True, place.down))
        if link is not None
    ]
    ends.sort(key=lambda held: (age(held[0]), held[0].peer == held[1].peer))
    last = {(name, up): at for at, (_, _, _, up, name) in enumerate(ends)}
    doubles = [held for at, held in enumerate(ends) if last[held[4], held[3]] != at]
    for _, side, index, up, _ in doubles:
        side.places[index] = side.places[index].put(up, None)
    return bool(doubles)


def rearrange(sides: list[Side], taste: Taste) -> bool:
    """Try all moves among the places of all ``sides``, in random order; whether anything changed.

    :data:`WARM_SWEEPS` times if there is a temperature, else until no move helps.
    """
    changed, sweeps = undouble(sides), 0
    while True:
        units = [(side, index) for side in sides for index in side.movable()]
        moves = [
            (a, b, whole)
            for at, a in enumerate(units)
            for b in units[:at]
            for whole in (False, True)
            if (a[0] is not b[0] if whole else a[0].middles is None)
        ]
        taste.chance.shuffle(moves)
        accepted, sweeps = sum(_try(*move, taste) for move in moves), sweeps + 1
        changed = changed or accepted > 0
        if not accepted or (taste.temperature_s and sweeps == WARM_SWEEPS):
            return changed


def pair_up(side: Side, taste: Taste) -> bool:
    """The same within one peer: which way in goes with which way out."""
    units = [(side, index) for index in side.movable()]
    return sum(_try(a, b, False, taste) for at, a in enumerate(units) for b in units[:at]) > 0


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


def through(place: Place, up: bool, costs: Mapping[str, float]) -> Way:
    """What belongs into the register of a relay's upper (lower) end: the way from (to) the data node."""
    other = place.side(not up)
    if other is None:
        return None, "", ""
    far = other.end(up)
    hop = costs.get(far.peer)
    return None if hop is None or far.cost_s is None else far.cost_s + hop, far.home, far.gate


def same(a: Way, b: Way) -> bool:
    """Whether two registers say the same."""
    return a == b or (a[1:] == b[1:] and a[0] is not None and b[0] is not None and abs(a[0] - b[0]) <= EPSILON_S)


def claimed(side: Side) -> list[Place]:
    """The places with this peer and its costs written into its ends of the links."""

    def end(place: Place, up: bool) -> Link | None:
        link = place.side(up)
        if link is None:
            return None
        old = link.end(up)
        way = through(place, up, side.costs) if side.middles is None else (0.0, side.peer, link.name)
        if old.peer == side.peer and same(old.way, way):
            return link
        return link.moved(up, End(side.peer, old.version + 1, *way))

    return [Place(end(place, False), end(place, True)) for place in side.places]
