"""A run's state is a pure fold over its receipts.

Each room that keeps state registers a chapter: the prefixes of the operations it listens to, its initial
value and a function ``apply(value, entry) -> value`` that changes nothing in place and does no I/O. Folding
the same log gives the same state, on any machine, up to any position: that is what ``talkoot replay`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from talkoot.core.ids import Digest, digest
from talkoot.core.receipt import Receipt, Signed
from talkoot.core.registry import Registry

START = Digest("0" * 64)  # the chain's value before the first receipt


@dataclass(frozen=True, slots=True)
class Entry:
    """One position of a log: the receipt, its id, and the hash chain up to and including it."""

    position: int
    id: Digest
    receipt: Receipt
    chain: Digest


@dataclass(frozen=True, slots=True)
class Chapter:
    """One room's part of the state."""

    prefixes: tuple[str, ...]
    initial: Any
    apply: Callable[[Any, Entry], Any]


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is known after ``position`` receipts (positions count from 1)."""

    position: int = 0
    chain: Digest = START
    chapters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getitem__(self, name: str) -> Any:
        return self.chapters[name] if name in self.chapters else chapters[name].initial


chapters: Registry[Chapter] = Registry("chapter of the state")


def link(chain: str, receipt_id: str) -> Digest:
    """The hash chain's next value."""
    return digest(f"{chain}{receipt_id}".encode(), "chain")


def advance(state: State, entry: Entry) -> State:
    """The state after one more receipt.

    Raises:
        ValueError: the entry is not the next one, or does not continue the hash chain.
    """
    if entry.position != state.position + 1:
        raise ValueError(f"receipt {entry.position} cannot follow receipt {state.position}")
    if link(state.chain, entry.id) != entry.chain:
        raise ValueError(f"the hash chain breaks at receipt {entry.position}")
    changed = dict(state.chapters)
    for name in chapters:
        chapter = chapters[name]
        if entry.receipt.op.startswith(chapter.prefixes):
            changed[name] = chapter.apply(changed.get(name, chapter.initial), entry)
    return State(entry.position, entry.chain, MappingProxyType(changed))


def fold(entries: Iterable[Entry], state: State | None = None) -> State:
    """The state after all ``entries``, starting from ``state`` or from nothing."""
    state = state or State()
    for entry in entries:
        state = advance(state, entry)
    return state


def next_entry(state: State, signed: Signed) -> Entry:
    """The entry that appending ``signed`` to a log in ``state`` makes.

    Raises:
        ValueError: the receipt is malformed or its signature does not hold.
    """
    receipt_id = signed.id
    return Entry(state.position + 1, receipt_id, signed.open(), link(state.chain, receipt_id))
