"""Answers over HTTP: nothing is computed for a client that has hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class HungUp(Exception):
    """The client is not there any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client hangs up.

    Raises:
        HungUp: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream:
    """A response of server-sent events; ends the generator when the client hangs up.

    Args:
        events: the data of each.
        headers: beside the usual ones.
    """

    def __init__(self, events: AsyncGenerator[str], headers: dict[str, str]) -> None:
        self._events = events
        usual = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        self._headers = [(key.encode(), value.encode()) for key, value in (usual | headers).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await unless_gone(receive, self._send(send))
        except HungUp:
            return

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
