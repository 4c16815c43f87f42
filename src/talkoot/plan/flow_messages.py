"""What peers that route flows say to each other: a few small messages about *links*, all safe to lose or repeat.

A link is one microbatch's lane between two peers of neighbouring stages. Each of its two ends is a register with a
single writer, the peer that holds the end, who raises the version whenever the end moves or its cost changes. Two
copies of a link merge by taking, end for end, the higher version; so copies may be lost, repeated and reordered, and
whoever exchanges them long enough agrees.

The moves of decentralised flow routing (Blagoev et al., 2025, "Go With The Flow", arXiv 2509.21221) map onto this:

========================================  ==============================================================
there                                     here
========================================  ==============================================================
REQUEST, REJECT, CANCEL, COST, INTRODUCE  :class:`Request`, :class:`Reject`, :class:`Cancel`, :class:`Cost`,
                                          :class:`Introduce`
FLOWS and the CHANGE or REDIRECT proposal  :class:`Offer`: all that the proposer holds; the other decides
accepted CHANGE or REDIRECT               :class:`Exchange`: what the proposer holds from now on
ACCEPT, NOTIFY_SWITCH, NOTIFY_COST,       :class:`Check`: a copy of one link
PUSH_BACK to re-point, CHECK_FLOW
========================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

Way: TypeAlias = tuple[float | None, str, str]  # cost in seconds (None = not complete), data node, gate; see End


class End(msgspec.Struct, frozen=True, array_like=True):
    """One end of a link.

    Attributes:
        peer: who holds it.
        version: raised by each writer; the higher one is true.
        cost_s: upper end: cost of the way from the data node to ``peer``; lower end: from ``peer`` home. Without the
            link itself. None = that way is not complete.
        home: the data node where that way starts, or ends; "" = not known.
        gate: the link by which it leaves, or reaches, the data node.
    """

    peer: str
    version: int
    cost_s: float | None = None
    home: str = ""
    gate: str = ""

    @property
    def way(self) -> Way:
        """The way that this end leads on to."""
        return self.cost_s, self.home, self.gate


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One peer's copy of a link.

    Attributes:
        name: unique for ever.
        up, down: its ends; activations go from ``up.peer`` to ``down.peer``.
    """

    name: str
    up: End
    down: End

    def end(self, up: bool) -> End:
        """The upper or the lower end."""
        return self.up if up else self.down

    def moved(self, up: bool, end: End) -> Link:
        """This link with one end replaced."""
        return Link(self.name, end if up else self.up, self.down if up else end)

    def merged(self, other: Link) -> Link:
        """The truth as far as both copies know it."""
        return Link(self.name, max(self.up, other.up, key=age), max(self.down, other.down, key=age))


def age(end: End) -> tuple[int, str]:
    """What a higher version is; two peers can only have written the same one after an answer came far too late."""
    return end.version, end.peer


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One activation slot: the link by which a microbatch comes, and the one by which it leaves; of a data node, one
    microbatch of its own: the link by which it comes home, and the one by which it sets out.

    Only ``down``: a way home that waits for a user. Only ``up``: a way that lost its continuation.
    """

    up: Link | None = None
    down: Link | None = None

    def side(self, up: bool) -> Link | None:
        """The link whose upper (or lower) end is here: ``down`` (or ``up``)."""
        return self.down if up else self.up

    def put(self, up: bool, link: Link | None) -> Place:
        """This place with the link of :meth:`side` replaced."""
        return Place(self.up, link) if up else Place(link, self.down)


def links_of(places: Iterable[Place]) -> list[Link]:
    """All links that have an end in these places."""
    return [link for place in places for link in (place.up, place.down) if link is not None]


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """To the next stage: let this link continue on one of your ways home.

    Attributes:
        link: its name is new, its lower end unknown yet.
        target: the data node that the way must reach; "" = any.
    """

    link: Link
    target: str


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """Answer to a :class:`Request`: no; and what there is instead (as :class:`Cost`; None = ask again later)."""

    name: str
    offers: dict[str, float] | None


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """To the other end: my copy of the link that we share.

    Attributes:
        up: whether the sender speaks for the upper end.
    """

    link: Link
    up: bool


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """To the other end: what you believe to be with me is not.

    Attributes:
        up: whether it is about the upper end.
        version: of that end; who knows a newer one ignores this.
    """

    name: str
    up: bool
    version: int


class Cost(msgspec.Struct, frozen=True, array_like=True, tag="cost"):
    """To the previous stage: my cheapest unused way home to each data node.

    Attributes:
        clock: the sender's counter; an older one than known is stale.
        offers: seconds by data node.
    """

    clock: int
    offers: dict[str, float]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """To a peer of the same stage: this is all I hold, and I touch none of it until you answer; rearrange it.

    Attributes:
        number: the sender's counter.
        places: its places.
        costs: of its links to the peers of the neighbouring stages, in seconds.
    """

    number: int
    places: tuple[Place, ...]
    costs: dict[str, float]


class Exchange(msgspec.Struct, frozen=True, array_like=True, tag="exchange"):
    """Answer to an :class:`Offer`.

    Attributes:
        number: of the offer.
        places: what the proposer holds now; None = nothing changes.
        busy: nothing was looked at.
        given: links of the proposer's that others hold now.
        group: whose places were looked at, the host's among them.
    """

    number: int
    places: tuple[Place, ...] | None = None
    busy: bool = False
    given: tuple[Link, ...] = ()
    group: tuple[str, ...] = ()


class Card(msgspec.Struct, frozen=True, array_like=True):
    """Who holds which stage, and where it is reached (may be "")."""

    peer: str
    stage: int
    address: str = ""


class Introduce(msgspec.Struct, frozen=True, array_like=True, tag="introduce"):
    """These are the peers I know, myself first."""

    cards: tuple[Card, ...]


FlowMessage: TypeAlias = Request | Reject | Check | Cancel | Cost | Offer | Exchange | Introduce
Outgoing: TypeAlias = list[tuple[str, FlowMessage]]  # (to whom, what)
