"""What lead and peers say to each other during training; topics and their bodies."""

from __future__ import annotations

from typing import Literal

import msgspec

from talkoot.core.receipt import Signed
from talkoot.plan.steps import Phase, Work


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """A microbatch that came by a stage in a committed step, and where from and where to: stages, -1 for none."""

    microbatch: int
    before: int
    after: int


class Update(msgspec.Struct, frozen=True, array_like=True):
    """How a committed step was applied to a stage: learning rate, gradient scale, and the microbatches that came by."""

    learning_rate: float
    scale: float
    visits: tuple[Visit, ...] = ()


class Donor(msgspec.Struct, frozen=True, array_like=True):
    """A peer that sends something: of layers ``[first, last)``, whose gradient had this norm."""

    peer: str
    first: int = 0
    last: int = 0
    norm: float = 1.0


class Assign(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``assign``: hold this stage, and take its state from there.

    Attributes:
        stage, num_stages, first, last: which layers ``[first, last)`` of the model's list.
        step: the committed steps that the state must have.
        reached: the most that there have been in this run; more after a rollback.
        source: ``stored``: from ``blobs``, or fresh when there are none; ``copy``: a donor sends it; ``journal``: a
            donor sends an older state and the gradients since; ``replay``: it is that of ``blobs``, and the donors
            send what they sent to the stage since; ``blend``: it is made of the donors' states.
        donors: the peers that send.
        blobs: names of checkpoint blobs that hold the layers.
        companions: of a replay: (stage, peer) of the others whose stages are computed again at the same time.
        updates: how the steps before ``step`` were applied, the last ones as many as the base is older.
    """

    stage: int
    num_stages: int
    first: int
    last: int
    step: int
    reached: int = 0
    source: Literal["stored", "copy", "journal", "replay", "blend"] = "stored"
    donors: tuple[Donor, ...] = ()
    blobs: tuple[str, ...] = ()
    companions: tuple[tuple[int, str], ...] = ()
    updates: tuple[Update, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """Peer to lead, ``ready``: I hold the stage that I was assigned.

    ``finite``: every number in it is; ``problem``: why what others sent for it could not be used, and I do not hold it.
    """

    stage: int
    finite: bool = True
    problem: str = ""


class Give(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``give``: send something to ``to``.

    Attributes:
        what: ``state``: your own; ``weights``: parts of it, by ``kinds``; ``kept``: what you keep of ``stage``;
            ``sent``: what you sent to the peers ``were`` since step ``since``; ``base``: your own, for a peer that
            keeps it.
    """

    to: str
    what: Literal["state", "weights", "kept", "sent", "base"] = "state"
    stage: int = 0
    kinds: tuple[str, ...] = ()
    were: tuple[str, ...] = ()
    since: int = 0


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Lead to peer, ``keep``: keep what is needed to bring this stage of another peer back.

    Attributes:
        kind: ``shadow``: apply its gradients at once; ``journal``: write them down.
        step, owner, blobs: what to begin with: the state of ``step``, from its owner, or stored as in :class:`Assign`.
    """

    kind: Literal["shadow", "journal"]
    stage: int
    first: int
    last: int
    step: int
    owner: str | None = None
    blobs: tuple[str, ...] = ()


class Keeps(msgspec.Struct, frozen=True):
    """Peer to lead, ``keeping``: the state of ``stage`` as of ``step`` is here; its gradients are heard from now on.

    A step of -1: something that was sent for it is lost, and I keep it no longer.
    """

    stage: int
    step: int


class Gradient(msgspec.Struct, frozen=True, array_like=True):
    """Peer to keeper, ``gradient``: my stage's, in this mixing attempt; it is not applied before the commit."""

    stage: int
    attempt: int


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """Peer to newcomer, ``sent/...``: what I sent in the message's step, as (phase, microbatch) of each frame.

    ``more``: this step is not complete yet.
    """

    keys: tuple[tuple[Phase, int], ...]
    more: bool = False


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


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """A peer that keeps this stage's gradients; ``wait``: the step is prepared only when it has this one."""

    peer: str
    wait: bool


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """With whom a stage's peers agree on its gradient.

    Attributes:
        attempt: counts up whenever any of this changes within a step; the mixing then starts again.
        group: the peers that hold the stage, in an order all of them agree on.
        visitors: the microbatches that visit the stage; its gradient is the mean over them.
        tie_to, tie_from: partners that share a tied embedding across a line's ends.
        streams: who is to get the stage's gradient from this peer.
    """

    group: tuple[str, ...]
    visitors: tuple[int, ...]
    attempt: int = 0
    tie_to: tuple[str, ...] = ()
    tie_from: str | None = None
    streams: tuple[Stream, ...] = ()


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
    """Lead to peer, ``commit``: apply the prepared step, to one's own stage and to what one keeps of others.

    Attributes:
        rates: learning rate of each stage.
        scale: of the gradient.
        streamed: (stage, peer, attempt) of the gradients that keepers were sent.
        log_from: what was sent in steps before this one need not be remembered; None = nothing need be.
    """

    rates: tuple[float, ...]
    scale: float
    streamed: tuple[tuple[int, str, int], ...] = ()
    log_from: int | None = None


class Cut(msgspec.Struct, frozen=True):
    """Peer to lead, ``cut``: my link to ``peer`` broke."""

    peer: str
    reason: str


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to lead, ``saved``: my state lies in this blob.

    Attributes:
        blob, size: the blob's name and bytes.
        tensors: digest of every tensor in it, by name.
        problem: why it could not be written; empty = it was.
    """

    blob: str
    size: int
    tensors: dict[str, str]
    problem: str = ""


class Heir(msgspec.Struct, frozen=True):
    """Lead to peer, ``heir``: if I am lost, this standby may lead; ``dismiss``: it may not, answered ``dismissed``."""

    peer: str
    address: str = ""


class Entries(msgspec.Struct, frozen=True):
    """Lead to standby, ``entries``: the log from entry ``after`` + 1 on, and its hash chain with them."""

    after: int
    signed: tuple[Signed, ...]
    chain: str


class Entered(msgspec.Struct, frozen=True):
    """Standby to lead, ``entered``: my copy of the log has that many entries."""

    position: int


class Orphan(msgspec.Struct, frozen=True):
    """Peer to standby, ``orphan``: I lost the lead and will not obey it any more."""

    generation: int


class Follow(msgspec.Struct, frozen=True, kw_only=True):
    """Peer to its new lead, ``follow``, the answer to ``claim``: I obey you, and this is what I hold.

    Attributes:
        stage: None = no state.
        applied: committed steps that it contains.
        prepared: the step whose gradient is final and not applied; -1 = none.
        keeps: (stage, base, step): what is kept of others' stages: gradients since ``base``, all up to ``step``.
    """

    stage: int | None
    applied: int = 0
    prepared: int = -1
    keeps: tuple[tuple[int, int, int], ...] = ()
