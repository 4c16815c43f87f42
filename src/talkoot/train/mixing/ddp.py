"""Plain data parallelism: every step, all replicas of a stage agree on the exact sum of all gradients.

Reduce-scatter, then all-gather (Patarasuk and Yuan, 2009), each one direct exchange: every member owns one slice of
the flat gradient, receives everybody's partial sums of that slice, completes it in the fixed order of
:mod:`talkoot.train.treesum`, and hands it to all. With N members each sends 2 (N - 1) / N of the gradient, the
optimum, when its microbatches form one block of the tree; scattered ones cost a few more partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from talkoot.core.ids import PeerId
from talkoot.train.mixing.rule import Vectors, add, mixing_rules
from talkoot.train.treesum import TreeSum

if TYPE_CHECKING:
    from torch import Tensor


def slice_of(size: int, index: int, count: int) -> slice:
    """The ``index``-th of ``count`` nearly equal slices of a vector."""
    return slice(size * index // count, size * (index + 1) // count)


class DataParallel:
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.StepRule`."""

    local: ClassVar[Literal[False]] = False
    turns = 2

    def outgoing(
        self, turn: int, me: PeerId, group: Sequence[PeerId], mine: TreeSum[Tensor]
    ) -> Mapping[PeerId, Vectors]:
        if turn == 0:
            return {
                peer: [(node, value[slice_of(len(value), index, len(group))]) for node, value in mine]
                for index, peer in enumerate(group)
                if peer != me
            }
        root = (0, mine.count)
        return {peer: [(root, mine.total)] for peer in group if peer != me}

    def merge(
        self,
        turn: int,
        me: PeerId,
        group: Sequence[PeerId],
        mine: TreeSum[Tensor],
        received: Mapping[PeerId, Vectors],
    ) -> TreeSum[Tensor]:
        import torch

        merged: TreeSum[Tensor] = TreeSum(mine.count, add, mine.absent)
        if turn == 0:
            index = group.index(me)
            for node, value in mine:
                merged.insert(node, value[slice_of(len(value), index, len(group))].clone())
            for peer in group:
                for node, value in received.get(peer, ()):
                    if any(len(known) != len(value) for _, known in merged):
                        raise ValueError(f"a slice of {len(value)} values is not as long as the others")
                    merged.insert(node, value)
            return merged
        slices = [mine.total if peer == me else received[peer][0][1] for peer in group]
        merged.insert((0, mine.count), torch.cat(slices))
        return merged


mixing_rules.register("ddp")(DataParallel())
