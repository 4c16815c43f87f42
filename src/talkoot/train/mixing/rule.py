"""How replicas agree: the two protocols of mixing rules, and their registry.

A rule is pure: it says what to send and merges what arrives. The peers do the talking, so the same rule runs in both
worlds, and faults and lateness are handled in one place. A :class:`StepRule` agrees on every step's gradient, inside
that step's transaction. A :class:`RoundRule` lets each replica take many inner steps by itself (a *round*), and then
moves the weights from which the next round starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from talkoot.core.ids import PeerId
from talkoot.core.registry import Registry
from talkoot.train.sections import Mixing
from talkoot.train.treesum import Node, TreeSum

if TYPE_CHECKING:  # the lead looks names up here, and it does without torch
    from torch import Tensor

Vectors: TypeAlias = "Sequence[tuple[Node, Tensor]]"  # flat float32 vectors by the microbatches that they sum
Buffers: TypeAlias = "Mapping[str, Tensor]"  # a rule's own state beside the slow weights, by name, each as long
Content = Literal["gradient", "weights"]


class StepRule(Protocol):
    """A rule over one step's gradients: partial sums in, the agreed sum over all microbatches out."""

    local: ClassVar[Literal[False]]
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


class RoundRule(Protocol):
    """A rule over rounds of inner steps. All its arithmetic is elementwise on flat vectors, so that it works on the
    whole model and on fragments of it alike, in whatever precision it is handed.

    A round: the replica starts from its *slow* weights, takes inner steps, and has *fast* weights. It sends what
    :meth:`message` makes of both; its group's messages are averaged; :meth:`merge` moves the slow weights with the
    mean. A replica whose partner is gone is a group of one: the mean is its own message.

    Attributes:
        partners: who is in a group: a random ``pair``, ``all`` replicas, or ``none``: nothing is ever sent.
        gather: in a group of all, everybody gets everybody's message, instead of sums that are passed on.
        contents: what each vector of a message carries; it decides which precision it travels in.
        buffers: names of the rule's own vectors, zero at the start.
        defaults: settings of the recipe's section ``mixing`` that this rule fills in where they are left open.
        law: which law of stability it follows, by its name in :mod:`talkoot.plan.spread`; empty = none is needed.
        codec: how its messages travel, where that is not the recipe's choice.
    """

    local: ClassVar[Literal[True]]
    partners: Literal["pair", "all", "none"]
    gather: bool
    contents: tuple[Content, ...]
    buffers: tuple[str, ...]
    defaults: Mapping[str, float | int | str]
    law: str
    codec: str

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        """The vectors to send, new tensors, one for each of ``contents``.

        Args:
            knobs: the recipe's section, without open settings.
            slow, fast: weights at the round's start and now; not changed.
            buffers: the rule's own vectors; may be changed (a residual that grows).
            weight: how much this replica's progress counts in its group, on average 1: its share of the group's
                tokens times the group's size.
        """
        ...

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        """Learn what is left of a message after encoding and decoding (error feedback)."""
        ...

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        """Move the slow weights, in place, given the group's mean of each vector (one's own as others got it)."""
        ...


mixing_rules: Registry[StepRule | RoundRule] = Registry("mixing rule")


def step_rule(name: str) -> StepRule:
    """The rule within a step: the named one, or, where that is about rounds, the sum over one's own microbatches."""
    rule = mixing_rules[name]
    return step_rule("ddp") if rule.local is True else rule


def add(left: Tensor, right: Tensor) -> Tensor:
    """Left plus right, in left's memory."""
    return left.add_(right)
