"""What happened in a run, in sentences: the newest ones, and those that are marked on the timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from talkoot.core.ids import short
from talkoot.serve import about
from talkoot.serve.words import clean

ROUTINE = ("checkpoint", "evaluate")  # they must not drive rarer ones out of the list
KEPT_EVENTS, KEPT_ROUTINE, KEPT_MARKS = 160, 40, 60


class Told(NamedTuple):
    """A sentence worth telling.

    Attributes:
        kind: colours it, and says with which sign it is marked.
        own: it is about the peer that signed the receipt; ``mark``: it is marked on the timeline.
    """

    kind: str
    text: str
    own: bool = False
    mark: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, in a sentence; ``peer`` names the lane it is marked on."""

    position: int
    seconds: float
    step: int
    kind: str
    text: str
    peer: str = ""


class Events:
    """The newest events of each sort; bounded."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._routine: deque[Event] = deque(maxlen=KEPT_ROUTINE)
        self._marks: dict[str, deque[Event]] = {}

    def add(self, event: Event, *, mark: bool) -> None:
        """One more; ``mark``: also on the timeline."""
        (self._routine if event.kind in ROUTINE else self._events).append(event)
        if mark:
            self._marks.setdefault(event.kind, deque(maxlen=KEPT_MARKS)).append(event)

    def newest_first(self) -> list[dict[str, Any]]:
        """All that are kept, as plain data."""
        return _plain(sorted((*self._routine, *self._events), key=lambda event: event.position, reverse=True))

    def marks(self) -> list[dict[str, Any]]:
        """Those for the timeline, in their order, as plain data."""
        return _plain(sorted((e for kept in self._marks.values() for e in kept), key=lambda e: e.position))


def _plain(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [
        {
            "kind": event.kind,
            "text": event.text,
            "peer": clean(short(event.peer)),
            "seconds": about.moment(event.seconds),
            "step": event.step,
            "position": event.position,
        }
        for event in events
    ]
