"""What a run in rounds will cost: from a recipe to what :mod:`talkoot.plan.mixing` computes with. No torch.

Also the two figures that a run is held against while it goes on: what its rule sends, and how far apart replicas stay.
"""

from __future__ import annotations

import math

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.plan.mixing import Mixture, message_bytes, sent_bytes, way
from talkoot.plan.spread import predicted_ratio
from talkoot.train.job import Job
from talkoot.train.mixing import RoundRule, mixing_rules, settled, wires
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.records import MixingState
from talkoot.train.rounds.replica import costs
from talkoot.train.sections import Mixing
from talkoot.world.links import Network

LEAST_MEASURED = 40  # receipts of pairs, two from each, before a spread means anything
ALARM, CALM = 3.0, 2.5  # times the expected spread: where replicas begin to be too far apart, and where that is over


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
    rule = _rule(mixing)
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
        **_forces(mixing),
        rounds=-(-recipe.train.steps // mixing.inner_steps),
        seed=recipe.seed,
    )


def _forces(mixing: Mixing) -> dict[str, float]:
    plain = {"momentum": 0.0, "outer_rate": 1.0, "pull": 1.0}  # of averaging, which leaves them open
    return {name: other if (own := getattr(mixing, name)) is None else own for name, other in plain.items()}


def _rule(mixing: Mixing) -> RoundRule:
    rule = mixing_rules[mixing.rule]
    if rule.local is False:
        raise ValueError(f"{mixing.rule} is no rule about rounds")
    return rule


def expected_bytes(mixing: Mixing, values: int, replicas: int) -> float:
    """What each replica sends in a round, by the rule's formula, on average over all.

    Args:
        mixing: settled, see :func:`~talkoot.train.mixing.settled`.
        values: numbers that a replica holds.
        replicas: how many there are.
    """
    rule = _rule(mixing)
    nbytes = sum(message_bytes(wire, values, mixing.density) for wire in wires(rule, mixing))
    return sent_bytes(way(rule.partners, mixing.collective, gather=rule.gather), max(replicas, 1), nbytes)


def expected_spread(mixing: Mixing, replicas: int) -> float | None:
    """The lasting variance of the slow weights over that of the outer gradients, both between so many replicas.

    Returns:
        The ratio; None where there is none to hold a run against: the rule keeps replicas equal or never brings them
        together, there are too few of them, or their spread has no bound.
    """
    law, forces = _rule(mixing).law, _forces(mixing)
    if not law or replicas < 3:  # two that always meet are one
        return None
    ratio = predicted_ratio(law, forces["momentum"], forces["outer_rate"], forces["pull"], replicas=replicas)
    return ratio if math.isfinite(ratio) else None


def is_far(state: MixingState, expected: float | None, *, already: bool = False) -> bool:
    """Whether replicas are much further apart than their rule should keep them; ``already``: they were, just before."""
    if expected is None or state.spread is None or state.measured < LEAST_MEASURED:
        return False
    return state.spread > (CALM if already else ALARM) * expected


def drift_in_words(mixing: Mixing, state: MixingState, expected: float | None) -> str:
    """What a warning about replicas that are too far apart says."""
    return (
        f"replicas drift apart: their variance is {state.spread or 0.0:.3g} times that of a round's progress, "
        f"where rule {mixing.rule!r} should keep it at {expected or 0.0:.3g}; "
        f"{state.alone / max(state.rounds, 1):.0%} of the rounds so far were alone"
    )
