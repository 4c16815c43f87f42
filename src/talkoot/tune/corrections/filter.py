"""The filter of filtered truncated importance sampling alone (arXiv:2605.22537, there F-NoIS).

``A' = A`` if ``A > 0`` or the divergence is below gamma, else 0: a good example says where to go however far it is; a
bad one far away only pushes probability off tokens that the learner would never emit.
"""

from __future__ import annotations

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, divergences, drop, untouched


def filtered(knobs: Correction, evidence: Evidence, corrected: Corrected) -> Corrected:
    """``corrected`` without far negatives."""
    divergence = divergences(evidence, knobs.kl_reduce)[knobs.kl_estimator].abs()
    return drop(evidence, corrected, ~(divergence < knobs.gamma))


@corrections.register("filter")
def filter_only(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight 1, far negatives dropped."""
    return filtered(knobs, evidence, untouched(evidence))
