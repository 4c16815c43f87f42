"""An asyncio loop on virtual time: it never waits, it jumps to the next timer.

Everything asyncio offers (tasks, timeouts, cancellation) therefore works unchanged inside a simulation, and a
simulated hour costs only the work done in it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Mapping
from typing import Any


class Deadlock(RuntimeError):
    """Every simulated peer waits for another one; nothing can ever happen again."""


class _Jump(selectors.BaseSelector):
    """A selector that, asked to wait for I/O, advances the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self.explain: Callable[[], str] = str
        self.jumped: Callable[[float], None] = _nothing
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"deadlock at virtual time {self.now:.6f}s: {self.explain()}")
        if timeout > 0:
            self.now += timeout
            self.jumped(self.now)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of a simulation; ``time()`` is virtual seconds from ``start_s``."""

    def __init__(self, explain: Callable[[], str] = lambda: "nobody can act", start_s: float = 0.0) -> None:
        self._jump = _Jump()
        self._jump.now = start_s
        self._jump.explain = explain
        super().__init__(self._jump)
        self._jump.jumped = self._adapt
        self._adapt(start_s)

    def time(self) -> float:
        return self._jump.now

    def _adapt(self, now: float) -> None:
        # Within this much a timer counts as due; late in a long run a nanosecond would round to nothing.
        self._clock_resolution = max(1e-9, math.ulp(now))


def _nothing(now: float) -> None:
    pass
