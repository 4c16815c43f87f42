"""GRPO without its two biases (Liu et al., 2025, "Understanding R1-Zero-like training", arXiv:2503.20783).

``1/(G L) sum_i sum_t min(R A_i, clip(R) A_i)`` with ``A_i = r_i - mean r`` and a constant L: neither short answers nor
questions of little variance count more.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("dr_grpo")(Algorithm({"loss_agg": "const", "adv_scale": "none"}))
