"""Algorithms of the GRPO family, one file each: presets of the switches."""

from talkoot.tune.objective.algorithms import bnpo, cispo, dapo, dr_grpo, grpo, gspo, reinforce, rloo
from talkoot.tune.objective.switches import Algorithm, algorithms

__all__ = [
    "Algorithm",
    "algorithms",
    "bnpo",
    "cispo",
    "dapo",
    "dr_grpo",
    "grpo",
    "gspo",
    "reinforce",
    "rloo",
]
