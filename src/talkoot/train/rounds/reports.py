"""What replicas report of their rounds, checked before anything is made of it, until the rounds are in the log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from talkoot.core.ids import PeerId, RunId
from talkoot.core.receipt import Receipt
from talkoot.train.mixing import settled
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.messages import Done, Place
from talkoot.train.rounds.records import Rounded
from talkoot.train.rounds.replica import FAR, share


class Report(NamedTuple):
    """A replica's word for a round: its facts, the name of its receipt, and the state stored after it, if any."""

    facts: Rounded
    receipt: str
    blob: str


class Reports:
    """Of rounds that are not committed yet.

    Attributes:
        highest: rounds that somebody has done.
        of: rounds that each peer has reported, the last one included.
        far: rounds in a row in which it met nobody because it was too far away.
    """

    def __init__(self, recipe: Recipe, run: RunId) -> None:
        self._inner = settled(recipe.mixing).inner_steps
        train = recipe.train
        self._tokens_per_step = share(recipe) * train.microbatch_size * recipe.model.context
        self._run = run
        self._open: dict[int, dict[int, Report]] = {}  # by round and slot
        self.highest = 0
        self.of: dict[PeerId, int] = {}
        self.far: Counter[PeerId] = Counter()

    def begin(self, rounds: int) -> None:
        """So many rounds stand, and nothing else is known."""
        self._open, self.highest, self.of = {}, rounds, {}
        self.far.clear()

    def check(self, done: Done, place: Place, generation: int, view: int) -> tuple[int, Receipt, Rounded]:
        """Open a report; the round it is about.

        Raises:
            ValueError: it is not the replica's own, or states what cannot be.
        """
        receipt = done.receipt.open()
        facts, number = receipt.read(Rounded), receipt.step // self._inner
        stated = (receipt.peer, receipt.run, receipt.op, receipt.generation, facts.slot)
        if stated != (place.peer, self._run, "train.round", generation, place.slot):
            raise ValueError(f"it states {stated}")
        if receipt.step % self._inner or place.slot in self._open.get(number, {}):
            raise ValueError(f"it is about step {receipt.step}, which is no round of its, or not any more")
        if not 0 < facts.steps <= self._inner or facts.tokens != facts.steps * self._tokens_per_step:
            raise ValueError(f"it states {facts.steps} steps with {facts.tokens} tokens")
        if not 0 < facts.view <= view:
            raise ValueError(f"it states view {facts.view}")
        counted = (facts.wait_s, facts.busy_s, facts.sent_bytes, facts.one_sided, facts.apart, facts.progress)
        if not all(0 <= value < math.inf for value in counted if value is not None):
            raise ValueError("it states a measure that is negative or not finite")
        if not math.isfinite(facts.loss) or not math.isfinite(facts.held_out or 0.0):
            raise ValueError("it states a loss that is not finite")
        return number, receipt, facts

    def take(self, number: int, peer: PeerId, report: Report) -> None:
        """Keep a report until its round is committed."""
        self._open.setdefault(number, {})[report.facts.slot] = report
        self.highest = max(self.highest, number + 1)
        self.of[peer] = max(self.of.get(peer, 0), number + 1)
        if report.facts.partners:
            del self.far[peer]
        else:
            self.far[peer] += any(why.startswith(FAR) for why in report.facts.alone)

    def missing(self, number: int, places: Collection[Place]) -> list[PeerId]:
        """Who takes part in a round and has not reported it."""
        reported = self._open.get(number, {})
        owing = [place for place in places if place.since <= number and place.slot not in reported]
        return [PeerId(place.peer) for place in owing]

    def pop(self, number: int) -> list[Report]:
        """The reports of a round, by slot; they are forgotten."""
        return [report for _, report in sorted(self._open.pop(number, {}).items())]
