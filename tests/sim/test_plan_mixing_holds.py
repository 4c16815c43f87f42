"""What ``talkoot plan`` says about mixing, against runs of the shipping engine without tensors, in virtual time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from talkoot.core.fold import Entry, State
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.plan.mixing import MixingOutlook, outlook
from talkoot.plan.networks import named_network
from talkoot.plan.profile import to_network
from talkoot.train.job import Job
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Mixing, Recipe, Swarm, Train
from talkoot.train.rounds.lead import RoundLead, train_in_rounds
from talkoot.train.rounds.prospects import mixture_of
from talkoot.train.rounds.records import MixingState
from talkoot.world.api import Host
from talkoot.world.sim.simulation import Simulation

UNEQUAL = (1.0, 0.9, 0.8, 0.7, 0.6, 1.0, 0.9, 0.5)


def foreseen_and_found(speeds: tuple[float, ...] = (), **mixing: Any) -> tuple[MixingOutlook, MixingState]:
    """Twelve rounds of eight replicas in cities of gcp12, first planned, then run."""
    settings = Mixing(inner_steps=25, **mixing)
    recipe = Recipe(
        mixing=settings,
        train=Train(steps=300, microbatches=8, microbatch_size=2, evaluate_every=0, checkpoint_every=0),
        swarm=Swarm(stages=1, replicas=8, speeds=speeds, flops=2e8),
    )
    network = to_network(named_network("gcp12", 8), list(recipe.swarm.peers))
    recipe = msgspec.structs.replace(recipe, network=network)
    config = ModelConfig.from_depth(1, 257)
    simulation = Simulation(seed=recipe.seed, network=network, peer_flops=recipe.swarm.flops)
    states: list[State] = []

    def observe(entry: Entry, state: State) -> None:
        states[:] = [state]

    async def main(world: Host) -> None:
        job = Job(recipe=recipe, config=config)
        await train_in_rounds(RoundLead(world, job, cut_stages(config, recipe), Log(None), observer=observe))
        await world.dismiss()

    simulation.run(main)
    return outlook(mixture_of(recipe, config)), states[0]["mixing"]


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "noloco"},
        {"rule": "noloco", "speeds": UNEQUAL},
        {"rule": "noloco", "speeds": UNEQUAL, "balance": False, "deadline_s": 1000.0},
        {"rule": "diloco"},
        {"rule": "diloco", "collective": "tree"},
        {"rule": "diloco", "collective": "direct"},
        {"rule": "sparseloco"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_bytes_and_waits_are_as_planned(settings):
    foreseen, found = foreseen_and_found(**settings)
    assert found.rounds == 12 * 8
    assert found.alone == 0
    assert found.sent_bytes / found.rounds == pytest.approx(foreseen.sent_bytes_per_round, rel=0.05)
    assert found.idle == pytest.approx(foreseen.idle_share, rel=0.15)
    assert found.idle > 0.01  # there was something to foresee
