"""Clipped weights of importance sampling (MiniMax, 2025, MiniMax-M1, arXiv:2506.13585).

``sum_i sum_t sg(clip(R, 1 - clip_low, 1 + clip_high)) A_i log p / sum_i len(a_i)``: the ratio is clipped and carries
no gradient, so that rare tokens keep theirs. Without a lower clip, as published; the upper one was not, 0.28 is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talkoot.tune.objective.surrogate import LIMIT, surrogates
from talkoot.tune.objective.switches import Algorithm, Objective, algorithms

if TYPE_CHECKING:
    from torch import Tensor

algorithms.register("cispo")(
    Algorithm({"surrogate": "clipped_weight", "loss_agg": "token_mean", "clip_low": 1.0, "clip_high": 0.28})
)


@surrogates.register("clipped_weight")
def clipped_weight(objective: Objective, log_ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """``sg(clip(R)) A log p``."""
    ratio = log_ratio.detach().clamp(-LIMIT, LIMIT).exp()
    return ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages * logp
