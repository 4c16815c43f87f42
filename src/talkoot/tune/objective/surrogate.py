"""What is made of ratio and advantage, by name; tensors of one value per token, flat. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from talkoot.core.registry import Registry
from talkoot.tune.objective.switches import Objective

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 20.0  # of a log-ratio before it is exponentiated: e^20 is finite in float32, and far beyond every clip


class Surrogate(Protocol):
    """A surrogate of the expected reward, to be maximised."""

    def __call__(self, objective: Objective, log_ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
        """Value of each token, (N,).

        Args:
            log_ratio: log of the ratio R (of the token, or of its completion), (N,), differentiable.
            logp: log-probability of the token, (N,), differentiable.
            advantages: of the token's completion, (N,).
        """
        ...


surrogates: Registry[Surrogate] = Registry("surrogate")


@surrogates.register("clip")
def clip(objective: Objective, log_ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """``min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)``, for A < 0 not below ``dual_clip A``
    (PPO, Schulman et al., 2017, arXiv:1707.06347; dual clip: Ye et al., 2020, arXiv:1912.09729)."""
    ratio = log_ratio.clamp(-LIMIT, LIMIT).exp()
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    value = (ratio * advantages).minimum(clipped * advantages)
    if objective.dual_clip:
        value = value.where(advantages >= 0, value.maximum(objective.dual_clip * advantages))
    return value
