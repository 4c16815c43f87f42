"""A real peer's world: ZeroMQ for the network, the wall clock for time, real signals for faults."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from talkoot.core.codec import encode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, HELLO, Blank, Frame, Message, frame_bytes
from talkoot.world.base import PeerWorld, check_outgoing
from talkoot.world.blobs import Blobs
from talkoot.world.faults import Fault
from talkoot.world.links import Network
from talkoot.world.real.endpoint import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, Endpoint
from talkoot.world.real.ports import is_loopback
from talkoot.world.real.shape import Shaper
from talkoot.world.real.wire import SIGNED, Wire, damaged, read_address

T = TypeVar("T")

BYE, HEARD = "world/bye", "world/heard"  # "that was all" and its answer: between worlds, programs never see them
GOODBYE_SECONDS = 3.0  # for the answer of those who ever spoke to us
STRANGER_SECONDS = 0.5  # others may not have met us, and then they cannot answer
CUT_SECONDS = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000  # until a link that carries nothing breaks


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to become a peer of a run.

    A rehearsal of other machines on this one sets the last two, for the lead and thus for all that it launches.

    Attributes:
        network: messages take as long as over these links (names are the peers'); None = as long as they do.
        emulate_flops: operations per second of the processor of a peer of speed 1. A computation then lasts its
            ``flops`` over that, one at a time per peer, as in a simulation: the work is done at once, and the rest
            of the time slept away. Never less than the work really took: that is slower than what is emulated.
    """

    run: str
    name: str
    seed: int = 0
    folder: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    encrypt: bool = False
    speed: float = 1.0
    faults: tuple[Fault, ...] = ()
    lead: str | None = None
    lead_address: str = ""
    secret: bytes | None = None  # of the peer's identity; a fresh one when None
    orphan_s: float = 0.0  # how long it outlives the process that started it
    network: Network | None = None
    emulate_flops: float | None = None

    def __post_init__(self) -> None:
        if self.network is not None and not is_loopback(self.host):
            raise TalkootError(
                "links can be shaped on one machine only",
                where=f"host {self.host}",
                why="its processes go by one clock; the links between machines are what they are",
                next="listen on 127.0.0.1, or do not shape the links",
            )
        if self.emulate_flops is not None and not 0 < self.emulate_flops < math.inf:
            raise TalkootError(
                "no processor is that fast",
                where="emulate_flops",
                why=f"it is {self.emulate_flops}",
                next="give operations per second, above 0",
            )


class Partition:
    """What is held up while a peer is cut off from all but its companions.

    Args:
        companions: names of peers that it still reaches.
        timer: of the moment when the other links break.
    """

    def __init__(self, companions: frozenset[str], timer: asyncio.TimerHandle) -> None:
        self.companions, self.timer = companions, timer
        self.incoming: list[Sequence[memoryview]] = []
        self.outgoing: list[tuple[PeerId, Sequence[Frame]]] = []


class RealWorld(PeerWorld):
    """A :class:`~talkoot.world.api.World` on this machine; create it inside a running event loop."""

    kind: Literal["simulated", "real"] = "real"

    def __init__(self, settings: Settings, key: Key | None = None) -> None:
        folder = Path(settings.folder) / "blobs" if settings.folder else None
        lead = PeerId(settings.lead) if settings.lead else None
        super().__init__(
            run=RunId(settings.run),
            name=settings.name,
            key=key or Key(settings.secret),
            seed=settings.seed,
            blobs=Blobs(folder),
            lead=lead,
        )
        self._speed = settings.speed
        self._emulated_flops = settings.emulate_flops and settings.emulate_flops * settings.speed
        self._busy_until = 0.0  # the emulated processor
        network, chance = settings.network, self.random("links")
        self._shaper = None if network is None else Shaper(network, self.name, chance, self._deliver)
        self._wire = Wire(self.key, settings.run)
        self._endpoint = Endpoint(
            self._arrived, self.notice_loss, host=settings.host, port=settings.port, encrypt=settings.encrypt
        )
        grouped = any(fault.peers for fault in settings.faults)  # then others must know whom they still reach
        known_as = self.name if self._shaper is not None or grouped else ""
        self.address = self._wire.address(self._endpoint.bound, self._endpoint.curve, known_as)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._acquainted: set[PeerId] = set()  # who has met us, as their messages show
        self._unheard: set[PeerId] = set()  # who has not said yet that our last message arrived
        self._launched: set[PeerId] = set()  # whose fatal errors count even before they said hello
        self._names: dict[PeerId, str] = {}  # where addresses tell them
        self._partition: Partition | None = None
        if lead:
            self.meet(lead, settings.lead_address)
        self.expect(settings.faults)

    @property
    def refused(self) -> dict[str, int]:
        """How many incoming messages were dropped, by reason."""
        return dict(self._wire.refused)

    def _arrived(self, parts: Sequence[memoryview]) -> None:
        claim = self._wire.sender(parts)
        if claim is None:
            return
        sender, topic = claim
        if self._partition is not None and self._severed(sender):
            self._partition.incoming.append(parts)
            return
        expected = topic == HELLO or (topic == FAILED and sender in self._launched)
        if sender not in self._met and not expected:
            self.hold(parts, sum(len(part) for part in parts))
            return
        message = self._wire.open(parts)
        if message is None:
            return
        if topic not in SIGNED:
            self._acquainted.add(sender)
        if self._shaper is None:
            self._deliver(message)
        else:
            self._shaper.hold(message)

    def _deliver(self, message: Message) -> None:
        sender = message.sender
        if message.topic == BYE:
            self.spawn(self._endpoint.send(sender, self._wire.pack(sender, HEARD, b"", (), 0, 0)), HEARD)
        elif message.topic == HEARD:
            self._unheard.discard(sender)
        else:
            self.mailbox.put(message)

    def notice_loss(self, peer: PeerId, reason: str) -> None:
        if self._shaper is not None:
            self._shaper.forget(peer)
        super().notice_loss(peer, reason)

    async def ready(self) -> None:
        """Make sure that others can reach this peer; TalkootError when they cannot."""
        await self._endpoint.check()

    def resubmit(self, held: Any) -> None:
        self._arrived(held)

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def meet(self, peer: PeerId, address: str) -> None:
        if peer != self.me:
            verified = read_address(peer, address)
            self._names[peer] = verified.name
            if self._met.get(peer, address) != address:  # it moved: started again under its old identity
                self._endpoint.disconnect(peer)
                if self._shaper is not None:
                    self._shaper.forget(peer)
            if self._shaper is not None:
                self._shaper.introduce(peer, verified.name)
            if not self._endpoint.linked(peer):
                self._wire.meet(peer, verified)
                self._endpoint.connect(peer, verified)
        super().meet(peer, address)

    async def send(
        self,
        to: PeerId,
        topic: str,
        body: msgspec.Struct | None = None,
        frames: Sequence[Frame] = (),
        *,
        generation: int = 0,
        step: int = 0,
    ) -> None:
        encoded = b"" if body is None else encode(body)
        if to == self.me:
            check_outgoing(topic, encoded, frames)
            copies = [bytes(frame) for frame in frames if not isinstance(frame, Blank)]
            if len(copies) != len(frames):
                raise ValueError("blank frames exist in simulations only")
            self.mailbox.put(Message(self.me, topic, generation, step, encoded, copies))
            return
        if self._shaper is not None and self._endpoint.linked(to):  # what goes nowhere occupies no link
            check_outgoing(topic, encoded, frames)
            encoded = self._shaper.stamp(to, encoded, len(encoded) + sum(map(frame_bytes, frames)))
        parts = self._wire.pack(to, topic, encoded, frames, generation, step)
        if self._takes_damage(frames):
            parts = damaged(parts)
        if self._partition is not None and self._severed(to) and self._endpoint.linked(to):
            self._partition.outgoing.append((to, [bytes(cast("bytes", part)) for part in parts]))
            return
        await self._endpoint.send(to, parts)

    async def receive(self, *topics: str, timeout: float | None = None) -> Message:
        async with asyncio.timeout(timeout):
            return await self.mailbox.take(*topics)

    async def compute(self, work: Callable[[], T], flops: float) -> T:
        # In line, not in a thread: sockets are served by ZeroMQ's own threads meanwhile, and a second Python
        # thread would make both wait for the interpreter lock.
        started = time.monotonic()
        result = work()
        ended = time.monotonic()
        if self._emulated_flops:
            took = max(flops / self._emulated_flops, ended - started)
            self._busy_until = max(started, self._busy_until) + took
            await asyncio.sleep(self._busy_until - ended)
        else:
            await asyncio.sleep((ended - started) * (1 / self._speed - 1))
        return result

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _signal(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.seconds:  # somebody else must wake us: a frozen process cannot
            wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()} 2>/dev/null"
            os.posix_spawnp("sh", ["sh", "-c", wake], os.environ)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _cut_off(self, companions: frozenset[str]) -> None:
        timer = asyncio.get_running_loop().call_later(CUT_SECONDS, self._hang_up)
        self._partition = Partition(companions, timer)

    def _severed(self, peer: PeerId) -> bool:
        return self._partition is not None and self._names.get(peer, "") not in self._partition.companions

    def _hang_up(self) -> None:
        """Break the links that carried nothing for too long; others find nobody here any more."""
        if self._partition is None:
            return
        severed = [peer for peer in self._met if self._severed(peer) and self._endpoint.linked(peer)]
        self._partition.incoming.clear()
        self._partition.outgoing.clear()
        for peer in severed:
            self._endpoint.disconnect(peer)
            self.notice_loss(peer, "no answer across the network")
        if not self._partition.companions:
            self._endpoint.stop_listening()

    def _rejoin(self) -> None:
        if self._partition is not None:
            self._partition.timer.cancel()
            self.spawn(self._catch_up(self._partition), "catch up")

    async def _catch_up(self, partition: Partition) -> None:
        while partition.outgoing:  # what is sent meanwhile joins the queue: order is kept
            await self._endpoint.send(*partition.outgoing.pop(0))
        self._partition = None
        for parts in partition.incoming:
            self._arrived(parts)

    async def close(self) -> None:
        """End every task, let queued messages leave, then end every socket."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._say_goodbye()
        await self._endpoint.close()

    async def _say_goodbye(self) -> None:
        """Wait until what was sent has been read: our end is seen at once, and must not overtake our last words."""
        peers = [peer for peer in self._met if self._endpoint.linked(peer)]
        self._unheard.update(peers)
        for peer in peers:
            await self.send(peer, BYE)
        due = time.monotonic() + (self._shaper.backlog_s() if self._shaper is not None else 0.0)
        while waiting := [peer for peer in self._unheard if self._endpoint.linked(peer)]:
            patience = GOODBYE_SECONDS if self._acquainted.intersection(waiting) else STRANGER_SECONDS
            if time.monotonic() - due > patience:
                break
            await asyncio.sleep(0.002)
