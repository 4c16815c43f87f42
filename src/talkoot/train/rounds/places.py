"""Who takes part in a run in rounds: places, views, newcomers and who gives them weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.run.greeting import Contact
from talkoot.run.journal import Observer
from talkoot.run.records import Warned
from talkoot.train.crew import Crew
from talkoot.train.job import Job
from talkoot.train.messages import Cut
from talkoot.train.mixing import mixing_rules, settled
from talkoot.train.records import Seated
from talkoot.train.roster import Member
from talkoot.train.rounds.messages import Arrived, Enter, Place, View
from talkoot.train.rounds.records import MixingState, Viewed
from talkoot.train.rounds.reports import Reports
from talkoot.train.states import RUN
from talkoot.world.api import Host, Message

AHEAD = 2  # rounds before a newcomer's first one: time to be heard of, and to fetch its weights
BEHIND = 4  # rounds after which somebody who meets nobody any more begins again from others' weights


class Seats(Crew):
    """A lead's view of who takes part.

    Attributes:
        places: of everybody who takes part, or will.
        slots: which share of the data each name trains on.
        reports: what they say of rounds that are not committed yet.
        rounds, until: committed ones; how many there are to be.
        needy: those who are to begin from another's weights, and have none yet.
        changed: whether the newest view is not what holds any more.
    """

    program = "talkoot.train.rounds.peer:train_replica"

    def __init__(self, world: Host, job: Job, log: Log, observer: Observer) -> None:
        super().__init__(world, job, log, observer)
        self.mixing = settled(self.recipe.mixing)
        rule = mixing_rules[self.mixing.rule]
        self.apart = rule.local is True and rule.partners != "all"  # each goes on whatever becomes of another
        names = [*self.recipe.swarm.peers, *(joiner.name for joiner in self.recipe.swarm.joiners)]
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.places: dict[PeerId, Place] = {}
        self.reports = Reports(self.recipe, world.run)
        self.planned = self.until = math.ceil(self.recipe.train.steps / self.mixing.inner_steps)
        self.rounds = 0
        self.needy: set[PeerId] = set()
        self.changed = False
        self._number = self.mixed.view.number if self.mixed.view else 0

    @property
    def mixed(self) -> MixingState:
        """The log's chapter about rounds."""
        return self.state["mixing"]

    def arrived(self) -> list[PeerId]:
        """Those who have weights, by slot."""
        places = sorted(self.places.items(), key=lambda item: item[1].slot)
        return [peer for peer, _ in places if self.roster.members[peer].stage is not None]

    def ready(self) -> bool:
        """Whether everybody is there who is still to come."""
        names = self.roster.names()
        return bool(names) and all(name in names or not self.roster.returns(name) for name in self.roster.home)

    async def begin_all(self) -> None:
        """Everybody is there."""
        kept = self.mixed.kept if self.rounds else {}
        for peer, member in sorted(self.roster.members.items(), key=lambda item: self.slots[item[1].name]):
            self._place(peer, self.rounds)
            self.states.note(member.name, "assign")
        self.states.note(RUN, "begin")
        view = self.write_view()
        able = [peer for peer, place in self.places.items() if place.slot in kept]
        for peer, place in self.places.items():
            enter = Enter(slot=place.slot, round=self.rounds, blob=kept.get(place.slot, ""), view=view)
            if self.rounds and not enter.blob:  # it was not there when the others were stored
                self.needy.add(peer)
                enter = msgspec.structs.replace(enter, donors=self._donors(peer, able))
            await self.tell(peer, "enter", enter, self.step)

    async def welcome(self) -> None:
        """Newcomers: a place from some round on, and who gives them weights. None where the end is near."""
        first = self.reports.highest + AHEAD
        fresh = [peer for peer in self.roster.members if peer not in self.places]
        if not fresh or first >= self.until:
            return
        able = [peer for peer in self.places if peer not in self.needy]
        donors = {peer: self._donors(peer, self.arrived() or able) for peer in fresh}
        self.needy.update(fresh)
        for peer in fresh:
            self._place(peer, first)
            self.states.note(self.roster.name_of(peer), "assign")
        view = await self.publish(but=fresh)
        for peer in fresh:
            wanted = self.mixing.joiner_donors
            enter = Enter(slot=self.places[peer].slot, round=first, donors=donors[peer], wanted=wanted, view=view)
            await self.tell(peer, "enter", enter, self.step)

    def _place(self, peer: PeerId, since: int) -> None:
        member, inner = self.roster.members[peer], self.mixing.inner_steps
        speeds = [self.roster.stated_speed(name) for name in self.roster.home]
        share = min(1.0, self.roster.stated_speed(member.name) / max(speeds)) if self.mixing.balance else 1.0
        steps = max(1, round(inner * share))
        self.places[peer] = Place(peer, member.name, member.address, self.slots[member.name], steps, since)

    def _donors(self, newcomer: PeerId, able: Collection[PeerId]) -> tuple[Contact, ...]:
        """Who can give weights, in an order drawn for this newcomer."""
        chance = self.world.random(f"donors {self.roster.name_of(newcomer)} {self.reports.highest}")
        found = sorted((self.places[peer] for peer in able if peer != newcomer), key=lambda place: place.slot)
        chance.shuffle(found)
        return tuple(Contact(place.peer, place.address) for place in found)

    def arrive(self, peer: PeerId, said: Arrived) -> None:
        """A newcomer has weights, or could get none.

        Raises:
            ValueError: that cannot be.
        """
        member = self.roster.members[peer]
        if said.problem:
            self.expel(peer, f"it could not begin: {said.problem}")
        if member.stage is not None:
            raise ValueError("it has begun long ago")
        self.postpone(peer, said.round)
        self.states.note(member.name, "ready")
        self.states.note(member.name, "accept")
        names = [self.places[PeerId(donor)].name for donor in said.donors if PeerId(donor) in self.places]
        source = ("replica " + ", ".join(names)) if names else (f"round {self.rounds}" if self.rounds else "start")
        member.stage, member.held = 0, True
        self.needy.discard(peer)
        self.record("peer.seat", Seated(peer=peer, name=member.name, stage=0, source=source))

    def postpone(self, peer: PeerId, round: int) -> None:
        """Somebody takes part only from that round on.

        Raises:
            ValueError: there is no such round.
        """
        place = self.places[peer]
        if not 0 <= round <= self.planned:
            raise ValueError(f"there is no round {round}")
        if round > place.since:
            self.places[peer] = msgspec.structs.replace(place, since=round)
            self.changed = True

    def hear_behind(self, peer: PeerId, round: int) -> None:
        """Somebody says that it is only in that round, and meets nobody."""
        if self.reports.highest - round >= BEHIND:
            self.begin_again(peer, "it is far behind")

    def begin_again(self, peer: PeerId, why: str) -> None:
        """Let somebody who meets nobody any more begin again with the others, from their weights."""
        since = self.reports.highest + AHEAD
        if self.apart and len(self.arrived()) > 1 and since < self.until:
            text = f"{self.places[peer].name} begins again from another replica's weights: {why}"
            self.record("run.warning", Warned(text=text))
            self.reports.far.clear()  # others were far away from it, too
            self.postpone(peer, since)

    def write_view(self) -> View:
        """A new view, and the word for it in the log."""
        self._number += 1
        self.changed = False
        places = tuple(sorted(self.places.values(), key=lambda place: place.slot))
        facts = Viewed(
            number=self._number,
            names=tuple(place.name for place in places),
            slots=tuple(place.slot for place in places),
            steps=tuple(place.steps for place in places),
            since=tuple(place.since for place in places),
        )
        self.record("train.view", facts)
        return View(number=self._number, places=places, until=self.until)

    async def publish(self, but: Sequence[PeerId] = ()) -> View:
        """Tell everybody who is there now."""
        view = self.write_view()
        for peer in self.places:
            if peer not in but:
                await self.tell(peer, "view", view, self.step)
        return view

    # -- what the crew leaves open -----------------------------------------------------------------------------

    def _cut(self, message: Message) -> None:
        """Two replicas cannot reach each other. Where groups are of two, they only step alone when they are paired."""
        with suppress(ValueError):
            if self.apart and message.read(Cut).peer != message.sender:
                return
        super()._cut(message)

    def note_loss(self, name: str) -> None:
        super().note_loss(name)
        for event in ("drained", "mend"):  # nobody stops for it
            self.states.note(RUN, event)

    def in_reach(self, peer: PeerId, seated: bool) -> range:
        inner = self.mixing.inner_steps
        place = self.places.get(peer)
        at = max(self.furthest, inner * max(self.reports.of.get(peer, 0), place.since if place else 0))
        return range(at + 1 + AHEAD * inner)  # some points are passed in some steps only, and faults wait for them

    def has_worked(self, peer: PeerId, member: Member) -> bool:
        return peer in self.reports.of
