"""A replica: inner steps by itself, an exchange with its group when one is due, and never a wait for the lead.

Two tasks: one listens (to the lead, to other replicas, to what the world says about links), one trains. Which exchange is
with whom follows from the view and the round, so that nobody has to ask.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.plan.pairing import pairs
from talkoot.train.job import Job
from talkoot.train.messages import Cut, Hello
from talkoot.train.mixing import RoundRule, mixing_rules, settled
from talkoot.train.rounds.collective import Broken, agree, collectives, gather
from talkoot.train.rounds.joining import Donor, fetch
from talkoot.train.rounds.mail import Mail
from talkoot.train.rounds.messages import (
    Arrived,
    Ask,
    Collect,
    Collected,
    Done,
    Enter,
    Fetch,
    Key,
    Offer,
    Part,
    Place,
    Refused,
    Standing,
    Took,
    View,
)
from talkoot.train.rounds.records import Rounded
from talkoot.train.rounds.replica import Exchange, ReplicaCompute, make_replica, share
from talkoot.train.rounds.swap import Swap, Waits
from talkoot.train.schedule import learning_rate
from talkoot.train.watchdog import Pulse
from talkoot.world.api import HELLO, LOST, Message, World

FROM_LEAD = ("enter", "view", "collect", "probe", "stop")
ABOUT_EXCHANGES = {"offer": Offer, "took": Took, "refused": Refused, "part": Part, "standing": Standing}
FROM_REPLICAS = (*ABOUT_EXCHANGES, "ask", "fetch", "weights")
REWARM = 20  # inner steps over which a newcomer without moments comes up to the learning rate
MERGE_FLOPS = 10.0  # per number


async def train_replica(world: World, argument: bytes) -> None:
    """A replica's program; ``argument`` is an encoded :class:`~talkoot.train.job.Job`."""
    peer = RoundPeer(world, decode(argument, Job))
    async with asyncio.TaskGroup() as tasks:
        await peer.serve(tasks)


class RoundPeer:
    """See the module's text.

    Attributes:
        mail: what others sent about exchanges.
        sums: by exchange of a group of all, of how many the sum is that is still known here.
        promised: views below which an exchange will not be completed here, by exchange.
        round_s: how long the last round took.
    """

    replica: ReplicaCompute

    def __init__(self, world: World, job: Job) -> None:
        if world.lead is None:
            raise ValueError("a replica needs a lead")
        self.world, self.job, self.lead = world, job, world.lead
        rule = mixing_rules[job.recipe.mixing.rule]
        if rule.local is False:
            raise ValueError(f"{job.recipe.mixing.rule} is no rule about rounds")
        self.rule: RoundRule = rule
        self.mixing = settled(job.recipe.mixing)
        self.mail, self.waits, self.donor = Mail(), Waits(self.mixing.deadline_s), Donor(self)
        self.sums: dict[Exchange, int] = {}
        self.promised: dict[Exchange, int] = {}
        self.views: list[View] = []
        self.generation = 0
        self.slot, self.round, self.round_s = 0, 0, 0.0
        self._at = 0  # the inner step under way, by the run's count
        self.entered = -1  # the round of entry, where the optimizer began anew
        self.weights: dict[PeerId, Message] = {}
        self._agreed_in = 0  # the view of the last agreement of all
        self._swaps: list[Swap] = []
        self._due: list[tuple[int, Swap | None, Key]] = []  # merges to come, by inner step
        self._unreported: list[tuple[Rounded, list[Swap], float]] = []
        self._wait_s = self._busy_s = 0.0
        self._sent = 0
        self._work = 0
        self._running: asyncio.Task[None] | None = None

    # -- listening --------------------------------------------------------------------------------------------

    async def serve(self, tasks: asyncio.TaskGroup) -> None:
        """Introduce oneself, then do as told until told to stop."""
        topics = (*FROM_LEAD, *FROM_REPLICAS, "chunk", LOST)
        await self.world.send(self.lead, HELLO, Hello(self.world.name, self.world.address, OLDEST_PROTOCOL, PROTOCOL))
        while True:
            message = await self.world.receive(*topics)
            if message.topic == LOST:
                if message.sender == self.lead:
                    return self._cancel()
                self.mail.lose(message.sender)
                await self.world.send(self.lead, "cut", Cut(message.sender, "its link broke"))
            elif message.topic in FROM_LEAD:
                if message.sender != self.lead:
                    continue
                self.generation = max(self.generation, message.generation)
                if message.topic == "stop":
                    return self._cancel()
                await self._obey(message, tasks)
            else:
                with suppress(ValueError):  # nonsense is as good as silence
                    await self._hear(message)

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _obey(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message.topic:
            case "enter" if self._running is None:
                self._running = tasks.create_task(self._take_part(message.read(Enter)))
            case "view":
                self._take(message.read(View))
            case "collect":
                tasks.create_task(self._collect(message.read(Collect)))
            case "probe":
                await self.tell("pulse", Pulse(self._work, False))

    def _take(self, view: View) -> None:
        for place in view.places:
            if place.peer != self.world.me:
                self.world.meet(PeerId(place.peer), place.address)
        self.views.append(view)
        self.mail.wake()

    async def _hear(self, message: Message) -> None:
        if message.topic == "ask":
            return await self._answer(message.read(Ask).key, message.sender)
        if message.topic == "fetch":
            return self.donor.ask(message.sender, message.read(Fetch))
        if message.topic == "chunk":
            return self.donor.take(message)
        if message.topic == "weights":
            self.weights[message.sender] = message
            return self.mail.wake()
        facts = message.read(ABOUT_EXCHANGES[message.topic])
        number = facts.hop if isinstance(facts, Part) else 0
        oldest = min([key.round for _, _, key in self._due] + [s.key.round for s in self._swaps] + [self.round])
        if not self.mail.put(facts.key, message, oldest, number) and message.topic == "offer":
            await self.send(message.sender, "refused", Refused(facts.key, "another round"))

    async def _answer(self, key: Key, asker: PeerId) -> None:
        at = (key.round, key.fragment)
        of = self.sums.get(at, 0)
        if not of:
            self.promised[at] = max(self.promised.get(at, 0), key.view)
            self.mail.wake()
        await self.send(asker, "standing", Standing(key, of), self.replica.part(at, 0, 1) if of else ())

    # -- for the other modules --------------------------------------------------------------------------------

    async def send(self, to: PeerId, topic: str, facts: msgspec.Struct, frames=()) -> None:
        """To another replica."""
        self._sent += sum(frame.nbytes if not isinstance(frame, bytes | bytearray) else len(frame) for frame in frames)
        await self.world.send(to, topic, facts, frames, generation=self.generation, step=self.round)

    async def tell(self, topic: str, facts: msgspec.Struct | None) -> None:
        """To the lead."""
        await self.world.send(self.lead, topic, facts, generation=self.generation, step=self.round)

    async def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for others, and keep account of it; False when it took too long."""
        started = self.world.now()
        try:
            return await self.mail.until(ready, seconds)
        finally:
            self._wait_s += self.world.now() - started

    async def crunch(self, work: Callable[[], object], numbers: int):
        """A merge's arithmetic."""
        return await self._work_on(work, MERGE_FLOPS * numbers)

    async def _work_on(self, work: Callable[[], object], flops: float):
        simulated = self.world.kind == "simulated"
        before = self.world.now() if simulated else time.process_time()
        result = await self.world.compute(work, flops)
        self._busy_s += (self.world.now() if simulated else time.process_time()) - before
        self._work += 1
        return result

    @property
    def view(self) -> View:
        """The newest view."""
        return self.views[-1]

    def broken(self, key: Key) -> bool:
        """Whether a group of all can not be counted on any more: somebody is gone, or it is another one by now."""
        newer = max(self.view.number, self.promised.get((key.round, key.fragment), 0)) > key.view
        return newer or any(place.peer in self.mail.gone for place in self.view.at(key.round))

    @property
    def until(self) -> int:
        """How many rounds there are."""
        return self.view.until

    # -- training ---------------------------------------------------------------------------------------------

    async def _take_part(self, enter: Enter) -> None:
        try:
            self.slot, self.round = enter.slot, enter.round
            self._take(enter.view)
            await self.world.reached(enter.round * self.mixing.inner_steps, "assign", late=True)
            self.replica = make_replica(self.job, self.rule, enter.slot)
            donors: list[PeerId] = []
            if enter.blob:
                self.replica.load(self.world.blobs.get(enter.blob), enter.round * self.mixing.inner_steps)
            elif enter.donors:
                self.round, donors = await fetch(self, enter)
                self.entered = self.round
        except (ValueError, KeyError, OSError, TalkootError) as problem:
            await self.tell("arrived", Arrived(round=enter.round, problem=str(problem)))
            return
        self._agreed_in = enter.view.number
        await self.tell("arrived", Arrived(round=self.round, donors=tuple(donors)))
        while self.round < self.until:
            await self._do_round()
        await self._finish_swaps(wait=True)
        await self._report()

    async def _do_round(self) -> None:
        started, self._wait_s, self._busy_s, self._sent = self.world.now(), 0.0, 0.0, 0
        view, loss, norm = self.view, 0.0, 0.0
        place = view.of(self.world.me) or Place(self.world.me, self.world.name, "", self.slot, self.mixing.inner_steps)
        steps = max(1, min(place.steps, self._nominal(self.round)))
        swaps: list[Swap] = []
        for inner in range(steps):
            one, its_norm = await self._step(inner, steps)
            loss, norm = loss + one / steps, norm + its_norm / steps
            swaps += await self._exchange(inner + 1, steps, place)
            await self._finish_swaps(wait=False)
            await self._report()
        number = self.round
        train = self.job.recipe.train
        if self._is_due(train.evaluate_every) or self._is_due(train.checkpoint_every) or number + 1 == self.until:
            await self._drain()
        held_out = None
        if self._is_due(train.evaluate_every) or number + 1 == self.until:
            held_out = await self._evaluate()
        tokens = steps * share(self.job.recipe) * train.microbatch_size * self.job.recipe.model.context
        facts = Rounded(
            slot=self.slot,
            view=view.number,
            steps=steps,
            tokens=tokens,
            loss=loss,
            gradient_norm=norm,
            held_out=held_out,
            wait_s=self._wait_s,
            busy_s=self._busy_s,
            sent_bytes=self._sent,
        )
        self._unreported.append((facts, swaps, started))
        self.round_s = self.world.now() - started
        self.round += 1
        self.mail.forget(
            min([key.round for _, _, key in self._due] + [s.key.round for s in self._swaps] + [self.round])
        )
        self.donor.entered(self.round)
        await self._report()

    def _nominal(self, number: int) -> int:
        """Inner steps that a replica of full speed takes in that round."""
        return min(self.mixing.inner_steps, self.job.recipe.train.steps - number * self.mixing.inner_steps)

    def _is_due(self, every: int) -> bool:
        """Whether something that is due every so many steps is due after this round."""
        inner = self.mixing.inner_steps
        return every > 0 and (self.round + 1) * inner // every > self.round * inner // every

    async def _step(self, inner: int, steps: int) -> tuple[float, float]:
        nominal = self._nominal(self.round)
        step = self._at = self.round * self.mixing.inner_steps + inner
        await self.world.reached(step, "begin")
        rate = learning_rate(self.job.recipe.train, self.round * self.mixing.inner_steps + inner * nominal // steps)
        since = (self.round - self.entered) * self.mixing.inner_steps + inner
        if self.entered >= 0 and since < REWARM:
            rate *= (since + 1) / REWARM
        found = await self._work_on(lambda: self.replica.step(step, rate), self.replica.step_flops)
        await self.world.reached(step, "forward")
        return found

    async def _evaluate(self) -> float | None:
        batches = self.job.held_out_batches
        if not batches:
            return None
        return await self._work_on(lambda: self.replica.evaluate(batches), self.replica.held_out_flops * batches)

    # -- exchanges --------------------------------------------------------------------------------------------

    async def _exchange(self, done: int, steps: int, place: Place) -> list[Swap]:
        """Begin what is due after ``done`` of this round's steps, and merge what was begun long enough ago."""
        begun: list[Swap] = []
        for fragment in range(self.replica.fragments):
            if done == max(1, steps * (fragment + 1) // self.replica.fragments):
                begun += await self._begin(fragment)
        for index, (left, swap, key) in enumerate(self._due):
            self._due[index] = (left - 1, swap, key)
        ready = [one for one in self._due if one[0] < 0]
        self._due = [one for one in self._due if one[0] >= 0]
        for _, swap, key in ready:
            await self._merge(swap, key)
        return begun

    async def _begin(self, fragment: int) -> list[Swap]:
        await self.world.reached(self._at, "mix")
        places = self.view.at(self.round)
        delay = int(self.mixing.overlap or 0)
        if self.rule.partners == "all":
            key, weight = Key(self.round, fragment, self.view.number), _weight(places, self.world.me)
            await self.crunch(lambda: self.replica.message((key.round, fragment), weight), self.replica.num_values)
            self._due.append((delay, None, key))
            return []
        named = {place.name: place for place in places}
        partner = None
        if self.rule.partners == "pair" and self.world.name in named:
            partner = named.get(pairs(list(named), self.round, str(self.job.recipe.seed))[self.world.name] or "")
        weight = _weight([named[self.world.name], partner], self.world.me) if partner else 1.0
        key = Key(self.round, fragment, zlib.crc32(" ".join(sorted(named)).encode()))
        await self._settle_fragment(fragment)
        swap = Swap(self, key, PeerId(partner.peer) if partner else None, partner.name if partner else "", weight)
        await swap.begin()
        self._due.append((delay, swap, key))
        self._swaps.append(swap)
        return [swap]

    async def _settle_fragment(self, fragment: int) -> None:
        for swap in self._swaps:
            if swap.key.fragment == fragment:
                await swap.settle(wait=True)

    async def _merge(self, swap: Swap | None, key: Key) -> None:
        if swap is not None:
            await swap.merge()
        else:
            await self._agree(key)
        await self.world.reached(self._at, "idle")

    async def _agree(self, key: Key) -> None:
        """The mean of all, however often the group changes on the way."""
        how = gather if self.rule.gather else collectives[self.mixing.collective]
        patience_s = self.job.recipe.train.patience_s
        while True:
            number = self.view.number
            key = Key(key.round, key.fragment, number)
            members = [PeerId(place.peer) for place in self.view.at(key.round)]
            try:
                if self.broken(key):
                    raise Broken
                await agree(self, key, members, how, first=number != self._agreed_in)
                self._agreed_in = number
                return
            except Broken:
                # The lead says who is left.
                if not await self.wait(lambda number=number: self.view.number > number, patience_s):
                    raise TalkootError(
                        "a round cannot be completed",
                        where=f"round {key.round} of {self.world.name}",
                        why=f"a replica is gone, and for {patience_s:.0f} s nobody said who is left",
                        next="look at the lead's machine; the same command resumes",
                    ) from None
                self.replica.restart((key.round, key.fragment))

    async def _finish_swaps(self, *, wait: bool) -> None:
        for swap in self._swaps:
            if swap.merged or swap.settled:
                await swap.settle(wait=wait)
        self._swaps = [swap for swap in self._swaps if not swap.settled]

    async def _drain(self) -> None:
        """Merge everything that is under way: nothing of a state may be on the wire when it is stored or judged."""
        due, self._due = self._due, []
        for _, swap, key in due:
            await self._merge(swap, key)
        await self._finish_swaps(wait=True)

    # -- reporting --------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Tell the lead of rounds whose exchanges are all over."""
        while self._unreported and all(swap.settled for swap in self._unreported[0][1]):
            facts, swaps, started = self._unreported.pop(0)
            measured = [swap.apart for swap in swaps if swap.apart is not None]
            facts = msgspec.structs.replace(
                facts,
                partners=tuple(swap.name for swap in swaps if swap.merged),
                alone=tuple(swap.why for swap in swaps if not swap.merged),
                one_sided=sum(swap.one_sided for swap in swaps),
                apart=sum(one.slow for one in measured) / len(measured) if measured else None,
                progress=sum(one.progress for one in measured) / len(measured) if measured else None,
            )
            number = self.round - 1 - len(self._unreported)
            await self.tell("round", await self._sign(facts, number, started))

    async def _sign(self, facts: Rounded, number: int, started: float) -> Done:
        world, train = self.world, self.job.recipe.train
        blob, size, problem = "", 0, ""
        inner = self.mixing.inner_steps
        every = train.checkpoint_every
        due = every > 0 and (number + 1) * inner // every > number * inner // every
        if (due or number + 1 >= self.until) and number + 1 == self.round:
            state = self.replica.save()
            try:
                blob, size = world.blobs.put(state), len(state)
            except TalkootError as error:
                problem = f"{error.what}: {error.why}"
        return Done(receipt=_receipt(self, facts, number, started), blob=blob, size=size, problem=problem)

    async def _collect(self, collect: Collect) -> None:
        """Bring all replicas' weights together; the collector averages, judges and stores them."""
        world, collector = self.world, PeerId(collect.collector.peer)
        await self._settled_down()
        if collector != world.me:
            world.meet(collector, collect.collector.address)
            return await self.send(collector, "weights", Fetch(self.round), self.replica.weights())
        others = [PeerId(contact.peer) for contact in collect.of if contact.peer != world.me]
        await self.wait(
            lambda: all(peer in self.weights or peer in self.mail.gone for peer in others),
            self.job.recipe.train.patience_s / 2,
        )
        found = [self.weights[peer].frames for peer in others if peer in self.weights]
        try:
            self.replica.average([self.replica.weights(), *found])
            held_out = await self._evaluate()
            state, tensors = self.replica.snapshot(self.round * self.mixing.inner_steps)
            answer = Collected(
                blob=world.blobs.put(state),
                size=len(state),
                tensors=tensors,
                averaged=1 + len(found),
                held_out=held_out,
            )
        except (ValueError, TalkootError) as problem:
            answer = Collected(problem=str(problem))
        await self.tell("collected", answer)

    async def _settled_down(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])


def _weight(group: Sequence[Place], me: str) -> float:
    """How much a replica's progress counts in a group: its share of the group's inner steps, on average 1."""
    mine = sum(place.steps for place in group if place.peer == me)
    return mine * len(group) / sum(place.steps for place in group)


def _receipt(peer: RoundPeer, facts: Rounded, number: int, started: float) -> Signed:
    world = peer.world
    return sign(
        Receipt(
            run=world.run,
            generation=peer.generation,
            step=number * peer.mixing.inner_steps,
            peer=world.me,
            task=Task(op="train.round", inputs={"tokens": peer.job.tokens_digest}, seed=peer.job.recipe.seed),
            outputs={"weights": peer.replica.digest()},
            body=body(facts),
            cost=facts.busy_s,
            started=started,
            ended=world.now(),
        ),
        world.key,
    )


__all__ = ["RoundPeer", "train_replica"]
