"""What lead and peers say to each other during training; topics and their bodies."""

from __future__ import annotations

import msgspec

from talkoot.core.receipt import Signed
from talkoot.plan.steps import Work


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


class Introduce(msgspec.Struct, frozen=True):
    """Lead to peer, ``introduce``: these are the others."""

    contacts: tuple[Contact, ...]


class Assign(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``assign``: hold this stage, and take its state from there.

    Attributes:
        stage, num_stages, first, last: which layers ``[first, last)`` of the model's list.
        step: the committed steps that the state must have.
        donor: a peer that will send it (topic ``state``); None = from ``blobs``, or fresh when those are empty.
        blobs: names of checkpoint blobs that hold the layers.
    """

    stage: int
    num_stages: int
    first: int
    last: int
    step: int
    donor: str | None = None
    blobs: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """Peer to lead, ``ready``: I hold the stage that I was assigned."""

    stage: int


class Give(msgspec.Struct, frozen=True):
    """Lead to peer, ``give``: send your state to ``to``."""

    to: str


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A microbatch as one peer sees it: from whom its activation comes and to whom it goes next."""

    microbatch: int
    source: str | None
    target: str | None


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``begin``: compute this step (or evaluate).

    Attributes:
        num_microbatches: of the whole step.
        items, order: this peer's share of the paths and its order of work.
        group: the peers that hold the same stage, in an order all of them agree on.
        tie_to, tie_from: partners that share a tied embedding across the pipeline's ends.
        evaluate: forward only, on held-out batches.
    """

    num_microbatches: int
    items: tuple[Item, ...]
    order: tuple[Work, ...]
    group: tuple[str, ...]
    tie_to: tuple[str, ...] = ()
    tie_from: str | None = None
    evaluate: bool = False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to lead, ``prepared``: my gradients are final and I can apply them.

    Attributes:
        losses: (microbatch, loss in nats per token) pairs, from the last stage.
        norms: squared norm of each tensor's gradient, in canonical order.
        receipt: the peer's signed statement about its work.
    """

    losses: tuple[tuple[int, float], ...]
    norms: tuple[float, ...]
    receipt: Signed | None = None


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``commit``: apply the prepared step."""

    learning_rate: float
    scale: float


class Cut(msgspec.Struct, frozen=True):
    """Peer to lead, ``cut``: my link to ``peer`` broke."""

    peer: str
    reason: str


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to lead, ``saved``: my state lies in this blob.

    Attributes:
        blob, size: the blob's name and bytes.
        tensors: digest of every tensor in it, by name.
    """

    blob: str
    size: int
    tensors: dict[str, str]
