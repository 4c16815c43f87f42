"""The mean progress of all replicas as a gradient for an outer optimizer (DiLoCo; Douillard et al., 2023).

With ``D = fast - slow`` and its mean over all, weighted by tokens, the slow weights take a step ``beta mean(D)`` with
momentum ``alpha``. ``diloco`` is as published: Nesterov's momentum, beta 0.7, alpha 0.9. ``diloco-heavy-ball`` is
what ``noloco`` becomes when everybody is in one group, with the same defaults as that: its fair baseline. (Published
comparisons used a heavy ball with alpha 0.3.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from talkoot.train.mixing.outer import Move, PlainRule, given, heavy_ball, nesterov
from talkoot.train.mixing.rule import Buffers, mixing_rules
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor


class MeanProgress(PlainRule):
    """See the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`.

    Args:
        move: the outer optimizer's kind of momentum.
        defaults: settings where the recipe leaves them open.
    """

    buffers: tuple[str, ...] = ("velocity",)

    def __init__(self, move: Move, defaults: Mapping[str, float | int | str]) -> None:
        self._move, self.defaults = move, defaults

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        return [(fast - slow).mul_(weight)]

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        self._move(slow, buffers["velocity"], means[0] * given(knobs.outer_rate), given(knobs.momentum))


mixing_rules.register("diloco")(MeanProgress(nesterov, {"outer_rate": 0.7, "momentum": 0.9}))
mixing_rules.register("diloco-heavy-ball")(MeanProgress(heavy_ball, {"outer_rate": 0.7, "momentum": 0.5}))
