"""How an answer is compared with what is right: one protocol, several kinds, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from talkoot.core.registry import Registry
from talkoot.tune.rewards.result import RewardResult


class Comparison(Protocol):
    """Compares the answer that a completion gave with the right one. Pure; bounded in time whatever the texts are."""

    def __call__(self, answer: str, given: str) -> bool:
        """Whether ``given`` is right, where ``answer`` says what is (a text, a number, a pattern)."""
        ...


comparisons: Registry[Comparison] = Registry("reward")


def compare(given: str, finished: bool, right: Callable[[str], bool]) -> RewardResult:
    """1 for a right answer of a completion that ended by itself, else 0 with the reason."""
    if not finished:
        return RewardResult(0.0, "cut off")
    if not given:
        return RewardResult(0.0, "no answer")
    return RewardResult(1.0, "right") if right(given) else RewardResult(0.0, "wrong")
