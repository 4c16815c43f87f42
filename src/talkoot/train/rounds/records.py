"""The facts in receipts of rounds, and what folds from them: how far replicas are apart, and what mixing costs."""

from __future__ import annotations

import math
from types import MappingProxyType

import msgspec

from talkoot.core.fold import Chapter, chapters
from talkoot.core.receipt import Receipt
from talkoot.run.records import Facts

WEIGHT = 0.02  # of the newest receipt in the running means, once there are 50: with 0.1 their ratio doubles by chance
REASONS, REASON_LENGTH = 12, 60  # of exchanges that came to nothing: kinds that are counted apart, and their length


class Rounded(Facts, frozen=True, kw_only=True):
    """``train.round``: a replica's own account of one of its rounds.

    Attributes:
        slot, view: its share of the data, and who was there, by number.
        steps, tokens: what it trained on.
        loss, gradient_norm: means over its inner steps; nats per token.
        held_out: of its slow weights after the round, where an evaluation was due.
        partners: names of those whose messages were merged.
        alone: exchanges of this round that came to nothing, each with the reason.
        one_sided: exchanges where it cannot know whether the partner merged.
        apart, progress: mean squared difference to a partner of the slow weights at the round's start and of the outer
            gradients, per parameter, from a sample; None where nobody was met.
        wait_s, busy_s, sent_bytes: seconds waiting for others, seconds computing, payload bytes sent to replicas.
    """

    slot: int
    view: int
    steps: int
    tokens: int
    loss: float
    gradient_norm: float = 0.0
    held_out: float | None = None
    partners: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    one_sided: int = 0
    apart: float | None = None
    progress: float | None = None
    wait_s: float = 0.0
    busy_s: float = 0.0
    sent_bytes: int = 0


class Viewed(Facts, frozen=True, kw_only=True):
    """``train.view``: who is in the run: names, slots, inner steps per round, and the round of each one's entry."""

    number: int
    names: tuple[str, ...]
    slots: tuple[int, ...]
    steps: tuple[int, ...]
    since: tuple[int, ...]


class Kept(Facts, frozen=True, kw_only=True):
    """``train.kept``: after ``round`` rounds, each slot's whole state lies in a blob."""

    round: int
    blobs: tuple[tuple[int, str], ...]


class Averaged(Facts, frozen=True, kw_only=True):
    """``train.average``: the final model is the mean of ``replicas``; held-out losses of it and of its members."""

    replicas: int
    held_out: float | None
    best: float | None
    mean: float | None

    def words(self) -> str:
        """As the end of a sentence that begins with the final model."""
        text = f"the mean of {self.replicas} replica{'s' * (self.replicas != 1)}"
        if self.held_out is None or self.best is None or self.mean is None:
            return text
        return f"{text}: held-out loss {self.held_out:.4f}; theirs {self.mean:.4f} on average, {self.best:.4f} at best"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all rounds that were trained on one share of the data."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    alone: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    sent_bytes: int = 0


class MixingState(msgspec.Struct, frozen=True):
    """The chapter ``mixing``.

    Attributes:
        rounds: receipts of rounds, over all replicas.
        exchanges, alone: how many rounds there were with a partner, and without although one was due.
        why: exchanges that came to nothing, by reason.
        wait_s, busy_s, sent_bytes: sums over all replicas.
        apart, progress: running means of what the receipts say; half of ``apart`` is the replicas' variance.
        measured: receipts in them; each pair writes two.
        kept, kept_round: blobs by slot of the newest stored states, and the round they follow.
        held_out: newest held-out loss by slot.
        slots: sums by slot.
        view, names: the newest one, and who was given each slot last.
        final: what became of the replicas at the end.
    """

    rounds: int = 0
    exchanges: int = 0
    alone: int = 0
    one_sided: int = 0
    why: MappingProxyType[str, int] = MappingProxyType({})
    wait_s: float = 0.0
    busy_s: float = 0.0
    sent_bytes: int = 0
    apart: float | None = None
    progress: float | None = None
    measured: int = 0
    kept: MappingProxyType[int, str] = MappingProxyType({})
    kept_round: int = 0
    held_out: MappingProxyType[int, float] = MappingProxyType({})
    slots: MappingProxyType[int, Slot] = MappingProxyType({})
    view: Viewed | None = None
    names: MappingProxyType[int, str] = MappingProxyType({})
    final: Averaged | None = None

    @property
    def averaged(self) -> float | None:
        """Held-out loss of the mean model, once there is one."""
        return self.final.held_out if self.final else None

    @property
    def spread(self) -> float | None:
        """Variance of the replicas' slow weights, as a multiple of the variance of their outer gradients."""
        return self.apart / self.progress if self.apart is not None and self.progress else None

    @property
    def idle(self) -> float:
        """Share of the replicas' time that was spent waiting for each other."""
        return self.wait_s / (self.wait_s + self.busy_s) if self.wait_s + self.busy_s else 0.0


def _running(before: float | None, new: float | None, known: int) -> float | None:
    """The mean of ``known`` receipts and a new one; of many, the newest count most."""
    if new is None or before is None:
        return before if new is None else new
    return before + max(WEIGHT, 1 / (known + 1)) * (new - before)


def mixed(state: MixingState, receipt: Receipt) -> MixingState:
    """The chapter after one more receipt."""
    replace = msgspec.structs.replace
    match receipt.op:
        case "train.round":
            return _rounded(state, receipt.read(Rounded))
        case "train.kept":
            facts = receipt.read(Kept)
            return replace(state, kept=MappingProxyType(dict(facts.blobs)), kept_round=facts.round)
        case "train.view":
            view = receipt.read(Viewed)
            names = {**state.names, **dict(zip(view.slots, view.names, strict=True))}
            return replace(state, view=view, names=MappingProxyType(names))
        case "train.average":
            return replace(state, final=receipt.read(Averaged))
    return state


def _rounded(state: MixingState, facts: Rounded) -> MixingState:
    known, sums = state.held_out, state.slots.get(facts.slot, Slot())
    apart, progress, wait_s, busy_s = map(_number, (facts.apart, facts.progress, facts.wait_s, facts.busy_s))
    if facts.held_out is not None:
        known = MappingProxyType({**known, facts.slot: facts.held_out})
    alone = bool(facts.alone and not facts.partners)
    slot = Slot(
        rounds=sums.rounds + 1,
        steps=sums.steps + facts.steps,
        tokens=sums.tokens + facts.tokens,
        alone=sums.alone + alone,
        wait_s=sums.wait_s + (wait_s or 0.0),
        busy_s=sums.busy_s + (busy_s or 0.0),
        sent_bytes=sums.sent_bytes + facts.sent_bytes,
    )
    return msgspec.structs.replace(
        state,
        rounds=state.rounds + 1,
        exchanges=state.exchanges + bool(facts.partners),
        alone=state.alone + alone,
        one_sided=state.one_sided + facts.one_sided,
        why=_counted(state.why, facts.alone) if facts.alone else state.why,
        wait_s=state.wait_s + (wait_s or 0.0),
        busy_s=state.busy_s + (busy_s or 0.0),
        sent_bytes=state.sent_bytes + facts.sent_bytes,
        apart=_running(state.apart, apart, state.measured),
        progress=_running(state.progress, progress, state.measured),
        measured=state.measured + (apart is not None),
        held_out=known,
        final=None,  # a run that was complete goes on
        slots=MappingProxyType({**state.slots, facts.slot: slot}),
    )


def _number(value: float | None) -> float | None:
    """What a replica says of itself, unless it is no number: one that lies must not spoil the sums of all."""
    return value if value is not None and math.isfinite(value) else None


def _counted(known: MappingProxyType[str, int], reasons: tuple[str, ...]) -> MappingProxyType[str, int]:
    """Partners' words are among the reasons: their number is bounded."""
    counts = dict(known)
    for reason in reasons:
        kind = reason[:REASON_LENGTH]
        kind = kind if kind in counts or len(counts) < REASONS else "others"
        counts[kind] = counts.get(kind, 0) + 1
    return MappingProxyType(counts)


chapters.register("mixing")(
    Chapter(
        ("train.round", "train.kept", "train.view", "train.average"),
        MixingState(),
        lambda state, entry: mixed(state, entry.receipt),
    )
)
