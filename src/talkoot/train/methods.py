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
    if train.planner != "straight" and recipe.swarm.layout != "ring":
        raise TalkootError(
            f"planner {train.planner!r} needs a ring",
            where="the recipe, key swarm.layout",
            why="its paths return to their origin for the loss; in a line the last stage computes it",
            next='set swarm.layout = "ring", or train.planner = "straight"',
        )
    if train.planner == "routes" and not recipe.routes:
        raise TalkootError(
            "there are no routes to follow",
            where="the recipe, key routes",
            why="planner 'routes' follows given ones",
            next="let `talkoot plan --out FILE` write a recipe with routes, or choose another train.planner",
        )
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
