"""A peer's ZeroMQ sockets: one inbox, one outgoing link per acquaintance, and a watch on each link.

The inbox is a PULL socket; links are PUSH sockets. ZeroMQ brings framing, reconnects, back-pressure and
heartbeats: a killed peer closes its connection, a frozen one misses heartbeats, and the link's monitor says
so. A broken link stays broken: nothing that was queued for it reaches the peer later. Off loopback every
connection is encrypted and authenticated with CURVE; the inbox's CURVE key is part of the peer's signed
address.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq
import zmq.asyncio
import zmq.utils.monitor

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.world.api import Frame, frame_bytes
from talkoot.world.base import MAX_FRAME_BYTES
from talkoot.world.real.ports import is_loopback, port_taken
from talkoot.world.real.wire import Address

HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000
ANSWER_MS = 5000  # for a connection
HANDSHAKE_MS = 2500  # heartbeats start after the handshake: a peer that freezes in it is noticed by this alone
BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED  # the attempt to connect failed
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
DRAIN_SECONDS = 0.2
ZERO_COPY_BYTES = 64 * 1024


class Endpoint:
    """The sockets of one peer.

    Args:
        arrived: called with the parts of each incoming message.
        lost: called with (peer, reason) when a link breaks.
        host, port: where to listen; port 0 lets the system choose.
        encrypt: use CURVE; forced off loopback.
    """

    def __init__(
        self,
        arrived: Callable[[Sequence[memoryview]], None],
        lost: Callable[[PeerId, str], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        encrypt: bool = False,
    ) -> None:
        self._arrived, self._lost = arrived, lost
        self._context = zmq.asyncio.Context()
        self._links_context = zmq.asyncio.Context()  # its end waits for what is still leaving
        self._links: dict[PeerId, zmq.asyncio.Socket] = {}
        self._watches: dict[PeerId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # all watches, those included that report a broken link
        self._curve = zmq.curve_keypair() if encrypt or not is_loopback(host) else None
        self._inbox = self._socket(self._context, zmq.PULL)
        if self._curve:
            self._inbox.curve_publickey, self._inbox.curve_secretkey = self._curve
            self._inbox.curve_server = True
        self.bound = self._bind(host, port)
        self._knock, self._heard = os.urandom(16), asyncio.Event()
        self._pump = asyncio.get_running_loop().create_task(self._receive(), name="inbox")

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.connect_timeout, socket.handshake_ivl = ANSWER_MS, HANDSHAKE_MS
        socket.reconnect_ivl = -1
        socket.sndhwm = socket.rcvhwm = 0  # programs bound their own queues; dropping breaks the order
        return socket

    def _bind(self, host: str, port: int) -> str:
        try:
            self._inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            self._links_context.destroy(linger=0)
            if problem.errno == zmq.EADDRINUSE:
                raise port_taken(host, port) from problem
            raise TalkootError(
                "cannot listen for other peers",
                where=f"{host}:{port}",
                why=str(problem),
                next="name an address of this machine, 127.0.0.1 for instance",
            ) from problem
        return cast(bytes, self._inbox.last_endpoint).decode().rstrip("\0")

    @property
    def curve(self) -> str:
        """Public CURVE key of the inbox; empty when connections are not encrypted."""
        return self._curve[0].decode() if self._curve else ""

    def connect(self, peer: PeerId, address: Address) -> None:
        """Open the link to ``peer``; connecting again to the same peer does nothing.

        Raises:
            ValueError: nobody can be at such an address, or it would be reached in the clear off loopback.
        """
        if peer in self._links:
            return
        host = address.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not address.curve and not is_loopback(host):
            raise ValueError(f"{address.endpoint} is not on this machine and offers no encryption")
        socket = self._socket(self._links_context, zmq.PUSH)
        monitor = socket.get_monitor_socket(BROKEN)
        try:
            if address.curve:
                socket.curve_serverkey = address.curve.encode()
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(address.endpoint)
        except zmq.ZMQError as problem:
            socket.close(linger=0)
            monitor.close(linger=0)
            raise ValueError(f"{address.endpoint} cannot be reached: {problem}") from problem
        self._links[peer] = socket
        watch = asyncio.get_running_loop().create_task(self._watch(peer, monitor), name="watch")
        self._watches[peer] = watch
        self._tasks.add(watch)
        watch.add_done_callback(self._tasks.discard)

    async def _watch(self, peer: PeerId, monitor: Any) -> None:
        try:
            event = cast(dict[str, Any], await cast(Any, zmq.utils.monitor).recv_monitor_message(monitor))
            self.disconnect(peer)
        finally:  # never before the link stopped reporting: ZeroMQ's thread blocks on news that nobody reads
            monitor.close(linger=0)
        await self.drained()
        refused = event["event"] == zmq.EVENT_CLOSED
        self._lost(peer, "nobody listens at its address" if refused else "its connection closed or fell silent")

    def linked(self, peer: PeerId) -> bool:
        """Whether there is a link to ``peer`` that has not broken."""
        return peer in self._links

    async def drained(self) -> None:
        """Return when what has arrived was handed on: it comes before the news of its sender's end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_SECONDS
        await asyncio.sleep(0.01)  # what ZeroMQ's thread is reading right now
        while not self._inbox.closed and loop.time() < deadline and cast(int, self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to ``peer`` and forget what was queued for it."""
        socket = self._links.pop(peer, None)
        if socket is not None:
            socket.disable_monitor()
            socket.close(linger=0)
        watch = self._watches.pop(peer, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()

    def stop_listening(self) -> None:
        """Close the inbox: whoever had a link to it finds it broken."""
        self._pump.cancel()
        self._inbox.close(linger=0)

    async def send(self, peer: PeerId, parts: Sequence[Frame]) -> bool:
        """Queue a message, never waiting; False when there is no link to the peer (it is unknown or gone)."""
        socket = self._links.get(peer)
        if socket is None:
            return False
        try:
            await cast(Any, socket).send_multipart(
                list(map(_snapshot, parts)), zmq.NOBLOCK, copy=False, copy_threshold=ZERO_COPY_BYTES
            )
        except zmq.ZMQError:  # it broke, and its watch has not been told yet
            return False
        return True

    async def _receive(self) -> None:
        while True:
            frames = await self._inbox.recv_multipart(copy=False)
            if len(frames) == 1 and frames[0].bytes == self._knock:
                self._heard.set()
            else:
                self._arrived([frame.buffer for frame in frames])

    async def check(self) -> None:
        """Reach one's own inbox the way others will: through its address, encrypted where theirs is.

        Raises:
            TalkootError: nothing came through within :data:`ANSWER_MS`.
        """
        socket = self._socket(self._context, zmq.PUSH)
        try:
            if self._curve:
                socket.curve_serverkey = self._curve[0]
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(self.bound)
            await socket.send(self._knock)
            async with asyncio.timeout(ANSWER_MS / 1000):
                await self._heard.wait()
        except (TimeoutError, zmq.ZMQError) as problem:
            raise TalkootError(
                "other peers cannot reach this address",
                where=self.bound,
                why=f"not even this process could: {str(problem) or f'nothing arrived within {ANSWER_MS} ms'}",
                next="let the firewall pass TCP connections to it, or name another address of this machine",
                code=Exit.UNREACHABLE,
            ) from problem
        finally:
            socket.close(linger=0)

    async def close(self, seconds: float = 3.0) -> None:
        """Give queued messages up to ``seconds`` to leave, then end every link, then stop listening."""
        for socket in self._links.values():
            socket.disable_monitor()
        tasks = [*self._tasks, self._pump]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links_context.destroy(linger=int(seconds * 1000))
        self._links.clear()
        self._context.destroy(linger=0)


def _snapshot(part: Frame) -> Frame:
    """``part``, or a copy of it where ZeroMQ would share memory that its owner may still change."""
    if isinstance(part, bytes) or frame_bytes(part) < ZERO_COPY_BYTES:
        return part
    if isinstance(part, memoryview):
        return part if part.readonly else part.tobytes()
    return bytes(cast(bytearray, part))
