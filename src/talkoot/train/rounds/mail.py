"""What replicas sent each other about exchanges, kept until the exchange is due.

Bounded: of each exchange, one message of a kind from each sender; of exchanges, those of the rounds right ahead; and
of each sender, so many messages in all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from talkoot.core.ids import PeerId
from talkoot.train.rounds.messages import Key
from talkoot.world.api import Message

AHEAD = 4  # rounds that somebody may be ahead and still be listened to
PER_SENDER = 8192  # messages that wait: enough for a ring of thousands
Offered = list[tuple[Key, PeerId]]  # exchanges, and who offered them


class Mail:
    """See the module's text.

    Attributes:
        gone: whose link broke, and when.
        ahead: the newest round that anybody was in who was too far ahead to be listened to.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, dict[tuple[str, str, int], Message]] = {}
        self._waiting: Counter[str] = Counter()  # messages by sender
        self._news = asyncio.Event()
        self.gone: dict[PeerId, float] = {}
        self.ahead = 0

    def put(self, key: Key, message: Message, current: int, number: int = 0) -> bool:
        """Keep a message about an exchange; False when that is over, too far ahead, or said already.

        Args:
            current: the oldest round that is still under way here.
            number: tells several messages of one topic and sender apart.
        """
        slot, sender = (message.topic, message.sender, number), message.sender
        if key.round > current + AHEAD:
            self.ahead = max(self.ahead, key.round)
        if not current <= key.round <= current + AHEAD or slot in self._kept.get(key, ()):
            return False
        if self._waiting[sender] >= PER_SENDER:
            return False
        self._kept.setdefault(key, {})[slot] = message
        self._waiting[sender] += 1
        self.wake()
        return True

    def take(self, key: Key, topic: str, sender: PeerId, number: int = 0) -> Message | None:
        """That message, if it is here."""
        message = self._kept.get(key, {}).pop((topic, sender, number), None)
        self._waiting[sender] -= message is not None
        return message

    def stale(self, round: int, fragment: int, view: int) -> Offered:
        """Forget all about that round and fragment in other views; returns what others offered there."""
        return self._drop([k for k in self._kept if (k.round, k.fragment) == (round, fragment) and k.view != view])

    def forget(self, before: int) -> Offered:
        """Drop everything about earlier rounds; returns what others still offered there."""
        return self._drop([key for key in self._kept if key.round < before])

    def _drop(self, keys: Collection[Key]) -> Offered:
        offered: Offered = []
        for key in keys:
            for topic, sender, _ in self._kept.pop(key):
                self._waiting[sender] -= 1
                if topic == "offer":
                    offered.append((key, PeerId(sender)))
        return offered

    def lose(self, peer: PeerId, now: float) -> None:
        """Somebody's link broke; whoever waits for it is woken."""
        self.gone[peer] = now
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
