"""A peer's ends of links: holding them, keeping their costs true, and agreeing about them with the other ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from talkoot.plan.flow_messages import Cancel, Card, Check, End, Link, Outgoing, Place, Way
from talkoot.plan.flow_moves import same, through

MAX_CHECK_PERIODS = 32  # the longest pause between two comparisons of an unchanging link
MAX_REMEMBERED = 256  # links passed on, kept to tell where they went


class Denial(msgspec.Struct):
    """What another peer believes to be here and is not: told again and again, ever more seldom, then no more."""

    to: str
    cancel: Cancel
    when: float
    pause: float


class Links:
    """What a peer holds, and whom it knows.

    Args:
        card: who this is.
        num_stages: of the whole ring, stage 0 included.
        slots: microbatches that a relay can hold, or that a data node wants to send per iteration.
        period_s: between ticks.
    """

    def __init__(self, card: Card, num_stages: int, slots: int, period_s: float) -> None:
        if not 0 <= card.stage < num_stages or num_stages < 2 or slots < 0:
            raise ValueError(f"stage {card.stage} of {num_stages} with {slots} slots makes no ring")
        self.card, self.me, self.stage, self.num_stages = card, card.peer, card.stage, num_stages
        self.slots, self.period_s = slots, period_s
        self.places = [Place()] * slots
        self.stages: dict[str, int] = {}  # of the peers met
        self.costs: dict[str, float] = {}  # of one hop to those of the neighbouring stages, in seconds
        self.gone: set[str] = set()
        self.tested: set[str] = set()  # peers of my stage with whom nothing was to be gained since the last change
        self.changed = 0  # counts changes of what this peer holds or what it costs
        self._passed_on: dict[str, Link] = {}
        self._denials: dict[str, Denial] = {}  # by link
        self._urgent = False
        self._due: dict[str, tuple[float, float]] = {}  # by link: when to compare copies, and the pause after that

    @property
    def after(self) -> int:
        """The stage to which activations go from here."""
        return (self.stage + 1) % self.num_stages

    @property
    def before(self) -> int:
        """The stage from which they come."""
        return (self.stage - 1) % self.num_stages

    def links(self) -> Iterator[tuple[int, bool, Link]]:
        """(place, whether the upper end is here, link) of all that is held."""
        for index, place in enumerate(self.places):
            if place.up is not None:
                yield index, False, place.up
            if place.down is not None:
                yield index, True, place.down

    def find(self, name: str, up: bool) -> tuple[int, Link] | None:
        """The place that holds the upper (lower) end of a link, and the link."""
        for index, is_up, link in self.links():
            if is_up == up and link.name == name:
                return index, link
        return None

    def known(self, name: str, up: bool) -> Link | None:
        """My copy of a link whose upper (lower) end is or was here."""
        held = self.find(name, up)
        return self._passed_on.get(name) if held is None else held[1]

    def put(self, index: int, up: bool, link: Link | None, tell: bool = True) -> None:
        """Hold the upper (lower) end of ``link`` in a place, or nothing any more; ``tell`` the other end at once."""
        self.places[index] = self.places[index].put(up, link)
        self.stir(link if tell else None)

    def stir(self, link: Link | None = None) -> None:
        """Something changed (at ``link``): compare copies at once, and try exchanges again."""
        self.changed += 1
        self.tested.clear()
        if link is not None:
            self._due[link.name] = (0.0, self.period_s)
            self._urgent = True

    def let_go(self, index: int, up: bool, link: Link, now: float, out: Outgoing) -> None:
        """Give the upper (lower) end of ``link`` back.

        Only I know, and the other end's own questions may be long in coming: one lost message must not be all it gets.
        """
        self.put(index, up, None)
        self.deny(link.end(not up).peer, Cancel(link.name, up, link.end(up).version))
        self.repeat_denials(now, out)

    def deny(self, to: str, cancel: Cancel) -> None:
        """Say so as soon as no host has my places, and repeat it."""
        self._denials[cancel.name] = Denial(to, cancel, 0.0, self.period_s)
        while len(self._denials) > MAX_REMEMBERED:
            del self._denials[next(iter(self._denials))]

    def repeat_denials(self, now: float, out: Outgoing) -> None:
        """Say what is due; nothing more of links that came here, or passed through here, after all."""
        for name, denial in list(self._denials.items()):
            known = self.known(name, denial.cancel.up) is not None
            if known or denial.to in self.gone or denial.pause >= MAX_CHECK_PERIODS * self.period_s:
                del self._denials[name]
            elif denial.when <= now:
                out.append((denial.to, denial.cancel))
                denial.when, denial.pause = now + denial.pause, 2 * denial.pause

    def replace(self, mine: list[Place], others: Iterable[Link]) -> None:
        """Hold ``mine`` from now on, and remember where ``others`` are."""
        before = {link.name for _, _, link in self.links()}
        self.places = mine
        for link in others:
            self._passed_on[link.name] = link
        for _, _, link in self.links():
            self._passed_on.pop(link.name, None)
            if link.name not in before:
                self.stir(link)
        while len(self._passed_on) > MAX_REMEMBERED:
            del self._passed_on[next(iter(self._passed_on))]
        self.stir()

    def way(self, index: int, up: bool, name: str = "") -> Way:
        """What belongs into the register of a place's upper (lower) end of the link of that name."""
        return through(self.places[index], up, self.costs) if self.stage else (0.0, self.me, name)

    def compare_urgent(self, now: float, out: Outgoing) -> None:
        """The same, if something changed."""
        if self._urgent:
            self.compare(now, out)

    def settle_links(self, now: float, out: Outgoing) -> None:
        """Cut links to peers that are gone, bring my registers up to date, and compare the copies that are due."""
        for index, up, link in list(self.links()):
            if link.end(not up).peer in self.gone:
                self.put(index, up, None)
        for index, up, link in list(self.links()):
            end, way = link.end(up), self.way(index, up, link.name)
            if not same(end.way, way):
                self.put(index, up, link.moved(up, End(self.me, end.version + 1, *way)))
        self.repeat_denials(now, out)
        self.compare(now, out)

    def compare(self, now: float, out: Outgoing) -> None:
        """Send a copy of every link that changed or was not compared for long."""
        self._urgent = False
        due: dict[str, tuple[float, float]] = {}
        for _, up, link in self.links():
            when, pause = self._due.get(link.name, (0.0, self.period_s))
            if when <= now:
                out.append((link.end(not up).peer, Check(link, up)))
                when, pause = now + pause, min(2 * pause, MAX_CHECK_PERIODS * self.period_s)
            due[link.name] = (when, pause)
        self._due = due

    def checked(self, sender: str, check: Check, locked: bool, out: Outgoing) -> None:
        """Another copy of a link came in."""
        up, name = not check.up, check.link.name  # the end that should be here
        claims = check.link.end(check.up).peer == sender  # else it only passes on what it knows, and wants no answer
        held = self.find(name, up)
        mine = self.known(name, up) or check.link
        merged = mine.merged(check.link)
        here = merged.end(up).peer == self.me
        if held is None:
            if here and claims:
                cancel = Cancel(name, up, merged.end(up).version)
                if locked:  # the answer under way may bring it
                    self.deny(sender, cancel)
                else:
                    out.append((sender, cancel))
            if here or not claims:
                return
            self._passed_on[name] = merged
        elif not here:  # it was taken over without my hearing of it
            self.put(held[0], up, None)
        elif merged != mine:
            self.put(held[0], up, merged, tell=merged.end(not up).peer != mine.end(not up).peer)
        if claims and merged != check.link:
            out.append((sender, Check(merged, up)))

    def cancelled(self, sender: str, cancel: Cancel) -> None:
        """The other end is not where I believed it to be."""
        held = self.find(cancel.name, not cancel.up)
        if held is not None:
            index, link = held
            far = link.end(cancel.up)
            if far.peer == sender and far.version <= cancel.version:
                self.put(index, not cancel.up, None)
