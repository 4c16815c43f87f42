"""A peer in post-training: answer prompts, send the answers, hear those of others, judge them, learn, report.

Nobody stands above it in a round. The lead says who takes part (a *view*); from there on rounds follow from the seed
and from what comes in. A peer waits for the others' completions of the same round, but only so long: somebody who is
gone is not waited for at all, somebody slow at most ``exchange.wait_s``. With nobody else there it learns alone, and
says so.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import msgspec

from talkoot.core.codec import decode
from talkoot.core.ids import PeerId
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.run.greeting import say_hello
from talkoot.tune.gather import Inbox
from talkoot.tune.job import TuneJob
from talkoot.tune.messages import Begin, Done, Ended, Place, Ready, Rollouts, View
from talkoot.tune.tuner import Learned, Tuner
from talkoot.tune.wire import Limits, pack
from talkoot.world.api import LOST, Message, World

HELLO_AGAIN_S = 2.0
TOPICS = ("view", "rollouts", "stop", LOST)


class Stopped(Exception):
    """The lead says that this is the end."""


async def tune_peer(world: World, argument: bytes) -> None:
    """The program of every peer."""
    with suppress(Stopped):
        await TunePeer(world, decode(argument, TuneJob)).run()


class TunePeer:
    """See the module's text."""

    def __init__(self, world: World, job: TuneJob) -> None:
        self.world, self.job, self.recipe = world, job, job.recipe
        if world.lead is None:
            raise ValueError("a peer that nobody launched has no lead")
        self.lead: PeerId = world.lead
        self.view = View(0, (), job.recipe.tune.rounds)
        self.round = self._stored = 0  # rounds done, and those after which its state was stored
        self._met: set[PeerId] = set()
        self._dropped: Counter[str] = Counter()  # messages that the world refused, up to the last round

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the hello to the end."""
        world, recipe = self.world, self.recipe
        begin = (await say_hello(world, self.lead, ("begin", "stop"), HELLO_AGAIN_S)).read(Begin)
        fresh = not begin.blob  # what was stored is beyond its warm start
        self.tuner = await world.compute(lambda: Tuner.open(recipe, world.name, warm=fresh), 0.0)
        size = self.tuner.size
        if begin.blob:
            state = world.blobs.get(begin.blob)
            self.round = self._stored = await world.compute(lambda: self.tuner.load(state, begin.blob), 2.0 * size)
        drift = await world.compute(self.tuner.self_check, 4.0 * size * self.tuner.limit)
        self.inbox = Inbox(world.run, self._limits())
        facts = Ready(self.tuner.tokenizer, size, self.tuner.trainable, drift)
        await world.send(self.lead, "ready", facts)
        while not self._here:
            await self._hear()
        while self.round < self.view.until:
            await self._round()
        # Where nobody waits, it may have passed the round that was to be the last.
        blob = await self._store() if self._stored != self.round else ""
        await world.send(self.lead, "ended", Ended(self.round, blob), step=self.round)
        while True:  # others may still want its completions, which the world sends; the lead says when all is done
            await self._hear()

    def _limits(self) -> Limits:
        """The most that any peer of the recipe may send."""
        recipe, task = self.recipe, self.tuner.task
        rollouts = [recipe.rollout_of(name) for name in recipe.names]
        return Limits(
            groups=max(rollout.prompts for rollout in rollouts) * (1 + recipe.exchange.refills),
            samples=max(rollout.samples for rollout in rollouts),
            tokens=max(recipe.limit_of(name, task) for name in recipe.names),
        )

    @property
    def _here(self) -> bool:
        """Whether the view has this peer in it."""
        return any(place.peer == self.world.me for place in self.view.places)

    async def _round(self) -> None:
        world, number, size = self.world, self.round, self.tuner.size
        await world.reached(number, "generate")
        await self._catch_up()
        if self.round != number or number >= self.view.until:
            return  # a new view says that this peer is needed later, or no more
        started = world.now()
        names = [place.name for place in self.places]
        rollout = self.recipe.rollout_of(world.name)
        tokens = rollout.prompts * rollout.samples * self.tuner.limit / (1 if self.recipe.vertical else len(names))
        batch = await world.compute(lambda: self.tuner.generate(number, names), 2.0 * size * tokens)
        facts = self.tuner.account(number, batch)
        await world.reached(number, "publish")
        generated, frames = pack(world, number, facts, batch.groups, self._texts(batch.texts), started)
        sent_bytes = await self._publish(generated, frames)
        await world.reached(number, "gather")
        before = world.now()
        await self._gather()
        waited_s = world.now() - before
        records = self.inbox.take(number, self.recipe.exchange.max_lag)
        owners = {place.peer: place.name for place in self.view.places}
        absent = self._names.keys() - {PeerId(record.peer) for record in records}
        absent = {peer for peer in absent if not self.inbox.heard_of(peer, number)}
        rejected = self._rejected()
        await world.reached(number, "update")
        learn = lambda: self.tuner.learn(number, batch, [(owners.get(r.peer, ""), r) for r in records], rejected)  # noqa: E731
        work = 8.0 * size * sum(record.facts.tokens for record in records) + 8.0 * size * facts.tokens
        learned = await world.compute(learn, work)
        missed = tuple(sorted(self._names[peer] for peer in absent))
        await self._report(generated, learned, missed, (started, waited_s), sent_bytes)

    @property
    def places(self) -> list[Place]:
        """Who takes part in this round, oneself included, in the order of names."""
        return [place for place in self.view.places if place.since <= self.round or place.peer == self.world.me]

    def _texts(self, texts: list[str]) -> list[str] | None:
        """The completions' texts, where somebody cannot read one's tokens."""
        unlike = any(place.tokenizer != self.tuner.tokenizer for place in self.view.places)
        return texts if unlike else None

    async def _publish(self, signed: Signed, frames: list[bytes]) -> int:
        """Send to all others; returns how many bytes of frames."""
        others = [PeerId(place.peer) for place in self.view.places if place.peer != self.world.me]
        for peer in others:
            await self.world.send(peer, "rollouts", Rollouts(signed), frames, step=self.round)
        return len(others) * sum(map(len, frames))

    @property
    def _names(self) -> dict[PeerId, str]:
        """Those whose completions are expected in this round, by identity."""
        return {PeerId(place.peer): place.name for place in self.places if place.peer != self.world.me}

    async def _gather(self) -> None:
        """Wait for the others' completions, but not for ever."""
        world = self.world
        deadline = world.now() + self.recipe.exchange.wait_s
        while self.inbox.missing(self.round, self._names) and world.now() < deadline:
            with suppress(TimeoutError):
                await self._hear(deadline - world.now())

    def _rejected(self) -> Counter[str]:
        """What was refused since the last round, by reason: here, and by the world on its way."""
        dropped = Counter(self.world.refused)
        found, self.inbox.rejected = self.inbox.rejected + (dropped - self._dropped), Counter()
        self._dropped = dropped
        return found

    async def _report(
        self, generated: Signed, learned: Learned, absent: tuple[str, ...], times: tuple[float, float], sent_bytes: int
    ) -> None:
        world, number, (started, waited_s) = self.world, self.round, times
        busy_s = learned.facts.busy_s
        facts = msgspec.structs.replace(learned.facts, absent=absent, sent_bytes=sent_bytes, waited_s=waited_s)
        self.round += 1
        blob, every = "", self.recipe.tune.checkpoint_every
        last = self.round >= self.view.until
        if last or (every and self.round % every == 0):
            blob = await self._store()
        receipt = Receipt(
            run=world.run,
            generation=0,
            step=number,
            peer=world.me,
            task=Task(op="tune.update", inputs={"policy": learned.before}, seed=self.recipe.seed),
            outputs={"policy": facts.policy},
            body=body(facts),
            cost=busy_s,
            started=started,
            ended=world.now(),
            parents=(generated.id, *learned.parents),
        )
        await world.reached(number, "report")
        await world.send(self.lead, "round", Done(generated, sign(receipt, world.key), blob), step=number)
        await world.reached(number, "idle")

    async def _store(self) -> str:
        """Put one's state by; the blob's name."""
        data = await self.world.compute(lambda: self.tuner.to_bytes(self.round), 2.0 * self.tuner.size)
        self._stored = self.round
        return self.world.blobs.put(data)

    # -- hearing ----------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Take in everything that waits, and open links again that broke."""
        while self.world.pending(*TOPICS):
            await self._hear()
        self._meet()

    async def _hear(self, timeout: float | None = None) -> None:
        """One message.

        Raises:
            Stopped: it was the last one.
            TimeoutError: there was none.
        """
        message = await self.world.receive(*TOPICS, timeout=None if timeout is None else max(0.0, timeout))
        match message.topic:
            case "stop" if message.sender == self.lead:
                raise Stopped
            case "view" if message.sender == self.lead:
                self._look(message.read(View))
            case "rollouts":
                members = {PeerId(place.peer) for place in self.view.places}
                self.inbox.put(message, self.round, self.recipe.exchange.max_lag, members)
            case _ if message.topic == LOST:
                self._lose(message)

    def _look(self, view: View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        for place in view.places:
            if place.peer == self.world.me and place.since > self.round:
                # It leaves rounds out; what was stored before them holds as after them.
                self._stored = place.since if self._stored == self.round else self._stored
                self.round = place.since
        self._meet()

    def _meet(self) -> None:
        for place in self.view.places:
            peer = PeerId(place.peer)
            if peer != self.world.me and (peer not in self._met or peer in self.inbox.gone):
                self.world.meet(peer, place.address)
                self._met.add(peer)
                self.inbox.gone.discard(peer)

    def _lose(self, message: Message) -> None:
        if message.sender == self.lead:
            raise Stopped  # nobody would write down what comes now
        self.inbox.gone.add(message.sender)
