"""Answers over HTTP: nothing is computed for a client that has hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


class HungUp(Exception):
    """The client is not there any more."""


class Stopping(Exception):
    """The server is to stop."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], stopping: asyncio.Event) -> T:
    """The result of ``work``, which is cancelled as soon as the client hangs up or the server is to stop.

    Raises:
        HungUp, Stopping: that happened.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, gone, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp if gone.done() else Stopping
        return task.result()
    finally:
        for one in (task, gone, stop):
            one.cancel()
        await asyncio.gather(task, gone, stop, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream:
    """A response of server-sent events; ends the generator when the client hangs up, or the server stops.

    Args:
        events: the data of each.
        headers: beside the usual ones.
        stopping: set when the server stops.
        farewell: the data of what is said then.
    """

    def __init__(
        self, events: AsyncGenerator[str], headers: dict[str, str], stopping: asyncio.Event, farewell: list[str]
    ) -> None:
        self._events, self._stopping, self._farewell = events, stopping, farewell
        usual = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        self._headers = [(key.encode(), value.encode()) for key, value in (usual | headers).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        try:
            await unless_gone(receive, self._send(send), self._stopping)
        except HungUp:
            return
        except Stopping:
            for data in self._farewell:
                await send(_event(data))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        try:
            async for data in self._events:
                await send(_event(data))
        finally:
            await self._events.aclose()


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
