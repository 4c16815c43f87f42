"""Random pairs instead of an all-reduce (NoLoCo; Kolehmainen et al., 2025).

Each replica moves by its pair's mean progress and is pulled to the pair's mean slow weights. With ``D = fast - slow``
and means over the pair::

    step = beta mean(D) - gamma (slow - mean(slow))        velocity <- alpha velocity + step

The sign of beta is that of the paper's analysis and released code; its equation 2, read with its own definition of D,
has the opposite one. Three names:

- ``noloco-literal`` sends D and the slow weights, two vectors, as published.
- ``noloco`` is the same rule in half the bytes (ours): as ``step = mean(beta D + gamma slow) - gamma slow``, one vector
  is enough. Where beta = gamma, it is the fast weights themselves, times beta.
- ``noloco-nesterov`` (ours) has Nesterov's momentum, as DiLoCo was published; it is stable over a wider range of gamma.

Heavy ball with alpha 0.5, beta 0.7, gamma 0.7 is the released configuration. Progress counts by its tokens and slow
weights count equally; so the mean over all replicas follows DiLoCo's trajectory, driven by the same progress, whoever
meets whom. Alone, a replica takes DiLoCo's step by itself.

Coarse numbers on the wire do not disturb that mean: each replica adds what its own message lost to its own step (as in
average-preserving gossip with quantized messages; Frasca et al., 2009). Then an error only moves two partners apart,
which the pull undoes, and alone there is none. Without that, slow weights creep to values that the wire can express.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from talkoot.train.mixing.outer import Move, Partners, PlainRule, given, heavy_ball, nesterov
from talkoot.train.mixing.rule import Buffers, Content, mixing_rules
from talkoot.train.sections import Mixing

if TYPE_CHECKING:
    from torch import Tensor


class PairPull(PlainRule):
    """The rule with one vector; see the module's text; implements :class:`~talkoot.train.mixing.rule.RoundRule`.

    Args:
        move, law: the outer optimizer's kind of momentum, and the law of stability that follows from it.
        defaults: settings where the recipe leaves them open.
    """

    partners: Partners = "pair"
    contents: tuple[Content, ...] = ("weights",)
    buffers: tuple[str, ...] = ("velocity", "rounding")

    def __init__(self, move: Move, law: str, defaults: Mapping[str, float | int | str]) -> None:
        self._move, self.law, self.defaults = move, law, defaults

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        rate, pull = weight * given(knobs.outer_rate), given(knobs.pull)
        return [(slow * (pull - rate)).add_(fast, alpha=rate)]

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        buffers["rounding"].copy_(vectors[0]).sub_(arrived[0])

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        step = means[0].sub(slow, alpha=given(knobs.pull)).add_(buffers["rounding"])
        self._move(slow, buffers["velocity"], step, given(knobs.momentum))


class PairPullInTwo(PairPull):
    """The rule with two vectors, progress and slow weights, which may travel in different precision."""

    contents: tuple[Content, ...] = ("gradient", "weights")

    def message(self, knobs: Mixing, slow: Tensor, buffers: Buffers, fast: Tensor, weight: float) -> list[Tensor]:
        return [(fast - slow).mul_(weight), slow.clone()]

    def sent(self, knobs: Mixing, buffers: Buffers, vectors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        progress, weights = (whole - part for whole, part in zip(vectors, arrived, strict=True))
        buffers["rounding"].copy_(progress.mul_(given(knobs.outer_rate)).add_(weights, alpha=given(knobs.pull)))

    def merge(self, knobs: Mixing, slow: Tensor, buffers: Buffers, means: Sequence[Tensor]) -> None:
        step = (means[1] - slow).mul_(given(knobs.pull)).add_(means[0], alpha=given(knobs.outer_rate))
        step.add_(buffers["rounding"])
        self._move(slow, buffers["velocity"], step, given(knobs.momentum))


RELEASED = {"outer_rate": 0.7, "momentum": 0.5, "pull": 0.7}
mixing_rules.register("noloco")(PairPull(heavy_ball, "heavy-ball", RELEASED))
mixing_rules.register("noloco-literal")(PairPullInTwo(heavy_ball, "heavy-ball", RELEASED))
# This pull makes replicas differ least, given that momentum.
mixing_rules.register("noloco-nesterov")(
    PairPull(nesterov, "nesterov", {"outer_rate": 0.5, "momentum": 0.9, "pull": 0.485})
)
