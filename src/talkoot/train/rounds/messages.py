"""What the lead and the replicas of a run in rounds say to each other; topics and their bodies.

Every message between replicas names round, fragment and view. Whoever is in another view, or past that round, refuses:
nothing stale is ever merged.
"""

from __future__ import annotations

import msgspec

from talkoot.core.receipt import Signed
from talkoot.run.greeting import Contact


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A replica in a view: who, where, its share of the data, its inner steps per round, its first round."""

    peer: str
    name: str
    address: str
    slot: int
    steps: int
    since: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to replica, ``view``: these are in the run.

    Attributes:
        number: counts up; the highest one counts.
        until: the run ends after so many rounds.
    """

    number: int
    places: tuple[Place, ...]
    until: int

    def at(self, round: int) -> list[Place]:
        """Who takes part in a round, in an order that everybody shares."""
        return sorted((place for place in self.places if place.since <= round), key=lambda place: place.slot)

    def of(self, peer: str) -> Place | None:
        """A peer's place, if it has one."""
        return next((place for place in self.places if place.peer == peer), None)


class Enter(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to replica, ``enter``: take part from this round on.

    Attributes:
        slot: which share of the data is yours.
        donors: replicas whose mean to start from, and others to turn to; none = the initial weights, or ``blob``.
        wanted: how many of them to average.
        blob: a stored state of this slot.
    """

    slot: int
    round: int
    donors: tuple[Contact, ...] = ()
    wanted: int = 1
    blob: str = ""
    view: View


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """Replica to lead, ``arrived``: I have a state and could begin; or why not."""

    round: int
    donors: tuple[str, ...] = ()
    problem: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Replica to lead, ``round``: a round's receipt. ``blob``, ``size``: the state stored after it, if one was due."""

    receipt: Signed
    blob: str = ""
    size: int = 0
    problem: str = ""


class Key(msgspec.Struct, frozen=True, array_like=True):
    """What an exchange is about."""

    round: int
    fragment: int
    view: int


class Offer(msgspec.Struct, frozen=True):
    """Replica to its partner, ``offer``: my message is in the frames; the last one is a sample, for telemetry."""

    key: Key


class Took(msgspec.Struct, frozen=True):
    """Replica to its partner, ``took``: your offer is whole and I merge it."""

    key: Key


class Refused(msgspec.Struct, frozen=True):
    """Replica to its partner, ``refused``: I do not merge yours, so do not merge mine."""

    key: Key
    why: str


class Part(msgspec.Struct, frozen=True):
    """Replica to replica, ``part``: a partial sum, or the mean, on its way through a group of all, in this hop."""

    key: Key
    hop: int


class Ask(msgspec.Struct, frozen=True):
    """Replica to replica, ``ask``: have you got that round's mean? If not, do not complete it in an older view."""

    key: Key


class Standing(msgspec.Struct, frozen=True):
    """Replica to replica, ``standing``, the answer: I have the sum ``of`` so many, in the frames; or (0) I have not."""

    key: Key
    of: int


class Fetch(msgspec.Struct, frozen=True):
    """Newcomer to donor, ``fetch``: send your slow weights, once you are in that round.

    Donor to newcomer, and newcomer to lead, ``later``: I am past its beginning; it will be that of this later round.
    Replica to lead, ``behind``: I am only here, and others are far ahead.
    """

    round: int


class Diverging(msgspec.Struct, frozen=True):
    """Replica to lead, ``diverged``: my numbers are not finite any more, in this round; I stop."""

    round: int
    why: str


class Chunk(msgspec.Struct, frozen=True):
    """Donor to newcomer, ``chunk``: the ``number``-th of ``count`` pieces of its state of a round, with this digest."""

    round: int
    number: int
    count: int
    digest: str


class Collect(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to replica, ``collect``: the run ends; send your weights to ``collector``, who averages those ``of`` all."""

    collector: Contact
    of: tuple[Contact, ...]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Collector to lead, ``collected``: the mean model lies in this blob.

    Attributes:
        blob, size, tensors: as in :class:`~talkoot.train.messages.Saved`.
        averaged: how many replicas are in it.
        held_out: its loss on held-out text, where there is any.
        problem: why there is none.
    """

    blob: str = ""
    size: int = 0
    tensors: dict[str, str] = {}
    averaged: int = 0
    held_out: float | None = None
    problem: str = ""
