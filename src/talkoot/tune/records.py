"""The facts in post-training's receipts, and the state that folds from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec

from talkoot.core.fold import Chapter, Entry, chapters
from talkoot.run.records import Facts, Gone, Joined, Start
from talkoot.tune.completion import Index, Sampling
from talkoot.tune.evaluate import Evaluation

KEPT = 3  # stored states per peer that a run can go back to
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Generated(Facts, frozen=True, kw_only=True):
    """``tune.generate``: the completions a peer made in a round. Digests of the frames stand in the receipt's outputs.

    Attributes:
        round: in which.
        task: digest of the task's definition.
        tokenizer: digest of the generator's tokenizer.
        policy: hash of the weights that generated; ``version``: updates that they had seen.
        sampling, seed: how, and the run's seed from which each sequence's follows.
        prompts: indices of the problems, one per group.
        samples: which draws of each prompt.
        lengths: tokens of each completion.
        stopped: whether each ended by itself.
        busy_s: seconds of work.
    """

    round: Index
    task: str
    tokenizer: str
    policy: str
    version: Index
    sampling: Sampling
    seed: int
    prompts: tuple[Index, ...]
    samples: tuple[tuple[Index, ...], ...]
    lengths: tuple[tuple[Index, ...], ...]
    stopped: tuple[tuple[bool, ...], ...]
    busy_s: float = 0.0

    @property
    def tokens(self) -> int:
        """All completions' tokens together."""
        return sum(map(sum, self.lengths))


class Updated(Facts, frozen=True, kw_only=True):
    """``tune.update``: what a peer learned in a round, from which completions (the receipt's parents), and its effect.

    Attributes:
        policy: hash of the weights afterwards; ``version``: updates seen.
        reward: mean reward of the peer's own completions of this round.
        learned: the learner's own facts, as plain numbers.
        counts: the learner's counts: tokens, groups used, groups skipped by reason.
        rejected: completions or records that were not used, by reason.
        absent: peers of the view whose record did not come in time.
        solo: it learned from its own completions only.
        reason: why the weights did not move; empty where they did.
        evaluations: scores, in rounds that evaluate.
        busy_s, sent_bytes, waited_s: work, traffic of the round, and waiting for others.
    """

    round: Index
    policy: str
    version: Index
    reward: Share
    learned: dict[str, float]
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    absent: tuple[str, ...] = ()
    solo: bool = False
    reason: str = ""
    evaluations: tuple[Evaluation, ...] = ()
    busy_s: float = 0.0
    sent_bytes: int = 0
    waited_s: float = 0.0

    def check(self) -> None:
        """ValueError where a number is not finite."""
        for name, value in (*self.learned.items(), ("busy_s", self.busy_s), ("waited_s", self.waited_s)):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}")


class Viewed(Facts, frozen=True, kw_only=True):
    """``tune.view``: who takes part from here on: (name, first round in which others wait for it)."""

    number: int
    places: tuple[tuple[str, int], ...]
    until: int


class Kept(Facts, frozen=True, kw_only=True):
    """``tune.kept``: a peer's state after ``round`` rounds is in the blob."""

    name: str
    round: int
    blob: str
    num_bytes: int


class TuneRolledBack(Facts, frozen=True, kw_only=True):
    """``tune.rollback``: rounds from ``round`` on are void; peers go on from there. Names to their stored states."""

    round: int
    reason: str


class Tuner(msgspec.Struct, frozen=True):
    """One peer's account, by name: sums over rounds that stand.

    Attributes:
        rounds: done. ``reward``: of the last round; ``rewards``: sum over all rounds.
        generated, trained: tokens. ``external``: groups of others learned from.
        rejected: by reason. ``alone``: rounds in which it learned from its own completions only.
        kept: stored states, newest last: (round, blob).
        marks: (round, rewards, generated, trained, external, alone, updates) at each of them.
    """

    present: bool = False
    rounds: int = 0
    reward: float | None = None
    rewards: float = 0.0
    generated: int = 0
    trained: int = 0
    external: int = 0
    rejected: Mapping[str, int] = MappingProxyType({})
    alone: int = 0
    policy: str = ""
    evaluations: tuple[Evaluation, ...] = ()
    busy_s: float = 0.0
    sent_bytes: int = 0
    kept: tuple[tuple[int, str], ...] = ()
    updates: int = 0  # rounds that it did itself: a peer that was away leaves some out
    marks: tuple[tuple[int, float, int, int, int, int, int], ...] = ()

    def mark(self) -> tuple[int, float, int, int, int, int, int]:
        """The sums that a rollback restores."""
        return (
            self.rounds,
            self.rewards,
            self.generated,
            self.trained,
            self.external,
            self.alone,
            self.updates,
        )


class TuneState(msgspec.Struct, frozen=True):
    """The chapter ``tune``: peers by name, and how far the run is."""

    active: bool = False  # whether this is a post-training run at all
    peers: Mapping[str, Tuner] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})  # of identities
    view: int = 0
    rollbacks: int = 0
    reached: int = 0  # rounds that all had done when the last session ended

    @property
    def round(self) -> int:
        """Rounds that every peer which takes part has done; with nobody there, those of the last session."""
        return min((peer.rounds for peer in self.peers.values() if peer.present), default=self.reached)

    @property
    def furthest(self) -> int:
        """The most rounds that any peer has done."""
        return max((peer.rounds for peer in self.peers.values()), default=0)


def _tune(state: TuneState, entry: Entry) -> TuneState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    if not state.active and receipt.op != "run.start":
        return state
    match receipt.op:
        case "run.start":
            return replace(state, active="tune" in receipt.read(Start).recipe)
        case "run.resume" | "run.end":
            absent = {name: replace(peer, present=False) for name, peer in state.peers.items()}
            return replace(state, peers=MappingProxyType(absent), reached=state.round)
        case "peer.join":
            joined = receipt.read(Joined)
            names = MappingProxyType({**state.names, joined.peer: joined.name})
            return _changed(replace(state, names=names), joined.name, present=True)
        case "peer.lost":
            gone = receipt.read(Gone)
            return _changed(state, gone.name, present=False)
        case "tune.view":
            return replace(state, view=receipt.read(Viewed).number)
        case "tune.generate":
            facts, name = receipt.read(Generated), _name(state, receipt.peer)
            busy_s = state.peers[name].busy_s + facts.busy_s
            return _changed(state, name, generated=state.peers[name].generated + facts.tokens, busy_s=busy_s)
        case "tune.update":
            return _update(state, _name(state, receipt.peer), receipt.read(Updated))
        case "tune.kept":
            kept = receipt.read(Kept)
            return _keep(state, kept)
        case "tune.rollback":
            return _roll_back(state, receipt.read(TuneRolledBack).round)
    return state


def _name(state: TuneState, peer: str) -> str:
    if peer not in state.names:
        raise ValueError(f"{peer[:8]} never joined")
    return state.names[peer]


def _changed(state: TuneState, name: str, **changes: object) -> TuneState:
    peer = msgspec.structs.replace(state.peers.get(name, Tuner()), **changes)
    return msgspec.structs.replace(state, peers=MappingProxyType({**state.peers, name: peer}))


def _update(state: TuneState, name: str, facts: Updated) -> TuneState:
    facts.check()
    peer = state.peers[name]
    if facts.round < peer.rounds:
        raise ValueError(f"{name} has done round {facts.round} before")
    rejected = {
        key: peer.rejected.get(key, 0) + facts.rejected.get(key, 0) for key in {*peer.rejected, *facts.rejected}
    }
    return _changed(
        state,
        name,
        rounds=facts.round + 1,
        reward=facts.reward,
        updates=peer.updates + 1,
        rewards=peer.rewards + facts.reward,
        trained=peer.trained + facts.counts.get("tokens", 0),
        external=peer.external + facts.counts.get("external_groups", 0),
        rejected=MappingProxyType(rejected),
        alone=peer.alone + facts.solo,
        policy=facts.policy,
        evaluations=facts.evaluations or peer.evaluations,
        busy_s=peer.busy_s + facts.busy_s,
        sent_bytes=peer.sent_bytes + facts.sent_bytes,
    )


def _keep(state: TuneState, kept: Kept) -> TuneState:
    peer = state.peers.get(kept.name, Tuner())
    if kept.round != peer.rounds:
        raise ValueError(f"{kept.name} has done {peer.rounds} rounds, the stored state is of {kept.round}")
    stored = ((*peer.kept, (kept.round, kept.blob)))[-KEPT:]
    return _changed(state, kept.name, kept=stored, marks=(*peer.marks, peer.mark())[-KEPT:])


def _roll_back(state: TuneState, round_number: int) -> TuneState:
    peers = {}
    for name, peer in state.peers.items():
        kept = tuple(one for one in peer.kept if one[0] <= round_number)
        marks = tuple(one for one in peer.marks if one[0] <= round_number)
        rounds, rewards, generated, trained, external, alone, updates = marks[-1] if marks else (0, 0.0, 0, 0, 0, 0, 0)
        peers[name] = msgspec.structs.replace(
            peer,
            rounds=rounds,
            rewards=rewards,
            generated=generated,
            trained=trained,
            external=external,
            alone=alone,
            updates=updates,
            kept=kept,
            marks=marks,
        )
    return msgspec.structs.replace(
        state,
        peers=MappingProxyType(peers),
        rollbacks=state.rollbacks + 1,
        reached=min(state.reached, round_number),
    )


chapters.register("tune")(Chapter(("run.start", "run.resume", "run.end", "peer.", "tune."), TuneState(), _tune))
