"""How replicas of one stage agree: the protocol that every mixing rule implements, and their registry.

A rule is pure: it says what to send to whom in each exchange and merges what arrives. The peer does the talking,
so the same rule runs in both worlds, and faults and lateness are handled in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry
from talkoot.train.treesum import Node, TreeSum

if TYPE_CHECKING:  # the lead looks names up here, and it does without torch
    from torch import Tensor

Vectors: TypeAlias = "Sequence[tuple[Node, Tensor]]"  # flat float32 vectors by the microbatches that they sum


class MixingRule(Protocol):
    """A rule over one step's gradients: partial sums in, the agreed sum over all microbatches out."""

    turns: int  # exchanges per step

    def outgoing(
        self, turn: int, me: PeerId, group: Sequence[PeerId], mine: TreeSum[Tensor]
    ) -> Mapping[PeerId, Vectors]:
        """What to send to each other member of ``group`` (all members list it in the same order)."""
        ...

    def merge(
        self,
        turn: int,
        me: PeerId,
        group: Sequence[PeerId],
        mine: TreeSum[Tensor],
        received: Mapping[PeerId, Vectors],
    ) -> TreeSum[Tensor]:
        """The sum after this exchange; after the last one it must be complete."""
        ...


mixing_rules: Registry[MixingRule] = Registry("mixing rule")


def add(left: Tensor, right: Tensor) -> Tensor:
    """Left plus right, in left's memory."""
    return left.add_(right)
