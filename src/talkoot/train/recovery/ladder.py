"""The protocol that every rung implements, and the climb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry


class Loss(msgspec.Struct, frozen=True):
    """What is known when some peers are gone.

    Attributes:
        survivors: for each stage, the peers that hold its committed state.
        step: committed steps.
        checkpoint: step of the newest whole snapshot, if there is one.
    """

    survivors: tuple[tuple[PeerId, ...], ...]
    step: int
    checkpoint: int | None

    @property
    def empty_stages(self) -> list[int]:
        """Stages that nobody holds any more."""
        return [stage for stage, peers in enumerate(self.survivors) if not peers]


class Rescue(msgspec.Struct, frozen=True):
    """How to go on.

    Attributes:
        rung: the method's name, for the log.
        step: committed steps after the rescue; fewer than before means a rollback of everybody.
        exact: whether the state is bit for bit the lost one.
    """

    rung: str
    step: int
    exact: bool = True


class Rung(Protocol):
    """One way to recover; pure."""

    def __call__(self, loss: Loss) -> Rescue | None:
        """The rescue, or None when this rung cannot serve."""
        ...


rungs: Registry[Rung] = Registry("recovery rung")


def climb(names: Sequence[str], loss: Loss) -> Rescue:
    """The first rescue that any of the named rungs offers.

    Raises:
        TalkootError: none can serve.
    """
    for name in names:
        rescue = rungs[name](loss)
        if rescue is not None:
            return rescue
    raise TalkootError(
        "the swarm cannot recover",
        where=f"stages {loss.empty_stages} after {loss.step} committed steps",
        why=f"nobody holds them any more, and none of the rungs can serve: {', '.join(names) or 'none configured'}",
        next="add replicas, or 'checkpoint' to recovery.ladder with train.checkpoint_every > 0",
        code=Exit.UNREACHABLE,
    )
