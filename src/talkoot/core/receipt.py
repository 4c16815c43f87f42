"""The one noun: a signed statement that a peer performed a task.

A task is a named operation on content-addressed inputs. A receipt says who performed it, when, at what cost,
and what came out; facts particular to the operation travel in ``body``, whose type the operation's room
declares. Tensors never enter a receipt, only their hashes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode, encode
from talkoot.core.ids import Digest, PeerId, digest
from talkoot.core.keys import Key, verify

T = TypeVar("T")

MAX_RECEIPT_BYTES = 2**20

# Checked whenever a receipt is decoded: a stranger's figures must neither poison sums nor overflow the log.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]  # finite


class Task(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A unit of work that can be asked for.

    Attributes:
        op: the operation, ``room.verb`` (``train.step``).
        inputs: digests of what it reads, by name.
        seed: source of all its randomness.
        deadline: world time in seconds after which nobody waits for it; 0 = none.
        price: what the asker pays, in millionths of a credit.
    """

    op: str
    inputs: dict[str, str] = {}
    seed: int = 0
    deadline: Seconds = 0.0
    price: Count = 0


class Receipt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A peer's statement about one performed task.

    Attributes:
        run, generation, step: where in which run it belongs; a stale generation never changes state.
        peer: the signer's public key.
        task: what was asked.
        outputs: digests of what came out, by name.
        body: MessagePack of the operation's own facts.
        cost: compute seconds spent.
        started, ended: world time in seconds.
        parents: ids of the receipts this one builds on.
    """

    version: int = PROTOCOL
    run: str
    generation: Count
    step: Count
    peer: str
    task: Task
    outputs: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw(b"\xc0")
    cost: Seconds = 0.0
    started: Seconds = 0.0
    ended: Seconds = 0.0
    parents: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        """The task's operation."""
        return self.task.op

    def read(self, kind: type[T]) -> T:
        """The operation's facts as ``kind``.

        Raises:
            ValueError: the body is not a ``kind``.
        """
        return decode(bytes(self.body), kind)


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A receipt's exact bytes with the signature over them; what is stored and sent."""

    raw: bytes
    signature: bytes

    @property
    def id(self) -> Digest:
        """The receipt's name: the hash of its bytes."""
        return digest(self.raw, "receipt")

    def open(self) -> Receipt:
        """Decode and check.

        Raises:
            ValueError: malformed, too large, of another protocol, or not signed by the peer it names.
        """
        return _opened(self.raw, self.signature)


@lru_cache(maxsize=64)  # a receipt is often judged first and appended next, and checking a signature costs 100 us
def _opened(raw: bytes, signature: bytes) -> Receipt:
    receipt = decode(raw, Receipt, MAX_RECEIPT_BYTES)
    if not OLDEST_PROTOCOL <= receipt.version <= PROTOCOL:
        raise ValueError(f"it was written in protocol {receipt.version}")
    if not verify(receipt.peer, signature, raw):
        raise ValueError(f"the signature is not {receipt.peer[:8]}'s")
    return receipt


def sign(receipt: Receipt, key: Key) -> Signed:
    """Sign a receipt as its own peer.

    Raises:
        ValueError: the key belongs to somebody else.
    """
    if receipt.peer != key.peer:
        raise ValueError("a peer signs only its own receipts")
    raw = encode(receipt)
    return Signed(raw, key.sign(raw))


def body(facts: msgspec.Struct) -> msgspec.Raw:
    """An operation's facts in the form a receipt carries."""
    return msgspec.Raw(encode(facts))


__all__ = ["PeerId", "Receipt", "Signed", "Task", "body", "sign"]
