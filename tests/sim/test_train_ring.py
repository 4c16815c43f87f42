"""The ring: paths return to their origin for the loss, skip and swap stages, and survive crashes, all bit for bit."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from test_train_kit import Fault, Run, model_folder, replace, simulate, text_folder, tiny

from talkoot.model.huggingface import load_model
from talkoot.plan.steps import Route
from talkoot.train import records
from talkoot.train.oracle import step_gradients
from talkoot.train.prepare import cut_stages, model_config, open_windows
from talkoot.train.recipe import PHASES, Joiner, Recipe
from talkoot.world.links import Link, Network

STAGES = 3  # the tiny model: embedding, head | block 1 | block 2


def ring(*, groups: tuple[int, ...] = (2, 2, 2), routes: tuple[Route, ...] = (), slots: int = 0, **train) -> Recipe:
    recipe = replace(tiny(**train), "swarm", layout="ring", groups=groups, slots=slots)
    return msgspec.structs.replace(recipe, routes=routes)


@cache
def undisturbed(tied: bool = False) -> Run:
    return simulate(tiny(3, 2, tied=tied))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 1), (3,), (2, 2, 3)])
def test_a_ring_without_skipping_trains_the_same_bits_as_a_line(groups, tied):
    run = simulate(ring(groups=groups, tied=tied, slots=2))
    assert run.losses == undisturbed(tied).losses
    assert run.result.state_hash == undisturbed(tied).result.state_hash


SKIPPING = (
    Route(("alder", "cedar"), 1),  # stage 1 alone
    Route(("alder", "elm"), 1),  # stage 2 alone
    Route(("birch", "fir", "dogwood"), 2),  # both, swapped
    Route(("birch", "dogwood", "elm"), 1),
)


def test_skipped_and_swapped_stages_get_the_gradient_of_a_single_process_in_that_order():
    recipe = ring(routes=SKIPPING, planner="routes", clip=0.0, steps=1)
    run = simulate(recipe)
    (commit,) = run.facts("train.commit", records.Committed)
    config = model_config(recipe)
    cut = cut_stages(config, recipe)
    head = config.layers + 1
    orders = [[*(i for s in stages for i in config.held(*cut[s]) if i != head), head] for stages in commit.stages]
    assert sorted(map(tuple, orders)) == sorted([(0, 1, 3), (0, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3), (0, 1, 2, 3)])
    windows = open_windows(recipe, str(text_folder() / "tokens"))
    rows = [torch.from_numpy(windows.train(0, m, 5)) for m in range(5)]
    gradients, losses = step_gradients(load_model(model_folder(False)), rows, orders)
    assert commit.losses == losses
    squares = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients.values())
    assert commit.gradient_norm == pytest.approx(squares**0.5, rel=1e-12)


@cache
def skipping() -> Run:
    return simulate(ring(routes=SKIPPING, planner="routes", full_every=3, repair="repair"))


def test_every_few_steps_are_done_with_all_stages():
    lengths = [{len(path) for path in facts.paths} for facts in skipping().facts("train.commit", records.Committed)]
    assert lengths == [{2, 3}, {2, 3}, {3}, {2, 3}, {2, 3}]


@pytest.mark.parametrize(
    "phase", [phase for phase in PHASES if phase not in ("assign", "save", "commit", "idle", "give")]
)
@pytest.mark.parametrize("victim", ["alder", "cedar", "dogwood", "fir"])
def test_a_crash_in_a_ring_is_mended_within_the_step_and_leaves_no_trace(victim, phase):
    if phase == "loss" and victim != "alder":
        return
    recipe = ring(routes=SKIPPING, planner="routes", full_every=3)
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer=victim, step=3, phase=phase),)))
    assert run.result.state_hash == skipping().result.state_hash
    assert run.losses == skipping().losses
    (mended,) = run.facts("train.mend", records.Mended)
    assert mended.lost == (victim,)
    assert mended.skipped == mended.restarted == 0
    carried = sum(route.count for route in SKIPPING if victim in route.peers)
    assert mended.repaired == carried
    assert mended.repeated <= carried, "one forward of one stage per hole at most"


@pytest.mark.parametrize("victim", ["alder", "cedar", "fir"])
def test_starting_hurt_microbatches_again_gives_the_same_bits_for_more_work(victim):
    recipe = ring(routes=SKIPPING, planner="routes", full_every=3, repair="redo")
    fault = Fault(peer=victim, step=3, phase="backward")
    run = simulate(msgspec.structs.replace(recipe, faults=(fault,)))
    assert run.result.state_hash == skipping().result.state_hash


def test_two_crashes_in_one_step_are_mended_too():
    faults = (Fault(peer="cedar", step=3, phase="forward"), Fault(peer="fir", step=3, phase="backward"))
    recipe = ring(routes=SKIPPING, planner="routes", full_every=3)
    run = simulate(msgspec.structs.replace(recipe, faults=faults))
    assert run.result.state_hash == skipping().result.state_hash
    assert sorted(name for facts in run.facts("train.mend", records.Mended) for name in facts.lost) == ["cedar", "fir"]


def test_where_skipping_has_slack_a_lost_visit_is_left_out_and_the_rest_repaired():
    routes = (Route(("alder", "cedar", "elm"), 3), Route(("birch", "dogwood", "fir"), 2))
    recipe = ring(routes=routes, planner="routes", repair="skip", slots=1)
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer="cedar", step=3, phase="begin"),)))
    (mended,) = run.facts("train.mend", records.Mended)
    assert (mended.skipped, mended.repaired) == (1, 2)
    shortened = run.facts("train.commit", records.Committed)[3]
    assert sorted(map(len, shortened.stages)) == [2, 3, 3, 3, 3]
    assert run.result.finished


def flowing(**more) -> Recipe:
    return ring(planner="flow", slots=2, microbatches=6, **more)


def test_peers_that_negotiate_their_routes_train_the_same_bits_as_planned_ones():
    run, planned = simulate(flowing()), simulate(ring(slots=2, microbatches=6))
    assert run.result.state_hash == planned.result.state_hash
    (routed,) = run.facts("train.routes", records.Routed)
    assert sum(route.count for route in routed.routes) == 6
    assert {len(route.peers) for route in routed.routes} == {STAGES}
    used = [name for route in routed.routes for name in route.peers]
    assert all(used.count(name) <= 2 for name in used), "no peer is on more lanes than it has slots"


@pytest.mark.parametrize("phase", ["forward", "mix"])
def test_a_relay_that_comes_back_finds_the_routes_as_they_were(phase):
    recipe = msgspec.structs.replace(flowing(), faults=(Fault(peer="cedar", step=2, phase=phase),))
    run = simulate(recipe)
    assert run.result.state_hash == simulate(flowing()).result.state_hash
    assert len(run.facts("train.routes", records.Routed)) == 1


def test_when_a_relay_stays_away_the_others_negotiate_anew():
    recipe = replace(flowing(), "swarm", respawn=False)
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer="cedar", step=2, phase="backward"),)))
    assert run.result.state_hash == simulate(flowing()).result.state_hash
    first, second = run.facts("train.routes", records.Routed)
    assert any("cedar" in route.peers for route in first.routes)
    assert not any("cedar" in route.peers for route in second.routes)


@pytest.mark.parametrize("planner", ["straight", "flow", "weighted"])
def test_a_peer_that_comes_later_gets_a_stage_and_work_and_changes_no_bit(planner):
    recipe = replace(ring(planner=planner, slots=2, microbatches=6), "swarm", groups=(2, 1, 2), slots=2)
    alone = simulate(recipe)
    joined = simulate(replace(recipe, "swarm", joiners=(Joiner(name="late", step=2, slots=2),)))
    assert joined.result.state_hash == alone.result.state_hash
    seat = next(facts for facts in joined.facts("peer.seat", records.Seated) if facts.name == "late")
    assert (seat.stage, seat.source) == (1, "replica"), "the stage with the fewest slots"
    last = joined.facts("train.commit", records.Committed)[-1]
    assert any("late" in path for path in last.paths)


def test_a_peer_that_helps_nowhere_waits():
    recipe = ring(planner="flow", slots=3, microbatches=2)
    run = simulate(replace(recipe, "swarm", joiners=(Joiner(name="spare", step=1, slots=1),)))
    assert not any(facts.name == "spare" for facts in run.facts("peer.seat", records.Seated))
    assert run.result.finished


def test_a_spare_takes_the_place_of_a_peer_that_is_gone_for_good():
    recipe = replace(ring(planner="flow", slots=2, microbatches=4), "swarm", respawn=False)
    recipe = replace(recipe, "swarm", joiners=(Joiner(name="spare", step=0, slots=2),))
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer="cedar", step=1, phase="forward"),)))
    seat = next(facts for facts in run.facts("peer.seat", records.Seated) if facts.name == "spare")
    assert seat.stage == 1
    assert any("spare" in path for path in run.facts("train.commit", records.Committed)[-1].paths)


def test_routes_are_planned_anew_when_a_peer_turns_out_slower_than_assumed():
    """The recipe takes all peers for equal; in truth one relay is ten times slower."""
    routes = (Route(("alder", "cedar", "elm"), 3), Route(("birch", "dogwood", "fir"), 3))
    recipe = ring(routes=routes, planner="routes", slots=3, microbatches=6, steps=8, replan_at=0.5)
    recipe = replace(recipe, "swarm", flops=2e7)  # so that computing is what takes time

    def slow(lead, simulation) -> None:
        before = lead.world.launch

        def launch(peer):
            return before(msgspec.structs.replace(peer, speed=0.1) if peer.name == "cedar" else peer)

        lead.world.launch = launch

    run = simulate(recipe, started=slow)
    (routed,) = run.facts("train.routes", records.Routed)
    assert "speeds" in routed.reason
    shares = [sum("cedar" in path for path in facts.paths) for facts in run.facts("train.commit", records.Committed)]
    assert shares[0] == 3
    assert shares[-1] < 3


def test_a_visit_whose_output_somebody_further_on_has_used_is_never_left_out():
    """Two neighbours of a path are lost together after its loss: both visits must be computed again."""
    routes = (Route(("alder", "cedar", "elm"), 1), Route(("birch", "dogwood", "fir"), 4))
    recipe = ring(routes=routes, planner="routes", repair="skip")

    def both(lead, simulation) -> None:
        before = simulation.kill

        def kill(peer):
            before(peer)
            if peer.world.name == "cedar" and simulation.of("elm").alive:
                before(simulation.of("elm"))

        simulation.kill = kill

    faults = (Fault(peer="cedar", step=3, phase="backward"),)
    run = simulate(msgspec.structs.replace(recipe, faults=faults), started=both)
    assert run.result.state_hash == simulate(recipe).result.state_hash
    assert sum(facts.skipped for facts in run.facts("train.mend", records.Mended)) == 0


def test_a_spare_that_is_lost_within_a_step_hurts_nobody():
    recipe = replace(ring(planner="flow", slots=3, microbatches=2), "swarm", joiners=(Joiner(name="spare", slots=1),))
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer="cedar", step=3, phase="forward"),)))
    assert run.result.finished

    def lose_spare(entry, state) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step == 1:
            lead_world[0].disturb("spare", "kill")

    lead_world: list = []
    run = simulate(recipe, observer=lose_spare, started=lambda lead, simulation: lead_world.append(lead.world))
    assert run.result.finished
    assert "spare" in {facts.name for facts in run.facts("peer.lost", records.Gone)}


def test_a_microbatch_that_begins_again_may_overtake_the_news_of_it():
    links = Network(links={"lead->cedar": Link(latency_s=0.2)})
    recipe = ring(slots=3, microbatches=6, repair="redo")
    fault = Fault(peer="elm", step=2, phase="backward")
    run = simulate(msgspec.structs.replace(recipe, network=links, faults=(fault,)))
    assert run.result.state_hash == simulate(recipe).result.state_hash
