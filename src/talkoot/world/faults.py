"""Faults as data: what goes wrong, with whom, and at which named point of which step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

FaultKind: TypeAlias = Literal["kill", "stop", "delay"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned fault, struck by the peer's own world when it reaches the point, once.

    Attributes:
        peer: the peer's name.
        step, phase: where (``phase`` as the program names it: ``forward``, ``backward``, ``reduce``...).
        kind: ``kill`` ends the process with SIGKILL, ``stop`` freezes it (SIGSTOP), ``delay`` pauses it.
        seconds: length of a delay; for ``stop``, time until it continues (0 = never).
    """

    peer: str
    step: int
    phase: str
    kind: FaultKind = "kill"
    seconds: float = 0.0


class FaultPlan:
    """The faults that one peer still has before it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._waiting = list(faults)

    def at(self, step: int, phase: str) -> Fault | None:
        """The fault due at this point, removed from the plan."""
        for index, fault in enumerate(self._waiting):
            if fault.step == step and fault.phase == phase:
                return self._waiting.pop(index)
        return None
