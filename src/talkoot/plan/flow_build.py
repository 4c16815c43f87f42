"""Building lanes backwards from the data nodes: who offers a way home, who asks for one."""

from __future__ import annotations

import msgspec

from talkoot.plan.flow_links import Links
from talkoot.plan.flow_messages import (
    Card,
    Check,
    Cost,
    End,
    Link,
    Offer,
    Outgoing,
    Place,
    Reject,
    Request,
)

ORPHAN_PERIODS = 24  # a way in without continuation is given back
ASTRAY_PERIODS = 100  # so is, without any change, a lane that ends at another data node
REFRESH_PERIODS = 20  # what is on offer is said again


class Pending(msgspec.Struct):
    """The one question that waits for an answer."""

    to: str
    question: Request | Offer
    since: float
    sent: float


class Builder(Links):
    """What a peer offers, wants and was promised; arguments as for :class:`~talkoot.plan.flow_links.Links`."""

    def __init__(self, card: Card, num_stages: int, slots: int, period_s: float) -> None:
        super().__init__(card, num_stages, slots, period_s)
        self.heard: dict[str, Cost] = {}  # what the next stage has on offer
        self.pending: Pending | None = None
        self.stuck: dict[str, tuple[float, int]] = {}  # links that lead nowhere: since when, and `changed` by then
        self._said: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._count = 0

    @property
    def locked(self) -> bool:
        """Whether what is held here is in the hands of a host."""
        return self.pending is not None and isinstance(self.pending.question, Offer)

    def asked(self, to: str, name: str) -> bool:
        """Whether I wait for an answer of ``to`` to the request for this link."""
        question = self.pending.question if self.pending is not None and self.pending.to == to else None
        return isinstance(question, Request) and question.link.name == name

    def ways(self) -> list[tuple[float, str, int]]:
        """Unused ways home: (cost in seconds, data node, place)."""
        found = [(*self.way(index, False), index) for index, place in enumerate(self.places) if place.up is None]
        return [(cost, home, index) for cost, home, _, index in found if cost is not None]

    def offers(self) -> dict[str, float]:
        """The cheapest of them to each data node, in seconds."""
        return {target: cost for cost, target, _ in sorted(self.ways(), reverse=True)}

    def advertise(self, now: float, out: Outgoing) -> None:
        """Tell the stage before what is on offer, when that changes and now and then."""
        offers = self.offers()
        targets, when = self._said
        if offers.keys() != targets or (offers and now >= when):
            self._said = (frozenset(offers), now + REFRESH_PERIODS * self.period_s)
            self._count += 1
            cost = Cost(self._count, offers)
            out += [(peer, cost) for peer in sorted(self.stages) if self.stages[peer] == self.before]

    def wanted(self) -> tuple[str, str] | None:
        """(whom to ask for a way home, the data node it must reach or "")."""
        loose = [place for place in self.places if place.down is None]
        if not loose:
            return None
        targets = {place.up.up.home for place in loose if place.up is not None} if self.stage else {self.me}
        targets = targets or {""}
        best = min(
            (
                (cost + self.costs[peer], peer, target if target in targets else "")
                for peer, heard in self.heard.items()
                for target, cost in heard.offers.items()
                if targets & {target, ""}
            ),
            default=None,
        )
        return None if best is None else best[1:]

    def requested(self, sender: str, request: Request, out: Outgoing) -> None:
        """A peer of the stage before asks for a way home."""
        asked = request.link
        ways = [way for way in self.ways() if request.target in ("", way[1])]
        if (known := self.known(asked.name, False)) is not None:  # asked twice
            out.append((sender, Check(known, False)))
        elif not ways or self.locked or self.stages.get(sender) != self.before:
            out.append((sender, Reject(asked.name, None if self.locked else self.offers())))
        else:
            index = min(ways)[-1]
            self.put(index, False, Link(asked.name, asked.up, End(self.me, 1, *self.way(index, False, asked.name))))

    def rejected(self, sender: str, reject: Reject) -> None:
        """There is no such way; remember what there is."""
        if self.asked(sender, reject.name):
            self.pending = None
            if reject.offers is not None:
                known = self.heard.get(sender)
                self.heard[sender] = Cost(known.clock if known else 0, reject.offers)

    def accepted(self, sender: str, check: Check) -> bool:
        """Take the way home that I asked for, if this is it and it still fits."""
        link = check.link
        if check.up or not self.asked(sender, link.name):
            return False
        self.pending = None
        loose = [k for k, place in enumerate(self.places) if place.down is None]
        sought = {k: self.me if self.stage == 0 else up.up.home if (up := self.places[k].up) else "" for k in loose}
        fits = sorted((k for k in loose if sought[k] in ("", link.down.home)), key=lambda k: sought[k] == "")
        if fits:
            self.put(fits[0], True, link)
        return bool(fits)

    def give_up(self, now: float, out: Outgoing) -> None:
        """Ways in without continuation go back after a while, and the peer before looks for another; so does, if
        nothing changes any more, a data node for a lane that leads to a stranger.
        """
        stuck: dict[str, tuple[float, int]] = {}
        up = self.stage == 0
        for index, place in enumerate(self.places):
            link = self._stuck(place)
            if link is None:
                continue
            since, changed = self.stuck.get(link.name, (now, self.changed))
            if up and changed != self.changed:
                since = now
            stuck[link.name] = since, self.changed
            if now - since > (ASTRAY_PERIODS if up else ORPHAN_PERIODS) * self.period_s:
                del stuck[link.name]
                self.let_go(index, up, link, now, out)
        self.stuck = stuck

    def _stuck(self, place: Place) -> Link | None:
        if self.stage:
            return place.up if place.down is None else None
        return place.down if place.down is not None and place.down.down.home not in ("", self.me) else None
