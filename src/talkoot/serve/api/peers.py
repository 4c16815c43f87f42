"""Experts in peers of their own, as the server sees them: launched over a host's world, asked by messages.

A peer that ends or is killed takes nothing with it but its answers: whoever waits for one hears of it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from talkoot.core.codec import encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.run.greeting import Hello
from talkoot.serve.api.engine import Backend, Gone
from talkoot.serve.api.models import Ask, Source, Token
from talkoot.serve.api.worker import PROGRAM, Asked, Cancelled, Said
from talkoot.world.api import FAILED, HELLO, LOST, Host, Launch, Lost, Message
from talkoot.world.base import rebuild_failure

PRELOAD = ("torch", "talkoot.model.huggingface", "talkoot.model.generate", "talkoot.serve.api.worker")
START_S = 120.0  # that a peer may take to load its model
SILENCE_S = 300.0  # that it may take to the next token; a long prompt is read in one go
CLOSE_S = 5.0  # that it may take to end when it is told to


class Peers:
    """Starts models as peers. :meth:`run` must run beside it.

    Args:
        world: the server's own; messages of the topics used here must have no other reader.
    """

    def __init__(self, world: Host) -> None:
        self._world = world
        self._starting: dict[str, asyncio.Future[tuple[PeerId, str]]] = {}  # by identity, whom we expect
        self._living: dict[str, _Remote] = {}  # by identity and by ticket
        self._launches = 0

    async def start(self, source: Source) -> Backend:
        """Launch a peer that loads a model.

        Raises:
            Gone: it ended before it was ready.
            TalkootError: it cannot load the model, or does not get ready in time.
        """
        self._launches += 1
        name = f"{source.name[:40]}-{self._launches}"
        ticket = self._world.launch(Launch(name=name, program=PROGRAM, argument=encode(source)))
        identity = self._world.identity(ticket)
        ready: asyncio.Future[tuple[PeerId, str]] = asyncio.get_running_loop().create_future()
        self._starting |= {identity: ready, ticket: ready}
        try:
            async with asyncio.timeout(START_S):
                peer, address = await ready
        except TimeoutError:
            _kill(self._world, name)
            raise TalkootError(
                "a model does not get ready",
                where=source.name,
                why=f"its peer said nothing for {START_S:.0f} s",
                next="look at that machine: is there memory for the model?",
                code=Exit.UNREACHABLE,
            ) from None
        finally:
            del self._starting[identity], self._starting[ticket]
        self._world.meet(peer, address)
        remote = _Remote(self._world, peer, name)
        self._living |= {peer: remote, ticket: remote}
        await self._world.send(peer, "welcome")
        return remote

    async def run(self) -> None:
        """Hear what peers say, until cancelled."""
        while True:
            message = await self._world.receive("token", "unable", HELLO, FAILED, LOST)
            try:
                self._take(message)
            except ValueError as problem:  # a peer that talks nonsense is as good as lost
                self._lose(message.sender, f"its {message.topic!r} makes no sense: {problem}")

    def _take(self, message: Message) -> None:
        starting, living = self._starting.get(message.sender), self._living.get(message.sender)
        match message.topic:
            case "token" if living:
                said = message.read(Said)
                living.hear(said.number, said.token)
            case "unable" if living:
                living.hear(message.step, rebuild_failure(message))
            case _ if message.topic == LOST:
                self._lose(message.sender, message.read(Lost).reason)
            case _ if message.topic == HELLO and starting and not starting.done():
                starting.set_result((message.sender, message.read(Hello).address))
            case _ if message.topic == FAILED and starting and not starting.done():
                starting.set_exception(rebuild_failure(message))
            case _ if message.topic == FAILED and living:
                self._lose(message.sender, rebuild_failure(message).why)

    def _lose(self, sender: str, reason: str) -> None:
        starting, living = self._starting.get(sender), self._living.pop(sender, None)
        if starting and not starting.done():
            starting.set_exception(Gone(reason))
        if living:
            living.lost(reason)


class _Remote:
    """See :class:`Backend`."""

    def __init__(self, world: Host, peer: PeerId, name: str) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.process = world.process(name)
        self._world, self._peer, self._name = world, peer, name
        self._number = 0
        self._heard: dict[int, asyncio.Queue[Token | TalkootError | Gone]] = {}

    async def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        if self.gone.done():
            raise Gone(self.gone.result())
        self._number += 1
        number = self._number
        heard = self._heard[number] = asyncio.Queue()
        whole = False
        try:
            await self._world.send(self._peer, "ask", Asked(number, ask))
            while not whole:
                news = await self._next(heard)
                whole = not isinstance(news, Token) or news.last != ""
                if not isinstance(news, Token):
                    raise news
                yield news
        finally:
            del self._heard[number]
            if not whole:
                self._tell_end(number)

    async def _next(self, heard: asyncio.Queue[Token | TalkootError | Gone]) -> Token | TalkootError | Gone:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await heard.get()
        except TimeoutError:  # its link is alive, but it does not work any more
            self.lost(f"it said nothing for {SILENCE_S:.0f} s")
            return Gone(self.gone.result())

    def _tell_end(self, number: int) -> None:
        """Beside the caller, who may be on its way out and must not wait; too late, it does no harm."""
        self._world.spawn(self._world.send(self._peer, "cancel", Cancelled(number)), f"cancel {number}")

    def hear(self, number: int, news: Token | TalkootError | Gone) -> None:
        """Something came for an answer."""
        if heard := self._heard.get(number):
            heard.put_nowait(news)

    def lost(self, reason: str) -> None:
        """The peer is gone, or so silent that it might as well be: then it must not come back."""
        if self.gone.done():
            return
        self.gone.set_result(reason)
        _kill(self._world, self._name)
        for number in self._heard:
            self.hear(number, Gone(reason))

    async def close(self) -> None:
        """See :class:`Backend`; the peer ends by itself."""
        await self._world.send(self._peer, "stop")
        await asyncio.wait([self.gone], timeout=CLOSE_S)
        _kill(self._world, self._name)


def _kill(world: Host, name: str) -> None:
    with suppress(KeyError, ProcessLookupError):  # it has ended
        world.disturb(name, "kill")
