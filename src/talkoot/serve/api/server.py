"""A server with all its parts: in a thread's or in peers' care, from a folder to an address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette

from talkoot.serve.api.app import Api, application
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.engine import Threads
from talkoot.serve.api.peers import PRELOAD, Peers
from talkoot.serve.api.pool import Pool
from talkoot.serve.api.routing import Dispatcher
from talkoot.serve.api.service import Gate, Service
from talkoot.serve.api.voices import Voices
from talkoot.serve.web import Server, address_of, bind, check_open, hosts_for

if TYPE_CHECKING:
    from talkoot.world.real.host import RealHost

OPEN = "without one, anybody who reaches this machine could use its models, and add others"
MAX_THREADS = 4  # that compute; more only divide the same processors


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve.

    Attributes:
        memory: bytes that models may take together; None = no limit.
        unknown: what happens to prompts that no expert knows: ``general``, ``ensemble`` or ``refuse``.
        scope: what prompts are routed by: the last ``turn`` of the user, or the whole ``chat``.
        remote: each model runs in a process of its own.
        running, waiting: requests that are answered, and that wait, at a time.
    """

    memory: int | None = None
    unknown: str = "general"
    scope: str = "turn"
    remote: bool = False
    running: int = 16
    waiting: int = 64


def build(
    catalogue: Catalogue,
    settings: Settings,
    *,
    token: str | None = None,
    hosts: frozenset[str] | None,
) -> Starlette:
    """The application over what is on offer; its models start within its lifespan."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with _starter(settings) as start:
            pool = Pool(start, settings.memory)
            service = Service(pool, Voices(asyncio.to_thread), Gate(settings.running, settings.waiting))
            app.state.api = Api(catalogue, Dispatcher(settings.unknown, settings.scope), service)
            try:
                yield
            finally:
                await pool.close()

    return application(lifespan, token=token, hosts=hosts)


@asynccontextmanager
async def _starter(settings: Settings) -> AsyncGenerator[Callable]:
    if not settings.remote:
        threads = Threads(min(MAX_THREADS, os.cpu_count() or 1))
        try:
            yield threads.start
        finally:
            await threads.close()
        return
    host = _host()
    try:
        await host.ready()
        await host.warm()
        peers = Peers(host)
        hearing = host.spawn(peers.run(), "peers")
        hearing.add_done_callback(_complain)
        yield peers.start
    finally:
        await host.dismiss()
        await host.close()


def _host() -> RealHost:
    from talkoot.world.real.host import RealHost
    from talkoot.world.real.peer import Settings as WorldSettings

    return RealHost(WorldSettings(run=f"serve-{os.urandom(4).hex()}", name="server"), preload=PRELOAD)


def _complain(task: asyncio.Task[None]) -> None:
    """Without whoever hears the peers nothing would ever be answered: a bug there must be seen."""
    if not task.cancelled() and (problem := task.exception()) is not None:
        asyncio.get_running_loop().call_exception_handler({"message": "peers are not heard", "exception": problem})


def serve_api(
    folder: Path,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    ready: Callable[[str, Catalogue], None] = lambda address, catalogue: None,
) -> None:
    """Serve until interrupted.

    Args:
        folder: of a blend, or of a model.
        settings: how.
        host: the address to listen on.
        port: 0 lets the system choose.
        token: required for, and then with every request to, an address that others can reach.
        ready: called with the server's address once connections are accepted.

    Raises:
        TalkootError: the folder cannot be served, the port is taken, or the address is open to others without a token.
    """
    check_open(host, token, OPEN)
    catalogue = Catalogue(folder)
    listener = bind(host, port)
    ready(address_of(host, listener), catalogue)
    app = build(catalogue, settings, token=token or None, hosts=hosts_for(host))

    async def stop() -> None:
        app.state.api.stopping.set()

    with suppress(KeyboardInterrupt):  # that is how it ends
        Server(app, stop).run_on(listener)
