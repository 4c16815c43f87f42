"""What lead and peers say to each other during training; topics and their bodies."""

from __future__ import annotations

import msgspec

from talkoot.core.receipt import Signed
from talkoot.plan.steps import Phase, Work


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
    """A microbatch as one peer of its path sees it.

    Attributes:
        position, length: which visit of the path this is, from 0, and which the last one is.
        source, target: whom the activation comes from and goes to. In a ring the last relay's target is the origin,
            and the origin's source is the last relay.
        after: the microbatch that must be back here before this one leaves.
        round: how often the microbatch had to begin again.
    """

    microbatch: int
    position: int
    length: int
    source: str | None
    target: str | None
    after: int | None = None
    round: int = 0


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """With whom a stage's peers agree on its gradient.

    Attributes:
        attempt: counts up whenever any of this changes within a step; the mixing then starts again.
        group: the peers that hold the stage, in an order all of them agree on.
        visitors: the microbatches that visit the stage; its gradient is the mean over them.
        tie_to, tie_from: partners that share a tied embedding across a line's ends.
    """

    group: tuple[str, ...]
    visitors: tuple[int, ...]
    attempt: int = 0
    tie_to: tuple[str, ...] = ()
    tie_from: str | None = None


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``begin``: compute this step (or evaluate).

    Attributes:
        num_microbatches: of the whole step.
        items, order: this peer's share of the paths and its order of work; without one it takes what is ready.
        mix: how the stage's gradient is agreed on.
        ring, slots: the layout, and how many microbatches the peer may hold (0 = any number).
        evaluate: forward only, on held-out batches.
    """

    num_microbatches: int
    items: tuple[Item, ...]
    order: tuple[Work, ...]
    mix: Mix
    ring: bool = False
    slots: int = 0
    evaluate: bool = False


class Neighbour(msgspec.Struct, frozen=True, array_like=True):
    """A peer of the same or a neighbouring stage, and what a hop to it costs in seconds, half of the work included."""

    peer: str
    stage: int
    hop_s: float


class Negotiate(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``negotiate``: agree with your neighbours on lanes.

    Attributes:
        places: lanes that a relay can be part of, or that an origin wants.
        period_s: of the peers' clocks; about half a usual round trip.
    """

    stage: int
    num_stages: int
    places: int
    neighbours: tuple[Neighbour, ...]
    period_s: float
    seed: int


class Census(msgspec.Struct, frozen=True):
    """Lead to peer, ``census``: peers are lost within a step; say what you have done, and hear them no more."""

    lost: tuple[str, ...]
    count: int


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to lead, ``standing/COUNT``: what I have done in this step, as (phase, microbatch).

    ``arrived``: microbatches whose forward (at their origin: loss) is still to be done, and whose input is here.
    """

    done: tuple[tuple[Phase, int], ...]
    arrived: tuple[int, ...]


class Amend(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``amend``: the paths have changed; go on with these items and this mixing."""

    items: tuple[Item, ...]
    mix: Mix


class Carry(msgspec.Struct, frozen=True, array_like=True):
    """Peer to peer, ``hop/...``: the frames are the input of your work of this phase and round on this microbatch."""

    phase: Phase
    microbatch: int
    round: int = 0


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to lead, ``prepared``: my gradients are final and I can apply them.

    Attributes:
        losses: (microbatch, loss in nats per token) pairs, from whoever computed losses.
        norms: squared norm of each tensor's gradient, in canonical order.
        attempt: of the mixing that this follows.
        receipt: the peer's signed statement about its work.
    """

    losses: tuple[tuple[int, float], ...]
    norms: tuple[float, ...]
    attempt: int = 0
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
