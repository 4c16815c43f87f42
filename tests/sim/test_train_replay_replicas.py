"""Replaying a lost stage where its neighbours have replicas: what one of them had sent may be gone with it."""

from __future__ import annotations

from functools import cache

import msgspec
from test_train_kit import Fault, Run, replace, simulate, tiny

from talkoot.train import records
from talkoot.train.recipe import Recipe

ALDER, CEDAR = "alder", "cedar"  # one of stage 0's two peers, and stage 1's only one


def recipe() -> Recipe:
    plain = replace(tiny(microbatches=4, steps=6, checkpoint_every=2), "swarm", groups=(2, 1))
    return replace(plain, "recovery", ladder=("replica", "replay", "checkpoint"))


@cache
def undisturbed() -> Run:
    return simulate(recipe())


def rungs(run: Run) -> list[str]:
    return [facts.rung for facts in run.facts("train.recover", records.Recovered)]


def test_a_stage_lost_together_with_one_who_had_sent_to_it_goes_back_to_the_snapshot(tmp_path):
    faults = (Fault(peer=ALDER, step=3, phase="forward"), Fault(peer=CEDAR, step=3, phase="forward"))
    run = simulate(msgspec.structs.replace(recipe(), faults=faults), tmp_path)
    assert rungs(run) == ["checkpoint"]
    assert run.result.state_hash == undisturbed().result.state_hash


def test_once_a_snapshot_has_come_after_the_loss_of_a_neighbour_its_stage_can_be_replayed(tmp_path):
    faults = (Fault(peer=ALDER, step=1, phase="forward"), Fault(peer=CEDAR, step=5, phase="forward"))
    run = simulate(msgspec.structs.replace(recipe(), faults=faults), tmp_path)
    assert rungs(run)[-1] == "replay"
    assert run.result.state_hash == undisturbed().result.state_hash


def test_a_stage_that_was_replayed_itself_remembers_what_it_had_sent(tmp_path):
    alone = replace(recipe(), "swarm", groups=(1, 1))
    faults = (Fault(peer=ALDER, step=2, phase="forward"), Fault(peer="birch", step=3, phase="forward"))
    run = simulate(msgspec.structs.replace(alone, faults=faults), tmp_path)
    assert rungs(run) == ["replay", "replay"]
    assert run.result.state_hash == undisturbed().result.state_hash
