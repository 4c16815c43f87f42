"""A peer's ZeroMQ sockets: one inbox, one outgoing link per acquaintance, and a watch on each link.

The inbox is a PULL socket; links are PUSH sockets. ZeroMQ brings framing, reconnects, back-pressure and
heartbeats: a killed peer closes its connection, a frozen one misses heartbeats, and the link's monitor says so.
Off loopback every connection is encrypted and authenticated with CURVE; the inbox's CURVE key is part of the peer's signed address.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
import zmq.utils.monitor

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.world.api import Frame
from talkoot.world.real.ports import port_taken
from talkoot.world.real.wire import MAX_FRAME_BYTES, Address

HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000
ZERO_COPY_BYTES = 64 * 1024


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address that never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
        self._links: dict[PeerId, zmq.asyncio.Socket] = {}
        self._watches: dict[PeerId, asyncio.Task[None]] = {}
        self._curve = zmq.curve_keypair() if encrypt or not is_loopback(host) else None
        self._inbox = self._socket(zmq.PULL)
        if self._curve:
            self._inbox.curve_publickey, self._inbox.curve_secretkey = self._curve
            self._inbox.curve_server = True
        self.bound = self._bind(host, port)
        self._pump = asyncio.get_running_loop().create_task(self._receive(), name="inbox")

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.sndhwm = socket.rcvhwm = 0  # programs bound their own queues; dropping here would break ordering
        return socket

    def _bind(self, host: str, port: int) -> str:
        try:
            self._inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            if problem.errno == zmq.EADDRINUSE:
                raise port_taken(host, port) from problem
            raise TalkootError(
                "cannot listen for other peers",
                where=f"{host}:{port}",
                why=str(problem),
                next="name an address of this machine, 127.0.0.1 for instance",
                code=Exit.UNREACHABLE,
            ) from problem
        return self._inbox.last_endpoint.decode().rstrip("\0")

    @property
    def curve(self) -> str:
        """Public CURVE key of the inbox; empty when connections are not encrypted."""
        return self._curve[0].decode() if self._curve else ""

    def connect(self, peer: PeerId, address: Address) -> None:
        """Open the link to ``peer``; connecting again to the same peer does nothing."""
        if peer in self._links:
            return
        socket = self._socket(zmq.PUSH)
        if address.curve:
            socket.curve_serverkey = address.curve.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address.endpoint)
        self._links[peer] = socket
        self._watches[peer] = asyncio.get_running_loop().create_task(self._watch(peer, monitor), name="watch")

    async def _watch(self, peer: PeerId, monitor: Any) -> None:
        await zmq.utils.monitor.recv_monitor_message(monitor)
        self.disconnect(peer)
        self._lost(peer, "its connection closed or its heartbeat stopped")

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to ``peer`` and forget what was queued for it."""
        socket = self._links.pop(peer, None)
        if socket is not None:
            socket.disable_monitor()
            socket.close(linger=0)
        self._watches.pop(peer, None)

    async def send(self, peer: PeerId, parts: Sequence[Frame]) -> bool:
        """Queue a message; False when there is no link to the peer (it is unknown or gone)."""
        socket = self._links.get(peer)
        if socket is None:
            return False
        try:
            await socket.send_multipart(parts, copy=False, copy_threshold=ZERO_COPY_BYTES)
        except zmq.ZMQError:  # the link was closed while the message waited
            return False
        return True

    async def _receive(self) -> None:
        while True:
            frames = await self._inbox.recv_multipart(copy=False)
            self._arrived([frame.buffer for frame in frames])

    async def flush(self, seconds: float = 0.5) -> None:
        """Close the links after giving queued messages up to ``seconds`` to leave."""
        for watch in self._watches.values():
            watch.cancel()
        for socket in self._links.values():
            socket.disable_monitor()
            socket.close(linger=int(seconds * 1000))
        self._links.clear()

    def close(self) -> None:
        """Stop listening and end every link."""
        self._pump.cancel()
        for watch in self._watches.values():
            watch.cancel()
        for peer in list(self._links):
            self.disconnect(peer)
        self._context.destroy()  # monitors and lingering links included
