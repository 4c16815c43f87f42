"""Mixing rules, one file each."""

from talkoot.train.mixing import ddp
from talkoot.train.mixing.rule import RoundRule, StepRule, mixing_rules, step_rule

__all__ = ["RoundRule", "StepRule", "ddp", "mixing_rules", "step_rule"]
