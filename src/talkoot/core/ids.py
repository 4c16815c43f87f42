"""Identifiers. Content is named by its hash; a peer is named by its public key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NewType

PeerId = NewType("PeerId", str)  # 64 hex digits: the Ed25519 public key itself
Digest = NewType("Digest", str)  # 64 hex digits: BLAKE2b-256 of canonical bytes
RunId = NewType("RunId", str)

DIGEST_BYTES = 32


def digest(data: bytes | memoryview, purpose: str = "") -> Digest:
    """BLAKE2b-256 of ``data`` as hex. ``purpose`` (at most 16 bytes) keeps different uses from colliding."""
    return Digest(hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=purpose.encode()).hexdigest())


def digest_of_digests(named: Iterable[tuple[str, str]]) -> Digest:
    """One digest for many named ones, independent of the order in which they arrive."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"named")
    for name, value in sorted(named):
        hasher.update(f"{len(name)}:{name}={len(value)}:{value};".encode())
    return Digest(hasher.hexdigest())


def short(identifier: str) -> str:
    """The first eight digits, for people."""
    return identifier[:8]
