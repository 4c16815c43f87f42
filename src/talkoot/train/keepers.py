"""The lead's book of who keeps what for whom; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from talkoot.core.ids import PeerId
from talkoot.plan.keepers import choose_keepers
from talkoot.plan.steps import View
from talkoot.train.messages import Stream
from talkoot.train.sections import KEPT, Recovery


class Kept(msgspec.Struct):
    """What one keeper has of one stage: gradients from ``base`` on, all of them up to ``step``; -1: nothing yet.

    ``asked``: the generation in which it was asked to keep it.
    """

    asked: int
    base: int = -1
    step: int = -1


class Keepers:
    """Who keeps which stage.

    Args:
        recovery: the recipe's section.

    Attributes:
        kind: ``shadow``, ``journal``, or nothing when the ladder needs no keepers.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self.kind = next((rung for rung in recovery.ladder if rung in KEPT), "")
        self._kept: dict[tuple[int, PeerId], Kept] = {}

    def clear(self) -> None:
        """Nothing that was kept is of use: everybody goes back."""
        self._kept.clear()

    def forget(self, peer: PeerId) -> None:
        """A keeper is gone."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] != peer}

    def drop(self, stage: int) -> None:
        """What is kept of this stage is no longer what its holders have."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] != stage}

    def of(self, stage: int) -> list[PeerId]:
        """Keepers of a stage, those included that are still waiting for its state."""
        return sorted(peer for held, peer in self._kept if held == stage)

    def able(self, stage: int, step: int) -> list[PeerId]:
        """Keepers that can bring the stage back as of ``step``."""
        return sorted(peer for (held, peer), kept in self._kept.items() if held == stage and kept.step == step)

    def base(self, stage: int, peer: PeerId) -> int:
        """The step whose state a keeper's gradients begin at."""
        return self._kept[stage, peer].base

    def add(self, stage: int, peer: PeerId, generation: int) -> None:
        """This peer was asked to keep the stage."""
        self._kept[stage, peer] = Kept(generation)

    def note(self, stage: int, peer: PeerId, step: int, generation: int) -> bool:
        """A keeper said that it has the state of ``step``, or (-1) that it lost what it had.

        Returns:
            Whether somebody may be waiting for it in vain.
        """
        kept = self._kept.get((stage, peer))
        if kept is None or generation < kept.asked:
            return False
        if step < 0:
            del self._kept[stage, peer]
            return kept.step >= 0
        kept.base, kept.step = step, max(kept.step, step)
        return False

    def restore(self, stage: int, peer: PeerId, base: int, step: int, generation: int) -> None:
        """A keeper told a new lead what it has."""
        if self.kind:
            self._kept[stage, peer] = Kept(generation, base, step)

    def streams(self, stage: int) -> tuple[Stream, ...]:
        """Who is to get the stage's gradients; those that have its state are waited for."""
        return tuple(Stream(peer, self._kept[stage, peer].step >= 0) for peer in self.of(stage))

    def committed(self, stage: int, streams: Iterable[Stream], step: int) -> None:
        """The step, whose gradient the keepers that were waited for have, is committed."""
        for stream in streams:
            kept = self._kept.get((stage, PeerId(stream.peer)))
            if kept is not None and stream.wait:
                kept.step = step + 1

    def stale(self, step: int) -> list[tuple[int, PeerId]]:
        """Journals that have grown long."""
        every = self._recovery.refresh_every
        grown = self.kind == "journal"
        return sorted(key for key, kept in self._kept.items() if grown and 0 <= kept.base <= step - every)

    def wanted(self, view: View, generation: int, sizes: Sequence[float]) -> list[tuple[int, PeerId]]:
        """(stage, peer) of keepers that are missing; who never got a state is asked again in a new generation.

        ``sizes``: bytes of each stage's gradient.
        """
        if not self.kind:
            return []
        self._kept = {key: kept for key, kept in self._kept.items() if kept.step >= 0 or kept.asked >= generation}
        guarded = self._recovery.guarded or range(view.num_stages)
        need = {stage: self._recovery.copies - len(self.of(stage)) for stage in guarded}
        return choose_keepers(view, need, list(self._kept), sizes)
