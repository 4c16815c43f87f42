"""Canonical bytes for everything that is signed, sent or stored, and the version both sides agree on.

MessagePack through msgspec: equal values give equal bytes (sorted keys, which must be strings; declared field
order), and decoding is strict: a stranger's bytes either match the declared type or are refused. Nothing is
ever pickled.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from talkoot.core.errors import Exit, TalkootError

T = TypeVar("T")

PROTOCOL = 1  # what this code speaks
OLDEST_PROTOCOL = 1  # the oldest it still understands
MAX_DECODE_BYTES = 16 * 2**20  # headers and receipts are small; tensors travel beside them as raw frames

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """Canonical MessagePack bytes of a msgspec struct or of plain data."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T], limit: int = MAX_DECODE_BYTES) -> T:
    """Strictly decode ``data`` as ``kind``.

    Raises:
        ValueError: too large, not MessagePack, or not of the declared shape. Callers that face a user turn it
            into a :class:`TalkootError`; callers that face a stranger drop the message.
    """
    size = memoryview(data).nbytes
    if size > limit:
        raise ValueError(f"{size} bytes where at most {limit} are allowed")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TalkootError) as problem:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {problem}") from problem


def negotiate(oldest: int, newest: int, *, who: str) -> int:
    """The newest protocol version that both sides speak.

    Raises:
        TalkootError: the ranges do not overlap; it says which side must be upgraded.
    """
    version = min(newest, PROTOCOL)
    if version < max(oldest, OLDEST_PROTOCOL) or oldest > newest:
        theirs_is_old = newest < OLDEST_PROTOCOL or oldest > newest  # or it makes no sense at all
        raise TalkootError(
            "no common protocol version",
            where=who,
            why=f"it speaks {oldest}..{newest}, this talkoot speaks {OLDEST_PROTOCOL}..{PROTOCOL}",
            next="upgrade talkoot on " + ("the other peer" if theirs_is_old else "this machine"),
            code=Exit.UNREACHABLE,
        )
    return version
