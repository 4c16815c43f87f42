"""How an answer is compared with what is right: one protocol, several kinds, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from talkoot.core.registry import Registry
from talkoot.tune.rewards.result import RewardResult


class Comparison(Protocol):
    """A kind of answer. Its methods are pure, and bounded in time whatever the texts are."""

    def check(self, answer: str) -> None:
        """ValueError, with the reason, when ``answer`` cannot say what is right."""
        ...

    def extract(self, completion: str) -> str:
        """The answer that a completion gives, in a canonical form; empty = none."""
        ...

    def reward(self, answer: str, given: str) -> RewardResult:
        """What a given answer (:meth:`extract`) earns, where ``answer`` says what is right."""
        ...


comparisons: Registry[Comparison] = Registry("reward")


def compare(given: str, finished: bool, right: Callable[[str], bool]) -> RewardResult:
    """1 for a right answer of a completion that ended by itself, else 0 with the reason."""
    if unusable := refused(given, finished):
        return unusable
    return outcome(right(given))


def refused(given: str, finished: bool) -> RewardResult | None:
    """0 for a completion that was cut off or gives no answer; None for all others."""
    if not finished:
        return RewardResult(0.0, "cut off")
    return None if given else RewardResult(0.0, "no answer")


def outcome(right: bool) -> RewardResult:
    """1 with ``right``, or 0 with ``wrong``."""
    return RewardResult(1.0, "right") if right else RewardResult(0.0, "wrong")
