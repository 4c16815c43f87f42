"""What a log proves about rounds: each replica's round counted once, none left out, and only by those who took part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from talkoot.core.fold import Entry
from talkoot.core.receipt import Receipt
from talkoot.run.records import Joined
from talkoot.train.records import Committed
from talkoot.train.rounds.records import Rounded, Viewed


class _Seat(NamedTuple):
    """A slot in a view: who has it, and from which round on."""

    name: str
    since: int


class Audit:
    """Follows the entries of one run; :meth:`see` says what is wrong with each.

    Args:
        recipe: the run's, as its first receipt states it.
    """

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self._inner = int(recipe.get("mixing", {}).get("inner_steps", 1))
        self._names: dict[str, str] = {}  # by peer
        self._views: dict[int, dict[int, _Seat]] = {}  # slots, by the view's number
        self._newest = 0
        self._open: dict[str, Receipt] = {}  # of rounds that no commit cites yet, by id

    def see(self, entry: Entry) -> list[str]:
        """Take in the next entry; what is wrong with it, in words."""
        receipt = entry.receipt
        match receipt.op:
            case "peer.join":
                facts = receipt.read(Joined)
                self._names[facts.peer] = facts.name
            case "train.view":
                return self._view(receipt.read(Viewed))
            case "train.round":
                self._open[entry.id] = receipt
            case "train.commit":
                return self._commit(receipt)
        return []

    def _view(self, facts: Viewed) -> list[str]:
        rows = zip(facts.slots, facts.names, facts.since, strict=False)
        self._views[facts.number] = {slot: _Seat(name, since) for slot, name, since in rows}
        whole = len(facts.names) == len(facts.slots) == len(facts.since) == len(self._views[facts.number])
        followed, self._newest = facts.number == self._newest + 1, facts.number
        return [] if whole and followed else [f"view {facts.number} does not follow, or has no sense"]

    def _commit(self, commit: Receipt) -> list[str]:
        facts, number = commit.read(Committed), commit.step // self._inner
        cited = [self._open.pop(parent) for parent in commit.parents if parent in self._open]
        faults: list[str] = []
        if len(cited) != len(commit.parents):
            faults.append(f"round {number} cites receipts that are unknown or already counted")
        if any((one.step, one.generation) != (commit.step, commit.generation) for one in cited):
            faults.append(f"round {number} cites another round's receipts")
        rounds = [one.read(Rounded) for one in cited]
        slots = [one.slot for one in rounds]
        if len(set(slots)) != len(slots):
            faults.append(f"round {number} counts a replica twice")
        present = {slot for slot, seat in self._views.get(self._newest, {}).items() if seat.since <= number}
        if not present <= set(slots):
            faults.append(f"round {number} leaves out slots {sorted(present - set(slots))}")
        faults += [
            f"round {number} counts {one.peer[:8]}, which did not take part"
            for one, said in zip(cited, rounds, strict=True)
            if not self._took_part(one.peer, number, said)
        ]
        if commit.step % self._inner or not all(0 < one.steps <= facts.steps <= self._inner for one in rounds):
            faults.append(f"round {number} states steps that it cannot have had")
        if facts.losses != tuple(one.loss for one in rounds) or facts.tokens != sum(one.tokens for one in rounds):
            faults.append(f"round {number} states other losses or tokens than its receipts")
        return faults

    def _took_part(self, peer: str, number: int, said: Rounded) -> bool:
        seat = self._views.get(said.view, {}).get(said.slot)
        return seat is not None and seat.name == self._names.get(peer) and seat.since <= number
