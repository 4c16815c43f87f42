"""What every server here shares: where it may listen, to whom it answers, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from talkoot.core.errors import TalkootError
from talkoot.serve.guard import LOOPBACK
from talkoot.world.real.ports import is_loopback, port_taken

SHUTDOWN_S = 3  # that a client may take to hang up


def hosts_for(host: str) -> frozenset[str] | None:
    """Names in a Host header that a server listening on ``host`` answers to; None = any, for servers with a token."""
    return LOOPBACK | {host} if is_loopback(host) else None


def check_open(host: str, token: str | None, why: str) -> None:
    """Refuse to listen where others can reach, without a token.

    Raises:
        TalkootError: saying ``why`` that would be wrong.
    """
    if not is_loopback(host) and not token:
        raise open_to_all(f"host {host}", why)


def open_to_all(where: str, why: str) -> TalkootError:
    """The error for a server that anybody could use."""
    return TalkootError(
        "a server that others can reach needs a token",
        where=where,
        why=why,
        next="add --token SECRET, or leave out --host to serve this machine only",
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 lets the system choose.

    Raises:
        TalkootError: the port is taken, or the address is not this machine's.
    """
    # The protocol is named because asyncio switches Nagle's algorithm off only then: an answer's second part would
    # otherwise wait 40 ms for the client to acknowledge the first.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        if problem.errno == errno.EADDRINUSE:
            raise port_taken(host, port) from problem
        raise TalkootError(
            "this cannot be served there",
            where=f"{host}:{port}",
            why=problem.strerror or str(problem),
            next="choose another --host or a --port above 1023",
        ) from problem
    listener.listen(128)
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """``http://HOST:PORT`` of a bound socket."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """Serves one application on one socket; lets it end what is open before it waits for its clients.

    Args:
        app: the application.
        closing: awaited first when the server stops: open streams must hear that they are to end.
    """

    def __init__(self, app: ASGIApp, closing: Callable[[], Awaitable[None]] | None = None) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            log_level="warning",
            timeout_graceful_shutdown=SHUTDOWN_S,
            server_header=False,
            access_log=False,
        )
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop in order, however often it is asked for: nothing here takes long, and processes must not be left."""
        super().handle_exit(sig, frame)
        self.force_exit = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        if self._closing is not None:
            await self._closing()
        await super().shutdown(sockets)

    def run_on(self, listener: socket.socket) -> None:
        """Serve until interrupted."""
        with contextlib.closing(listener):
            self.run(sockets=[listener])
