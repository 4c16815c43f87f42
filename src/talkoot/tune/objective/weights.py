"""How much each token counts: weights over the whole batch of a step, so that no split into microbatches matters.

A completion that is masked (cut off, under ``overlong = mask``; equal rewards, under dynamic sampling) is in no
denominator. One whose advantage a correction set to zero still is: that is how the correction is defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from talkoot.tune.objective.switches import Objective


def token_weights(objective: Objective, lengths: Tensor, counted: Tensor) -> Tensor:
    """Weight of every token of each completion, (R,) float64; 0 for those that do not count.

    Args:
        lengths: tokens of each completion, (R,).
        counted: which are part of the loss, (R,) bool.
    """
    completions = counted.sum().clamp(min=1).double()
    lengths = lengths.double()
    weight = {
        "seq_mean": lambda: 1 / (completions * lengths),
        "token_mean": lambda: (1 / lengths[counted].sum().clamp(min=1)).expand_as(lengths),
        "const": lambda: (1 / (completions * objective.max_length)).expand_as(lengths),
        "seq_sum": lambda: (1 / completions).expand_as(lengths),
    }[objective.loss_agg]()
    return torch.where(counted, weight, torch.zeros_like(weight))
