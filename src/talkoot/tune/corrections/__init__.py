"""Corrections for completions that another policy made, one file each; :mod:`~.rule` says what one is."""

from talkoot.tune.corrections import filter, ftis, fvis, mis, none, opsm, tis, vis
from talkoot.tune.corrections.rule import Corrected, Correction, CorrectionRule, Evidence, corrections

__all__ = [
    "Corrected",
    "Correction",
    "CorrectionRule",
    "Evidence",
    "corrections",
    "filter",
    "ftis",
    "fvis",
    "mis",
    "none",
    "opsm",
    "tis",
    "vis",
]
