"""Mixing rules, one file each."""

from talkoot.train.mixing import ddp, diloco, epidemic, noloco, none, sparseloco, streaming
from talkoot.train.mixing.knobs import settled, wires
from talkoot.train.mixing.rule import RoundRule, StepRule, mixing_rules, step_rule

__all__ = [
    "RoundRule",
    "StepRule",
    "ddp",
    "diloco",
    "epidemic",
    "mixing_rules",
    "noloco",
    "none",
    "settled",
    "sparseloco",
    "step_rule",
    "streaming",
    "wires",
]
