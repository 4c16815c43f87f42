"""The facts in receipts of rounds, and what folds from them: how far replicas are apart, and what mixing costs."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from talkoot.core.fold import Chapter, Entry, chapters
from talkoot.train.run_records import Facts

WEIGHT = 0.1  # of the newest pair in the running means


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


class MixingState(msgspec.Struct, frozen=True):
    """The chapter ``mixing``.

    Attributes:
        rounds: receipts of rounds, over all replicas.
        exchanges, alone: how many rounds there were with a partner, and without although one was due.
        wait_s, busy_s, sent_bytes: sums over all replicas.
        apart, progress: running means of what the receipts say; half of ``apart`` is the replicas' variance.
        kept, kept_round, view: blobs by slot of the newest stored states, the round they follow, and the view then.
        held_out: newest held-out loss by slot.
        number: of the newest view.
    """

    rounds: int = 0
    exchanges: int = 0
    alone: int = 0
    one_sided: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    sent_bytes: int = 0
    apart: float | None = None
    progress: float | None = None
    kept: MappingProxyType[int, str] = MappingProxyType({})
    kept_round: int = 0
    held_out: MappingProxyType[int, float] = MappingProxyType({})
    number: int = 0
    averaged: float | None = None

    @property
    def spread(self) -> float | None:
        """Variance of the replicas' slow weights, as a multiple of the variance of their outer gradients."""
        return self.apart / self.progress if self.apart is not None and self.progress else None

    @property
    def idle(self) -> float:
        """Share of the replicas' time that was spent waiting for each other."""
        return self.wait_s / (self.wait_s + self.busy_s) if self.wait_s + self.busy_s else 0.0


def _running(before: float | None, new: float | None) -> float | None:
    if new is None:
        return before
    return new if before is None else before + WEIGHT * (new - before)


def _mixing(state: MixingState, entry: Entry) -> MixingState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    match receipt.op:
        case "train.round":
            facts = receipt.read(Rounded)
            known = state.held_out
            if facts.held_out is not None:
                known = MappingProxyType({**known, facts.slot: facts.held_out})
            return replace(
                state,
                rounds=state.rounds + 1,
                exchanges=state.exchanges + bool(facts.partners),
                alone=state.alone + bool(facts.alone and not facts.partners),
                one_sided=state.one_sided + facts.one_sided,
                wait_s=state.wait_s + facts.wait_s,
                busy_s=state.busy_s + facts.busy_s,
                sent_bytes=state.sent_bytes + facts.sent_bytes,
                apart=_running(state.apart, facts.apart),
                progress=_running(state.progress, facts.progress),
                held_out=known,
            )
        case "train.kept":
            facts = receipt.read(Kept)
            return replace(state, kept=MappingProxyType(dict(facts.blobs)), kept_round=facts.round)
        case "train.view":
            return replace(state, number=receipt.read(Viewed).number)
        case "train.average":
            return replace(state, averaged=receipt.read(Averaged).held_out)
    return state


chapters.register("mixing")(
    Chapter(("train.round", "train.kept", "train.view", "train.average"), MixingState(), _mixing)
)
