"""Which stored states a run in rounds can go on from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from talkoot.core.fold import Entry
from talkoot.train.rounds.records import Kept
from talkoot.world.blobs import Blobs


class Found(NamedTuple):
    """What there is.

    Attributes:
        kept: the newest whole set of states; where there is none, what is left of the newest one.
        sets: the blobs of all sets that the log knows up to it, oldest first.
        warnings: what is damaged or absent, in words.
    """

    kept: Kept | None
    sets: tuple[frozenset[str], ...]
    warnings: tuple[str, ...]


def find(entries: Iterable[Entry], blobs: Blobs, inner_steps: int) -> Found:
    """Look for stored states that the log names and that are not void by a rollback since; their bytes are checked."""
    sets: list[Kept] = []
    for entry in entries:
        receipt = entry.receipt
        if receipt.op == "train.kept":
            kept = receipt.read(Kept)
            sets = [one for one in sets if one.round < kept.round] + [kept]
        elif receipt.op == "train.rollback":
            sets = [one for one in sets if one.round * inner_steps <= receipt.step]
    warnings: list[str] = []
    partial: Kept | None = None
    for at in range(len(sets) - 1, -1, -1):
        good: list[tuple[int, str]] = []
        for slot, name in sets[at].blobs:
            try:
                blobs.get(name)
                good.append((slot, name))
            except (KeyError, ValueError, OSError) as problem:
                why = "is not there" if isinstance(problem, KeyError) else str(problem)
                warnings.append(f"the state of slot {slot} after round {sets[at].round} cannot be used: {name}: {why}")
        if len(good) == len(sets[at].blobs):
            return Found(sets[at], _names(sets[: at + 1]), tuple(warnings))
        if good and partial is None:
            partial = Kept(round=sets[at].round, blobs=tuple(good))
    if partial is None:
        return Found(None, (), tuple(warnings))
    warnings.append(f"whoever lost its state gets another's: from round {partial.round} on this is not the same run")
    return Found(partial, _names([partial]), tuple(warnings))


def _names(sets: Iterable[Kept]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(name for _, name in kept.blobs) for kept in sets)
