"""A model at work: it answers several asks at once, a token of each in turn.

The same engine runs in a thread of the server and in a peer of its own; what differs is who computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from talkoot.serve.api.models import Ask, Model, Source, Token, kinds

Compute = Callable[[Callable[[], Any], float], Awaitable[Any]]


class Gone(Exception):
    """The one who was to answer is not there any more; the text says why."""


class Backend(Protocol):
    """A model that is ready to answer, wherever it runs.

    Attributes:
        gone: done, with the reason, once it will never answer again.
        process: of the peer that it runs in; 0 = in this one.
    """

    gone: asyncio.Future[str]
    process: int

    def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        """The answer, token by token; leaving the iteration early ends the work.

        Raises:
            Gone: it was lost before the end.
            TalkootError: the ask cannot be answered by this model.
        """
        ...

    async def close(self) -> None:
        """Give its memory back."""
        ...


class Engine:
    """Takes an answer's tokens from a model one at a time, so that others get their turn.

    Args:
        model: in memory.
        compute: runs a piece of work that costs so many floating-point operations.
    """

    def __init__(self, model: Model, compute: Compute) -> None:
        self._model, self._compute = model, compute

    async def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        """See :class:`Backend`."""
        steps, fresh = self._model.stream(ask), len(ask.tokens)
        while (token := await self._compute(lambda: next(steps, None), 2.0 * self._model.size * fresh)) is not None:
            yield token
            fresh = 1


class Threads:
    """Starts models in this process; their work is done by a few threads, first come, first served.

    Args:
        threads: how many.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "model")

    async def start(self, source: Source) -> Backend:
        """Load a model."""
        model = await self._compute(lambda: _load(source), 0.0)
        return _Local(model, self._compute)

    async def _compute(self, work: Callable[[], Any], flops: float) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def close(self) -> None:
        """End the threads; what they have begun, they finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _load(source: Source) -> Model:
    import torch

    torch.set_num_threads(1)  # per answer: several at once keep all processors busy
    return kinds[source.kind](source)


class _Local:
    def __init__(self, model: Model, compute: Compute) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.process = 0
        self._engine: Engine | None = Engine(model, compute)

    async def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        if self._engine is None:
            raise Gone("it was unloaded")
        async for token in self._engine.answer(ask):
            yield token

    async def close(self) -> None:
        self._engine = None
