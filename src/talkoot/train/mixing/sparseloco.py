"""The few largest numbers of what has gathered up, to everybody (SparseLoCo; Sarfi et al., 2025).

Each replica keeps a residual ``e <- feedback e + D`` of its progress ``D = fast - slow``, sends its largest numbers per
chunk in two bits each (:mod:`talkoot.train.mixing.codecs`, codec ``sparse``), and subtracts what the others got. The
slow weights move by the mean of all messages, with no momentum: the residual takes that part. DeMo (Peng et al., 2024)
does the like for every step. As published: feedback 0.95, 1 to 3 % of the numbers, outer rate 1. The levels in two bits
are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from talkoot.train.mixing.outer import PlainRule, given
from talkoot.train.mixing.rule import Buffers, mixing_rules
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor


class SparseProgress(PlainRule):
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`.

    A message takes the place of the residual until :meth:`sent` says what of it arrived; whoever merges its own message
    in full, in a group of one, has sent all of it.
    """

    gather = True
    buffers: tuple[str, ...] = ("residual",)
    defaults: Mapping[str, float | int | str] = MappingProxyType({"outer_rate": 1.0})
    codec = "sparse"

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        residual = buffers["residual"].mul_(knobs.feedback).add_(fast - slow, alpha=weight)
        return [residual.clone()]

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        buffers["residual"].sub_(arrived[0])

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        slow.add_(means[0], alpha=given(knobs.outer_rate))


mixing_rules.register("sparseloco")(SparseProgress())
