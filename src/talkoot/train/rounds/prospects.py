"""What a run in rounds will cost: from a recipe to what :mod:`talkoot.plan.mixing` computes with. No torch."""

from __future__ import annotations

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.plan.mixing import Mixture, way
from talkoot.train.job import Job
from talkoot.train.mixing import mixing_rules, settled, wires
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.replica import costs
from talkoot.world.links import Network


def mixture_of(recipe: Recipe, config: ModelConfig, network: Network | None = None) -> Mixture:
    """The recipe's replicas, and how they mix.

    Args:
        recipe, config: what is trained by whom.
        network: between them, by their names; the recipe's own when None.

    Raises:
        TalkootError: settings that do not go together, fewer than two replicas, or a model in stages.
        ValueError: the rule is none about rounds.
    """
    mixing, swarm = settled(recipe.mixing), recipe.swarm
    rule = mixing_rules[mixing.rule]
    if rule.local is False:
        raise ValueError(f"{mixing.rule} is no rule about rounds")
    names = list(swarm.peers)
    if swarm.num_stages > 1 or (len(names) < 2 and rule.partners != "none"):
        few = swarm.num_stages == 1
        raise TalkootError(
            f"mixing rule {mixing.rule!r} needs replicas",
            where=f"the recipe, key swarm.{'replicas' if few else 'stages'}",
            why="a single one has nobody to mix with"
            if few
            else f"each replica holds the whole model, and this one is cut into {swarm.num_stages} stages",
            next="set swarm.replicas to at least 2" if few else "set swarm.stages = 1, and swarm.replicas",
        )
    values = sum(config.layer_parameters())
    step_flops, _ = costs(Job(recipe=recipe, config=config), values)
    return Mixture(
        speeds={name: swarm.speed(index) for index, name in enumerate(names)},
        network=recipe.network if network is None else network,
        step_s=step_flops / swarm.flops,
        inner_steps=mixing.inner_steps,
        balance=mixing.balance,
        how=way(rule.partners, mixing.collective, gather=rule.gather),
        wires=wires(rule, mixing),
        values=values,
        density=mixing.density,
        fragments=mixing.fragments or 1,
        overlap=mixing.overlap or 0,
        law=rule.law,
        momentum=mixing.momentum or 0.0,
        outer_rate=1.0 if mixing.outer_rate is None else mixing.outer_rate,  # plain averaging
        pull=1.0 if mixing.pull is None else mixing.pull,
        rounds=-(-recipe.train.steps // mixing.inner_steps),
        seed=recipe.seed,
    )
