"""Which exchange is due when, and with whom: it follows from the view and the round, so that nobody has to ask."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.pairing import pairs
from talkoot.train.rounds.collective import Broken, agree, collectives, gather
from talkoot.train.rounds.messages import Key, Place
from talkoot.train.rounds.replica import Exchange
from talkoot.train.rounds.swap import Swap

if TYPE_CHECKING:
    from talkoot.train.rounds.trainer import Trainer


class Mean(NamedTuple):
    """The mean of all on its way: a task that ends with how many it is of."""

    key: Key
    forming: asyncio.Task[int]


class Exchanges:
    """One replica's exchanges, from the message to the merge."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._begun: dict[Exchange, Swap] = {}  # the newest ones
        self._swaps: list[Swap] = []  # whose outcome is not settled
        self._due: list[tuple[int, Swap | Mean]] = []  # merges to come, and after how many inner steps

    @property
    def oldest(self) -> int:
        """The oldest round of which anything is under way."""
        rounds = [due.key.round for _, due in self._due] + [swap.key.round for swap in self._swaps]
        return min([*rounds, self._trainer.round])

    def passed(self, key: Key, sender: PeerId) -> str:
        """Why an offer comes in vain, if it does: this replica went another way with that exchange."""
        swap = self._begun.get((key.round, key.fragment))
        if swap is None or (swap.awaits(sender) and swap.key == key):
            return ""
        return swap.why or "another view"

    async def after(self, done: int, steps: int) -> list[Swap]:
        """Begin what is due after ``done`` of this round's ``steps``, and merge what was begun long enough ago."""
        begun: list[Swap] = []
        fragments = self._trainer.replica.fragments
        for fragment in range(fragments):
            if done == max(1, steps * (fragment + 1) // fragments):
                begun += await self._begin(fragment)
        self._due = [(left - 1, due) for left, due in self._due]
        await self._merge(0)
        await self.settle(wait=False)
        return begun

    async def _begin(self, fragment: int) -> list[Swap]:
        trainer, me = self._trainer, self._trainer.world.name
        await trainer.reached("mix", late=True)
        view, replica = trainer.view, trainer.replica
        places = {place.name: place for place in view.at(trainer.round)}
        delay = int(trainer.mixing.overlap or 0)
        if trainer.rule.partners == "all":
            key, weight = Key(trainer.round, fragment, view.number), _weight(list(places.values()), me)
            await trainer.crunch(lambda: replica.message((key.round, fragment), weight), replica.num_values)
            # It forms while inner steps go on.
            self._due.append((delay, Mean(key, trainer.world.spawn(self._agree(key), "mean"))))
            return []
        partner = None
        if trainer.rule.partners == "pair" and me in places:
            partner = places.get(pairs(list(places), trainer.round, str(trainer.job.recipe.seed))[me] or "")
        weight = _weight([places[me], partner], me) if partner else 1.0
        for swap in self._swaps:
            if swap.key.fragment == fragment:
                await swap.settle(wait=True)
        key = Key(trainer.round, fragment, zlib.crc32(" ".join(sorted(places)).encode()))
        swap = Swap(trainer, key, partner, weight)
        self._begun = {at: one for at, one in self._begun.items() if at[0] >= trainer.round - 1}
        self._begun[key.round, fragment] = swap
        await swap.begin()
        self._due.append((delay, swap))
        self._swaps.append(swap)
        return [swap]

    def cancel(self) -> None:
        """Let go of everything that is under way."""
        for _, due in self._due:
            if isinstance(due, Mean):
                due.forming.cancel()
        self._begun, self._swaps, self._due = {}, [], []

    async def complete(self) -> None:
        """Merge everything that is due later."""
        await self._merge(math.inf)

    async def _merge(self, below: float) -> None:
        """Everything that is due in fewer inner steps, in order."""
        while ready := [one for one in self._due if one[0] < below]:
            _, due = ready[0]
            await (due.merge() if isinstance(due, Swap) else self._merge_mean(due))
            self._due.remove(ready[0])
            await self._trainer.reached("idle", late=True)

    async def _merge_mean(self, mean: Mean) -> None:
        trainer, at = self._trainer, (mean.key.round, mean.key.fragment)
        of = await trainer.waiting(mean.forming)
        await trainer.crunch(lambda: trainer.replica.finish(at, of), trainer.replica.num_values)

    async def _agree(self, key: Key) -> int:
        """Form the sum of all, however often the group changes on the way; returns of how many it is."""
        trainer = self._trainer
        how = gather if trainer.rule.gather else collectives[trainer.mixing.collective]
        patience_s = trainer.job.recipe.train.patience_s
        again = False
        while True:
            view = trainer.view
            key = Key(key.round, key.fragment, view.number)
            members = [PeerId(place.peer) for place in view.at(key.round)]
            try:
                if trainer.broken(key):
                    raise Broken
                # Without one's own part nobody can have the sum, unless this replica was not expected yet.
                doubtful = again or 0 <= trainer.entered >= key.round - 1
                return await agree(trainer, key, members, how, doubtful=doubtful)
            except Broken:
                # The lead says who is left.
                if not await trainer.mail.until(lambda number=view.number: trainer.view.number > number, patience_s):
                    raise TalkootError(
                        "a round cannot be completed",
                        where=f"round {key.round} of {trainer.world.name}",
                        why=f"a replica is gone, and for {patience_s:.0f} s nobody said who is left",
                        next="look at the lead's machine; the same command resumes",
                    ) from None
                trainer.replica.restart((key.round, key.fragment))
                again = True

    async def settle(self, *, wait: bool) -> None:
        """Hear whether partners took what they were sent; with ``wait``, until that is clear of all of them."""
        for swap in self._swaps:
            if swap.merged:
                await swap.settle(wait=wait)
        self._swaps = [swap for swap in self._swaps if not swap.settled]

    async def drain(self) -> None:
        """Merge everything that is under way: nothing of a state may be on the wire when it is stored or judged."""
        await self.complete()
        await self.settle(wait=True)


def _weight(group: Sequence[Place], me: str) -> float:
    """How much a replica's progress counts in a group: its share of the group's inner steps, on average 1."""
    mine = sum(place.steps for place in group if place.name == me)
    return mine * len(group) / sum(place.steps for place in group)
