"""Links between peers: latency, bandwidth, jitter, loss, and when a message is through."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import msgspec

from talkoot.core.errors import TalkootError

ENVELOPE_BYTES = 320  # header and signature of the real wire format


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directed link.

    Attributes:
        latency_s: one-way delay in seconds.
        bytes_per_s: bandwidth in bytes per second.
        jitter_s: each message is late by up to this much, uniformly.
        loss: chance that a message needs retransmission, each costing one more round trip; order is kept,
            as in TCP.
    """

    latency_s: float = 0.0005
    bytes_per_s: float = 1.25e9
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        delays = 0 <= self.latency_s < math.inf and 0 <= self.jitter_s < math.inf  # NaN is neither
        if not (delays and self.bytes_per_s > 0 and 0 <= self.loss < 1):
            raise TalkootError(
                "a link's figures make no sense",
                where="links",
                why=f"latency_s={self.latency_s}, bytes_per_s={self.bytes_per_s}, "
                f"jitter_s={self.jitter_s}, loss={self.loss}",
                next="latency and jitter are >= 0 seconds, bytes_per_s > 0, loss in [0, 1)",
            )

    def delay(self, chance: random.Random) -> float:
        """Propagation time of one message in seconds, retransmissions included."""
        delay = self.latency_s
        if self.jitter_s:
            delay += chance.random() * self.jitter_s
        while self.loss and chance.random() < self.loss:
            delay += 2 * self.latency_s
        return delay


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who reaches whom how well.

    Attributes:
        default: the link between peers not named below.
        links: overrides by ``"from->to"``; a missing direction takes the other one's.
    """

    default: Link = Link()
    links: Mapping[str, Link] = {}

    def __post_init__(self) -> None:
        for name in self.links:
            source, arrow, target = name.partition("->")
            if not (source and arrow and target) or "->" in target or name != "".join(name.split()):
                raise TalkootError(
                    f"{name!r} names no link",
                    where="links",
                    why="a link is named by the peers at its ends",
                    next='write it as "from->to", without spaces: "peer-0->peer-1"',
                )

    def link(self, source: str, target: str) -> Link:
        """The link from peer ``source`` to peer ``target`` (names)."""
        if not self.links:
            return self.default
        return self.links.get(f"{source}->{target}") or self.links.get(f"{target}->{source}") or self.default


class LinkClock:
    """One directed link's timetable; the simulated network and shaped real links both go by it.

    A link carries one message at a time: a message leaves its sender after its size over the bandwidth, counted
    from when the link is free, and arrives after the link's delay, but never before the one sent before it.
    """

    __slots__ = ("_free", "last_arrival")

    def __init__(self) -> None:
        self._free = self.last_arrival = 0.0

    def book(self, link: Link, now: float, nbytes: int, chance: random.Random) -> tuple[float, float]:
        """Book a message with a payload of ``nbytes``, sent at ``now``.

        Returns:
            When its last byte leaves the sender, and when it arrives (seconds on the clock that ``now`` is from).
        """
        self._free = sent = max(now, self._free) + (nbytes + ENVELOPE_BYTES) / link.bytes_per_s
        self.last_arrival = self.after_last(sent + link.delay(chance))
        return sent, self.last_arrival

    def after_last(self, when: float) -> float:
        """``when``, or just after the last booked arrival: timers due at the same time come in no particular order."""
        return max(when, math.nextafter(self.last_arrival, math.inf))
