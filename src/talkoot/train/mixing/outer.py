"""What the rules over rounds share: the outer optimizer's two kinds of momentum, and a rule with nothing special.

Both take a step ``g`` (already times the outer rate) and a buffer ``B``, zero at the start:

- heavy ball (Polyak, 1964): ``B <- alpha B + g``, ``x <- x + B``;
- Nesterov's (1983), in the form of Sutskever et al. (2013) that SGD in torch has: ``B <- alpha B + g``,
  ``x <- x + g + alpha B``.

Much that is called DiLoCo in released code is the first, and what was published is the second, hence two names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from talkoot.train.mixing.rule import Buffers, Content
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor

Partners: TypeAlias = Literal["pair", "all", "none"]
Move: TypeAlias = "Callable[[Tensor, Tensor, Tensor, float], None]"


def heavy_ball(slow: Tensor, velocity: Tensor, step: Tensor, momentum: float) -> None:
    """Move ``slow`` and ``velocity``, in place, by heavy-ball momentum."""
    velocity.mul_(momentum).add_(step)
    slow.add_(velocity)


def nesterov(slow: Tensor, velocity: Tensor, step: Tensor, momentum: float) -> None:
    """Move ``slow`` and ``velocity``, in place, by Nesterov's momentum."""
    velocity.mul_(momentum).add_(step)
    slow.add_(step).add_(velocity, alpha=momentum)


def given(value: float | None) -> float:
    """A setting of the outer optimizer.

    Raises:
        ValueError: it is open: nobody called :func:`~talkoot.train.mixing.knobs.settled`.
    """
    if value is None:
        raise ValueError("a setting of the outer optimizer is open")
    return value


class PlainRule:
    """A rule's attributes where it does nothing special: all replicas send their progress, and nothing is left over."""

    local: ClassVar[Literal[True]] = True
    partners: Partners = "all"
    gather: bool = False
    contents: tuple[Content, ...] = ("gradient",)
    buffers: tuple[str, ...] = ()
    defaults: Mapping[str, float | int | str] = MappingProxyType({})
    law: str = ""
    codec: str = ""

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        """Rounding is forgotten: the next round's progress is measured from the weights that it led to."""
