"""Building lanes backwards from the data nodes: who offers a way home, who asks for one."""

from __future__ import annotations

import msgspec

from talkoot.plan.flow_links import Links
from talkoot.plan.flow_messages import (
    Cancel,
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
        self.orphans: dict[str, float] = {}  # ways in without continuation: since when
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

    def leads_to(self, index: int) -> str | None:
        """The data node that a microbatch in this place reaches."""
        if self.stage == 0:
            return self.me if index >= self.slots else None
        down = self.places[index].down
        return None if down is None else down.target

    def ways(self) -> list[tuple[float, str, int]]:
        """Unused ways home: (cost in seconds, data node, place)."""
        return [
            (cost, target, index)
            for index, place in enumerate(self.places)
            if place.up is None
            and (target := self.leads_to(index)) is not None
            and (cost := self.cost(index, False)) is not None
        ]

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
        if self.stage == 0:
            targets = {self.me} if any(place.down is None for place in self.places[: self.slots]) else set[str]()
        else:
            targets = {place.up.target for place in self.places if place.up is not None and place.down is None}
            if not targets and Place() in self.places:
                targets = {""}
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
            cost, target, index = min(ways)
            self.put(index, False, Link(asked.name, target, asked.up, End(self.me, 1, cost)))

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
        if self.stage == 0:
            fits = [k for k in range(self.slots) if self.places[k].down is None and link.target == self.me]
        else:
            fits = [k for k, p in enumerate(self.places) if not p.down and p.up and p.up.target == link.target]
            fits += [k for k, p in enumerate(self.places) if p == Place()]
        if fits:
            self.put(fits[0], True, link)
        return bool(fits)

    def give_up_orphans(self, now: float, out: Outgoing) -> None:
        """Ways in without continuation go back after a while; the peer before then looks for another."""
        orphans: dict[str, float] = {}
        for index, place in enumerate(self.places):
            if self.stage == 0 or place.up is None or place.down is not None:
                continue
            since = orphans[place.up.name] = self.orphans.get(place.up.name, now)
            if now - since > ORPHAN_PERIODS * self.period_s:
                out.append((place.up.up.peer, Cancel(place.up.name, False, place.up.down.version)))
                del orphans[place.up.name]
                self.put(index, False, None)
        self.orphans = orphans
