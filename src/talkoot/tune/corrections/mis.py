"""Masked importance sampling: weight rho where it is at most C, else 0 (as in TRL's and verl's mask modes): a token
that the learner finds far likelier than its generator did is left out instead of truncated."""

from __future__ import annotations

from dataclasses import replace

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, importance, untouched


@corrections.register("mis")
def mis(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight rho, or 0 above C, per token or per completion."""
    rho = importance(knobs, evidence)
    return replace(untouched(evidence), weight=rho.masked_fill(rho > knobs.cap, 0.0))
