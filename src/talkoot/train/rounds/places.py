"""Who takes part in a run in rounds: places, views, newcomers and who gives them weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.train.crew import Crew
from talkoot.train.job import Job
from talkoot.train.journal import Observer
from talkoot.train.messages import Contact
from talkoot.train.mixing import settled
from talkoot.train.rounds.messages import Enter, Place, View
from talkoot.train.rounds.records import MixingState, Viewed
from talkoot.train.states import RUN
from talkoot.world.api import Host

AHEAD = 2  # rounds before a newcomer's first one: time to be heard of, and to fetch its weights


class Seats(Crew):
    """A lead's view of who takes part.

    Attributes:
        places: of everybody who takes part, or will.
        slots: which share of the data each name trains on.
        rounds, highest, until: committed ones; those that somebody has done; how many there are to be.
    """

    program = "talkoot.train.rounds.peer:train_replica"

    def __init__(self, world: Host, job: Job, log: Log, observer: Observer) -> None:
        super().__init__(world, job, log, observer)
        self.mixing = settled(self.recipe.mixing)
        names = [*self.recipe.swarm.peers, *(joiner.name for joiner in self.recipe.swarm.joiners)]
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.places: dict[PeerId, Place] = {}
        self.until = math.ceil(self.recipe.train.steps / self.mixing.inner_steps)
        self.rounds = self.highest = 0
        self._number = 0

    @property
    def mixed(self) -> MixingState:
        """The log's chapter about rounds."""
        return self.state["mixing"]

    async def begin_all(self) -> None:
        """Everybody is there."""
        kept = self.mixed.kept if self.rounds else {}
        for peer, member in sorted(self.roster.members.items(), key=lambda item: self.slots[item[1].name]):
            self._place(peer, self.rounds)
            self.states.note(member.name, "assign")
        self.states.note(RUN, "begin")
        view = self.write_view()
        for peer, place in self.places.items():
            enter = Enter(slot=place.slot, round=self.rounds, blob=kept.get(place.slot, ""), view=view)
            if self.rounds and not enter.blob:  # it was not there when the others were stored
                enter = msgspec.structs.replace(enter, donors=self._donors(peer, [*self.places]))
            await self.tell(peer, "enter", enter, self.step)

    async def welcome(self) -> None:
        """Newcomers: a place from some round on, and who gives them weights."""
        fresh = [peer for peer in self.roster.members if peer not in self.places]
        first = min(self.highest + AHEAD, max(self.until - 1, 0))
        seated = [peer for peer in self.places if self.roster.members[peer].stage is not None]
        donors = {peer: self._donors(peer, seated or [*self.places]) for peer in fresh}
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
        chance = self.world.random(f"donors {self.roster.name_of(newcomer)} {self.highest}")
        found = sorted((self.places[peer] for peer in able if peer != newcomer), key=lambda place: place.slot)
        chance.shuffle(found)
        return tuple(Contact(place.peer, place.address) for place in found)

    def write_view(self) -> View:
        """A new view, and the word for it in the log."""
        self._number += 1
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
