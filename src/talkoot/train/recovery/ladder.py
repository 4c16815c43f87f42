"""The protocol that every rung implements, and the climb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One stage after a loss.

    Attributes:
        survivors: peers that hold its committed state.
        keepers: peers of other stages that can bring it back bit for bit.
        blocks: decoder blocks in it.
        ends: whether it also holds the embedding or the head.
        approximated: whether it is itself a blend that no step was done with yet.
        gradient_norm: of the stage, before clipping, in the last committed step.
    """

    survivors: tuple[PeerId, ...]
    keepers: tuple[PeerId, ...] = ()
    blocks: int = 1
    ends: bool = False
    approximated: bool = False
    gradient_norm: float = 1.0


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when some peers are gone.

    Attributes:
        stages: what is left of each.
        hurt: stages that lost somebody, and those that nobody holds.
        step: committed steps.
        checkpoint: step of the newest whole snapshot, if there is one.
        logged: why the steps since then cannot be computed again from what neighbours sent; empty = they can.
        ring: whether the first and the last stage are neighbours.
        exact_moments: whether a blend is to have the lost stage's own optimizer moments.
        failed: (stage, rung) of those that were tried in this recovery and brought nothing usable.
    """

    stages: tuple[Holding, ...]
    hurt: tuple[int, ...]
    step: int
    checkpoint: int | None = None
    logged: str = "nobody remembers what was sent"
    ring: bool = False
    exact_moments: bool = False
    failed: frozenset[tuple[int, str]] = frozenset()

    @property
    def empty_stages(self) -> list[int]:
        """Stages that nobody holds any more."""
        return [stage for stage, held in enumerate(self.stages) if not held.survivors]

    def neighbours(self, stage: int) -> list[int]:
        """The stages before and after a stage that hold decoder blocks."""
        count = len(self.stages)
        beside = [(stage - 1) % count, (stage + 1) % count] if self.ring else [stage - 1, stage + 1]
        return sorted({s for s in beside if 0 <= s < count and s != stage and self.stages[s].blocks})


class Share(msgspec.Struct, frozen=True):
    """A neighbour's part in a blend: who, of which stage, and the norm of its gradient."""

    peer: PeerId
    stage: int
    norm: float


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage's state comes from.

    Attributes:
        rung: the method's name, for the log.
        how: ``copy``: from a survivor; ``kept``: from a keeper; ``replay``: the snapshot's, and the steps since are
            computed again; ``blend``: of the neighbours' states; ``rollback``: everybody goes back to ``step``.
        step: committed steps after it; fewer than before means a rollback of everybody.
        keeper: who sends what it keeps.
        shares: the neighbours that it is made of.
        exact: whether the state is bit for bit the lost one.
    """

    rung: str
    how: Literal["copy", "kept", "replay", "blend", "rollback"]
    step: int
    keeper: PeerId | None = None
    shares: tuple[Share, ...] = ()
    exact: bool = True


class Rung(Protocol):
    """One way to get a stage back; pure."""

    def __call__(self, loss: Loss, stage: int) -> Source | str:
        """Where its state comes from, or why this rung cannot serve."""
        ...


rungs: Registry[Rung] = Registry("recovery rung")


class Unrecoverable(TalkootError):
    """No rung can serve; the run stops before anything is approximated or lost.

    Attributes:
        reasons: for each lost stage, what each rung said.
    """

    def __init__(self, reasons: Mapping[int, Mapping[str, str]], step: int) -> None:
        self.reasons = reasons
        whys = "; ".join(
            f"stage {stage}: " + (", ".join(f"{rung}: {why}" for rung, why in said.items()) or "no rung is configured")
            for stage, said in reasons.items()
        )
        super().__init__(
            "the swarm cannot recover",
            where=f"stages {sorted(reasons)} after {step} committed steps",
            why=whys,
            next="run the same command again to go on from the newest snapshot; for the next time add replicas, "
            "'shadow' to recovery.ladder, or 'checkpoint' with train.checkpoint_every > 0",
            code=Exit.UNREACHABLE,
        )


def climb(names: Sequence[str], loss: Loss) -> dict[int, Source]:
    """For each hurt stage, the first source that any of the named rungs offers.

    Where somebody still holds the stage, that is its source, unless ``checkpoint`` comes first.
    Lost stages that are computed again need what other lost ones had sent, so then all of them are computed again.

    Raises:
        Unrecoverable: for some stage there is none.
    """
    sources: dict[int, Source] = {}
    reasons: dict[int, dict[str, str]] = {}
    for stage in loss.hurt:
        if loss.stages[stage].survivors and tuple(names[:1]) != ("checkpoint",):
            sources[stage] = Source(rung="replica", how="copy", step=loss.step)
            continue
        said: dict[str, str] = {}
        for name in names:
            tried = (stage, name) in loss.failed
            answer = "what it brought was of no use" if tried else rungs[name](loss, stage)
            if isinstance(answer, Source):
                sources[stage] = answer
                break
            said[name] = answer
        else:
            reasons[stage] = said
    if reasons:
        raise Unrecoverable(reasons, loss.step)
    again = next((source for source in sources.values() if source.how == "replay"), None)
    if again is not None and not any(source.how == "rollback" for source in sources.values()):
        sources |= dict.fromkeys(loss.empty_stages, again)
    return sources
