"""Filtered truncated importance sampling (arXiv:2605.22537): truncated weights outside the clip, far negatives
dropped."""

from __future__ import annotations

from talkoot.tune.corrections.filter import filtered
from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections
from talkoot.tune.corrections.tis import tis


@corrections.register("ftis")
def ftis(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight ``min(rho, C)``, far negatives dropped."""
    return filtered(knobs, evidence, tis(knobs, evidence))
