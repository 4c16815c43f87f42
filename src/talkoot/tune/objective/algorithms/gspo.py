"""Group sequence policy optimization (Zheng et al., 2025, arXiv:2507.18071).

``1/G sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)`` with one ratio per completion,
``s_i = exp(1/len(a_i) sum_t log R)``: a mean over tokens moves far less than one token does, hence the narrow clip.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("gspo")(Algorithm({"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}))
