"""The filter, with importance sampling inside the clip (arXiv:2605.22537, there F-VIS)."""

from __future__ import annotations

from talkoot.tune.corrections.filter import filtered
from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections
from talkoot.tune.corrections.vis import vis


@corrections.register("fvis")
def fvis(knobs: Correction, evidence: Evidence) -> Corrected:
    """R against the generator, far negatives dropped."""
    return filtered(knobs, evidence, vis(knobs, evidence))
