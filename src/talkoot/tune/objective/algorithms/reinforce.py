"""Policy gradient with the group's mean as baseline (Williams, 1992, "Simple statistical gradient-following
algorithms").

``1/G sum_i (r_i - mean r) sum_t log p``. No ratio: in later steps of one round it is biased, use it with one step per
round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talkoot.tune.objective.surrogate import surrogates
from talkoot.tune.objective.switches import Algorithm, Objective, algorithms

if TYPE_CHECKING:
    from torch import Tensor

algorithms.register("reinforce")(
    Algorithm({"surrogate": "log_probability", "loss_agg": "seq_sum", "adv_scale": "none"})
)


@surrogates.register("log_probability")
def log_probability(objective: Objective, log_ratio: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """``A log p``."""
    return advantages * logp
