"""Pure planning: who computes what, in which order. No I/O, no clock, no torch."""

from talkoot.plan import dispatch, routes, senders, shuffled, straight, swapped
from talkoot.plan.steps import Planner, StepPlan, View, planners, validate

__all__ = [
    "Planner",
    "StepPlan",
    "View",
    "dispatch",
    "planners",
    "routes",
    "senders",
    "shuffled",
    "straight",
    "swapped",
    "validate",
]
