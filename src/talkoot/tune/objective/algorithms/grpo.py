"""Group relative policy optimization (Shao et al., 2024, DeepSeekMath, arXiv:2402.03300).

``1/G sum_i 1/len(a_i) sum_t min(R A_i, clip(R, 0.8, 1.2) A_i)`` with ``A_i = (r_i - mean r) / (sigma r + 1e-4)``.
Long wrong answers are punished less per token than short ones.
"""

from talkoot.tune.objective.switches import Algorithm, algorithms

algorithms.register("grpo")(Algorithm({}))
