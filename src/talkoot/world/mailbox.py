"""A peer's waiting messages, taken by topic."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from talkoot.world.api import LOST, Message

MAX_WAITING_BYTES = 8 * 2**30  # beyond this a peer is being flooded
MESSAGE_BYTES = 512  # what an empty message takes


class Mailbox:
    """Messages by topic, first in first out; takers wait without polling.

    Args:
        limit: bytes that may wait; a message beyond it is dropped and counted in ``dropped``.
    """

    def __init__(self, limit: int = MAX_WAITING_BYTES) -> None:
        self._waiting: dict[str, deque[Message]] = {}
        self._takers: dict[str, deque[asyncio.Future[Message]]] = {}
        self._bytes, self._limit, self.dropped, self._arrivals = 0, limit, 0, 0

    def put(self, message: Message) -> None:
        """Hand over to the longest-waiting taker of its topic, or keep."""
        self._arrivals += 1
        message.arrival = self._arrivals
        if self._hand_over(message):
            return
        # This world's own notices pass even through a flood: whoever waits for a lost peer must hear of it.
        if self._bytes + _size(message) > self._limit and message.topic != LOST:
            self.dropped += 1
            return
        self._bytes += _size(message)
        self._waiting.setdefault(message.topic, deque()).append(message)

    def _hand_over(self, message: Message) -> bool:
        takers = self._takers.get(message.topic)
        while takers:
            future = takers.popleft()
            if not future.done():
                future.set_result(message)
                return True
        return False

    def restore(self, message: Message) -> None:
        """Take back a message whose taker was cancelled before it could use it: it keeps its place."""
        if self._hand_over(message):
            return
        self._bytes += _size(message)
        queue = self._waiting.setdefault(message.topic, deque())
        queue.appendleft(message)
        if len(queue) > 1 and queue[1].arrival < message.arrival:
            self._waiting[message.topic] = deque(sorted(queue, key=lambda held: held.arrival))

    def holds(self, *topics: str) -> bool:
        """Whether a message on any of ``topics`` waits."""
        return any(topic in self._waiting for topic in topics)

    async def take(self, *topics: str) -> Message:
        """The message that arrived first on any of ``topics``; a cancelled taker loses nothing."""
        waiting = [topic for topic in topics if topic in self._waiting]
        if waiting:
            first = min(waiting, key=lambda topic: self._waiting[topic][0].arrival)
            return self._pop(first, self._waiting[first])
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._takers.setdefault(topic, deque()).append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.restore(future.result())
            raise
        finally:
            for topic in topics:
                takers = self._takers.get(topic)
                if takers is not None:
                    if future in takers:
                        takers.remove(future)
                    if not takers:
                        del self._takers[topic]

    def _pop(self, topic: str, queue: deque[Message]) -> Message:
        message = queue.popleft()
        self._bytes -= _size(message)
        if not queue:
            del self._waiting[topic]
        return message

    def discard(self, stale: Callable[[Message], bool]) -> None:
        """Drop the waiting messages for which ``stale`` holds."""
        for topic, queue in list(self._waiting.items()):
            kept = deque(message for message in queue if not stale(message))
            self._bytes -= sum(map(_size, queue)) - sum(map(_size, kept))
            if kept:
                self._waiting[topic] = kept
            else:
                del self._waiting[topic]

    @property
    def wanted(self) -> list[str]:
        """Topics that somebody waits for; what a stuck peer is stuck on."""
        return sorted(self._takers)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


def _size(message: Message) -> int:
    return message.nbytes + MESSAGE_BYTES
