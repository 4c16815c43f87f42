"""A peer within one step: it works on what its desk offers, listens, mixes gradients, and signs for what it did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId, digest
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.plan.steps import Work
from talkoot.train.allegiance import Allegiance
from talkoot.train.compute import StageCompute, hop_bytes
from talkoot.train.desk import Desk, Parcel
from talkoot.train.job import Job
from talkoot.train.keeping import SentLog
from talkoot.train.messages import Amend, Begin, Carry, Census, Cut, Gradient, Mix, Prepared, Standing
from talkoot.train.records import Worked
from talkoot.train.treesum import Node
from talkoot.train.watchdog import Pulse
from talkoot.world.api import Frame, Message, World, frame_bytes

PULSE_S = 0.2  # the shortest time between two signs of life
FROM_LEAD = ("census", "amend")  # what it says within a step


class _Amended(Exception):
    """The paths changed while gradients were being mixed."""


class Partials(msgspec.Struct, frozen=True):
    """Body of a ``mix`` message: which microbatches each frame sums."""

    nodes: tuple[Node, ...]


class Worker:
    """State of one training peer, and its step; see the module's text.

    Args:
        world: the peer's own; it has a lead.
        job: what it was told at its launch.
    """

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.allegiance = Allegiance(world, job.recipe.train.patience_s)
        self.stage: StageCompute | None = None
        self.index = 0
        self.generation = 0
        self.desk = Desk(world.me, ())
        self.mix = Mix(group=(), visitors=())
        self.hops = ""  # the topic on which neighbours' frames of this step arrive
        self.prepared = -1  # the mixing attempt that the lead was told of
        self.ready = -1  # the step whose gradient is final and not applied
        self.running: asyncio.Task[None] | None = None
        self.sent_bytes = 0
        self.busy_s = 0.0
        self.sent = SentLog()
        self._hop_bytes = hop_bytes(job.config, job.recipe)
        self.step: int | None = None  # the committed steps in the state that it holds
        self.work_done = 0  # pieces of work, ever
        self.waiting = False  # for somebody's message
        self.pulse_s = max(PULSE_S, job.recipe.recovery.watchdog_s / 10)
        self.pulsed_at = world.now()

    @property
    def lead(self) -> PeerId:
        """Whom this peer works for."""
        return self.allegiance.lead

    def held(self) -> StageCompute:
        if self.stage is None:
            raise ValueError("the lead asked for work before it assigned a stage")
        return self.stage

    async def work_on(self, begin: Begin, step: int) -> None:
        """One step up to "prepared", and on from there as often as a crash elsewhere changes the paths."""
        world, stage = self.world, self.held()
        started, self.busy_s, self.sent_bytes = world.now(), 0.0, 0
        world.discard(
            lambda message: message.step < step and message.topic.startswith(("hop/", "mix/", "tie/", "kept/"))
        )
        await world.reached(step, "begin")
        stage.begin(step, begin.num_microbatches, begin.evaluate, begin.mix.visitors)
        self.desk = Desk(
            world.me, begin.items, begin.order, ring=begin.ring, slots=begin.slots, forward_only=begin.evaluate
        )
        self.hops = f"hop/{self.generation}/{step}{'/evaluate' if begin.evaluate else ''}"
        self.mix, self.prepared, self.ready = begin.mix, -1, -1
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
            attempt = self.mix.attempt
            await self._tell_prepared(stage, step, started)
            self.prepared = attempt
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
        await self._advance(step)
        parcel = self.desk.finish(work, output)
        if parcel is not None:
            await self._deliver(parcel, step)
        await self.world.reached(step, work.phase)

    async def _advance(self, step: int) -> None:
        """One more piece of work is done; now and then the lead hears of it."""
        self.work_done += 1
        now = self.world.now()
        if now - self.pulsed_at >= self.pulse_s:
            self.pulsed_at = now
            await self.tell("pulse", self.pulse(), step)

    def pulse(self) -> Pulse:
        """A sign of life."""
        idle = self.running is None or self.running.done()
        return Pulse(self.work_done, idle or self.waiting, sum(self.world.refused.values()))

    async def listen(self, *topics: str) -> Message:
        """The next message on any of ``topics``; meanwhile this peer counts as waiting."""
        self.waiting = True
        try:
            return await self.world.receive(*topics)
        finally:
            self.waiting = False

    async def _work(self, work, flops: float):
        """Compute, and keep account of the time it took: virtual in a simulation, processor time for real."""
        before = self.world.now() if self.world.kind == "simulated" else time.process_time()
        result = await self.world.compute(work, flops)
        after = self.world.now() if self.world.kind == "simulated" else time.process_time()
        self.busy_s += after - before
        return result

    async def _deliver(self, parcel: Parcel, step: int) -> None:
        to, phase, microbatch, number, frames = parcel
        if to == self.world.me:
            self.desk.arrive(to, phase, microbatch, frames, number)
        else:
            await self.send(PeerId(to), self.hops, Carry(phase, microbatch, number), frames, step)

    async def _hear(self, step: int, *topics: str) -> Message | None:
        """Take one message; those that every step has are dealt with here, one on ``topics`` is returned.

        Raises:
            _Amended: the mixing has to start again.
        """
        message = await self.listen(*topics, self.hops, *FROM_LEAD)
        current = message.sender == self.lead and (message.generation, message.step) == (self.generation, step)
        if message.topic == self.hops:
            try:
                carry = message.read(Carry)
                if [frame_bytes(frame) for frame in message.frames] != [self._hop_bytes]:
                    raise ValueError(f"{message} does not carry one activation")
            except ValueError as problem:
                return await self._accuse(message.sender, problem, step)
            self.desk.arrive(message.sender, carry.phase, carry.microbatch, message.frames, carry.round)
        elif message.topic in topics:
            return message
        elif message.topic == "census" and current:
            census = message.read(Census)
            done, arrived = self.desk.take_stock(census.lost)
            await self.tell(f"standing/{census.count}", Standing(done=done, arrived=arrived), step)
        elif message.topic == "amend" and current:
            await self._amend(message.read(Amend), step)
        return None

    async def _accuse(self, sender: str, problem: Exception, step: int) -> None:
        """Tell the lead of somebody whose bytes make no sense; without them this step cannot go on as planned."""
        why = f"{problem.where}: {problem.why}" if isinstance(problem, TalkootError) else str(problem)
        await self.tell("cut", Cut(sender, f"it sent what makes no sense: {why}"), step)

    async def _hear_forever(self, step: int) -> NoReturn:
        """Until the lead has changed something.

        Raises:
            _Amended: as :meth:`_hear`.
        """
        while True:
            await self._hear(step)

    async def _amend(self, amend: Amend, step: int) -> None:
        for parcel in self.desk.amend(amend.items):
            await self._deliver(parcel, step)
        before, self.mix = self.mix.attempt, amend.mix
        if amend.mix.attempt != before:
            self.ready = -1
            self.held().amend(amend.mix.visitors)
            raise _Amended

    async def take_from(self, sender: str, topic: str) -> Message:
        """The next message on ``topic`` from that very peer; anybody else's is dropped."""
        while (message := await self.listen(topic)).sender != sender:
            pass
        return message

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
                    await self.send(peer, topic, Partials(nodes), [frame for _, frame in parts], step)
                received = {}
                while len(received) < len(group) - 1:
                    message = await self._hear(step, topic)
                    if message is not None and message.sender in group:
                        try:
                            received[message.sender] = _partials(message)
                        except ValueError as problem:
                            await self._accuse(message.sender, problem, step)
                try:
                    stage.merge(turn, me, group, received)
                except (ValueError, LookupError, TalkootError) as problem:
                    if len(received) > 1:
                        raise  # whose fault it is cannot be told
                    await self._accuse(next(iter(received)), problem, step)
                    await self._hear_forever(step)
                await self._advance(step)
        if mix.tie_from is not None:
            topic = f"tie/{self.generation}/{step}/{mix.attempt}"
            for peer in mix.tie_to:
                await self.send(PeerId(peer), topic, None, stage.tied_gradient(), step)
            while (message := await self._hear(step, topic)) is None or message.sender != mix.tie_from:
                pass
            try:
                stage.merge_tied(message.frames)
            except (LookupError, TalkootError) as problem:
                await self._accuse(message.sender, problem, step)
                await self._hear_forever(step)

    async def _stream(self, stage: StageCompute, step: int) -> None:
        """Send the gradient to those who keep this stage, and wait until they have it."""
        attempt = self.mix.attempt
        frames = stage.gradient() if self.mix.streams else ()
        for stream in self.mix.streams:
            await self.send(PeerId(stream.peer), "gradient", Gradient(self.index, attempt), frames, step)
        topic = f"kept/{self.generation}/{step}/{attempt}"
        heard: set[str] = set()
        while any(
            stream.wait and stream.peer not in heard for stream in self.mix.streams
        ):  # a lost one leaves the list
            message = await self._hear(step, topic)
            if message is not None:
                heard.add(message.sender)

    async def _tell_prepared(self, stage: StageCompute, step: int, started: float) -> None:
        losses, norms = stage.finish()
        if not self.desk.forward_only:
            await self._stream(stage, step)
        losses = {m: loss for m, loss in losses.items() if m in self.desk.items}
        receipt = None if self.desk.forward_only else self._receipt(losses, norms, step, started)
        facts = Prepared(losses=tuple(sorted(losses.items())), norms=norms, attempt=self.mix.attempt, receipt=receipt)
        self.ready = -1 if self.desk.forward_only else step
        await self.tell("prepared", facts, step)

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

    async def send(
        self, to: PeerId, topic: str, facts: msgspec.Struct | None, frames: Sequence[Frame], step: int
    ) -> None:
        self.sent_bytes += sum(map(frame_bytes, frames))
        await self.world.send(to, topic, facts, frames, generation=self.generation, step=step)

    async def tell(self, topic: str, facts: msgspec.Struct | None, step: int) -> None:
        await self.world.send(self.lead, topic, facts, generation=self.generation, step=step)


def _partials(message: Message) -> list[tuple[Node, Frame]]:
    nodes = message.read(Partials).nodes
    if len(nodes) != len(message.frames):
        raise ValueError(f"{message} names {len(nodes)} parts and carries {len(message.frames)}")
    return list(zip(nodes, message.frames, strict=True))
