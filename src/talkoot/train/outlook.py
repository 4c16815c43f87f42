"""What the lead tells a planner about a step, and the log about a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

import talkoot
from talkoot.plan.steps import View
from talkoot.run.records import Start
from talkoot.train.compute import hop_bytes, stage_flops
from talkoot.train.job import Job
from talkoot.train.roster import Roster


def view_of(job: Job, roster: Roster, stages: Sequence[tuple[int, int]], step: int, num_microbatches: int) -> View:
    """What a planner knows of a step, or of an evaluation, with this many microbatches."""
    recipe = job.recipe
    costs = [stage_flops(job.config, *cut, recipe) for cut in stages]
    return View(
        seats=roster.seats(),
        num_stages=len(stages),
        num_microbatches=num_microbatches,
        ring=recipe.swarm.layout == "ring",
        step=step,
        seed=recipe.seed,
        visits=recipe.train.visits,
        homes=roster.home,
        network=recipe.network,
        hop_bytes=hop_bytes(job.config, recipe),
        stage_s=[forward / recipe.swarm.flops for forward, _ in costs],
        loss_s=costs[0][1] / recipe.swarm.flops,
    )


def start_of(job: Job, world: str, stages: Sequence[tuple[int, int]], tokenizer: str) -> Start:
    """The first entry of a run's log."""
    return Start(
        world=world,
        talkoot=talkoot.__version__,
        recipe=msgspec.to_builtins(job.recipe),
        config=msgspec.to_builtins(job.config),
        parameters=job.config.num_parameters(),
        stages=tuple(stages),
        tokens=job.tokens_digest,
        tokenizer=tokenizer,
    )
