"""GRPO's advantages under a mean over all tokens of the batch: what training libraries call ``bnpo``.

``sum_i sum_t min(R A_i, clip(R, 0.8, 1.2) A_i) / sum_i len(a_i)``. The name comes from Xiao et al. (2025, BNPO,
arXiv:2506.02864), whose normalization of rewards by a fitted Beta density is *not* part of it, here as there.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("bnpo")(Algorithm({"loss_agg": "token_mean"}))
