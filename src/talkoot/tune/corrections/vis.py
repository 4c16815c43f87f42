"""Importance sampling inside the clip: R = learner / generator. A far completion is clipped away, whichever way it is
far."""

from __future__ import annotations

from dataclasses import replace

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, corrections, refuse_unlike, untouched


@corrections.register("vis")
def vis(knobs: Correction, evidence: Evidence) -> Corrected:
    """Weight 1, and R against the generator's log-probabilities; these must be of the same tokens.

    Raises:
        TalkootError: a generator has another tokenizer.
    """
    refuse_unlike(evidence)
    return replace(untouched(evidence), clip_to="generator")
