"""Decoupled clip and dynamic sampling (Yu et al., 2025, DAPO, arXiv:2503.14476).

``sum_i sum_t min(R A_i, clip(R, 0.8, 1.28) A_i) / sum_i len(a_i)`` over groups with unequal rewards only, with a soft
penalty on overlong completions.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("dapo")(
    Algorithm({"loss_agg": "token_mean", "clip_high": 0.28, "overlong": "soft", "dynamic_sampling": True})
)
