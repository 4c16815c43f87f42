"""Rewards: pure functions of a problem and a completion's text, and what they say about it."""

from __future__ import annotations

import msgspec


class RewardResult(msgspec.Struct, frozen=True):
    """What a completion earned.

    Attributes:
        value: from 0 to 1; always finite.
        reason: a short word for why, counted per round: ``right``, ``wrong``, ``no answer``, ``cut off``, ``timeout``
        parts: contributions by name, where there are several.
    """

    value: float
    reason: str
    parts: dict[str, float] = {}

    @property
    def right(self) -> bool:
        """Whether the answer counts as correct."""
        return self.value >= 1.0
