"""A replica between its lead and the others: it listens while it trains, and answers.

Two tasks: this one hears the lead, other replicas, and what the world says about links; :class:`Trainer` works.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from talkoot.core.codec import decode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.run.greeting import Contact, say_hello
from talkoot.train.job import Job
from talkoot.train.messages import Cut
from talkoot.train.rounds.joining import Donor, fetch
from talkoot.train.rounds.messages import (
    Arrived,
    Ask,
    Collect,
    Collected,
    Enter,
    Fetch,
    Key,
    Offer,
    Part,
    Refused,
    Standing,
    Took,
    View,
)
from talkoot.train.rounds.replica import Exchange, make_replica
from talkoot.train.rounds.trainer import Trainer
from talkoot.train.watchdog import Pulse
from talkoot.world.api import LOST, Message, World

FROM_LEAD = ("enter", "view", "collect", "probe", "stop")
ABOUT_EXCHANGES = {"offer": Offer, "took": Took, "refused": Refused, "part": Part, "standing": Standing}
FROM_REPLICAS = (*ABOUT_EXCHANGES, "ask", "fetch", "later", "chunk", "weights")


async def train_replica(world: World, argument: bytes) -> None:
    """A replica's program; ``argument`` is an encoded :class:`~talkoot.train.job.Job`."""
    peer = RoundPeer(world, decode(argument, Job))
    async with asyncio.TaskGroup() as tasks:
        await peer.serve(tasks)


class RoundPeer(Trainer):
    """See the module's text."""

    def __init__(self, world: World, job: Job) -> None:
        super().__init__(world, job)
        self.donor = Donor(self)
        self._weights: dict[PeerId, Message] = {}  # of replicas, at the end
        self._early: dict[tuple[PeerId, Exchange], tuple[Key, PeerId]] = {}  # questions in a view not known here yet
        self._running: asyncio.Task[None] | None = None
        self._entered = -1  # under which generation

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        """Introduce oneself, then do as told until told to stop."""
        world = self.world
        topics = (*FROM_LEAD, *FROM_REPLICAS, LOST)
        first = await say_hello(world, self.lead, topics, self.job.recipe.recovery.watchdog_s)
        while True:
            message = first or await world.receive(*topics)
            first = None
            if message.topic == LOST and message.sender == self.lead:
                return self._cancel()
            if message.topic == LOST:
                self.mail.lose(PeerId(message.sender), world.now())
                await self.tell("cut", Cut(message.sender, "its link broke"))
            elif message.topic not in FROM_LEAD:
                with suppress(ValueError):  # nonsense is as good as silence
                    await self._hear(message)
            elif message.sender == self.lead and message.generation >= self.generation:
                self.generation = message.generation
                if message.topic == "stop":
                    return self._cancel()
                await self._obey(message, tasks)

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _obey(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message.topic:
            case "enter" if message.generation > self._entered:
                self._entered = message.generation
                self._forget()
                self._running = tasks.create_task(self._take_part(message.read(Enter)))
            case "view":
                await self._take(message.read(View))
                if self._running is not None and self._running.done() and self.round < self.view.until:
                    self._running = tasks.create_task(self.train())  # others had gone further than the end
            case "collect":
                tasks.create_task(self._collect(message.read(Collect)))
            case "probe":
                await self.tell("pulse", Pulse(self.work, self.waits > 0 or self.idle))

    def _forget(self) -> None:
        """Begin anew: under an older generation nobody had weights to give."""
        self._cancel()
        self.exchanges.cancel()
        self.mail.forget(sys.maxsize)
        self.sums, self.promised, self.entered, self._unreported = {}, {}, -1, []

    @property
    def idle(self) -> bool:
        """Whether there is no round to do here: not yet, or not any more."""
        return self._running is None or self._running.done()

    async def _take(self, view: View) -> None:
        if self.views and view.number <= self.view.number:
            return
        for place in view.places:
            if place.peer != self.world.me:  # whoever the lead still counts on gets another chance
                self.mail.gone.pop(PeerId(place.peer), None)
                self.world.meet(PeerId(place.peer), place.address)
        self.views = [view]
        self.mail.wake()
        early, self._early = self._early, {}
        for key, asker in early.values():
            await self._answer(key, asker)

    async def _hear(self, message: Message) -> None:
        place = self.view.of(message.sender) if self.views else None
        if place is None:
            return  # it is not in the run any more: what it says may be of any time
        if message.sender in self.mail.gone:
            self.greet(place)
        match message.topic:
            case "ask":
                await self._answer(message.read(Ask).key, message.sender)
            case "fetch":
                await self.donor.ask(message.sender, message.read(Fetch))
            case "later":
                await self.donor.later(message.sender, message.read(Fetch))
            case "chunk":
                self.donor.take(message)
            case "weights":
                self._weights[message.sender] = message
                self.mail.wake()
            case topic:
                await self._hear_of_exchange(message, message.read(ABOUT_EXCHANGES[topic]))

    async def _hear_of_exchange(self, message: Message, facts: Offer | Took | Refused | Part | Standing) -> None:
        key, number = facts.key, facts.hop if isinstance(facts, Part) else 0
        if not 0 <= key.fragment < int(self.mixing.fragments or 1):
            return
        over = message.topic == "offer" and self.exchanges.passed(key, message.sender)
        if over or not self.mail.put(key, message, self.exchanges.oldest, number):
            await self.refuse([(key, message.sender)] if message.topic == "offer" else [], over or "another round")

    async def _answer(self, key: Key, asker: PeerId) -> None:
        at = (key.round, key.fragment)
        if key.view > self.view.number:  # a promise about a view that may not exist would bind for ever
            self._early[asker, at] = (key, asker)
            return
        of = self.sums.get(at, 0)
        if not of and self.round - 1 <= key.round <= self.round + 1:
            self.promised[at] = max(self.promised.get(at, 0), key.view)
            self.mail.wake()
        await self.send(asker, "standing", Standing(key, of), self.replica.total(at) if of else ())

    def finished(self) -> None:
        self.donor.finish()

    def owes(self, round: int) -> bool:
        return self.donor.owes(round)

    async def rejoin(self, since: int) -> None:
        self.round = since
        donors = [Contact(place.peer, place.address) for place in self.view.places if place.peer != self.world.me]
        self.world.random(f"donors {since}").shuffle(donors)
        enter = Enter(
            slot=self.slot, round=since, donors=tuple(donors), wanted=self.mixing.joiner_donors, view=self.view
        )
        with suppress(ValueError):  # nobody has any to give: then these are as good as others
            self.round, _ = await fetch(self, enter)
        if self.round > since:  # the lead waits for a word on every round from the first one on
            await self.tell("later", Fetch(self.round))
        await self.began()

    async def began(self) -> None:
        self.donor.entered(self.round)
        await self.refuse(self.mail.forget(self.exchanges.oldest), "another round")

    async def _take_part(self, enter: Enter) -> None:
        try:
            self.slot, self.round = enter.slot, enter.round
            await self._take(enter.view)
            self._step = enter.round * self.mixing.inner_steps
            await self.reached("assign", late=True)
            self.replica = make_replica(self.job, self.rule, enter.slot)
            donors: list[PeerId] = []
            if enter.blob:
                self.replica.load(self.world.blobs.get(enter.blob), self._step)
            elif enter.donors:
                self.round, donors = await fetch(self, enter)
                self.entered = self.round
        except (ValueError, KeyError, OSError, TalkootError) as problem:
            await self.tell("arrived", Arrived(round=enter.round, problem=str(problem)))
            return
        await self.began()
        await self.tell("arrived", Arrived(round=self.round, donors=tuple(donors)))
        await self.train()

    async def _collect(self, collect: Collect) -> None:
        """Bring all replicas' weights together; the collector averages, judges and stores them."""
        world, collector = self.world, PeerId(collect.collector.peer)
        if self._running is not None:
            await asyncio.wait([self._running])
        if collector != world.me:
            world.meet(collector, collect.collector.address)
            await self.send(collector, "weights", Fetch(self.round), self.replica.weights())
            return
        others = [PeerId(contact.peer) for contact in collect.of if contact.peer != world.me]
        await self.wait(
            lambda: all(peer in self._weights or peer in self.mail.gone for peer in others),
            self.job.recipe.train.patience_s / 2,
        )
        found = [self._weights[peer].frames for peer in others if peer in self._weights]
        try:
            averaged = self.replica.average([self.replica.weights(), *found])
            held_out = await self.evaluate()
            state, tensors = self.replica.snapshot(self.round * self.mixing.inner_steps)
            blob = world.blobs.put(state)
            answer = Collected(blob=blob, size=len(state), tensors=tensors, averaged=averaged, held_out=held_out)
        except (ValueError, TalkootError) as problem:
            answer = Collected(problem=str(problem))
        await self.tell("collected", answer)
