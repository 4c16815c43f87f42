"""An expert in a peer of its own: loads one model, then answers what its lead asks, several asks at once."""

from __future__ import annotations

import asyncio

import msgspec

from talkoot.core.codec import decode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.run.greeting import say_hello
from talkoot.serve.api.engine import Engine
from talkoot.serve.api.models import Ask, Source, Token, kinds
from talkoot.world.api import LOST, World
from talkoot.world.base import failure_of

PROGRAM = "talkoot.serve.api.worker:serve_expert"
HELLO_AGAIN_S = 1.0


class Asked(msgspec.Struct, frozen=True):
    """Lead to peer, ``ask``: go on with this; ``number`` names it from here on."""

    number: int
    ask: Ask


class Cancelled(msgspec.Struct, frozen=True):
    """Lead to peer, ``cancel``: nobody waits for that answer any more."""

    number: int


class Said(msgspec.Struct, frozen=True):
    """Peer to lead, ``token``: the next one of an answer."""

    number: int
    token: Token


async def serve_expert(world: World, argument: bytes) -> None:
    """The peer's program; ``argument`` is a :class:`Source`. Ends at the lead's ``stop`` or end."""
    lead = world.lead
    if lead is None:
        raise ValueError("an expert needs somebody who asks")
    source = decode(argument, Source)
    model = await world.compute(lambda: kinds[source.kind](source), 0.0)
    engine, running = Engine(model, world.compute), dict[int, asyncio.Task[None]]()
    await say_hello(world, lead, ("welcome",), HELLO_AGAIN_S)
    async with asyncio.TaskGroup() as group:  # a bug in an answer ends the peer: somebody waits for that answer
        while True:
            message = await world.receive("ask", "cancel", "stop", LOST)
            if message.sender != lead:
                continue
            if message.topic in ("stop", LOST):
                break
            if message.topic == "cancel":
                if task := running.pop(message.read(Cancelled).number, None):
                    task.cancel()
                continue
            asked = message.read(Asked)
            running[asked.number] = task = group.create_task(_answer(world, lead, engine, asked))
            task.add_done_callback(lambda _, number=asked.number: running.pop(number, None))
        for task in list(running.values()):
            task.cancel()


async def _answer(world: World, lead: PeerId, engine: Engine, asked: Asked) -> None:
    try:
        async for token in engine.answer(asked.ask):
            await world.send(lead, "token", Said(asked.number, token))
    except TalkootError as problem:
        await world.send(lead, "unable", failure_of(problem), step=asked.number)
