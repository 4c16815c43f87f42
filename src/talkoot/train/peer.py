"""A training peer: holds one stage, computes what the lead asks, talks to its neighbours, and signs for its work.

The same coroutine runs in both worlds. It never decides anything about the swarm: the lead proposes, the peer performs.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode
from talkoot.core.ids import PeerId, digest
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.plan.flow import FlowNode, Settings
from talkoot.plan.flow_messages import Card
from talkoot.plan.steps import Work
from talkoot.train.compute import StageCompute
from talkoot.train.desk import Desk, Parcel
from talkoot.train.job import Job, make_stage
from talkoot.train.messages import (
    Amend,
    Assign,
    Begin,
    Carry,
    Census,
    Commit,
    Cut,
    Give,
    Hello,
    Introduce,
    Mix,
    Negotiate,
    Prepared,
    Ready,
    Saved,
    Standing,
)
from talkoot.train.negotiate import negotiate, topic_of
from talkoot.train.records import Worked
from talkoot.train.treesum import Node
from talkoot.world.api import HELLO, LOST, Frame, Lost, Message, World, frame_bytes
from talkoot.world.base import MAX_FRAMES

FROM_LEAD = ("census", "amend")  # what it says within a step
QUIET_PERIODS = 40  # of a negotiation without change, and this peer is content
CHUNK_BYTES = 256 * 2**20  # of a state on its way to a newcomer


class _Amended(Exception):
    """The paths changed while gradients were being mixed."""


class Partials(msgspec.Struct, frozen=True):
    """Body of a ``mix`` message: which microbatches each frame sums."""

    nodes: tuple[Node, ...]


async def train_peer(world: World, argument: bytes) -> None:
    """A peer's program; ``argument`` is an encoded :class:`Job`."""
    job = decode(argument, Job)
    peer = Peer(world, job)
    async with asyncio.TaskGroup() as tasks:
        await peer.serve(tasks)


class Peer:
    """State of one training peer; see :func:`train_peer`."""

    def __init__(self, world: World, job: Job) -> None:
        if world.lead is None:
            raise ValueError("a training peer needs a lead")
        self.world, self.job, self.lead = world, job, world.lead
        self.stage: StageCompute | None = None
        self.index = 0
        self.generation = 0
        self.node: FlowNode | None = None  # while routes are negotiated
        self.desk = Desk(world.me, ())
        self.mix = Mix(group=(), visitors=())
        self.hops = ""  # the topic on which neighbours' frames of this step arrive
        self.prepared = -1  # the mixing attempt that the lead was told of
        self.running: asyncio.Task[None] | None = None
        self.sent_bytes = 0
        self.busy_s = 0.0

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
                    self.running = tasks.create_task(self._compute(message.read(Begin), message.step))
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
            message = await self._from(assign.donor, f"state/{self.generation}")
            stage.load([b"".join(bytes(frame) for frame in message.frames if isinstance(frame, _BYTES))], assign.step)
        elif assign.blobs:
            stage.load([self.world.blobs.get(name) for name in assign.blobs], assign.step)
        await self._tell("ready", Ready(assign.stage), assign.step)

    async def _give(self, give: Give, step: int) -> None:
        state, _ = self._held().save()
        view = memoryview(state)
        chunk = max(CHUNK_BYTES, -(-len(view) // MAX_FRAMES))
        frames = [view[at : at + chunk] for at in range(0, len(view), chunk)]
        await self._send(PeerId(give.to), f"state/{self.generation}", None, frames, step)

    async def _save(self, step: int) -> None:
        state, tensors = self._held().save()
        name = self.world.blobs.put(state)
        await self._tell("saved", Saved(blob=name, size=len(state), tensors=tensors), step)

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
        stage = self._held()
        await self.world.compute(lambda: stage.apply(commit.learning_rate, commit.scale), 12.0 * stage.num_values)

    def _held(self) -> StageCompute:
        if self.stage is None:
            raise ValueError("the lead asked for work before it assigned a stage")
        return self.stage

    async def _compute(self, begin: Begin, step: int) -> None:
        """One step up to "prepared", and on from there as often as a crash elsewhere changes the paths."""
        world, stage = self.world, self._held()
        started, self.busy_s, self.sent_bytes = world.now(), 0.0, 0
        world.discard(lambda message: message.step < step and message.topic.startswith(("hop/", "mix/", "tie/")))
        await world.reached(step, "begin")
        stage.begin(step, begin.num_microbatches, begin.evaluate, begin.mix.visitors)
        self.desk = Desk(
            world.me, begin.items, begin.order, ring=begin.ring, slots=begin.slots, forward_only=begin.evaluate
        )
        self.hops = f"hop/{self.generation}/{step}{'/evaluate' if begin.evaluate else ''}"
        self.mix, self.prepared = begin.mix, -1
        while True:
            with suppress(_Amended):
                await self._turn(stage, step, started)

    async def _turn(self, stage: StageCompute, step: int, started: float) -> None:
        """Hear what has arrived; then do one piece of work, or mix, or wait."""
        while self.world.pending(self.hops, *FROM_LEAD):
            await self._hear(step)
        desk = self.desk
        work = desk.next()
        if work is not None:
            await self._do(stage, work, step)
        elif desk.finished and self.prepared != self.mix.attempt:
            if not desk.forward_only:
                await self._mix(stage, step)
            await self.world.reached(step, "prepare")
            self.prepared = self.mix.attempt
            await self._tell_prepared(stage, step, started)
        else:
            await self._hear(step)

    async def _do(self, stage: StageCompute, work: Work, step: int) -> None:
        m, frames = work.microbatch, self.desk.inputs(work)
        match work.phase:
            case "forward":
                output = await self._work(partial(stage.forward, m, frames), stage.forward_flops)
            case "loss":
                output = await self._work(partial(stage.loss, m, frames), stage.loss_flops)
            case "backward":
                output = await self._work(partial(stage.backward, m, frames), 2 * stage.forward_flops)
        parcel = self.desk.finish(work, output)
        if parcel is not None:
            await self._deliver(parcel, step)
        await self.world.reached(step, work.phase)

    async def _deliver(self, parcel: Parcel, step: int) -> None:
        to, phase, microbatch, number, frames = parcel
        if to == self.world.me:
            self.desk.arrive(to, phase, microbatch, frames, number)
        else:
            await self._send(PeerId(to), self.hops, Carry(phase, microbatch, number), frames, step)

    # -- listening during a step -----------------------------------------------------------------------------

    async def _hear(self, step: int, *topics: str) -> Message | None:
        """Take one message; those that every step has are dealt with here, one on ``topics`` is returned.

        Raises:
            _Amended: the mixing has to start again.
        """
        message = await self.world.receive(*topics, self.hops, *FROM_LEAD)
        current = message.sender == self.lead and (message.generation, message.step) == (self.generation, step)
        if message.topic == self.hops:
            with suppress(ValueError):  # nonsense is as good as silence
                carry = message.read(Carry)
                self.desk.arrive(message.sender, carry.phase, carry.microbatch, message.frames, carry.round)
        elif message.topic in topics:
            return message
        elif message.topic == "census" and current:
            census = message.read(Census)
            done, arrived = self.desk.take_stock(census.lost)
            await self._tell(f"standing/{census.count}", Standing(done=done, arrived=arrived), step)
        elif message.topic == "amend" and current:
            await self._amend(message.read(Amend), step)
        return None

    async def _amend(self, amend: Amend, step: int) -> None:
        for parcel in self.desk.amend(amend.items):
            await self._deliver(parcel, step)
        if amend.mix.attempt != self.mix.attempt:
            self.mix = amend.mix
            self._held().amend(amend.mix.visitors)
            raise _Amended

    async def _from(self, sender: str, topic: str) -> Message:
        """The next message on ``topic`` from that very peer; anybody else's is dropped."""
        while (message := await self.world.receive(topic)).sender != sender:
            pass
        return message

    async def _work(self, work, flops: float):
        """Compute, and keep account of the time it took: virtual in a simulation, processor time for real."""
        before = self.world.now() if self.world.kind == "simulated" else time.process_time()
        result = await self.world.compute(work, flops)
        after = self.world.now() if self.world.kind == "simulated" else time.process_time()
        self.busy_s += after - before
        return result

    async def _mix(self, stage: StageCompute, step: int) -> None:
        mix, me = self.mix, self.world.me
        group = [PeerId(peer) for peer in mix.group]
        await self.world.reached(step, "mix")
        stage.start_mixing()
        if len(group) > 1:
            for turn in range(stage.turns):
                topic = f"mix/{self.generation}/{step}/{mix.attempt}/{turn}"
                for peer, parts in stage.outgoing(turn, me, group).items():
                    nodes = tuple(node for node, _ in parts)
                    await self._send(peer, topic, Partials(nodes), [frame for _, frame in parts], step)
                received = {}
                while len(received) < len(group) - 1:
                    message = await self._hear(step, topic)
                    if message is not None and message.sender in group:
                        received[message.sender] = _partials(message)
                stage.merge(turn, me, group, received)
        if mix.tie_from is not None:
            topic = f"tie/{self.generation}/{step}/{mix.attempt}"
            for peer in mix.tie_to:
                await self._send(PeerId(peer), topic, None, stage.tied_gradient(), step)
            while (message := await self._hear(step, topic)) is None or message.sender != mix.tie_from:
                pass
            stage.merge_tied(message.frames)

    async def _tell_prepared(self, stage: StageCompute, step: int, started: float) -> None:
        losses, norms = stage.finish()
        losses = {m: loss for m, loss in losses.items() if m in self.desk.items}
        receipt = None if self.desk.forward_only else self._receipt(losses, norms, step, started)
        facts = Prepared(losses=tuple(sorted(losses.items())), norms=norms, attempt=self.mix.attempt, receipt=receipt)
        await self._tell("prepared", facts, step)

    def _receipt(
        self,
        losses: dict[int, float],
        norms: tuple[float, ...],
        step: int,
        started: float,
    ) -> Signed:
        world = self.world
        facts = Worked(
            stage=self.index,
            microbatches=tuple(sorted(self.desk.items)),
            sent_bytes=self.sent_bytes,
            busy_s=self.busy_s,
            forwards=self.desk.counts["forward"],
            backwards=self.desk.counts["backward"],
            losses=self.desk.counts["loss"],
        )
        # The squared norms, all bits of them, are a cheap fingerprint of the gradient that this peer vouches for.
        fingerprint = msgspec.msgpack.encode((sorted(losses.items()), norms))
        return sign(
            Receipt(
                run=world.run,
                generation=self.generation,
                step=step,
                peer=world.me,
                task=Task(op="train.step", inputs={"tokens": self.job.tokens_digest}, seed=self.job.recipe.seed),
                outputs={"gradient": digest(fingerprint)},
                body=body(facts),
                cost=self.busy_s,
                started=started,
                ended=world.now(),
            ),
            world.key,
        )

    async def _send(
        self, to: PeerId, topic: str, facts: msgspec.Struct | None, frames: Sequence[Frame], step: int
    ) -> None:
        self.sent_bytes += sum(map(frame_bytes, frames))
        await self.world.send(to, topic, facts, frames, generation=self.generation, step=step)

    async def _tell(self, topic: str, facts: msgspec.Struct | None, step: int) -> None:
        await self.world.send(self.lead, topic, facts, generation=self.generation, step=step)


_BYTES = bytes | bytearray | memoryview


def _partials(message: Message) -> list[tuple[Node, Frame]]:
    nodes = message.read(Partials).nodes
    if len(nodes) != len(message.frames):
        raise ValueError(f"{message} names {len(nodes)} parts and carries {len(message.frames)}")
    return list(zip(nodes, message.frames, strict=True))
