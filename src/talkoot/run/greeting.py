"""How a peer of any kind makes itself known to its lead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL
from talkoot.core.ids import PeerId
from talkoot.world.api import HELLO, Message, World


class Hello(msgspec.Struct, frozen=True):
    """Peer to lead, ``hello``: here I am."""

    name: str
    address: str
    oldest_protocol: int
    newest_protocol: int


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer lives."""

    peer: str
    address: str


class Introduce(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lead to peer, ``introduce``: these are the others.

    ``processes``: for a standby, process ids by name, of those that run on the lead's machine.
    """

    contacts: tuple[Contact, ...]
    processes: dict[str, int] = {}


async def say_hello(world: World, lead: PeerId, topics: Sequence[str], again_s: float) -> Message:
    """Introduce oneself every ``again_s`` seconds until something comes on ``topics``; returns that."""
    hello = Hello(world.name, world.address, OLDEST_PROTOCOL, PROTOCOL)
    while True:
        await world.send(lead, HELLO, hello)
        with suppress(TimeoutError):
            return await world.receive(*topics, timeout=again_s)
