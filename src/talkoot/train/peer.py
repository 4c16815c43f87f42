"""A training peer: holds one stage, computes what the lead asks, talks to its neighbours, and signs for its work.

The same coroutine runs in both worlds. It never decides anything about the swarm: the lead proposes, the peer performs.
"""

from __future__ import annotations

import asyncio
import math
import random

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode
from talkoot.core.ids import PeerId
from talkoot.plan.flow import FlowNode, Settings
from talkoot.plan.flow_messages import Card
from talkoot.train.job import Job, make_stage
from talkoot.train.messages import (
    Assign,
    Begin,
    Commit,
    Cut,
    Give,
    Hello,
    Introduce,
    Negotiate,
    Ready,
    Saved,
)
from talkoot.train.negotiate import negotiate, topic_of
from talkoot.train.worker import Worker
from talkoot.world.api import HELLO, LOST, Lost, World
from talkoot.world.base import MAX_FRAMES

QUIET_PERIODS = 40  # of a negotiation without change, and this peer is content
CHUNK_BYTES = 256 * 2**20  # of a state on its way to a newcomer


async def train_peer(world: World, argument: bytes) -> None:
    """A peer's program; ``argument`` is an encoded :class:`Job`."""
    job = decode(argument, Job)
    peer = Peer(world, job)
    async with asyncio.TaskGroup() as tasks:
        await peer.serve(tasks)


class Peer(Worker):
    """A training peer between steps; see :func:`train_peer`."""

    def __init__(self, world: World, job: Job) -> None:
        super().__init__(world, job)
        self.node: FlowNode | None = None  # while routes are negotiated

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        """Introduce oneself, then do as told until told to stop."""
        world = self.world
        hello = Hello(world.name, world.address, OLDEST_PROTOCOL, PROTOCOL)
        await world.send(self.lead, HELLO, hello)
        topics = ("introduce", "assign", "give", "negotiate", "begin", "commit", "save", "stop", LOST)
        while True:
            message = await world.receive(*topics)
            if message.topic == LOST:
                if message.sender == self.lead:
                    return await self._cancel()
                if self.node is not None:
                    await self._forget(self.node, message.sender)
                # The lead may still reach both of us, so it must hear of it; what it means is its decision.
                await world.send(self.lead, "cut", Cut(message.sender, message.read(Lost).reason))
                continue
            if message.sender != self.lead or message.generation < self.generation:
                continue
            await self._enter(message.generation)
            match message.topic:
                case "introduce":
                    for contact in message.read(Introduce).contacts:
                        world.meet(PeerId(contact.peer), contact.address)
                case "assign":
                    await self._cancel()
                    self.running = tasks.create_task(self._assign(message.read(Assign)))
                case "give":
                    await self._give(message.read(Give), message.step)
                case "negotiate":
                    await self._cancel()
                    self.running = tasks.create_task(self._negotiate(message.read(Negotiate)))
                case "begin":
                    await self._cancel()
                    self.running = tasks.create_task(self.work_on(message.read(Begin), message.step))
                case "commit":
                    await self._commit(message.read(Commit), message.step)
                case "save":
                    await self._save(message.step)
                case "stop":
                    return await self._cancel()

    async def _enter(self, generation: int) -> None:
        if generation > self.generation:
            # Before anything else: work of the old generation must not speak in the name of the new one, and an
            # assignment may be waiting for the state of a donor that is gone.
            await self._cancel()
            self.generation = generation
            self.world.discard(lambda message: message.generation < generation and message.topic not in (LOST, "stop"))

    async def _cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            self.running = None

    async def _assign(self, assign: Assign) -> None:
        self.index = assign.stage
        self.stage = None  # two stages at once might not fit
        stage = self.stage = make_stage(self.job, assign.first, assign.last)
        if assign.donor is not None:
            message = await self.take_from(assign.donor, f"state/{self.generation}")
            stage.load([b"".join(bytes(frame) for frame in message.frames if isinstance(frame, _BYTES))], assign.step)
        elif assign.blobs:
            stage.load([self.world.blobs.get(name) for name in assign.blobs], assign.step)
        await self.tell("ready", Ready(assign.stage), assign.step)

    async def _give(self, give: Give, step: int) -> None:
        state, _ = self.held().save()
        view = memoryview(state)
        chunk = max(CHUNK_BYTES, -(-len(view) // MAX_FRAMES))
        frames = [view[at : at + chunk] for at in range(0, len(view), chunk)]
        await self.send(PeerId(give.to), f"state/{self.generation}", None, frames, step)

    async def _save(self, step: int) -> None:
        state, tensors = self.held().save()
        name = self.world.blobs.put(state)
        await self.tell("saved", Saved(blob=name, size=len(state), tensors=tensors), step)

    async def _negotiate(self, ask: Negotiate) -> None:
        period_s, generation = ask.period_s, self.generation
        chance = random.Random(f"{ask.seed} {self.world.name}")
        # By sum, iterations come out 6 % shorter than by the longest lane, which the published method shortens: LAB.md.
        card, settings = Card(self.world.me, ask.stage), Settings(period_s=period_s, objective="sum")
        node = self.node = FlowNode(card, ask.num_stages, ask.places, chance=chance, settings=settings)
        for other in ask.neighbours:
            node.met(other.peer, other.stage, other.hop_s)
        await negotiate(
            self.world,
            node,
            generation=generation,
            quiet_s=QUIET_PERIODS * period_s,
            limit_s=math.inf,  # the lead knows when it is enough
            listen_for_losses=False,
        )
        self.node = None

    async def _forget(self, node: FlowNode, peer: PeerId) -> None:
        for to, message in node.forget(peer, self.world.now()):
            await self.world.send(PeerId(to), topic_of("message", self.generation), message, generation=self.generation)

    async def _commit(self, commit: Commit, step: int) -> None:
        await self._cancel()  # it only waits for news by now: the lead has everybody's word that all is prepared
        await self.world.reached(step, "commit")
        stage = self.held()
        await self.world.compute(lambda: stage.apply(commit.learning_rate, commit.scale), 12.0 * stage.num_values)


_BYTES = bytes | bytearray | memoryview
