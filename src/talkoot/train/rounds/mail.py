"""What replicas sent each other about exchanges, kept until the exchange is due.

Bounded: of each exchange, one message of a kind from each sender; of exchanges, those of the rounds right ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from talkoot.core.ids import PeerId
from talkoot.train.rounds.messages import Key
from talkoot.world.api import Message

AHEAD = 4  # rounds that somebody may be ahead and still be listened to
PER_EXCHANGE = 4096  # messages about one exchange: enough for a ring of thousands


class Mail:
    """See the module's text."""

    def __init__(self) -> None:
        self._kept: dict[Key, dict[tuple[str, str, int], Message]] = {}
        self._news = asyncio.Event()
        self.gone: set[PeerId] = set()

    def put(self, key: Key, message: Message, current: int, number: int = 0) -> bool:
        """Keep a message about an exchange; False when that is over, too far ahead, or said already.

        Args:
            current: the oldest round that is still under way here.
            number: tells several messages of one topic and sender apart.
        """
        kept = self._kept.setdefault(key, {})
        slot = (message.topic, message.sender, number)
        if not current <= key.round <= current + AHEAD or slot in kept or len(kept) >= PER_EXCHANGE:
            if not kept:
                del self._kept[key]
            return False
        kept[slot] = message
        self.wake()
        return True

    def take(self, key: Key, topic: str, sender: PeerId, number: int = 0) -> Message | None:
        """That message, if it is here."""
        return self._kept.get(key, {}).pop((topic, sender, number), None)

    def stale(self, round: int, fragment: int, view: int) -> list[tuple[Key, PeerId]]:
        """Exchanges of that round and fragment that others offered in another view, and who did; they are forgotten."""
        keys = [k for k in self._kept if (k.round, k.fragment) == (round, fragment) and k.view != view]
        found = [(key, PeerId(sender)) for key in keys for topic, sender, _ in self._kept[key] if topic == "offer"]
        for key in keys:
            del self._kept[key]
        return found

    def forget(self, before: int) -> None:
        """Drop everything about earlier rounds."""
        for key in [key for key in self._kept if key.round < before]:
            del self._kept[key]

    def lose(self, peer: PeerId) -> None:
        """Somebody is gone; whoever waits for it is woken."""
        self.gone.add(peer)
        self.wake()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._news.set()

    async def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready``; False when it took too long."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not ready():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return ready()
        return True
