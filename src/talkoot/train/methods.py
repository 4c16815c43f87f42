"""Whether a recipe names methods that exist: checked before anything is launched or written. No torch."""

from __future__ import annotations

from typing import Any

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.registry import Registry
from talkoot.plan import planners
from talkoot.plan.repair import repairs
from talkoot.train.mixing import mixing_rules
from talkoot.train.recipe import Recipe
from talkoot.train.recovery import rungs
from talkoot.train.schedule import schedules


def check_methods(recipe: Recipe) -> None:
    """Refuse a misspelt planner, mixing rule, recovery rung or schedule.

    Raises:
        TalkootError: naming the key and the nearest method that there is.
    """
    train = recipe.train
    _check("planner", planners, train.planner)
    _check("mixing", mixing_rules, train.mixing)
    _check("schedule", schedules, train.schedule)
    _check("recovery", rungs, *train.recovery)
    _check("repair", repairs, train.repair)


def _check(key: str, registry: Registry[Any], *names: str) -> None:
    for name in names:
        if name not in registry:
            raise TalkootError(
                f"unknown {registry.noun} {name!r}",
                where=f"the recipe, key train.{key}",
                why=nearest(name, registry),
                next=f"use one of: {', '.join(registry)}",
            )
