"""Splits of a task's items: by a hash of the prompt, so that no prompt is in two of them, whatever its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from talkoot.core.ids import digest

TRAIN, HELD_OUT, SHIFTED = SPLITS = ("train", "held_out", "shifted")
T = TypeVar("T")


def is_held_out(seed: int, prompt: str, one_in: int = 10) -> bool:
    """Whether a prompt is never trained on: one in ``one_in`` is, chosen by its text and the seed."""
    return int(digest(f"{seed}/{prompt}".encode(), "held out")[:8], 16) % one_in == 0


def member(splits: Mapping[str, T], split: str) -> T:
    """What belongs to a split; ValueError names those that there are."""
    if split not in splits:
        raise ValueError(f"there is no split {split!r}, but {', '.join(SPLITS)}")
    return splits[split]


def numbered(items: Sequence[T], number: int, split: str) -> T:
    """Item ``number`` modulo their count; ValueError when the split is empty."""
    if not items:
        raise ValueError(f"the split {split!r} of this task is empty")
    return items[number % len(items)]
