"""Rehearsals: large swarms in virtual time on one core, with times and sizes that can be checked by hand."""

from __future__ import annotations

import pytest

from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.train.compute import BlankStage
from talkoot.train.job import Job
from talkoot.train.lead import Lead
from talkoot.train.loop import train
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Model, Recipe, Swarm, Train
from talkoot.train.rehearse import rehearse
from talkoot.world.faults import Fault
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import PEER_FLOPS, Simulation

CONFIG = ModelConfig.from_depth(8, 1024)


def recipe_of(
    stages: int, replicas: int, *, steps: int = 3, microbatches: int = 8, link: Link | None = None, faults=()
) -> Recipe:
    return Recipe(
        seed=5,
        model=Model(depth=8, context=64),
        train=Train(steps=steps, microbatches=microbatches, evaluate_every=0, checkpoint_every=0),
        swarm=Swarm(stages=stages, replicas=replicas),
        network=Network(default=link or Link()),
        faults=faults,
    )


def stage_seconds(recipe: Recipe) -> list[float]:
    """Seconds that one forward takes at each stage."""
    ranges = cut_stages(CONFIG, recipe)
    return [BlankStage(CONFIG, first, last, recipe).forward_flops / PEER_FLOPS for first, last in ranges]


@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches"), [(1, 1, 4), (1, 4, 8), (4, 1, 8), (4, 2, 8), (3, 2, 7)]
)
def test_a_step_takes_at_least_its_compute_and_little_more_on_a_fast_network(stages, replicas, microbatches):
    recipe = recipe_of(stages, replicas, microbatches=microbatches, link=Link(latency_s=1e-9, bytes_per_s=1e15))
    found = rehearse(recipe, CONFIG)
    forward = stage_seconds(recipe)
    most = -(-microbatches // replicas)  # of the busiest replica
    busiest = 3 * max(forward) * most
    one_path = 3 * sum(forward)
    assert found.step_seconds >= max(busiest, one_path)
    apply = 12 * max(CONFIG.layer_parameters()) * CONFIG.layer_count / PEER_FLOPS
    assert found.step_seconds <= busiest + one_path + apply, "1F1B: the bubble is at most one path"
    assert all(0 < share <= 1 for share in found.busy.values())


def test_more_latency_never_makes_a_step_shorter():
    seconds = [
        rehearse(recipe_of(4, 2, link=Link(latency_s=latency)), CONFIG).step_seconds
        for latency in (0.0, 0.001, 0.01, 0.1)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 2 * 3 * 0.1, "forward and back through four stages cross six links"


def test_two_replicas_send_the_optimum_of_bytes_for_mixing():
    recipe = recipe_of(1, 2, steps=4)
    sent = rehearse(recipe, CONFIG).sent_bytes
    vector = 4 * CONFIG.num_parameters()
    assert sent == {"alder": 4 * vector, "birch": 4 * vector}  # 2 (N - 1) / N = 1 vector a step


def test_messages_grow_linearly_with_the_pipelines_length():
    def per_step(stages: int) -> int:
        long, short = (rehearse(recipe_of(stages, 2, steps=steps), CONFIG).events for steps in (6, 3))
        return (long - short) // 3

    events = {stages: per_step(stages) for stages in (2, 4, 8)}
    assert events[8] - events[4] == pytest.approx(2 * (events[4] - events[2]), rel=0.05)


def test_two_hundred_peers_rehearse_with_the_same_log_twice():
    recipe = recipe_of(10, 20, steps=2, microbatches=40)
    first = rehearse(recipe, CONFIG)
    assert (first.result.finished, len(first.busy)) == (True, 200)
    assert rehearse(recipe, CONFIG).result.log_hash == first.result.log_hash


def test_a_rehearsal_survives_losses_and_takes_longer_for_them():
    calm = rehearse(recipe_of(2, 2, steps=5), CONFIG)
    faults = tuple(Fault(peer=name, step=3, phase="backward") for name in ("alder", "birch"))
    hit = rehearse(recipe_of(2, 2, steps=5, faults=faults), CONFIG)
    assert hit.result.step == 5
    assert hit.seconds > calm.seconds


def test_a_single_step_can_be_rehearsed():
    assert rehearse(recipe_of(2, 1, steps=1), CONFIG).step_seconds > 0


def test_what_a_long_run_keeps_in_memory_does_not_grow_with_its_steps():
    """Sampled over 300 steps with losses: mailboxes, strangers' messages, and the lead's own tables."""
    faults = tuple(
        Fault(peer=name, step=step, phase=phase)
        for name, step, phase in (("alder", 20, "mix"), ("dogwood", 90, "backward"), ("cedar", 150, "commit"))
    )
    recipe = recipe_of(2, 2, steps=300, microbatches=4, link=Link(jitter_s=0.002), faults=faults)
    simulation = Simulation(seed=1, network=recipe.network)
    kept: dict[int, int] = {}

    async def main(world) -> Lead:
        log = Log(None)

        def observe(entry, state) -> None:
            if entry.receipt.op == "train.commit" and entry.receipt.step % 10 == 9:
                living = [body.world for body in simulation.fabric.peers.values() if body.alive]
                waiting = sum(len(peer.mailbox) + len(peer._strangers) for peer in living)
                tasks = sum(len(body.tasks) for body in simulation.fabric.peers.values())
                tables = len(lead.roster.members) + len(lead.roster.launched) + len(lead.roster.lost)
                kept[entry.receipt.step] = waiting + tasks + tables

        lead = Lead(world, Job(recipe=recipe, config=CONFIG), cut_stages(CONFIG, recipe), log, observer=observe)
        await train(lead)
        await world.dismiss()
        log.close()
        return lead

    lead = simulation.run(main)
    assert lead.state["peers"].lost == 3
    assert len(kept) == 30
    early = max(count for step, count in kept.items() if step < 20)
    late = max(count for step, count in kept.items() if step > 200)
    assert late <= early + 3 * len(lead.roster.home), "a few stale messages may wait for the next recovery, no more"
    assert all(body.world.mailbox.dropped == 0 for body in simulation.fabric.peers.values())
