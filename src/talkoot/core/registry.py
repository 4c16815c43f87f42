"""Methods by name: a new planner, mixing rule or recovery rung is one file and one registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from talkoot.core.errors import TalkootError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """A named collection of implementations of one protocol.

    Args:
        noun: what the entries are, for messages (``"planner"``).
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an implementation under ``name``; a name can be taken once."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.noun} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise TalkootError(
                f"unknown {self.noun} {name!r}",
                where=f"the {self.noun}'s name",
                why=nearest(name, self._entries),
                next=f"use one of: {', '.join(sorted(self._entries))}",
            )
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
