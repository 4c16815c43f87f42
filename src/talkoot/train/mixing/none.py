"""Replicas that never talk: the baseline that any mixing has to beat.

It is averaging in groups of one. The mean is one's own message, the fast weights, and a round moves the slow weights
there; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from talkoot.train.mixing.outer import Partners, PlainRule
from talkoot.train.mixing.rule import Buffers, Content, mixing_rules
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor


class Alone(PlainRule):
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`."""

    partners: Partners = "none"
    contents: tuple[Content, ...] = ("weights",)

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        return [fast.clone()]

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        slow.copy_(means[0])


mixing_rules.register("none")(Alone())
