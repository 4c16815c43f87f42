"""The facts in training's receipts, and the state that folds from them."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from talkoot.core.fold import Chapter, Entry, chapters
from talkoot.core.receipt import Receipt
from talkoot.plan.steps import Route
from talkoot.run.records import Appointed, End, Facts, Gone, Joined, Resume, RunState, Start, Succeeded, Warned


class Seated(Facts, frozen=True, kw_only=True):
    """``peer.seat``: a peer holds a stage and its state is that of ``step``; ``source`` says where from."""

    peer: str
    name: str
    stage: int
    source: str


class Worked(Facts, frozen=True, kw_only=True):
    """``train.step``: a peer's own account of its part of a step.

    ``forwards``, ``backwards``, ``losses``: how often it did each; more than its microbatches = work
    done twice after a crash.
    """

    stage: int
    microbatches: tuple[int, ...]
    sent_bytes: int
    busy_s: float
    forwards: int = 0
    backwards: int = 0
    losses: int = 0


class Committed(Facts, frozen=True, kw_only=True):
    """``train.commit``: a step was applied by everybody; or, where replicas step by themselves, all reported a round.

    Attributes:
        losses: by microbatch (of a round: by replica), nats per token.
        paths, stages: the peers (by name) that each microbatch visited, and the stages that they served; ``stages``
            is left out where each microbatch visited all in order.
        stage_norms: gradient norm of each stage, before clipping.
        bumps: stages whose learning rate has a factor, and the factor.
        steps: how many steps this is: 1, or those of a round.
    """

    loss: float
    losses: tuple[float, ...]
    paths: tuple[tuple[str, ...], ...]
    stages: tuple[tuple[int, ...], ...] = ()
    tokens: int
    learning_rate: float
    gradient_norm: float
    stage_norms: tuple[float, ...] = ()
    bumps: tuple[tuple[int, float], ...] = ()
    steps: int = 1

    def ways(self, num_stages: int) -> list[tuple[int, ...]]:
        """The stages that each microbatch visited, in its order."""
        return list(self.stages) if self.stages else [tuple(range(num_stages))] * len(self.paths)


class Evaluated(Facts, frozen=True, kw_only=True):
    """``train.evaluate``: mean held-out loss, nats per token."""

    loss: float
    tokens: int


class Checkpointed(Facts, frozen=True, kw_only=True):
    """``train.checkpoint``: a whole snapshot exists."""

    manifest: str
    state_hash: str
    num_bytes: int


class RolledBack(Facts, frozen=True, kw_only=True):
    """``train.rollback``: commits from ``step`` on are void; the run goes on from there."""

    reason: str


class Recovered(Facts, frozen=True, kw_only=True):
    """``train.recover``: which rungs of the ladder served, and how long nothing was computed.

    ``approximate``: stages that are not what they were.
    """

    rung: str
    lost: tuple[str, ...]
    pause_s: float
    approximate: tuple[int, ...] = ()


class Blended(Facts, frozen=True, kw_only=True):
    """``train.blend``: nobody had a stage's state any more, and it is made of its neighbours; the run is approximate
    now.

    Attributes:
        sources: names and stages of the peers that gave their weights, and the gradient norms that weigh them.
        merge, omega_power, moments, bump: how, as in the recipe.
        loss: of the last committed step.
    """

    stage: int
    sources: tuple[tuple[str, int, float], ...]
    merge: str
    omega_power: int
    moments: str
    bump: float
    loss: float | None

    def words(self) -> str:
        """What was done, in a few words."""
        sources = " and ".join(str(stage) for _, stage, _ in self.sources)
        return f"nobody had stage {self.stage} any more, it was made of stages {sources}: approximate from here on"


class Routed(Facts, frozen=True, kw_only=True):
    """``train.routes``: the ways that microbatches take from here on, and how they were found.

    ``seconds``: how long that took.
    """

    routes: tuple[Route, ...]
    reason: str
    seconds: float


class Mended(Facts, frozen=True, kw_only=True):
    """``train.mend``: peers were lost within a step, and the step went on around the holes.

    Attributes:
        lost: names.
        repaired, skipped, restarted: visits taken over by another peer, left out, or whose microbatch began again.
        repeated: forwards that had been done already and are done again for it.
    """

    lost: tuple[str, ...]
    repaired: int
    skipped: int
    restarted: int
    repeated: int

    def words(self) -> str:
        """What was done, in a few words."""
        parts = [f"{self.repaired} visits taken over"] if self.repaired else []
        parts += [f"{self.skipped} left out"] if self.skipped else []
        parts += [f"{self.restarted} microbatches begun again"] if self.restarted else []
        parts += [f"{self.repeated} forwards repeated"] if self.repeated else []
        return ", ".join(parts) or "nothing was on its way through them"


class PeerState(msgspec.Struct, frozen=True):
    """One peer that is present."""

    name: str
    stage: int | None = None
    busy_s: float = 0.0
    microbatches: int = 0
    sent_bytes: int = 0


class PeersState(msgspec.Struct, frozen=True):
    """The chapter ``peers``: who is present (by identity), and how many ever joined or were lost."""

    present: MappingProxyType[str, PeerState] = MappingProxyType({})
    joined: int = 0
    lost: int = 0


class TrainState(msgspec.Struct, frozen=True):
    """The chapter ``train``: ``step`` committed steps stand, the next one is number ``step``.

    ``norms``: of each stage's last gradient; ``blended``: at which step a stage was approximated last.
    """

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    held_out: float | None = None
    checkpoint: int | None = None
    manifest: str = ""
    generation: int = 0
    rollbacks: int = 0
    norms: tuple[float, ...] = ()
    blended: MappingProxyType[int, int] = MappingProxyType({})


def _peers(state: PeersState, entry: Entry) -> PeersState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    present = dict(state.present)
    match receipt.op:
        case "run.start" | "run.resume" | "run.end":
            return replace(state, present=MappingProxyType({}))  # peers do not outlive their lead
        case "peer.join":
            facts = receipt.read(Joined)
            present[facts.peer] = PeerState(facts.name)
            return replace(state, present=MappingProxyType(present), joined=state.joined + 1)
        case "peer.seat":
            facts = receipt.read(Seated)
            if facts.peer not in present:
                raise ValueError(f"{facts.peer[:8]} never joined")
            present[facts.peer] = replace(present[facts.peer], stage=facts.stage)
            return replace(state, present=MappingProxyType(present))
        case "peer.lost":
            present.pop(receipt.read(Gone).peer, None)
            return replace(state, present=MappingProxyType(present), lost=state.lost + 1)
        case "train.step":
            return replace(state, present=MappingProxyType(_credit(present, receipt)))
    return state


def _credit(present: dict[str, PeerState], receipt: Receipt) -> dict[str, PeerState]:
    facts, peer = receipt.read(Worked), present.get(receipt.peer)
    if peer is None:
        raise ValueError(f"{receipt.peer[:8]} is not in this run")
    present[receipt.peer] = msgspec.structs.replace(
        peer,
        busy_s=peer.busy_s + facts.busy_s,
        microbatches=peer.microbatches + len(facts.microbatches),
        sent_bytes=peer.sent_bytes + facts.sent_bytes,
    )
    return present


def _train(state: TrainState, entry: Entry) -> TrainState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    if receipt.generation < state.generation:
        raise ValueError(f"generation {receipt.generation} is stale, the run is at {state.generation}")
    match receipt.op:
        case "run.resume" | "run.succeed":  # so that no two leads share a generation, even when one committed nothing
            if receipt.op == "run.succeed" and receipt.generation == state.generation:
                raise ValueError("whoever succeeds a lead does so under a new generation")
            return replace(state, generation=receipt.generation)
        case "train.commit":
            facts = receipt.read(Committed)
            if receipt.step != state.step:
                raise ValueError(f"step {receipt.step} cannot be committed, the next one is {state.step}")
            tokens = state.tokens + facts.tokens
            norms, generation = facts.stage_norms, receipt.generation
            return replace(
                state, step=state.step + facts.steps, tokens=tokens, loss=facts.loss, norms=norms, generation=generation
            )
        case "train.blend":
            blended = {**state.blended, receipt.read(Blended).stage: receipt.step}
            return replace(state, blended=MappingProxyType(blended))
        case "train.rollback":
            if receipt.step > state.step:
                raise ValueError("a rollback goes back")
            per_step = state.tokens // state.step if state.step else 0
            void = state.checkpoint is not None and state.checkpoint > receipt.step
            return replace(
                state,
                checkpoint=(receipt.step or None) if void else state.checkpoint,  # a later one was passed over
                manifest="" if void else state.manifest,
                step=receipt.step,
                tokens=per_step * receipt.step,
                generation=receipt.generation,
                rollbacks=state.rollbacks + 1,
                blended=MappingProxyType({s: at for s, at in state.blended.items() if at <= receipt.step}),
            )
        case "train.checkpoint":
            return replace(state, checkpoint=receipt.step, manifest=receipt.read(Checkpointed).manifest)
        case "train.evaluate":
            return replace(state, held_out=receipt.read(Evaluated).loss)
    return state  # a peer's own account changes nothing until the commit that cites it


chapters.register("peers")(Chapter(("run.", "peer.", "train.step"), PeersState(), _peers))
chapters.register("train")(Chapter(("run.resume", "run.succeed", "train."), TrainState(), _train))

__all__ = [
    "Appointed",
    "Blended",
    "Checkpointed",
    "Committed",
    "End",
    "Evaluated",
    "Facts",
    "Gone",
    "Joined",
    "Mended",
    "PeerState",
    "PeersState",
    "Recovered",
    "Resume",
    "RolledBack",
    "Routed",
    "RunState",
    "Seated",
    "Start",
    "Succeeded",
    "TrainState",
    "Warned",
    "Worked",
]
