"""How a peer of any kind makes itself known to its lead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL
from talkoot.core.ids import PeerId
from talkoot.train.messages import Hello
from talkoot.world.api import HELLO, Message, World


async def say_hello(world: World, lead: PeerId, topics: Sequence[str], again_s: float) -> Message:
    """Introduce oneself every ``again_s`` seconds until something comes on ``topics``; returns that."""
    hello = Hello(world.name, world.address, OLDEST_PROTOCOL, PROTOCOL)
    while True:
        await world.send(lead, HELLO, hello)
        with suppress(TimeoutError):
            return await world.receive(*topics, timeout=again_s)
