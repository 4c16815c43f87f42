"""Policy gradient with the mean of the *other* completions as baseline (Kool et al., 2019; Ahmadian et al., 2024,
"Back to basics", arXiv:2402.14740).

``1/G sum_i (r_i - mean of the others) sum_t log p``, which is ``G/(G-1)`` times the gradient with the group's mean.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("rloo")(
    Algorithm({"surrogate": "log_probability", "loss_agg": "seq_sum", "baseline": "leave_one_out", "adv_scale": "none"})
)
