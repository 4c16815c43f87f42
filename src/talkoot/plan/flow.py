"""Decentralised flow routing: peers that know only their neighbours agree on lanes for as many microbatches as fit.

After Blagoev et al., 2025, "Go With The Flow" (arXiv 2509.21221), redesigned where messages may be lost, repeated or
reordered and peers may vanish; `flow_messages` says which of its messages became what.

A *lane* carries one microbatch at a time from a data node (stage 0) through one relay of every stage back to the same
data node, and takes up one activation slot (a *place*) of each. Every peer runs one :class:`FlowNode`:

- **Build**, backwards. Each data node offers as many ways home as it has microbatches. A peer with a free place asks
  the next stage for the cheapest way home that it has heard of, and then offers it, one link longer, to the stage
  before. A way in whose continuation got lost asks first, and is given back after a while.
- **Improve**, sideways. A wave runs to and fro over the stages, one stage per round, so that what a stage decides is
  known to the next one in time. In its round, the peers of a stage lay open to one of them, the host, all that they
  hold, and touch nothing until answered. The host rearranges what it got and its own (`flow_moves`) and commits: it
  alone decides, so a lost answer is only a repeated question. Every peer hosts in turn.
- **Repair.** Copies of a link are compared again and again, ever more seldom while nothing changes. What cannot be
  reconciled is dropped, and built anew.

When nothing changes any more and every peer knows all of its neighbouring stages, the flow is a maximum: suppose some
origin could take more. No way home to it waits in stage 1, and none to a satisfied origin does (all of those are in
use), so stage 1 has free places; a free place would have asked, so none waits in stage 2 either, and so on, until all
the ways home that the origins offered are in use, which contradicts the assumption. A full stage ends the argument
as the bottleneck. With several origins, ways are told apart by where they lead.

Nothing here does I/O or looks at a clock: the driver passes ``now`` in seconds and delivers what comes back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import msgspec

from talkoot.plan.flow_build import Builder, Pending
from talkoot.plan.flow_messages import (
    Cancel,
    Card,
    Check,
    Cost,
    End,
    Exchange,
    FlowMessage,
    Introduce,
    Link,
    Offer,
    Outgoing,
    Place,
    Reject,
    Request,
    links_of,
)
from talkoot.plan.flow_moves import (
    NOTHING,
    Objective,
    Side,
    Taste,
    astray_here,
    claimed,
    middles_of,
    pair_up,
    paired,
    rearrange,
)

REPEAT_PERIODS = 3  # an unanswered question is repeated
EXPIRE_PERIODS = 15  # and given up
INTRODUCE_PERIODS = 10
COLD = 0.005  # relative temperature below which chance plays no part any more
MAX_CARDS = 128  # per introduction
MAX_GROUP = 8  # peers that rearrange together
MAX_WAVE = 8  # stages; in a longer ring, every so many stages meet at once


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to search.

    Attributes:
        objective: ``max`` = the most expensive lane (it sets the iteration time), ties by sum; ``sum`` = total cost.
        heat: initial temperature, relative to a peer's mean link cost; 0 = improvements only.
        decay: of the temperature over one meeting of a stage.
        period_s: between ticks; a round of the wave lasts four. Best about half of the usual round trip.
    """

    objective: Objective = "max"
    heat: float = 0.5
    decay: float = 0.9
    period_s: float = 0.25

    @property
    def round_s(self) -> float:
        """How long a stage has for its meeting."""
        return 4 * self.period_s


class FlowNode(Builder):
    """One peer's part.

    Args:
        card: who this is: name, stage, address.
        num_stages: of the whole ring, stage 0 included.
        slots: microbatches that a relay can hold, or that a data node wants to send per iteration.
        chance: the only source of randomness.
    """

    def __init__(
        self, card: Card, num_stages: int, slots: int, *, chance: random.Random, settings: Settings | None = None
    ) -> None:
        self.settings = settings or Settings()
        super().__init__(card, num_stages, slots, self.settings.period_s)
        self.chance = chance
        self.heat = self.settings.heat
        self.cards: dict[str, Card] = {}
        self._warm = False  # has seen a whole lane: before that, there is nothing to improve
        self._guests: dict[str, Offer] = {}
        self._answers: dict[str, Exchange] = {}
        self._introduced = 0.0

    # -- who is there -------------------------------------------------------------------------------------------------

    def met(self, peer: str, stage: int, cost_s: float = 0.0, address: str = "") -> None:
        """Know a peer from now on; ``cost_s`` is that of one hop to it (unused within a stage)."""
        if peer == self.me:
            return
        self.gone.discard(peer)
        self.cards[peer] = Card(peer, stage, address)
        self.stages[peer] = stage
        if stage in (self.after, self.before):
            self.costs[peer] = cost_s
        self._said = (frozenset(), 0.0)
        self.stir()

    def forget(self, peer: str, now: float) -> Outgoing:
        """A peer is lost: ways through it are cut; what is left of them is offered or continued anew."""
        out: Outgoing = []
        self.gone.add(peer)
        for known in (self.stages, self.costs, self.cards, self.heard, self._guests, self._answers):
            known.pop(peer, None)
        if self.pending is not None and self.pending.to == peer:
            self.pending = None
        self.stir()
        return self._flush(now, out)

    @property
    def strangers(self) -> list[Card]:
        """Peers heard of that matter here but were not met; the driver reaches them and calls :meth:`met`."""
        near = {self.stage, self.after, self.before}
        return [card for peer, card in self.cards.items() if peer not in self.stages and card.stage in near]

    @property
    def settled(self) -> bool:
        """Whether this peer has nothing left to ask: cold, agreed with all of its stage, no way in left open."""
        mates = self._mates()
        improved = not self._warm or not mates or (not self.heat and self.tested >= set(mates))
        astray = any(map(astray_here, self.places))
        return improved and not astray and self.pending is None and not self.stuck and self.wanted() is None

    def holding(self) -> Holding:
        """What this peer holds, for :func:`flows`."""
        return Holding(self.me, self.stage, tuple(self.places))

    def _mates(self) -> list[str]:
        return sorted(peer for peer, stage in self.stages.items() if stage == self.stage)

    # -- time and messages --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Outgoing:
        """To be called every ``period_s`` seconds."""
        out: Outgoing = []
        self._warm = self._warm or _has_lane(self._sides({})[0])
        if not self.locked:
            self.give_up(now, out)
            self.advertise(now, out)
        self._introduce(now, out)
        self._ask_again(now, out)
        if self.pending is None:
            self._ask(now, out)
        if self._guests and (now / self.settings.round_s) % 1 >= 0.5:
            self._decide(out)
        return self._flush(now, out)

    def receive(self, sender: str, message: FlowMessage, now: float) -> Outgoing:
        """Take in one message; anything may come twice, late or never."""
        out: Outgoing = []
        match message:
            case Introduce():
                for card in message.cards:
                    if card.peer not in self.gone and card.peer != self.me and 0 <= card.stage < self.num_stages:
                        self.cards.setdefault(card.peer, card)
            case Cost():
                known = self.heard.get(sender)
                if self.stages.get(sender) == self.after and (known is None or message.clock > known.clock):
                    self.heard[sender] = message
            case Request():
                self.requested(sender, message, out)
            case Reject():
                self.rejected(sender, message)
            case Check():
                if not self.accepted(sender, message):
                    self.checked(sender, message, self.locked, out)
            case Cancel():
                if self.asked(sender, message.name):
                    self.pending = None
                self.cancelled(sender, message)
            case Offer():
                self._offered(sender, message, now, out)
            case Exchange():
                self._exchanged(sender, message)
        if isinstance(message, Check):
            self.compare_urgent(now, out)
            return out
        return self._flush(now, out)

    def _flush(self, now: float, out: Outgoing) -> Outgoing:
        """Tell the other ends what changed; while a host has my places, nothing of mine changes."""
        if not self.locked:
            if self.stage == 0:
                self.places = paired(self.places)
            elif pair_up(self._sides({})[0], self._taste(0.0)):
                self.stir()
            self.settle_links(now, out)
        else:
            self.compare(now, out)
        return out

    def _ask(self, now: float, out: Outgoing) -> None:
        """One question at a time: for a way home if one is needed and on offer, else for a better arrangement."""
        wanted, host = self.wanted(), self._host(now)
        self._count += 1
        if wanted is not None:
            to, target = wanted
            name = f"{self.me[:16]}:{self._count}:{self.chance.getrandbits(32):x}"
            question = Request(Link(name, End(self.me, 1), End(to, 0)), target)
        elif host is not None and self._warm and (self.heat or host not in self.tested):
            to, question = host, Offer(self._count, tuple(self.places), self.costs)
        else:
            return
        self.pending = Pending(to, question, now, now)
        out.append((to, question))

    def _ask_again(self, now: float, out: Outgoing) -> None:
        pending = self.pending
        if pending is None:
            return
        if now - pending.since > EXPIRE_PERIODS * self.period_s:
            self.pending = None
            self.heard.pop(pending.to, None)
        elif now - pending.sent > REPEAT_PERIODS * self.period_s:
            pending.sent = now
            out.append((pending.to, pending.question))

    def _introduce(self, now: float, out: Outgoing) -> None:
        if now >= self._introduced and self.stages:
            self._introduced = now + INTRODUCE_PERIODS * self.period_s
            cards = [card for card in self.cards.values() if card.peer in self.stages]
            cards = self.chance.sample(cards, min(len(cards), MAX_CARDS))
            out.append((self.chance.choice(sorted(self.stages)), Introduce((self.card, *cards))))

    # -- improving ----------------------------------------------------------------------------------------------------

    def _taste(self, heat: float) -> Taste:
        mean = sum(self.costs.values()) / max(1, len(self.costs))
        return Taste(self.settings.objective, heat * mean, self.chance)

    def _sides(self, guests: Mapping[str, Offer]) -> list[Side]:
        """My places and my guests'; mine are the very list if there are no guests."""
        held = [(self.me, self.costs, list(self.places) if guests else self.places)]
        held += [(guest, offer.costs, list(offer.places)) for guest, offer in sorted(guests.items())]
        middles = None if self.stage else middles_of((costs, places) for _, costs, places in held)
        return [Side(*one, middles) for one in held]

    def _host(self, now: float) -> str | None:
        """To whom I lay open my places in this round; None = not my stage's turn, or it is me.

        Peers that disagree about time or about who is there only lose a round.
        """
        span = min(self.num_stages, MAX_WAVE)
        turn = int(now / self.settings.round_s)
        step = turn % (2 * span)
        if self.stage % span != min(step, 2 * span - 1 - step):
            return None
        meeting = turn // span
        ring = sorted([*self._mates(), self.me])
        if len(ring) > MAX_GROUP:
            random.Random(f"{self.stage} {meeting}").shuffle(ring)
        start = ring.index(self.me) // MAX_GROUP * MAX_GROUP
        group = ring[start : start + MAX_GROUP]
        host = group[meeting % len(group)]
        return None if host == self.me else host

    def _offered(self, sender: str, offer: Offer, now: float, out: Outgoing) -> None:
        last = self._answers.get(sender)
        if last is not None and offer.number <= last.number:
            if offer.number == last.number:
                out.append((sender, last))
        elif self.locked or self.stages.get(sender) != self.stage:
            self._answers[sender] = Exchange(offer.number, busy=True)
            out.append((sender, self._answers[sender]))
        elif sender not in self._guests or offer.number > self._guests[sender].number:
            self._guests[sender] = offer
            if len(self._guests) >= min(len(self._mates()), MAX_GROUP - 1):
                self._decide(out)

    def _decide(self, out: Outgoing) -> None:
        """Rearrange my places and my guests', hold mine and tell them theirs."""
        guests, self._guests = self._guests, {}
        sides = self._sides(guests)
        changed = not self.locked and rearrange(sides, self._taste(self.heat if self._warm else 0.0))
        arranged = [claimed(side) for side in sides] if changed else [side.places for side in sides]
        links = {link.name: link for places in arranged for link in links_of(places)}
        group = tuple(side.peer for side in sides)
        for (guest, offer), places in zip(sorted(guests.items()), arranged[1:], strict=True):
            answer = Exchange(offer.number, busy=self.locked, group=group)
            if changed:
                kept = {link.name for link in links_of(places)}
                given = tuple(links[link.name] for link in links_of(offer.places) if link.name not in kept)
                answer = Exchange(offer.number, tuple(places), given=given, group=group)
            self._answers[guest] = answer
            out.append((guest, answer))
        if changed:
            self.replace(arranged[0], links.values())
        if not self.locked:
            self._met(group, sides, changed)

    def _exchanged(self, sender: str, answer: Exchange) -> None:
        pending = self.pending
        if pending is None or not isinstance(pending.question, Offer):
            return
        if pending.to != sender or pending.question.number != answer.number:
            return
        self.pending = None
        if answer.busy:
            return
        places = answer.places
        if places is not None and len(places) == len(self.places):
            self._take(pending.question, places, answer.given)
        self._met(answer.group, self._sides({}), places is not None)

    def _take(self, offer: Offer, places: tuple[Place, ...], given: tuple[Link, ...]) -> None:
        """Hold what the host decided, with what I heard of it meanwhile and without what was cut meanwhile."""
        offered = {link.name for link in links_of(offer.places)}
        held = {link.name: link for _, _, link in self.links()}

        def current(link: Link | None) -> Link | None:
            if link is None or link.name not in offered:
                return link
            return link.merged(held[link.name]) if link.name in held else None

        given = tuple(link.merged(held.get(link.name, link)) for link in given)
        self.replace([Place(current(place.up), current(place.down)) for place in places], given)

    def _met(self, peers: Iterable[str], sides: list[Side], changed: bool) -> None:
        """Cool down by one meeting, once there are whole lanes; remember with whom nothing is left to gain."""
        self._warm = self._warm or any(map(_has_lane, sides))
        if self._warm and self.heat:
            self.heat *= self.settings.decay
            if self.heat < COLD:
                self.heat = 0.0
                self.tested.clear()
        if not changed and not self.heat:
            self.tested |= set(peers) & set(self._mates())


def _has_lane(side: Side) -> bool:
    return any((side.value(place) or NOTHING).whole for place in side.places)


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One peer's part of the routing, as the lead collects it."""

    peer: str
    stage: int
    places: tuple[Place, ...]


def flows(holdings: Iterable[Holding]) -> list[tuple[str, ...]]:
    """The whole lanes that the peers' own records agree on: a data node, then the relays in the order of visiting.

    A lane counts only if both ends of each of its links name each other and it returns to its data node.
    """
    holdings = sorted(holdings, key=lambda holding: holding.peer)
    below = {
        place.up.name: (holding, place) for holding in holdings for place in holding.places if place.up is not None
    }
    lanes: list[tuple[str, ...]] = []
    for origin in holdings:
        for start in origin.places if origin.stage == 0 else ():
            lane, holder, link = [origin.peer], origin, start.down
            while link is not None and link.name in below:
                after, place = below[link.name]
                if place.up is None or link.down.peer != after.peer or place.up.up.peer != holder.peer:
                    break
                if after.stage == 0:
                    if after is origin:
                        lanes.append(tuple(lane))
                    break
                lane.append(after.peer)
                holder, link = after, place.down if after.stage == holder.stage + 1 else None  # no crafted circles
    return lanes
