"""Which models are in memory: loaded when first asked, the longest unused one given up for another, never one at work.

A model is known by its :class:`Source`, so that new weights under an old name are another model; requests under way
keep the one that they began with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from talkoot.core.errors import Exit, TalkootError
from talkoot.serve.api.engine import Backend, Gone
from talkoot.serve.api.models import Source

RESTARTS = 3  # losses in a row after which a model is started again only when somebody asks for it
LONGEST_PAUSE_S = 60.0


@dataclass
class Slot:
    """A model's place, and how it fared.

    Attributes:
        users: requests that hold it.
        held: bytes reserved for it now.
        losses: ends and failed starts in a row, without a token in between.
        ill_until: until when others are preferred to it.
        token_s: seconds per token, smoothed; 0 before the first.
    """

    source: Source
    backend: Backend | None = None
    starting: asyncio.Task[Backend] | None = None
    users: int = 0
    held: int = 0
    used_at: float = 0.0
    retired: bool = False
    losses: int = 0
    ill_until: float = 0.0
    token_s: float = 0.0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("loads", "evictions", "failures", "tokens"), 0)
    )

    def spoke(self, seconds: float | None) -> None:
        """It gave a token, so long after the one before; None for an answer's first."""
        self.losses, self.ill_until = 0, 0.0
        self.counts["tokens"] += 1
        if seconds is not None:
            self.token_s = seconds if not self.token_s else 0.9 * self.token_s + 0.1 * seconds


class Pool:
    """See the module's text.

    Args:
        start: loads a model.
        memory: bytes that all models together may take; None = no limit.
        clock: seconds.
    """

    def __init__(
        self,
        start: Callable[[Source], Awaitable[Backend]],
        memory: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._memory, self._clock = start, memory, clock
        self._slots: dict[Source, Slot] = {}
        self._waiting: list[asyncio.Future[None]] = []  # for somebody to leave
        self._chores: set[asyncio.Task[None]] = set()
        self._kept: Collection[Source] | None = None
        self._closed = False

    @property
    def slots(self) -> list[Slot]:
        """All that were ever asked for and are still served."""
        return list(self._slots.values())

    def healthy(self, source: Source) -> bool:
        """Whether there is no reason to prefer another model."""
        slot = self._slots.get(source)
        return slot is None or slot.ill_until <= self._clock()

    @asynccontextmanager
    async def use(self, source: Source) -> AsyncIterator[tuple[Slot, Backend]]:
        """A model, loaded and safe from eviction until the caller leaves.

        Raises:
            Gone: it ended while it started.
            TalkootError: it cannot be loaded, or never fits into memory.
        """
        slot = self._slots.setdefault(source, Slot(source))
        slot.retired = (
            self._kept is not None and source not in self._kept
        )  # asked for before it was, and only now begun
        slot.users += 1
        try:
            yield slot, await self._ready(slot)
        finally:
            slot.users -= 1
            slot.used_at = self._clock()
            self._left(slot)

    async def _ready(self, slot: Slot) -> Backend:
        if slot.backend is not None and not slot.backend.gone.done():
            return slot.backend
        if slot.starting is None:
            slot.starting = asyncio.get_running_loop().create_task(self._load(slot), name=f"load {slot.source.name}")
            slot.starting.add_done_callback(_seen)
        return await asyncio.shield(slot.starting)  # others may wait for the same, or come back for it

    async def _load(self, slot: Slot) -> Backend:
        reserved = 0
        try:
            reserved = await self._make_room(slot)
            backend = await self._start(slot.source)
        except (TalkootError, Gone):
            self._fail(slot, reserved)
            raise
        finally:
            slot.starting = None
        slot.backend = backend
        slot.counts["loads"] += 1
        backend.gone.add_done_callback(lambda _: self._lost(slot, backend))
        self._left(slot)  # perhaps nobody waits for it any more
        return backend

    async def _make_room(self, slot: Slot) -> int:
        needed = slot.source.weights
        if self._memory is not None and needed > self._memory:
            raise TalkootError(
                "the model does not fit into memory",
                where=slot.source.name,
                why=f"it takes {needed:,} bytes, all models together may take {self._memory:,}",
                next="start the server with a larger --memory",
                code=Exit.UNREACHABLE,
            )
        while self._memory is not None and sum(one.held for one in self._slots.values()) + needed > self._memory:
            idle = [one for one in self._slots.values() if one.backend is not None and not one.users]
            if idle:
                await self._evict(min(idle, key=lambda one: one.used_at))
            else:
                await self._somebody_leaves()
        slot.held += needed
        return needed

    async def _evict(self, slot: Slot) -> None:
        backend, slot.backend = slot.backend, None
        if backend is not None:
            slot.counts["evictions"] += not slot.retired
            await backend.close()
            slot.held -= slot.source.weights  # not 0: it may be on its way in again
        if slot.retired and not slot.users and slot.starting is None and self._slots.get(slot.source) is slot:
            del self._slots[slot.source]
        self._wake()

    def _lost(self, slot: Slot, backend: Backend) -> None:
        """A model ended; unless we closed it, it is started again."""
        if slot.backend is not backend:
            return
        slot.backend = None
        self._fail(slot, slot.source.weights)
        if not slot.retired and not self._closed and slot.losses <= RESTARTS:
            self._spawn(self._restart(slot))

    async def _restart(self, slot: Slot) -> None:
        try:
            await self._ready(slot)
        except (TalkootError, Gone):
            return  # counted where it happened

    def _fail(self, slot: Slot, freed: int) -> None:
        slot.held -= freed
        slot.losses += 1
        slot.counts["failures"] += 1
        if slot.losses > 1:  # the first time, waiting for it is better than another model
            slot.ill_until = self._clock() + min(2.0 ** (slot.losses - 2), LONGEST_PAUSE_S)
        self._wake()

    def retire(self, kept: Collection[Source]) -> None:
        """Only these are served from now on; others go once nobody uses them."""
        self._kept = kept
        for slot in self.slots:
            slot.retired = slot.source not in kept
            self._left(slot)

    def _left(self, slot: Slot) -> None:
        if slot.retired and not slot.users:
            self._spawn(self._evict(slot))
        self._wake()

    async def close(self) -> None:
        """Unload everything."""
        self._closed = True
        for slot in self.slots:
            slot.retired = True
            if slot.starting is not None:
                slot.starting.cancel()
        await asyncio.gather(*(self._evict(slot) for slot in self.slots), return_exceptions=True)

    async def _somebody_leaves(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def _seen(task: asyncio.Task[Backend]) -> None:
    """Whoever waited has left: what went wrong is counted, and must not be reported as forgotten."""
    if not task.cancelled():
        task.exception()
