"""Faults as data: what goes wrong, with whom, and when: at a named point of a step, or at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

FaultKind: TypeAlias = Literal["kill", "stop", "delay", "corrupt", "partition", "disk_full"]
SIGNALLED = ("kill", "stop")  # at a time, whoever started the process strikes these; all others the peer's own world
LETHAL = ("kill", "stop", "partition")  # what a peer does not come back from, if it lasts


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned fault, struck once: either when the peer reaches a point of its work, or at a time.

    Attributes:
        peer: the peer's name.
        peers: instead of it, for a ``partition``: a group that stays together; each is cut off when it gets there.
        step, phase: where (``phase`` as the program names it: ``forward``, ``backward``, ``mix``...); for
            what does not happen in every step, the first time from that step on.
        at_s: instead of it, seconds after the run's start; it strikes whoever bears the name then.
        kind: ``kill`` ends the process with SIGKILL, ``stop`` freezes it (SIGSTOP), ``delay`` pauses it where it next
            reaches a point, ``corrupt`` damages the next message with frames that it sends on its way, ``partition``
            cuts it off from everybody else, ``disk_full`` lets its disk take nothing more.
        seconds: how long that lasts; 0 = for good (a delay: not at all).
    """

    peer: str = ""
    peers: tuple[str, ...] = ()
    step: int | None = None
    phase: str = ""
    at_s: float | None = None
    kind: FaultKind = "kill"
    seconds: float = 0.0

    @property
    def victims(self) -> tuple[str, ...]:
        """Names of all whom it strikes."""
        return self.peers or (self.peer,)


class FaultPlan:
    """The faults that one peer still has before it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._waiting = list(faults)

    def at(self, step: int, phase: str, *, late: bool = False) -> Fault | None:
        """The fault due at this point, removed from the plan; with ``late``, those of earlier steps are due, too."""
        for index, fault in enumerate(self._waiting):
            due = fault.step == step or (late and fault.step is not None and fault.step < step)
            if due and fault.phase == phase:
                return self._waiting.pop(index)
        return None

    def timed(self) -> list[Fault]:
        """The faults that strike at a time, removed from the plan."""
        timed = [fault for fault in self._waiting if fault.at_s is not None]
        self._waiting = [fault for fault in self._waiting if fault.at_s is None]
        return timed
