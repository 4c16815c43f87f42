"""Pure planning: who computes what, in which order. No I/O, no clock, no torch."""

from talkoot.plan import straight
from talkoot.plan.steps import Planner, StepPlan, planners, validate

__all__ = ["Planner", "StepPlan", "planners", "straight", "validate"]
