"""The simulated network: who reaches whom, when a message arrives, and who notices that a link broke.

A link opens when a peer meets another, carries one message at a time in each direction, and breaks once:
because the other end is gone, or because it did not answer for a while. What is sent over a broken link is
lost.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from talkoot.core.ids import PeerId
from talkoot.world.api import Message
from talkoot.world.base import PeerWorld
from talkoot.world.links import ENVELOPE_BYTES, LinkClock, Network
from talkoot.world.sim.loop import VirtualLoop

KILL_NOTICE = 0.012
FREEZE_NOTICE = 2.5


@dataclass
class Body:
    """One simulated peer's physical side: whether it lives, stands still, computes, and how fast."""

    world: PeerWorld
    speed: float = 1.0
    alive: bool = True
    killed_at: float = math.inf
    thawed: asyncio.Event | None = None  # set unless frozen; None = never frozen so far
    island: tuple[int, frozenset[str]] | None = None  # cut off: the partition's number, and whom it still reaches
    busy_until: float = 0.0
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict[asyncio.Task[Any], None])  # in order
    launcher: PeerWorld | None = None
    ticket: str = ""
    host: bool = False  # it may start peers itself

    @property
    def frozen(self) -> bool:
        """Whether it stands still."""
        return self.thawed is not None and not self.thawed.is_set()


class Fabric:
    """All links between simulated peers.

    Args:
        loop: the clock that deliveries and notices are booked on.
        network: latency, bandwidth, jitter and loss of each link.
        seed: of jitter and loss.
    """

    def __init__(self, loop: VirtualLoop, network: Network, seed: int) -> None:
        self.loop, self.network, self.chance = loop, network, random.Random(seed)
        self.peers: dict[PeerId, Body] = {}
        self.delivered = 0
        self._clocks: defaultdict[tuple[str, str], LinkClock] = defaultdict(LinkClock)  # by sender and receiver
        self._links: set[tuple[PeerId, PeerId]] = set()  # open ones, from a peer to one it met
        self._cut: dict[frozenset[str], int] = {}  # pairs of names -> the partition that cut them
        self._partitions = 0
        self._stalled: list[tuple[Body, PeerId, Message]] = []  # sent across a cut that nobody noticed yet

    def connect(self, who: PeerId, about: PeerId, address: str) -> None:
        """Open a link, if there is none; it breaks soon when the other end does not answer.

        Raises:
            ValueError: nobody has this identity and address.
        """
        subject = self.peers.get(about)
        if subject is None or subject.world.address != address:
            raise ValueError(f"this is not an address of {about[:8]}")
        if who == about or (who, about) in self._links:
            return
        self._links.add((who, about))
        if not subject.alive:
            self._notice(who, about, KILL_NOTICE, "nobody listens at its address")
        elif self._severed(self.peers[who], subject):
            self._notice_cut(who, about)
        elif (thawed := subject.thawed) is not None and subject.frozen:
            self._notice(who, about, FREEZE_NOTICE, "it does not answer", only_if=lambda: not thawed.is_set())

    def gone(self, peer: Body, reason: str) -> None:
        """Let those who met a dead peer, and whoever launched it, notice; what had left it arrives first."""
        me, now = peer.world.me, self.loop.time()
        for who, about in self._links_of(peer):
            if about == me:
                self._notice(who, about, KILL_NOTICE, reason, after_last_word=peer.killed_at == math.inf)
        if peer.launcher is not None:
            when = now + KILL_NOTICE
            if peer.killed_at == math.inf:
                when = self._clocks[peer.world.name, peer.launcher.name].after_last(when)
            self.loop.call_at(when, peer.launcher.notice_loss, PeerId(peer.ticket), reason)

    def silent(self, peer: Body, thawed: asyncio.Event) -> None:
        """Let others hang up on a frozen peer unless it moves in time; the peer finds out when it does."""
        for who, about in self._links_of(peer):
            self._notice(who, about, FREEZE_NOTICE, "its heartbeat stopped", only_if=lambda: not thawed.is_set())

    def partition(self, *groups: Sequence[str]) -> None:
        """Cut every link between peers (names) of different groups; both sides notice after a while."""
        self._partitions += 1
        for index, group in enumerate(groups):
            for other in groups[index + 1 :]:
                for pair in (frozenset((a, b)) for a in group for b in other):
                    self._cut.setdefault(pair, self._partitions)
        self._notice_partition()

    def isolate(self, peer: Body, companions: frozenset[str]) -> None:
        """Cut a peer off from all but its companions (names); a later one of its name is not concerned."""
        self._partitions += 1
        peer.island = (self._partitions, companions | {peer.world.name})
        self._notice_partition()

    def rejoin(self, peer: Body) -> None:
        """End a peer's isolation. What was sent over links that did not break arrives late, as in TCP."""
        peer.island = None
        self._resume()

    def heal(self) -> None:
        """End all partitions between groups. What was sent over links that did not break arrives late, as in TCP."""
        self._cut.clear()
        self._resume()

    def _resume(self) -> None:
        stalled, self._stalled = self._stalled, []
        for source, to, message in stalled:
            if source.alive:
                self.transmit(source, to, message)

    def _notice_partition(self) -> None:
        for who, about in sorted(self._links):
            if self._severed(self.peers[who], self.peers[about]) == self._partitions:
                self._notice_cut(who, about)

    def _severed(self, one: Body, other: Body) -> int:
        """The number of the (latest) partition that cuts the link between two peers; 0 = none does."""
        number = self._cut.get(frozenset((one.world.name, other.world.name)), 0) if self._cut else 0
        for island, name in ((one.island, other.world.name), (other.island, one.world.name)):
            if island is not None and name not in island[1]:
                number = max(number, island[0])
        return number

    def transmit(self, source: Body, to: PeerId, message: Message) -> None:
        """Put a message on the link; it arrives later, or never."""
        if to == source.world.me:
            source.world.mailbox.put(message)
            return
        if (source.world.me, to) not in self._links:
            return
        target = self.peers[to]
        names = (source.world.name, target.world.name)
        if self._partitions and self._severed(source, target):
            self._stalled.append((source, to, message))
            return
        link = self.network.link(*names)
        sent, arrival = self._clocks[names].book(link, self.loop.time(), message.nbytes, self.chance)
        self.loop.call_at(arrival, self._arrive, source, sent, target, message)

    def _arrive(self, source: Body, sent: float, target: Body, message: Message) -> None:
        if target.alive and sent <= source.killed_at:
            self.delivered += 1
            target.world.resubmit(message)

    def _links_of(self, peer: Body) -> list[tuple[PeerId, PeerId]]:
        return sorted(link for link in self._links if peer.world.me in link)

    def _notice_cut(self, who: PeerId, about: PeerId) -> None:
        pair = (self.peers[who], self.peers[about])
        cut = self._severed(*pair)
        reason = "no answer across the network"
        self._notice(who, about, FREEZE_NOTICE, reason, only_if=lambda: self._severed(*pair) == cut)

    def _notice(
        self,
        who: PeerId,
        about: PeerId,
        after: float,
        reason: str,
        only_if: Callable[[], bool] = lambda: True,
        after_last_word: bool = False,
    ) -> None:
        observer, subject = self.peers[who], self.peers[about]
        names = (subject.world.name, observer.world.name)

        def tell() -> None:
            if observer.alive and (who, about) in self._links and only_if():
                self._links.discard((who, about))
                observer.world.notice_loss(about, reason)

        when = self.loop.time() + after + self.network.link(*names).latency_s
        self.loop.call_at(self._clocks[names].after_last(when) if after_last_word else when, tell)


__all__ = ["ENVELOPE_BYTES", "FREEZE_NOTICE", "KILL_NOTICE", "Body", "Fabric"]
