"""No correction: what others made is learned from as if it were one's own (SAPO, Amico et al., 2025,
arXiv:2509.08721)."""

from __future__ import annotations

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, untouched


@corrections.register("none")
def none(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight 1, and R against the learner's own log-probabilities."""
    return untouched(evidence)
