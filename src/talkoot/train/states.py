"""What state each seat and the whole run are in: two tables, and the receipts that say which way through them was
taken.

A *slot* is a name in the recipe, whoever fills it at the time. The lead feeds events to :class:`States`; what changes
is written as one ``state.move`` receipt per batch, and folding the log checks every move against the tables again, so
a log with an impossible one is refused. Events that mean nothing in a state change nothing.

========== ===================================================================================
slot       vacant -launch-> assigned -join-> waiting -assign-> syncing -ready-> verifying -accept-> active;
           active -suspect-> suspect -alive-> active; from anywhere -lost-> vacant; rolled back: -vacate-> waiting
run        starting -begin-> running -loss-> draining -drained-> planning -plan-> recovering -whole-> running;
           planning -mend-> running (within a step); recovering -loss-> planning; -give_up-> halted; -end-> ended
========== ===================================================================================
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import msgspec

from talkoot.core.fold import Chapter, Entry, chapters
from talkoot.run.records import Facts

RUN = ""  # in a move, the slot that stands for the whole run
FILLED = ("assigned", "waiting", "syncing", "verifying", "active", "suspect")
GOING = ("starting", "running", "draining", "planning", "recovering")

SLOT_TABLE: dict[tuple[str, str], str] = {
    ("vacant", "launch"): "assigned",
    ("assigned", "join"): "waiting",
    ("waiting", "assign"): "syncing",
    ("syncing", "ready"): "verifying",
    ("verifying", "accept"): "active",
    ("active", "suspect"): "suspect",
    ("suspect", "alive"): "active",
    **{(state, "assign"): "syncing" for state in ("syncing", "verifying")},  # once more: somebody was lost meanwhile
    **{(state, "lost"): "vacant" for state in FILLED},
    **{(state, "vacate"): "waiting" for state in ("syncing", "verifying", "active", "suspect")},
}
RUN_TABLE: dict[tuple[str, str], str] = {
    ("starting", "begin"): "running",
    ("running", "loss"): "draining",
    ("starting", "loss"): "draining",
    ("draining", "drained"): "planning",
    ("planning", "plan"): "recovering",
    ("planning", "mend"): "running",
    ("recovering", "loss"): "draining",
    ("recovering", "whole"): "running",
    **{(state, "give_up"): "halted" for state in GOING},
    **{(state, "end"): "ended" for state in GOING},
    ("halted", "end"): "halted",
    ("halted", "start"): "starting",
    ("ended", "start"): "starting",
    **{(state, "start"): "starting" for state in GOING},  # the lead died without a word
}


class Move(NamedTuple):
    """A slot (or the run, as :data:`RUN`), what happened, and the state that follows."""

    slot: str
    event: str
    state: str


class Moved(Facts, frozen=True, kw_only=True):
    """Body of ``state.move``; in the order in which it happened."""

    moves: tuple[Move, ...]


class StatesState(msgspec.Struct, frozen=True):
    """The chapter ``states``: the run's state, and every slot's that was ever filled."""

    run: str = "starting"
    slots: MappingProxyType[str, str] = MappingProxyType({})

    def of(self, slot: str) -> str:
        """A slot's state, or the run's."""
        return self.run if slot == RUN else self.slots.get(slot, "vacant")

    def after(self, slot: str, event: str) -> str | None:
        """The state that follows; None when the event means nothing here."""
        return (RUN_TABLE if slot == RUN else SLOT_TABLE).get((self.of(slot), event))

    def moved(self, move: Move) -> StatesState:
        """The states after a move.

        Raises:
            ValueError: the tables have no such move.
        """
        if self.after(move.slot, move.event) != move.state:
            what = f"slot {move.slot!r}" if move.slot else "the run"
            raise ValueError(f"{what} is {self.of(move.slot)}: {move.event!r} does not make it {move.state}")
        if move.slot == RUN:
            return StatesState(move.state, self.slots)
        return StatesState(self.run, MappingProxyType({**self.slots, move.slot: move.state}))


class States:
    """The states as the lead knows them, and the moves that are not in the log yet.

    Args:
        state: what the log says.
    """

    def __init__(self, state: StatesState) -> None:
        self._now = state
        self._pending: list[Move] = []

    def note(self, slot: str, event: str) -> None:
        """Something happened to a slot, or to the run."""
        state = self._now.after(slot, event)
        if state is not None and state != self._now.of(slot):
            move = Move(slot, event, state)
            self._now = self._now.moved(move)
            self._pending.append(move)

    def of(self, slot: str) -> str:
        """A slot's state, or the run's."""
        return self._now.of(slot)

    def take(self) -> tuple[Move, ...]:
        """The moves since the last call."""
        moves, self._pending = tuple(self._pending), []
        return moves


def _states(state: StatesState, entry: Entry) -> StatesState:
    receipt = entry.receipt
    if receipt.op == "run.start":
        return StatesState()
    if receipt.op == "run.resume":  # peers do not outlive their lead
        return StatesState("starting", MappingProxyType({}))
    if receipt.op == "state.move":
        for move in receipt.read(Moved).moves:
            state = state.moved(move)
    return state


chapters.register("states")(Chapter(("state.", "run.start", "run.resume"), StatesState(), _states))
