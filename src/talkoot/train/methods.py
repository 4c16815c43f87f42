"""Whether a recipe names methods that exist: checked before anything is launched or written. No torch."""

from __future__ import annotations

from typing import Any

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.registry import Registry
from talkoot.model.config import ModelConfig
from talkoot.plan import planners
from talkoot.plan.repair import repairs
from talkoot.plan.swapped import LEAST_STAGES
from talkoot.train.mixing import mixing_rules, settled
from talkoot.train.recipe import LEAD, Recipe
from talkoot.train.recovery import rungs
from talkoot.train.schedule import schedules
from talkoot.world.faults import Fault


def check_methods(recipe: Recipe) -> None:
    """Refuse a misspelt planner, mixing rule, recovery rung or schedule.

    Raises:
        TalkootError: naming the key and the nearest method that there is.
    """
    train = recipe.train
    _check("train.planner", planners, train.planner)
    if train.planner not in ("straight", "shuffled") and recipe.swarm.layout != "ring":
        raise TalkootError(
            f"planner {train.planner!r} needs a ring",
            where="the recipe, key swarm.layout",
            why="its paths return to their origin for the loss; in a line the last stage computes it",
            next='set swarm.layout = "ring", or train.planner = "straight"',
        )
    if train.planner == "swapped" and recipe.swarm.num_stages < LEAST_STAGES:
        raise TalkootError(
            "planner 'swapped' needs more stages",
            where="the recipe, key swarm.stages",
            why=f"it swaps the first two and the last two relay stages of {LEAST_STAGES} or more, origins included; "
            f"there are {recipe.swarm.num_stages}",
            next=f'set swarm.stages to at least {LEAST_STAGES}, or train.planner = "straight"',
        )
    check_routes(recipe)
    _check("mixing.rule", mixing_rules, recipe.mixing.rule)
    check_rounds(recipe)
    _check("train.schedule", schedules, train.schedule)
    _check("recovery.ladder", rungs, *recipe.recovery.ladder)
    saves = recipe.train.checkpoint_every or recipe.recovery.failures_per_hour
    if "replay" in recipe.recovery.ladder and not saves:
        raise TalkootError(
            "rung 'replay' needs snapshots",
            where="the recipe, key recovery.ladder",
            why="what was sent since the newest one is kept on disk, and train.checkpoint_every is 0",
            next="set train.checkpoint_every, or recovery.failures_per_hour, above 0",
        )
    _check("train.repair", repairs, train.repair)


def check_fits(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse to cut a model into more fragments than it has layers.

    Raises:
        TalkootError: saying how many there are.
    """
    fragments = settled(recipe.mixing).fragments or 1
    if fragments > config.layer_count:
        raise TalkootError(
            "the model cannot be mixed in so many fragments",
            where="the recipe, key mixing.fragments",
            why=f"it is {fragments}; the model has {config.layer_count} layers, embedding and head included",
            next=f"set mixing.fragments to at most {config.layer_count}",
        )


ROUND_PHASES = ("assign", "begin", "forward", "mix", "idle", "give")  # that a replica passes


def _passes(fault: Fault) -> bool:
    """Whether anybody comes to where a fault is to strike, in a run in rounds."""
    return fault.at_s is not None or (fault.peer != LEAD and fault.phase in ROUND_PHASES)


def check_rounds(recipe: Recipe) -> None:
    """Refuse what replicas that step by themselves cannot do, and settings with which they would fly apart.

    Raises:
        TalkootError: naming the key.
    """
    settled(recipe.mixing)
    swarm, rule = recipe.swarm, recipe.mixing.rule
    if not mixing_rules[rule].local:
        return
    replicas = len(swarm.peers)
    refusals = (
        (swarm.num_stages > 1, "swarm.stages", f"it is {swarm.num_stages}", "set swarm.stages = 1 and swarm.replicas"),
        (swarm.layout != "line", "swarm.layout", f"it is {swarm.layout}", 'set swarm.layout = "line"'),
        (
            recipe.train.microbatches % replicas > 0,
            "train.microbatches",
            f"{replicas} replicas cannot share {recipe.train.microbatches} microbatches equally",
            f"set train.microbatches to a multiple of {replicas}",
        ),
        (swarm.standbys > 0, "swarm.standbys", "a standby follows steps, not rounds", "set swarm.standbys = 0"),
    )
    if strange := sorted({f"{one.phase} of {one.peer}" for one in recipe.faults if not _passes(one)}):
        raise TalkootError(
            "these faults would never strike",
            where="the recipe or the chaos file, key faults",
            why=f"in a run in rounds nobody passes {', '.join(strange)}",
            next=f"use phase {', '.join(ROUND_PHASES)} of a replica, or at_s",
        )
    for wrong, key, why, what in refusals:
        if wrong:
            raise TalkootError(
                f"mixing rule {rule!r} lets each replica hold the whole model and step by itself",
                where=f"the recipe, key {key}",
                why=why,
                next=f'{what}, or mixing.rule = "ddp"',
            )


def _check(key: str, registry: Registry[Any], *names: str) -> None:
    for name in names:
        if name not in registry:
            raise TalkootError(
                f"unknown {registry.noun} {name!r}",
                where=f"the recipe, key {key}",
                why=nearest(name, registry),
                next=f"use one of: {', '.join(registry)}",
            )


def check_routes(recipe: Recipe) -> None:
    """Refuse routes that cannot be followed: there are none, some stage is left out, or a peer is on too many.

    Raises:
        TalkootError: naming the key.
    """
    train, swarm, homes = recipe.train, recipe.swarm, recipe.swarm.peers
    if train.planner != "routes":
        if recipe.routes:
            raise _unfit(
                "routes", f"planner {train.planner!r} finds its own", 'leave them out, or set train.planner = "routes"'
            )
        if train.visits not in (0, swarm.num_stages):
            raise _unfit("train.visits", f"planner {train.planner!r} visits all stages", 'set train.planner = "routes"')
        if train.planner == "flow" and swarm.num_stages < 2:
            raise _unfit(
                "train.planner", "with one stage there is nothing to agree on", 'set train.planner = "straight"'
            )
        return
    lanes = [route for route in recipe.routes if route.count]
    if not lanes:
        raise _unfit("routes", "there are none", "let `talkoot plan --out FILE` write a recipe with routes")
    missed = sorted(set(range(swarm.num_stages)) - {homes[name] for route in lanes for name in route.peers})
    if missed:
        raise _unfit("routes", f"no route visits stages {missed}", "every stage needs work")
    lengths = sorted({len(route.peers) for route in lanes})
    if train.visits and lengths != [train.visits]:
        raise _unfit("train.visits", f"it is {train.visits}, and the routes visit {lengths} stages", "let both agree")
    for index, (name, _) in enumerate(homes.items()):
        used, slots = sum(name in route.peers for route in lanes), swarm.slots_of(index)
        if slots and used > slots:
            raise _unfit(
                "routes", f"{name} is on {used} of them and has {slots} slots", "raise swarm.slots or move a route"
            )


def _unfit(key: str, why: str, next: str) -> TalkootError:
    return TalkootError("the routes cannot be used", where=f"the recipe, key {key}", why=why, next=next)
