"""Pure planning: who computes what, in which order. No I/O, no clock, no torch."""

from talkoot.plan import routes, senders, straight
from talkoot.plan.steps import Planner, StepPlan, View, planners, validate

__all__ = ["Planner", "StepPlan", "View", "planners", "routes", "senders", "straight", "validate"]
