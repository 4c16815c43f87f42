"""A training peer: holds one stage, computes what the lead asks, talks to its neighbours, and signs for its work.

The same coroutine runs in both worlds. It never decides anything about the swarm: the lead proposes, the peer performs.
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from functools import partial

from talkoot.core.codec import decode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.flow import FlowNode, Settings
from talkoot.plan.flow_messages import Card
from talkoot.plan.steps import Phase
from talkoot.run.greeting import Introduce, say_hello
from talkoot.train.allegiance import TOPICS as WHOM_TO_OBEY
from talkoot.train.compute import UPDATE_FLOPS, gradient_bytes
from talkoot.train.job import Job, make_stage
from talkoot.train.keeping import Journal, Keeping, SentLog, Shadow, Streamed
from talkoot.train.messages import (
    Assign,
    Begin,
    Commit,
    Cut,
    Follow,
    Give,
    Gradient,
    Keep,
    Keeps,
    Negotiate,
    Ready,
    Saved,
    Sent,
    Update,
)
from talkoot.train.negotiate import negotiate, topic_of
from talkoot.train.rebuild import Unusable, rebuild
from talkoot.train.worker import Worker
from talkoot.world.api import LOST, Lost, Message, World
from talkoot.world.base import MAX_FRAMES

FROM_LEAD = ("introduce", "assign", "give", "keep", "negotiate", "begin", "commit", "save", "probe", "stop")
FROM_OWNERS = ("base", "gradient")  # of stages that are kept here for others
LASTING = (LOST, "stop", *FROM_OWNERS)  # topics on which an older generation has its say
QUIET_PERIODS = 40  # of a negotiation without change, and this peer is content


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
        self.keeping: dict[int, Keeping] = {}  # by stage, what is kept for others
        self.early: dict[int, Message] = {}  # by stage, states that came before the word that they are to be kept

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        """Introduce oneself, then do as told until told to stop."""
        world = self.world
        topics = (*FROM_LEAD, *FROM_OWNERS, *WHOM_TO_OBEY, LOST)
        first = await say_hello(world, self.lead, topics, self.job.recipe.recovery.watchdog_s)
        while True:
            try:
                message = first or await world.receive(*topics, timeout=self.allegiance.patience_s)
            except TimeoutError:  # there is no lead any more
                return await self._cancel()
            first = None
            if message.topic == LOST:
                if not await self._lost(message):
                    return await self._cancel()
                continue
            if message.topic in FROM_OWNERS:
                await self._hear_owner(message)
                continue
            if message.topic == "claim" and self.allegiance.accepts(message, self.generation):
                await self._follow(message)
                continue
            if not await self.allegiance.obeys(message) or message.generation < self.generation:
                continue
            await self._enter(message.generation)
            if message.topic in ("give", "begin", "commit", "save") and message.step != self.step:
                # A message was lost. Whatever came of this state now would be wrong, so somebody else must take over.
                reason = f"it holds the state of step {self.step} and was to do '{message.topic}' of {message.step}"
                await self.tell("cut", Cut(world.me, reason), message.step)
                continue
            match message.topic:
                case "probe":
                    await self.tell("pulse", self.pulse(), message.step)
                case "introduce":
                    for contact in message.read(Introduce).contacts:
                        world.meet(PeerId(contact.peer), contact.address)
                case "assign":
                    await self._cancel()
                    self.running = tasks.create_task(self._assign(message.read(Assign)))
                case "give":
                    await self._give(message.read(Give), message.step)
                case "keep":
                    await self._keep(message.read(Keep), message.step)
                case "negotiate":
                    await self._cancel()
                    self.running = tasks.create_task(self._negotiate(message.read(Negotiate)))
                case "begin":
                    await self._cancel()
                    self.running = tasks.create_task(self.work_on(message.read(Begin), message.step))
                case "commit":
                    await self._commit(message.read(Commit), message.step)
                case "heir" | "dismiss":
                    await self.allegiance.hear(message)
                case "save":
                    await self._save(message.step)
                case "stop":
                    return await self._cancel()

    async def _lost(self, message: Message) -> bool:
        """A link broke; whether there is still somebody to work for."""
        if self.allegiance.concerns(message.sender):
            return await self.allegiance.lost(message.sender, self.generation)
        if self.node is not None:
            await self._forget(self.node, message.sender)
        # The lead may still reach both of us, so it must hear of it; what it means is its decision.
        await self.world.send(self.lead, "cut", Cut(message.sender, message.read(Lost).reason))
        return True

    async def _follow(self, claim: Message) -> None:
        """Say to a new lead what is here, before its generation ends what is under way; a final gradient is kept."""
        stage = None if self.step is None else self.index
        keeps = tuple((at, keeping.kept.base, keeping.kept.step) for at, keeping in sorted(self.keeping.items()))
        follow = Follow(stage=stage, applied=self.step or 0, prepared=self.ready, keeps=keeps)
        await self._enter(claim.generation)
        await self.tell("follow", follow, claim.step)

    async def _enter(self, generation: int) -> None:
        if generation > self.generation:
            # Before anything else: work of the old generation must not speak in the name of the new one, and an
            # assignment may be waiting for the state of a donor that is gone.
            await self._cancel()
            self.generation = generation
            self.world.discard(lambda message: message.generation < generation and message.topic not in LASTING)

    async def _cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            self.running = None

    async def _assign(self, assign: Assign) -> None:
        self.index = assign.stage
        await self.world.reached(assign.reached, "assign", late=True)
        self.stage = self.step = None  # two stages at once might not fit
        self.ready = -1
        self.keeping.clear()  # whoever is given a seat keeps nothing that counts
        stage = self.stage = make_stage(self.job, assign.first, assign.last)
        self.sent = SentLog()
        try:
            await rebuild(self, assign, stage)
        except Unusable as problem:
            await self.tell("ready", Ready(assign.stage, finite=False, problem=str(problem)), assign.step)
            return
        self.step = assign.step
        await self.tell("ready", Ready(assign.stage, stage.finite()), assign.step)

    # -- for others ------------------------------------------------------------------------------------------

    async def _give(self, give: Give, step: int) -> None:
        to, topic = PeerId(give.to), f"state/{self.generation}"
        match give.what:
            case "state":
                await self.send(to, topic, None, self.held().pack(), step)
            case "weights":
                await self.send(to, topic, None, self.held().pack(give.kinds), step)
            case "base":
                await self.send(to, "base", Ready(self.index), self.held().pack(), step)
            case "kept":
                keeping = self.keeping.get(give.stage)
                if keeping is None or keeping.kept.step != step:  # better nothing than an older state
                    reason = f"it was to give the state of stage {give.stage} of step {step}, which it does not have"
                    await self.tell("cut", Cut(self.world.me, reason), step)
                    return
                kept = keeping.kept.hand_over()
                await self.send(to, topic, None, kept.state, kept.step)
                for at, frames in enumerate(kept.gradients, kept.step):
                    await self.send(to, f"journal/{self.generation}", None, frames, at)
            case "sent":
                for at in range(give.since, step):
                    await self._give_sent(to, at, frozenset(give.were))

    async def _give_sent(self, to: PeerId, step: int, were: frozenset[str]) -> None:
        found, topic = self.sent.of(step, were), f"sent/{self.generation}"
        for at in range(0, max(1, len(found)), MAX_FRAMES):
            part = found[at : at + MAX_FRAMES]
            keys: tuple[tuple[Phase, int], ...] = tuple((phase, microbatch) for phase, microbatch, _ in part)
            more = at + MAX_FRAMES < len(found)
            await self.send(to, topic, Sent(keys, more), [frame for _, _, frames in part for frame in frames], step)

    async def _keep(self, keep: Keep, step: int) -> None:
        kept = Shadow(make_stage(self.job, keep.first, keep.last)) if keep.kind == "shadow" else Journal()
        config = self.job.config
        numbers = sum(config.layer_parameters()[index] for index in config.held(keep.first, keep.last))
        (size,) = gradient_bytes(config, [(keep.first, keep.last)], self.job.recipe.recovery.stream)
        flops = UPDATE_FLOPS * numbers if keep.kind == "shadow" else 0.0
        keeping = self.keeping[keep.stage] = Keeping(kept, size, flops, keep.owner, self.generation)
        early = self.early.pop(keep.stage, None)
        if keep.owner is None:
            keeping.begin([self.world.blobs.get(name) for name in keep.blobs], keep.step)
            await self.tell("keeping", Keeps(keep.stage, keep.step), step)
        elif early is not None:
            await self._hear_owner(early)

    async def _hear_owner(self, message: Message) -> None:
        """Somebody whose stage is kept here sends its state, or a gradient."""
        with suppress(ValueError):  # nonsense is as good as silence
            if message.topic == "base":
                stage = message.read(Ready).stage
                keeping, said = self.keeping.get(stage), (message.sender, message.generation)
                if keeping is not None and keeping.renew(*said, message.frames, message.step):
                    await self.tell("keeping", Keeps(stage, message.step), message.step)
                elif keeping is None and 0 <= stage < self.job.recipe.swarm.num_stages:
                    self.early[stage] = message
            else:
                said = message.read(Gradient)
                stage, which = said.stage, Streamed(message.step, message.sender, message.generation, said.attempt)
                if stage in self.keeping:
                    self.keeping[stage].gradient(which, message.frames)
            await self._answer(stage)

    async def _answer(self, stage: int) -> None:
        """Tell owners which gradients are here with all that comes before them, or the lead that something is lost."""
        keeping = self.keeping.get(stage)
        for which in keeping.answers() if keeping is not None else ():
            topic = f"kept/{which.generation}/{which.step}/{which.attempt}"
            await self.send(PeerId(which.owner), topic, None, (), which.step)
        if keeping is not None and keeping.torn:
            del self.keeping[stage]
            await self.tell("keeping", Keeps(stage, -1), self.step or 0)

    async def _save(self, step: int) -> None:
        await self.world.reached(step, "save")
        state, tensors = self.held().save()
        name = problem = ""
        try:
            name = self.world.blobs.put(state)
        except TalkootError as error:  # a full disk: whether that ends anything is the lead's decision
            problem = f"{self.world.name}: {error.what}: {error.why}"
        await self.tell("saved", Saved(blob=name, size=len(state), tensors=tensors, problem=problem), step)

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
        stage, work = self.held(), UPDATE_FLOPS * self.held().num_values
        await self.world.compute(lambda: stage.apply(commit.rates[self.index], commit.scale), work)
        self.ready = -1
        if commit.log_from is not None:
            self.sent.note(step, self.desk.parcels(), commit.log_from)
        for index, owner, attempt in commit.streamed:
            keeping = self.keeping.get(index)
            if keeping is not None:
                which = Streamed(step, owner, self.generation, attempt)
                update = Update(commit.rates[index], commit.scale)
                await self.world.compute(partial(keeping.commit, which, update), keeping.flops)
                await self._answer(index)
        self.early = {index: held for index, held in self.early.items() if held.step > step}  # the others came in vain
        self.step, self.work_done = step + 1, self.work_done + 1
        await self.world.reached(step, "idle")
