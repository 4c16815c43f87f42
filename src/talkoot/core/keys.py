"""Ed25519 keys (RFC 8032): a peer is its public key, and a statement counts only with its signature."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId

SIGNATURE_BYTES = 64
PEER_DIGITS = 64


class Key:
    """A private signing key; ``peer`` is the matching public identity.

    Args:
        secret: the 32 secret bytes; a fresh random key when omitted.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        fresh = secret is None
        self._private = Ed25519PrivateKey.generate() if fresh else Ed25519PrivateKey.from_private_bytes(secret)
        public = self._private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.peer = PeerId(public.hex())

    @classmethod
    def derived(cls, *parts: str | int) -> Key:
        """A key that is a function of its arguments: for simulations, whose logs repeat; not for peers."""
        return cls(hashlib.blake2b(repr(parts).encode(), digest_size=32, person=b"sim-key").digest())

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature of ``data``."""
        return self._private.sign(data)

    def save(self, path: Path) -> None:
        """Write the secret, readable by its owner alone; an existing file is never overwritten."""
        secret = self._private.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secret)
        except OSError:
            path.unlink(missing_ok=True)  # half a key would only be in the way of a whole one
            raise

    @classmethod
    def load(cls, path: Path) -> Key:
        """Read a key that :meth:`save` wrote.

        Raises:
            TalkootError: the file is not exactly one secret.
        """
        secret = path.read_bytes()
        if len(secret) != 32:
            raise TalkootError(
                "this is not a talkoot key",
                where=str(path),
                why=f"it holds {len(secret)} bytes, a key has 32",
                next="restore the key from a backup, or remove the file to start with a new identity",
            )
        return cls(secret)


@lru_cache(maxsize=4096)
def _public(peer: str) -> Ed25519PublicKey | None:
    if peer != peer.lower():
        return None  # a key has one name only: the same digits in capitals would be a second identity
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer))
    except ValueError:
        return None


def verify(peer: str, signature: bytes, data: bytes) -> bool:
    """Whether ``signature`` is ``peer``'s over ``data``; malformed input is simply not a signature."""
    public = _public(peer) if len(peer) == PEER_DIGITS else None
    if public is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        public.verify(signature, data)
    except InvalidSignature:
        return False
    return True
