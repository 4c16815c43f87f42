"""What recipes of every kind are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.plain import CORRECT

TREES = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel", "ivy", "juniper", "kauri", "larch")
LIMIT = 2**31  # every integer of a recipe is below it, but for seeds; sharper limits are the sections' own
Rule: TypeAlias = tuple[str, bool, str]  # of a value: its key, whether it fits, and what must hold


def peer_names(count: int) -> list[str]:
    """Names for ``count`` peers: alder, birch, ... larch, alder2, ..."""
    return [TREES[i % len(TREES)] + (str(i // len(TREES) + 1) if i >= len(TREES) else "") for i in range(count)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a recipe; unknown keys are refused with the nearest valid one, impossible values by name.

    Attributes:
        KEY: how recipes call it; empty = the class's name.

    Raises:
        TalkootError: a value breaks a rule.
    """

    KEY: ClassVar[str] = ""

    def rules(self) -> Iterable[Rule]:
        """What must hold of its values."""
        return ()

    def __post_init__(self) -> None:
        for name, fits, rule in (*self._small(), *self.rules()):
            if not fits:  # NaN fits nowhere
                raise TalkootError(
                    "the recipe cannot be used",
                    where=f"{self.KEY or type(self).__name__.lower()}.{name}",
                    why=f"it is {getattr(self, name)}, it must be {rule}",
                    next=CORRECT,
                )

    def _small(self) -> Iterator[Rule]:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, int) and name != "seed":
                    yield name, -LIMIT < one < LIMIT, f"between -{LIMIT} and {LIMIT}"
