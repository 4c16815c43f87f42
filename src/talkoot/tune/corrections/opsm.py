"""Off-policy sequence masking (DeepSeek-AI, 2025, DeepSeek-V3.2, arXiv:2512.02556).

A completion with a negative advantage is dropped where the mean of ``log generator - log learner`` over its tokens is
above delta. Unlike the filter's divergence this has a sign: what the learner finds likelier than its generator did
stays.
"""

from __future__ import annotations

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, divergences, drop, untouched


@corrections.register("opsm")
def opsm(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight 1, negatives with a mean divergence above delta dropped."""
    return drop(evidence, untouched(evidence), divergences(evidence, "mean")["naive"] > knobs.delta)
