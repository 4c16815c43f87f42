"""Divergence of the policy from a reference, estimated on sampled tokens (Schulman, "Approximating KL divergence",
2020).

With D = log reference - log policy of a token that the policy drew: ``k1`` = -D is unbiased in value, but its gradient
is zero on average; ``k2`` = D^2 / 2 is biased in value and has the divergence's gradient; ``k3`` = exp(D) - D - 1 is
unbiased in value, never negative, and what GRPO subtracts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from talkoot.tune.objective.surrogate import LIMIT

if TYPE_CHECKING:
    from torch import Tensor


def divergence(estimator: Literal["k1", "k2", "k3"], logp: Tensor, reference: Tensor) -> Tensor:
    """Estimate per token, (N,); differentiable in ``logp``, never in ``reference``."""
    difference = (reference.detach() - logp).clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.exp() - difference - 1
