"""What recipes of every kind are made of."""

from __future__ import annotations

import msgspec

TREES = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel", "ivy", "juniper", "kauri", "larch")


def peer_names(count: int) -> list[str]:
    """Names for ``count`` peers: alder, birch, ... larch, alder2, ..."""
    return [TREES[i % len(TREES)] + (str(i // len(TREES) + 1) if i >= len(TREES) else "") for i in range(count)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a recipe; unknown keys are refused with the nearest valid one."""
