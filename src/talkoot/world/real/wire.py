"""The wire format: an authenticated MessagePack header, then raw frames that it vouches for.

A message is ``[header, proof, frame, frame, ...]``. The header names run, generation, step, sender, receiver
and a sequence number that only grows, so a message can be neither forged, redirected, replayed nor cut. Two
peers that have met share a key for each direction (X25519, each half signed by its owner's identity), and the
proof is an AES-GMAC tag: 0.4 ms for 10 MiB, where a hash and a signature cost 13 ms. A hello, or the news of a
fatal error, may come from somebody not met yet and is signed with Ed25519 itself. Everything is bounded and
checked before any of it reaches a program.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple, cast
from urllib.parse import quote, unquote

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode, encode
from talkoot.core.ids import PeerId
from talkoot.core.keys import Key, verify
from talkoot.world.api import FAILED, HELLO, LOST, Blank, Frame, Message, frame_bytes
from talkoot.world.base import MAX_FRAMES, MAX_TOPIC, check_outgoing

MAX_HEADER_BYTES = 16 * 2**20
MAX_ADDRESS = 1000
TAG_BYTES = 16
SIGNED = (HELLO, FAILED)  # what one may have to say to somebody who has not met one yet
HEADER_NONCE = 2**32 - 1  # frames count their nonces from 0
ADDRESS = re.compile(
    r"(tcp://[^\s/#]+:[0-9]{1,5})#([!-~]{40})?#([0-9a-f]{64})(?:#([A-Za-z0-9_.~%-]+))?"  # CURVE keys may hold a '#'
)


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every message carries before its frames."""

    protocol: int
    run: str
    generation: int
    step: int
    sender: str
    to: str
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    topic: str
    body: bytes
    sizes: tuple[int, ...]
    tags: bytes


class Address(NamedTuple):
    """Where and how to reach a peer: ZeroMQ endpoint, CURVE key ('' on loopback), X25519 half in hex.

    In a rehearsal with shaped links also the peer's name, which says what link leads to it; else ''.
    """

    endpoint: str
    curve: str
    exchange: str
    name: str = ""


def write_address(key: Key, address: Address) -> str:
    """An address as text, signed by the peer it belongs to."""
    text = "#".join(address[:3]) + (f"#{quote(address.name, safe='')}" if address.name else "")
    return f"{text}#{key.sign(text.encode()).hex()}"


def read_address(peer: PeerId, text: str) -> Address:
    """The address in ``text``.

    Raises:
        ValueError: malformed, or not signed by ``peer``.
    """
    body, _, signature = text[:MAX_ADDRESS].rpartition("#")
    well_formed = ADDRESS.fullmatch(body) if len(text) <= MAX_ADDRESS else None
    if well_formed is None or not verify(peer, bytes.fromhex(signature), body.encode()):
        raise ValueError(f"this is not an address signed by {peer[:8]}")
    endpoint, curve, exchange, name = well_formed.groups(default="")
    if not 0 < int(endpoint.rpartition(":")[2]) < 2**16:
        raise ValueError(f"{endpoint} names no port")
    return Address(endpoint, curve, exchange, unquote(name))


class Wire:
    """Seals and opens the messages of one peer.

    Args:
        key: the peer's identity.
        run: only messages of this run pass.
    """

    def __init__(self, key: Key, run: str) -> None:
        self._key, self._run = key, run
        self._exchange = X25519PrivateKey.generate()
        self._seal: dict[str, AESGCM] = {}
        self._open: dict[str, AESGCM] = {}
        self._last: dict[tuple[str, bool], int] = {}  # signed ones count apart: they overtake what waits
        self._sequence = time.time_ns()  # grows even over a restart under the same identity
        self.refused: dict[str, int] = {}  # reason -> messages dropped

    def address(self, endpoint: str, curve: str, name: str = "") -> str:
        """This peer's own address."""
        half = self._exchange.public_key().public_bytes_raw().hex()
        return write_address(self._key, Address(endpoint, curve, half, name))

    def meet(self, peer: PeerId, address: Address) -> None:
        """Agree on keys with a peer whose address was verified."""
        theirs = X25519PublicKey.from_public_bytes(bytes.fromhex(address.exchange))
        secret = self._exchange.exchange(theirs)
        mine = self._key.peer
        for table, source, target in ((self._seal, mine, peer), (self._open, peer, mine)):
            info = f"talkoot wire {self._run} {source} {target}".encode()
            table[peer] = AESGCM(HKDF(SHA256(), 32, None, info).derive(secret))

    def pack(
        self, to: str, topic: str, body: bytes, frames: Sequence[Frame], generation: int, step: int
    ) -> list[Frame]:
        """A message's parts.

        Raises:
            ValueError: blank frames, or what :func:`~talkoot.world.base.check_outgoing` refuses.
        """
        check_outgoing(topic, body, frames)
        flat = [_flat(frame) for frame in frames]
        sizes = tuple(map(frame_bytes, flat))
        self._sequence += 1
        sequence, seal = self._sequence, self._seal.get(to)
        tags = b""
        if seal is not None:
            tags = b"".join(seal.encrypt(_nonce(sequence, index), b"", frame) for index, frame in enumerate(flat))
        header = Header(PROTOCOL, self._run, generation, step, self._key.peer, to, sequence, topic, body, sizes, tags)
        raw = encode(header)
        if topic in SIGNED or seal is None:
            return [raw, self._key.sign(raw)]
        return [raw, seal.encrypt(_nonce(sequence, HEADER_NONCE), b"", raw), *flat]

    def sender(self, parts: Sequence[memoryview | bytes]) -> tuple[PeerId, str] | None:
        """Claimed sender and topic, nothing proven yet; None when the parts are no message at all."""
        try:
            header = decode(parts[0], Header, MAX_HEADER_BYTES)
        except (ValueError, IndexError):
            self._count("malformed header")
            return None
        return PeerId(header.sender), header.topic

    def open(self, parts: Sequence[memoryview | bytes]) -> Message | None:
        """The message in ``parts``, or None when anything about it is wrong; the reason is counted."""
        try:
            return self._check(parts)
        except ValueError as problem:
            self._count(str(problem).partition(":")[0])
            return None

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _check(self, parts: Sequence[memoryview | bytes]) -> Message:
        if not 2 <= len(parts) <= 2 + MAX_FRAMES:
            raise ValueError("wrong number of parts")
        raw, proof, frames = bytes(parts[0]), bytes(parts[1]), parts[2:]
        try:
            header = decode(raw, Header, MAX_HEADER_BYTES)
        except ValueError:
            raise ValueError("malformed header") from None
        if not OLDEST_PROTOCOL <= header.protocol <= PROTOCOL:
            raise ValueError("unknown protocol version")
        if header.to != self._key.peer or header.run != self._run:
            raise ValueError("not for this peer or run")
        if len(header.topic) > MAX_TOPIC or header.topic == LOST:
            raise ValueError("reserved topic")  # losses are what this world itself observes, never hearsay
        if header.sizes != tuple(map(frame_bytes, frames)):
            raise ValueError("frames cut short")
        self._prove(header, raw, proof, frames)
        kind = (header.sender, header.topic in SIGNED)
        if header.sequence <= self._last.get(kind, 0):
            raise ValueError("replayed")
        self._last[kind] = header.sequence
        sender = PeerId(header.sender)
        return Message(sender, header.topic, header.generation, header.step, header.body, frames)

    def _prove(self, header: Header, raw: bytes, proof: bytes, frames: Sequence[memoryview | bytes]) -> None:
        if header.topic in SIGNED:
            if frames or not verify(header.sender, proof, raw):
                raise ValueError("bad signature")
            return
        key = self._open.get(header.sender)
        if key is None or len(header.tags) != TAG_BYTES * len(frames):
            raise ValueError("not acquainted")
        try:
            key.decrypt(_nonce(header.sequence, HEADER_NONCE), proof, raw)
            for index, frame in enumerate(frames):
                tag = header.tags[TAG_BYTES * index : TAG_BYTES * (index + 1)]
                key.decrypt(_nonce(header.sequence, index), tag, frame)
        except InvalidTag:
            raise ValueError("bad tag") from None


def damaged(parts: Sequence[Frame]) -> list[Frame]:
    """The parts of a message, one bit of its last frame changed on the way."""
    last = bytearray(cast("bytes", parts[-1]))
    if last:
        last[len(last) // 2] ^= 1
    return [*parts[:-1], bytes(last) or b"!"]


def _flat(frame: Frame) -> bytes | bytearray | memoryview:
    """A frame as plain bytes, without a copy; tensors come as views of numbers, which ciphers do not take."""
    if isinstance(frame, Blank):
        raise ValueError("blank frames exist in simulations only")
    if not isinstance(frame, memoryview):
        return frame
    return frame.cast("B") if frame.nbytes else b""


def _nonce(sequence: int, index: int) -> bytes:
    return sequence.to_bytes(8, "big") + index.to_bytes(4, "big")
