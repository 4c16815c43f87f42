"""Truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
training").

Weight ``min(rho, C)`` outside the clip: unbiased up to C, and of bounded variance.
"""

from __future__ import annotations

from dataclasses import replace

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, importance, untouched


@corrections.register("tis")
def tis(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight ``min(rho, C)``, per token or per completion."""
    return replace(untouched(evidence), weight=importance(knobs, evidence).clamp(max=knobs.cap))
