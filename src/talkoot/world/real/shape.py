"""Shaped links: real processes on one machine that hear each other as late as the network of a recipe would allow.

The sender books each message on the same timetable that the simulated network uses, and writes the time of its
arrival in front of the body, where the wire's proof covers it. Bytes travel at once; the receiver holds the message
back until it is due. So a peer that computes in line delays nobody's messages, and what loopback itself takes is part
of the modelled delay instead of an addition to it. The clock is the machine's monotonic one, which all its processes
share.

Heartbeats and the notice of a loss are not shaped, and with its notice a lost peer's messages that are not due yet
are lost, too. Over real distances those that had left it would still arrive.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections import defaultdict, deque
from collections.abc import Callable

from talkoot.core.ids import PeerId
from talkoot.world.api import Message
from talkoot.world.links import LinkClock, Network
from talkoot.world.mailbox import MAX_WAITING_BYTES, MESSAGE_BYTES

DUE = struct.Struct(">d")  # seconds on the event loop's clock


class Shaper:
    """One peer's half of every link: stamps what it sends, and holds back what it receives.

    Args:
        network: the links to imitate.
        name: this peer's, as the network knows it.
        chance: of jitter and loss.
        deliver: called with each message when it is due.
        limit: bytes that may be held back; a message beyond it is dropped and counted in ``dropped``.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        chance: random.Random,
        deliver: Callable[[Message], None],
        limit: int = MAX_WAITING_BYTES,
    ) -> None:
        self._network, self._name, self._chance, self._deliver, self._limit = network, name, chance, deliver, limit
        self._loop = asyncio.get_running_loop()
        self._names: dict[PeerId, str] = {}
        self._clocks: defaultdict[str, LinkClock] = defaultdict(LinkClock)  # by the receiver's name
        self._held: defaultdict[PeerId, deque[tuple[asyncio.TimerHandle, int]]] = defaultdict(deque)  # due in order
        self._bytes = self.dropped = 0

    def introduce(self, peer: PeerId, name: str) -> None:
        """Learn what the network calls a peer."""
        self._names[peer] = name

    def stamp(self, to: PeerId, body: bytes, nbytes: int) -> bytes:
        """Book a message of ``nbytes`` payload for the link to ``to``; returns its body with the stamp before it."""
        name = self._names[to]
        link = self._network.link(self._name, name)
        _, due = self._clocks[name].book(link, self._loop.time(), nbytes, self._chance)
        return DUE.pack(due) + body

    def hold(self, message: Message) -> None:
        """Deliver a message when its stamp says; at once when it has an empty body, and thus none."""
        if not message.body:
            self._deliver(message)
            return
        due = DUE.unpack_from(message.body)[0] if len(message.body) >= DUE.size else math.nan
        size = message.nbytes + MESSAGE_BYTES
        if not math.isfinite(due) or self._bytes + size > self._limit:
            self.dropped += 1
            return
        message.body = message.body[DUE.size :]
        self._bytes += size
        # A late one takes the same way: it must not overtake those whose timers are due and have not run yet.
        self._held[message.sender].append((self._loop.call_at(due, self._release, message), size))

    def _release(self, message: Message) -> None:
        held = self._held[message.sender]
        self._bytes -= held.popleft()[1]
        if not held:
            del self._held[message.sender]
        self._deliver(message)

    def forget(self, sender: PeerId) -> None:
        """Drop what is held back from a peer: its link broke, and what was on its way is lost."""
        for timer, size in self._held.pop(sender, ()):
            timer.cancel()
            self._bytes -= size

    def backlog_s(self) -> float:
        """Seconds until everything sent so far has arrived."""
        last = max((clock.last_arrival for clock in self._clocks.values()), default=0.0)
        return max(0.0, last - self._loop.time())
