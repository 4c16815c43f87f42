"""What the losses of a recipe's peers would cost: from a recipe to what the ladder's costs are computed from."""

from __future__ import annotations

from talkoot.model.config import ModelConfig
from talkoot.plan.ladder import JUMP_ITERATIONS, Case
from talkoot.train.compute import hop_bytes, stage_flops
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Recipe
from talkoot.world.sim.fabric import KILL_NOTICE

START_S = 2.0  # of a new process until it is ready for a state: 1.5 s of it is the import of torch


def recovery_case(
    recipe: Recipe,
    config: ModelConfig,
    iteration_s: float,
    *,
    start_s: float = START_S,
    jump_iterations: float = JUMP_ITERATIONS,
) -> Case:
    """The recipe's swarm and its recovery, for :mod:`talkoot.plan.ladder`.

    Args:
        recipe, config: what is trained by whom.
        iteration_s: of a whole step, as a rehearsal takes it.
        start_s, jump_iterations: see :class:`~talkoot.plan.ladder.Case`.
    """
    swarm, train, recovery = recipe.swarm, recipe.train, recipe.recovery
    cut, sizes = cut_stages(config, recipe), config.layer_parameters()
    held = [config.held(*layers) for layers in cut]
    ends = {0, config.layer_count - 1}
    holders: list[tuple[str, ...]] = [
        tuple(name for name, home in swarm.peers.items() if home == stage) for stage in range(len(cut))
    ]
    flops = [3 * forward + loss for forward, loss in (stage_flops(config, *layers, recipe) for layers in cut)]
    return Case(
        holders=tuple(holders),
        values=tuple(sum(sizes[layer] for layer in layers) for layers in held),
        blocks=tuple(len(set(layers) - ends) for layers in held),
        ends=tuple(stage for stage, layers in enumerate(held) if ends & set(layers)),
        ring=swarm.layout == "ring",
        network=recipe.network,
        ladder=recovery.ladder,
        copies=recovery.copies,
        guarded=recovery.guarded,
        refresh_every=recovery.refresh_every,
        moments=recovery.moments,
        stream_bytes=2 if recovery.stream == "bfloat16" else 4,
        checkpoint_every=min(train.checkpoint_every or train.steps, train.steps),
        iteration_s=iteration_s,
        stage_s=tuple(
            train.microbatches * one / swarm.flops / len(names) for one, names in zip(flops, holders, strict=True)
        ),
        sent_bytes=train.microbatches * hop_bytes(config, recipe),
        microbatches=train.microbatches,
        detection_s=KILL_NOTICE,
        start_s=start_s,
        jump_iterations=jump_iterations,
    )
