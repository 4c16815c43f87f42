"""Random pairs average their weights (gossip averaging, Boyd et al., 2006; for SGD: D-PSGD, Lian et al., 2017).

It is ``noloco`` without momentum, with beta = gamma = 1. Progress that took more tokens than the partner's counts for
more, as in all rules here; with equal work it is the plain mean of the fast weights. Rounding on the wire leaves the
mean over all replicas alone, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from talkoot.train.mixing.outer import Partners, PlainRule
from talkoot.train.mixing.rule import Buffers, Content, mixing_rules
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor


class PairAverage(PlainRule):
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`."""

    partners: Partners = "pair"
    contents: tuple[Content, ...] = ("weights",)
    buffers: tuple[str, ...] = ("rounding",)
    law = "average"

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        return [slow.lerp(fast, weight)]  # at weight 1 these are the fast weights, bit for bit

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        buffers["rounding"].copy_(vectors[0]).sub_(arrived[0])

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        slow.copy_(means[0]).add_(buffers["rounding"])


mixing_rules.register("epidemic")(PairAverage())
