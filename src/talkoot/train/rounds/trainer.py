"""A replica's rounds: inner steps by itself, an exchange with its group when one is due, and a receipt for each round.

Nothing here waits for the lead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.train.job import Job
from talkoot.train.mixing import RoundRule, mixing_rules, settled
from talkoot.train.rounds.exchanges import Exchanges
from talkoot.train.rounds.mail import Mail, Offered
from talkoot.train.rounds.messages import Diverging, Done, Fetch, Key, Place, Refused, View
from talkoot.train.rounds.records import Rounded
from talkoot.train.rounds.replica import Diverged, Exchange, ReplicaCompute, share
from talkoot.train.rounds.swap import Swap, Waits
from talkoot.train.schedule import learning_rate
from talkoot.world.api import Frame, World, frame_bytes

T = TypeVar("T")

REWARM = 20  # inner steps over which a newcomer without moments comes up to the learning rate
MERGE_FLOPS = 10.0  # per number
AGAIN_S = 20.0  # until a broken link is tried again


class Trainer:
    """State of one replica, and its rounds.

    Attributes:
        mail: what others sent about exchanges.
        sums: by exchange of a group of all, of how many the sum is that is still known here.
        promised: views below which an exchange will not be completed here, by exchange.
        round, round_s: the one under way, and how long the last one took.
        entered: the round of entry, where the optimizer began anew; -1 = at the start, or from a stored state.
        work: pieces of work done.
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
        self.mail, self.patience, self.exchanges = Mail(), Waits(self.mixing.deadline_s), Exchanges(self)
        self.sums: dict[Exchange, int] = {}
        self.promised: dict[Exchange, int] = {}
        self.views: list[View] = []  # the newest one, once there is one
        self.waits = 0  # how many wait for others here
        self.generation = self.work = 0
        self.slot, self.round, self.round_s, self.entered = 0, 0, 0.0, -1
        self._step = 0  # the inner step under way, by the run's count
        self._unreported: list[tuple[Rounded, list[Swap], float]] = []
        self._wait_s = self._busy_s = 0.0
        self._sent = 0

    @property
    def view(self) -> View:
        """Who takes part, as far as is known here."""
        return self.views[-1]

    def broken(self, key: Key) -> bool:
        """Whether a group of all cannot be counted on any more: somebody is gone, or it is another one by now."""
        newer = max(self.view.number, self.promised.get((key.round, key.fragment), 0)) > key.view
        return newer or any(place.peer in self.mail.gone for place in self.view.at(key.round))

    async def reached(self, phase: str, *, late: bool = False) -> None:
        """A named point of the inner step under way."""
        await self.world.reached(self._step, phase, late=late)

    # -- talking and computing, with an account of both -------------------------------------------------------

    async def send(self, to: PeerId, topic: str, facts: msgspec.Struct, frames: Sequence[Frame] = ()) -> None:
        """To another replica."""
        self._sent += sum(map(frame_bytes, frames))
        await self.world.send(to, topic, facts, frames, generation=self.generation, step=self.round)

    async def tell(self, topic: str, facts: msgspec.Struct | None) -> None:
        """To the lead."""
        await self.world.send(self.lead, topic, facts, generation=self.generation, step=self.round)

    async def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for others; False when it took too long."""
        return await self.waiting(self.mail.until(ready, seconds))

    async def waiting(self, work: Awaitable[T]) -> T:
        """What others have to do with counts as waiting."""
        started = self.world.now()
        self.waits += 1
        try:
            return await work
        finally:
            self.waits -= 1
            self._wait_s += self.world.now() - started

    def greet(self, place: Place) -> None:
        """Open a link again that broke."""
        self.mail.gone.pop(PeerId(place.peer), None)
        self.world.meet(PeerId(place.peer), place.address)

    def reaches(self, place: Place) -> bool:
        """Whether a partner is worth a message: a broken link is tried again now and then."""
        since = self.mail.gone.get(PeerId(place.peer))
        if since is not None and self.world.now() - since >= AGAIN_S:
            self.greet(place)
            return True
        return since is None

    async def refuse(self, offered: Offered, why: str) -> None:
        """Tell whoever offered something that it will not be merged."""
        for key, sender in offered:
            await self.send(sender, "refused", Refused(key, why))

    async def crunch(self, work: Callable[[], T], numbers: int) -> T:
        """A message's or a merge's arithmetic on so many numbers."""
        return await self._compute(work, MERGE_FLOPS * numbers)

    async def _compute(self, work: Callable[[], T], flops: float) -> T:
        simulated = self.world.kind == "simulated"
        before = self.world.now() if simulated else time.process_time()
        result = await self.world.compute(work, flops)
        self._busy_s += (self.world.now() if simulated else time.process_time()) - before
        self.work += 1
        return result

    # -- rounds -----------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Round after round, until the view says that it is enough."""
        try:
            while self.round < self.view.until:
                await self._do_round()
                place = self.view.of(self.world.me)
                if place is not None and place.since > self.round:
                    await self.exchanges.drain()
                    await self._report()
                    await self.rejoin(place.since)
            await self.exchanges.drain()
        except Diverged as problem:  # nobody may get numbers like these
            await self.tell("diverged", Diverging(self.round, str(problem)))
            return
        await self._report()
        self.finished()

    async def _do_round(self) -> None:
        started, self._wait_s, self._busy_s, self._sent = self.world.now(), 0.0, 0.0, 0
        train, view, loss, norm = self.job.recipe.train, self.view, 0.0, 0.0
        place = view.of(self.world.me)
        steps = max(1, min(self.mixing.inner_steps if place is None else place.steps, self._nominal()))
        swaps: list[Swap] = []
        for inner in range(steps):
            one, its_norm = await self._inner_step(inner, steps)
            loss, norm = loss + one / steps, norm + its_norm / steps
            swaps += await self.exchanges.after(inner + 1, steps)
            await self._report()
        last = self.round + 1 == self.view.until
        judged = last or self._is_due(self.round, train.evaluate_every)
        if judged or self._is_due(self.round, train.checkpoint_every):
            await self.exchanges.drain()
        held_out = await self.evaluate() if judged else None
        facts = Rounded(
            slot=self.slot,
            view=view.number,
            steps=steps,
            tokens=steps * share(self.job.recipe) * train.microbatch_size * self.job.recipe.model.context,
            loss=loss,
            gradient_norm=norm,
            held_out=held_out,
            wait_s=self._wait_s,
            busy_s=self._busy_s,
            sent_bytes=self._sent,
        )
        self._unreported.append((facts, swaps, started))
        self.round_s = self.world.now() - started
        if self.owes(self.round + 1):  # a newcomer's state must not lack what others merge later
            await self.exchanges.complete()
        self.round += 1
        await self.began()
        await self._report()
        if self.mail.ahead > self.round:  # or so they say: the lead knows whether it is so
            self.mail.ahead = 0
            await self.tell("behind", Fetch(self.round))

    async def began(self) -> None:
        """A round begins."""

    async def rejoin(self, since: int) -> None:
        """Leave out rounds and begin again from others' weights: one's own are too far from theirs."""
        self.round = since

    def finished(self) -> None:
        """There are no more rounds to do."""

    def owes(self, round: int) -> bool:
        """Whether somebody waits for the state with which that round begins."""
        return False

    def _nominal(self) -> int:
        """Inner steps that a replica of full speed takes in this round."""
        return min(self.mixing.inner_steps, self.job.recipe.train.steps - self.round * self.mixing.inner_steps)

    def _is_due(self, number: int, every: int) -> bool:
        """Whether something that is due every so many steps is due after that round."""
        inner = self.mixing.inner_steps
        return every > 0 and (number + 1) * inner // every > number * inner // every

    async def _inner_step(self, inner: int, steps: int) -> tuple[float, float]:
        first = self.round * self.mixing.inner_steps
        self._step = first + inner
        await self.reached("begin")
        rate = learning_rate(self.job.recipe.train, first + inner * self._nominal() // steps)
        since = self._step - self.entered * self.mixing.inner_steps
        if self.entered >= 0 and since < REWARM:
            rate *= (since + 1) / REWARM
        loss, norm = await self._compute(lambda: self.replica.step(self._step, rate), self.replica.step_flops)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"the loss or the gradient of step {self._step} is not finite")
        await self.reached("forward")
        return loss, norm

    async def evaluate(self) -> float | None:
        """Held-out loss of the slow weights, where there is held-out text."""
        batches = self.job.held_out_batches
        if not batches:
            return None
        return await self._compute(lambda: self.replica.evaluate(batches), self.replica.held_out_flops * batches)

    # -- receipts ---------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Tell the lead of rounds whose exchanges are all over."""
        while self._unreported and all(swap.settled for swap in self._unreported[0][1]):
            facts, swaps, started = self._unreported.pop(0)
            number = self.round - 1 - len(self._unreported)
            measured = [swap.apart for swap in swaps if swap.apart is not None]
            facts = msgspec.structs.replace(
                facts,
                partners=tuple(swap.name for swap in swaps if swap.merged),
                alone=tuple(swap.why for swap in swaps if not swap.merged and self.rule.partners != "none"),
                one_sided=sum(swap.one_sided for swap in swaps),
                apart=sum(one.slow for one in measured) / len(measured) if measured else None,
                progress=sum(one.progress for one in measured) / len(measured) if measured else None,
            )
            stored = self._is_due(number, self.job.recipe.train.checkpoint_every) or number + 1 == self.view.until
            receipt = self._sign(facts, number, started)
            here = stored and number + 1 == self.round  # else what is here is of a later round by now
            await self.tell("round", self._store(receipt) if here else Done(receipt=receipt))

    def _store(self, receipt: Signed) -> Done:
        state = self.replica.save()
        try:
            return Done(receipt=receipt, blob=self.world.blobs.put(state), size=len(state))
        except TalkootError as error:  # a full disk: whether that ends anything is the lead's decision
            return Done(receipt=receipt, problem=f"{error.what}: {error.why}")

    def _sign(self, facts: Rounded, number: int, started: float) -> Signed:
        world, seed = self.world, self.job.recipe.seed
        return sign(
            Receipt(
                run=world.run,
                generation=self.generation,
                step=number * self.mixing.inner_steps,
                peer=world.me,
                task=Task(op="train.round", inputs={"tokens": self.job.tokens_digest}, seed=seed),
                outputs={"weights": self.replica.digest()},
                body=body(facts),
                cost=facts.busy_s,
                started=started,
                ended=world.now(),
            ),
            world.key,
        )
