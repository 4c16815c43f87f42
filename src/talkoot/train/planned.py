"""From a recipe to what a route planner works on, and from the planner's answer to a recipe that trains by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from talkoot.core.toml import to_toml
from talkoot.model.config import ModelConfig
from talkoot.plan import published
from talkoot.plan.problem import Problem, Routes, Rules
from talkoot.plan.profile import Profile, to_network, to_problem
from talkoot.plan.steps import Route
from talkoot.train.compute import hop_bytes, stage_flops
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Recipe, Swarm
from talkoot.world.links import Link, Network

USUAL_SAMPLES = 8
BACKWARD_RATIO = 2.0  # what a peer's backward costs beside its forward; see `talkoot.train.peer`
_WRITTEN = ("latency_s", "bytes_per_s")  # figures of a link that are written down even where they are the usual ones


def ring_stages(recipe: Recipe, config: ModelConfig, num_stages: int) -> list[tuple[int, int]]:
    """Layers of each of a ring's stages, head and embedding in the first.

    Raises:
        TalkootError: the model has fewer layers.
    """
    return cut_stages(config, Recipe(model=recipe.model, swarm=Swarm(layout="ring", groups=(1,) * num_stages)))


def recipe_problem(recipe: Recipe, config: ModelConfig, profile: Profile, num_stages: int) -> Problem:
    """What one iteration of ``recipe`` costs on the machines of ``profile``, cut into ``num_stages`` stages.

    The profile's seconds are those of one of this model's blocks for one of its sequences. In the problem a "layer" is
    one floating-point operation per token: blocks may be unlike, and a first stage may hold no block at all (it then
    counts as one operation, so that the loss has something to be a multiple of).

    Raises:
        TalkootError: the model has fewer layers than stages.
    """
    costs = [stage_flops(config, *cut, recipe) for cut in ring_stages(recipe, config, num_stages)]
    tokens = recipe.train.microbatch_size * recipe.model.context
    per_token = [max(round(forward / tokens), 1) for forward, _ in costs]
    block = _block_flops(recipe, config)
    nodes = tuple(
        msgspec.structs.replace(node, layer_sample_s=node.layer_sample_s * recipe.model.context / block)
        for node in profile.nodes
    )
    return to_problem(
        msgspec.structs.replace(profile, nodes=nodes),
        activation_bytes=hop_bytes(config, recipe),
        gradient_bytes=4 * max(stage_parameters(recipe, config, num_stages)),
        stage_layers=per_token,
        samples=recipe.train.microbatch_size,
        backward_ratio=BACKWARD_RATIO,
        loss_ratio=costs[0][1] / (tokens * per_token[0]),
    )


def usual_problem(profile: Profile, num_stages: int, samples: int = USUAL_SAMPLES) -> Problem:
    """What one iteration costs where no recipe names a model: a published profile of costs.

    One layer of width 1024 per stage, sequences of 1024 tokens, a backward of 1.5 forwards, the loss a quarter of one.
    With 8 sequences, and 0.055 s per layer and sequence, these are the costs of :mod:`talkoot.plan.published`.
    """
    return to_problem(
        profile,
        activation_bytes=published.ACTIVATION_BYTES * samples / USUAL_SAMPLES,
        gradient_bytes=4 * 12 * 1024**2,
        stage_layers=(1,) * num_stages,
        samples=samples,
    )


def stage_parameters(recipe: Recipe, config: ModelConfig, num_stages: int) -> list[int]:
    """Number of parameters of each of a ring's stages."""
    sizes = config.layer_parameters()
    return [sum(sizes[layer] for layer in config.held(*cut)) for cut in ring_stages(recipe, config, num_stages)]


def planned_recipe(recipe: Recipe, config: ModelConfig, profile: Profile, routes: Routes, rules: Rules) -> Recipe:
    """``recipe``, trained by the machines that ``routes`` place, along its lanes, over the links of ``profile``.

    Peers compute a forward in exactly the profile's seconds where the world simulates or emulates them, and are named
    like the nodes, as far as a peer may be. Faults are left out, as they name other peers.

    Args:
        routes: by the profile's node numbers.
    """
    names = peer_names_of([node.name for node in profile.nodes])
    placed = [node for group in routes.groups for node in group]
    fastest_s = min(profile.nodes[node].layer_sample_s for node in placed)
    swarm = msgspec.structs.replace(
        recipe.swarm,
        layout="ring",
        groups=tuple(map(len, routes.groups)),
        names=tuple(names[node] for node in placed),
        speeds=tuple(fastest_s / profile.nodes[node].layer_sample_s for node in placed),
        slots=tuple(profile.nodes[node].slots for node in placed),
        flops=_block_flops(recipe, config) / fastest_s,
    )
    lanes = [lane for lane in routes.lanes if lane.count]
    return msgspec.structs.replace(
        recipe,
        swarm=swarm,
        train=msgspec.structs.replace(
            recipe.train, planner="routes", visits=rules.visits, microbatches=routes.num_microbatches
        ),
        network=Network(default=recipe.network.default, links=_links(profile, names, placed)),
        routes=tuple(Route(tuple(names[node] for node in (lane.origin, *lane.relays)), lane.count) for lane in lanes),
        faults=(),
    )


def peer_names_of(names: Sequence[str]) -> list[str]:
    """Names that peers may have, like these: no blanks, no arrow, none twice, nobody called lead."""
    taken = {"lead"}
    found: list[str] = []
    for name in names:
        plain = "-".join(name.split()).replace(">", "-") or "peer"
        fresh, turn = plain, 1
        while fresh in taken:
            turn += 1
            fresh = f"{plain}-{turn}"
        taken.add(fresh)
        found.append(fresh)
    return found


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, which :func:`talkoot.train.recipe.load_recipe` reads back as an equal one."""
    tree: dict[str, Any] = msgspec.to_builtins(recipe)
    usual = msgspec.to_builtins(Link())
    tree["network"]["links"] = {
        name: {key: value for key, value in link.items() if key in _WRITTEN or value != usual[key]}
        for name, link in tree["network"]["links"].items()
    }
    return to_toml(tree)


def _block_flops(recipe: Recipe, config: ModelConfig) -> float:
    """Forward operations of one block for one sequence; their mean where blocks are unlike."""
    blocks = config.layer_flops(recipe.model.context)[1:-1]
    return recipe.model.context * sum(blocks) / len(blocks)


def _links(profile: Profile, names: Sequence[str], placed: Sequence[int]) -> dict[str, Link]:
    """Links between placed peers; a direction is left out where it equals the other one, which then stands for it."""
    links = to_network(profile, names).links
    kept: dict[str, Link] = {}
    present = [names[node] for node in placed]
    for one in present:
        for other in present:
            if one != other and kept.get(f"{other}->{one}") != links[f"{one}->{other}"]:
                kept[f"{one}->{other}"] = links[f"{one}->{other}"]
    return kept
