"""Mixing rules, one file each."""

from talkoot.train.mixing import average
from talkoot.train.mixing.rule import MixingRule, mixing_rules

__all__ = ["MixingRule", "average", "mixing_rules"]
