"""Routing a prompt to an expert: rules, one file each; calibration; and a router that domains are added to."""

from talkoot.blend.router import average, bigram, chunk, naive_bayes, votes
from talkoot.blend.router.calibration import Calibration, Wanted
from talkoot.blend.router.choose import choose
from talkoot.blend.router.router import Decision, Router
from talkoot.blend.router.rule import Counted, Rule, Scorer, rules

__all__ = [
    "Calibration",
    "Counted",
    "Decision",
    "Router",
    "Rule",
    "Scorer",
    "Wanted",
    "average",
    "bigram",
    "choose",
    "chunk",
    "naive_bayes",
    "rules",
    "votes",
]
