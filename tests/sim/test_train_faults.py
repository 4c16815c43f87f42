"""Faults of every kind at every point, and messages that are lost, cost time and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from test_train_kit import Fault, Run, replace, simulate, tiny

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.records import Gone, Warned
from talkoot.train.chaos import storm, trace
from talkoot.train.checkpoint import manifests, read_manifest
from talkoot.train.lead import Lead
from talkoot.train.recipe import PHASES, Recipe, peer_names
from talkoot.train.records import Recovered, RolledBack, Seated
from talkoot.train.run import run_simulated
from talkoot.train.verify import examine, verify
from talkoot.world.sim.simulation import Simulation

LONG = 1e6


@cache
def undisturbed(stages: int = 2, replicas: int = 2, steps: int = 5) -> str:
    return simulate(tiny(stages, replicas, steps=steps)).result.state_hash


def check(run: Run, expected: str | None = None) -> None:
    assert run.result.state_hash == (expected or undisturbed())
    assert examine(run.entries).faults == ()


def lost(run: Run) -> list[str]:
    return [gone.name for gone in run.facts("peer.lost", Gone)]


def warnings(run: Run) -> list[str]:
    return [facts.text for facts in run.facts("run.warning", Warned)]


KINDS = [("stop", 0.0), ("stop", 1.0), ("delay", LONG), ("partition", 0.0), ("partition", 1.0), ("partition", 9.0)]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "give"])
@pytest.mark.parametrize(("kind", "seconds"), KINDS, ids=lambda value: str(value))
def test_a_fault_of_any_kind_at_any_point_leaves_no_trace_in_the_state(kind, seconds, phase, tmp_path):
    """At step 2, which begins after a snapshot; to be seen taking over a seat, the victim is killed before."""
    faults = [Fault(peer="birch", step=2, phase=phase, kind=kind, seconds=seconds)]
    if phase == "assign":
        faults.append(Fault(peer="birch", step=2, phase="mix"))
    recipe = tiny(2, 2, tuple(faults))
    if phase == "save":  # one replica of each stage saves: there must be no choice
        recipe = tiny(2, 1, tuple(faults))
    run = simulate(recipe, tmp_path)
    check(run)
    noticed = {"stop": seconds == 0.0, "delay": True, "partition": seconds != 1.0}[kind]
    if phase != "loss":  # the first stage computes none
        assert lost(run) == ["birch"] * (noticed + (phase == "assign"))


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("assign", "loss", "idle", "give")])
@pytest.mark.parametrize("victim", ["birch", "dogwood"])
def test_a_damaged_message_is_refused_and_made_up_for(victim, phase, tmp_path):
    refused: Counter[str] = Counter()

    def started(lead: Lead, simulation: Simulation) -> None:
        simulations.append(simulation)

    simulations: list[Simulation] = []
    run = simulate(tiny(2, 2, (Fault(peer=victim, step=1, phase=phase, kind="corrupt"),)), tmp_path, started=started)
    check(run)
    for body in simulations[0]._peers.values():
        refused.update(body.world.refused)
    if phase != "save":  # there is none at step 1
        assert refused == {"bad tag": 1}
        assert lost(run) == []
        assert len(warnings(run)) == 1
        assert "a message was lost" in warnings(run)[0]


def test_a_damaged_state_on_its_way_to_a_newcomer_is_sent_again_soon():
    faults = (
        Fault(peer="birch", step=1, phase="forward"),
        Fault(peer="alder", step=1, phase="prepare", kind="corrupt"),  # what it sends next is its state
    )
    run = simulate(tiny(2, 2, faults, patience_s=400.0))
    check(run)
    seats = [(facts.name, facts.source) for facts in run.facts("peer.seat", Seated)]
    assert seats.count(("birch", "replica")) == 1
    assert len(warnings(run)) == 1
    assert run.entries[-1].receipt.ended < 50, "not after a quarter of the patience"


def losing(topic: str, after: int) -> Callable[[Lead, Simulation], None]:
    """An arrangement: the first message on ``topic`` of step ``after`` or later is lost."""

    def arrange(lead: Lead, simulation: Simulation) -> None:
        transmit = simulation.fabric.transmit
        gone: list[Any] = []

        def transmitting(source: Any, to: Any, message: Any) -> None:
            stem = message.topic.partition("/")[0]
            if not gone and stem == topic and lead.step >= after and source.world.me != to:
                gone.append(message)
                return
            transmit(source, to, message)

        simulation.fabric.transmit = transmitting  # type: ignore[method-assign]
        simulation.gone = gone  # type: ignore[attr-defined]
        lead.gone = gone  # type: ignore[attr-defined]

    return arrange


IN_STEPS = ["begin", "hop", "mix", "prepared", "commit", "save", "saved"]
IN_RECOVERY = ["hello", "introduce", "assign", "give", "state", "ready", "census", "standing", "amend"]


@pytest.mark.parametrize("topic", [*IN_STEPS, *IN_RECOVERY])
def test_any_lost_message_is_made_up_for(topic, tmp_path):
    faults = (Fault(peer="birch", step=2, phase="forward"),) if topic in IN_RECOVERY else ()
    run = simulate(tiny(2, 2, faults), tmp_path, started=losing(topic, 2))
    assert run.lead.gone, "one was lost"  # type: ignore[attr-defined]
    check(run)


@pytest.mark.parametrize("topic", ["tie", "mix"])
def test_a_lost_message_of_the_mixing_is_made_up_for(topic):
    run = simulate(tiny(2, 2, tied=True), started=losing(topic, 2))
    assert run.lead.gone  # type: ignore[attr-defined]
    check(run, simulate(tiny(1, 1, tied=True)).result.state_hash)
    assert lost(run) == []
    assert len(warnings(run)) == 1


def test_a_peer_that_missed_a_commit_gives_up_its_seat():
    run = simulate(tiny(2, 2), started=losing("commit", 4))
    check(run)
    (gone,) = run.facts("peer.lost", Gone)
    assert gone.reason == "it holds the state of step 3 and was to do 'save' of 4"
    assert lost(run) == ["alder"]


def test_before_the_first_commit_there_is_no_telling_what_is_usual_and_patience_decides():
    with pytest.raises(TalkootError, match="stands still") as caught:
        simulate(tiny(2, 1, (Fault(peer="birch", step=0, phase="forward", kind="delay", seconds=LONG),)))
    assert caught.value.code is Exit.UNREACHABLE
    assert "birch" in caught.value.where


def test_a_hung_peer_is_found_and_replaced_while_a_slow_one_is_waited_for():
    hung = simulate(tiny(2, 2, (Fault(peer="cedar", step=2, phase="backward", kind="delay", seconds=LONG),)))
    check(hung)
    assert lost(hung) == ["cedar"]
    assert hung.entries[-1].receipt.ended < 50
    slow = simulate(tiny(2, 2, (Fault(peer="cedar", step=2, phase="backward", kind="delay", seconds=15.0),)))
    check(slow)
    assert lost(slow) == []


def test_a_whole_stage_hung_at_once_goes_back_to_the_snapshot(tmp_path):
    names = ("cedar", "dogwood")
    faults = tuple(Fault(peer=name, step=3, phase="commit", kind="delay", seconds=LONG) for name in names)
    run = simulate(tiny(2, 2, faults), tmp_path)
    check(run)
    assert sorted(lost(run)) == list(names)
    assert len(run.facts("train.rollback", RolledBack)) == 1


# -- partitions ----------------------------------------------------------------------------------------------------


def test_a_group_cut_off_together_is_lost_together_and_its_replacements_are_not_cut_off(tmp_path):
    fault = Fault(peers=("birch", "cedar"), step=2, phase="begin", kind="partition")
    run = simulate(tiny(2, 2, (fault,)), tmp_path)
    check(run)
    assert sorted(lost(run)) == ["birch", "cedar"]
    assert run.facts("train.rollback", RolledBack) == []


# -- full disks ----------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_snapshots_of_that_time_and_no_others(tmp_path):
    plain = simulate(tiny(2, 1, steps=30))
    seconds = plain.entries[-1].receipt.ended / 4
    fault = Fault(peer="alder", step=2, phase="save", kind="disk_full", seconds=seconds)
    run = simulate(tiny(2, 1, (fault,), steps=30, checkpoint_every=2, keep_checkpoints=99), tmp_path)
    check(run, undisturbed(2, 1, 30))
    kept = {read_manifest(path).step for path in manifests(tmp_path)}
    given_up = {int(text.split("step ")[1].split(":")[0]) for text in warnings(run)}
    assert kept | given_up == set(range(2, 31, 2))
    assert kept.isdisjoint(given_up)
    assert min(given_up) == 2
    assert all("alder: the disk is full" in text and "No space left on device" in text for text in warnings(run))
    assert lost(run) == []


def test_where_one_replica_has_a_full_disk_the_other_one_saves(tmp_path):
    run = simulate(tiny(2, 2, (Fault(peer="alder", step=2, phase="save", kind="disk_full"),)), tmp_path)
    check(run)
    assert warnings(run) == []
    assert [read_manifest(path).step for path in manifests(tmp_path)] == [5, 4]


def test_a_loss_while_the_disk_is_full_goes_back_to_the_newest_whole_snapshot(tmp_path):
    faults = (
        Fault(peer="alder", step=4, phase="save", kind="disk_full"),
        Fault(peer="alder", step=5, phase="mix"),
    )
    run = simulate(tiny(2, 1, faults, steps=7), tmp_path)
    check(run, undisturbed(2, 1, 7))
    assert [entry.receipt.step for entry in run.entries if entry.receipt.op == "train.rollback"] == [2]
    assert warnings(run)[0].endswith("the newest one is that of step 2")


def test_a_run_does_not_end_without_its_last_state_and_resumes_when_there_is_space(tmp_path):
    recipe = tiny(2, 1, (Fault(peer="alder", step=4, phase="begin", kind="disk_full"),))
    with pytest.raises(TalkootError, match="the last state cannot be saved") as caught:
        run_simulated(recipe, tmp_path)
    assert "the newest one is that of step 4" in caught.value.next
    assert [read_manifest(path).step for path in manifests(tmp_path)] == [4, 2]
    result = run_simulated(msgspec.structs.replace(recipe, faults=()), tmp_path)
    assert (result.finished, result.state_hash) == (True, undisturbed(2, 1))
    assert verify(tmp_path / LOG).faults == ()


@pytest.mark.parametrize("phase", ["begin", "commit", "save"])
def test_a_full_disk_of_the_lead_ends_the_run_and_loses_nothing(phase, tmp_path):
    recipe = tiny(2, 2, (Fault(peer="lead", step=4, phase=phase, kind="disk_full"),))
    with pytest.raises(TalkootError, match="the run log cannot be written") as caught:
        run_simulated(recipe, tmp_path)
    assert "free some space" in caught.value.next
    log = Log(tmp_path / LOG)
    steps = [entry.receipt.step for entry in log.entries() if entry.receipt.op == "train.commit"]
    log.close()
    assert steps == [0, 1, 2, 3]
    result = run_simulated(msgspec.structs.replace(recipe, faults=()), tmp_path)
    assert (result.finished, result.state_hash) == (True, undisturbed())
    assert verify(tmp_path / LOG).faults == ()


def test_a_manifest_that_cannot_be_written_costs_that_snapshot_alone(tmp_path, monkeypatch):
    def started(lead: Lead, simulation: Simulation) -> None:
        write = lead.world.blobs.write

        def writing(target, data) -> None:
            if target.name == "step-00000002.json":
                raise TalkootError("the disk is full", where=str(target), why="No space left on device", next="")
            write(target, data)

        lead.world.blobs.write = writing  # type: ignore[method-assign]

    run = simulate(tiny(), tmp_path, started=started)
    check(run)
    assert warnings(run) == [
        "no snapshot of step 2: the disk is full: No space left on device; there is no other: it would start over"
    ]
    assert [read_manifest(path).step for path in manifests(tmp_path)] == [5, 4]


# -- faults outlive their victims ----------------------------------------------------------------------------------


def test_a_replacement_has_the_faults_of_its_name_still_before_it(tmp_path):
    faults = (
        Fault(peer="birch", step=1, phase="forward"),
        Fault(peer="birch", step=1, phase="assign"),
        Fault(peer="birch", step=8, phase="commit"),
        Fault(peer="birch", step=12, phase="mix"),
    )
    run = simulate(tiny(2, 2, faults, steps=15), tmp_path)
    check(run, undisturbed(2, 2, 15))
    assert lost(run) == ["birch"] * 4
    at = [entry.receipt.step for entry in run.entries if entry.receipt.op == "peer.lost"]
    assert at[0] == 1
    assert at[1] in (2, 3), "at the next step's beginning it would have had the seat"
    assert at[2:] == [9, 12]


def test_a_peer_can_be_killed_again_inside_the_recovery_that_rolled_everybody_back(tmp_path):
    faults = (Fault(peer="alder", step=3, phase="backward"), Fault(peer="alder", step=3, phase="assign"))
    run = simulate(tiny(2, 1, faults), tmp_path)
    check(run, undisturbed(2, 1))
    assert lost(run) == ["alder", "alder"]
    assert [facts.lost for facts in run.facts("train.recover", Recovered)] == [("alder", "alder")]


def test_a_resumed_run_takes_another_chaos_file_and_is_not_struck_twice(tmp_path):
    first = tiny(2, 2, (Fault(peer="birch", step=1, phase="mix"),))

    def stop(entry: Any, state: Any) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulated(first, tmp_path, stop)
    again = msgspec.structs.replace(first, faults=(*first.faults, Fault(peer="cedar", step=4, phase="mix")))
    assert run_simulated(again, tmp_path).state_hash == undisturbed()
    assert verify(tmp_path / LOG).lost == ("birch", "cedar")


# -- faults at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kill", "stop", "delay", "corrupt", "partition", "disk_full"])
def test_faults_strike_at_their_times(kind, tmp_path):
    plain = simulate(tiny(2, 2, steps=20))
    half = next(e.receipt.ended for e in plain.entries if e.receipt.op == "train.commit" and e.receipt.step == 9)
    seconds = {"delay": LONG, "disk_full": 0.1}.get(kind, 0.0)
    faults = (Fault(peer="cedar", at_s=half, kind=kind, seconds=seconds),)
    run = simulate(tiny(2, 2, faults, steps=20), tmp_path)
    check(run, undisturbed(2, 2, 20))
    if kind in ("kill", "stop", "delay", "partition"):
        assert lost(run) == ["cedar"]
        struck = [entry.receipt for entry in run.entries if entry.receipt.op == "peer.lost"]
        assert {9, 10, 11} >= {receipt.step for receipt in struck}
    if kind == "corrupt":
        assert len(warnings(run)) == 1


def test_a_trace_of_kills_keyed_by_seconds_strikes_replacements_as_well():
    plain = simulate(tiny(2, 2, steps=20))
    seconds = plain.entries[-1].receipt.ended
    kills = trace(3600 * 2 / seconds, peer_names(4), 2 * seconds / 3600, seed=1)
    run = simulate(tiny(2, 2, kills, steps=20))
    check(run, undisturbed(2, 2, 20))
    assert max(Counter(lost(run)).values()) >= 2


# -- storms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 1)])
def test_a_kill_storm_ends_in_the_undisturbed_state(stages, replicas, seed, tmp_path):
    recipe = tiny(stages, replicas, steps=14)
    kills = storm(recipe, seed)
    run = simulate(msgspec.structs.replace(recipe, faults=kills), tmp_path)
    check(run, undisturbed(stages, replicas, 14))
    assert set(lost(run)) == set(peer_names(stages * replicas))
    assert len(lost(run)) >= len(kills) - 3, "a phase may not be reached any more when another is lost first"


def kept(recipe: Recipe) -> Recipe:
    return replace(recipe, "recovery", ladder=("replica", "shadow", "checkpoint"))


def test_a_kill_storm_over_kept_stages_ends_in_the_undisturbed_state(tmp_path):
    recipe = kept(tiny(3, 1, steps=14))
    run = simulate(msgspec.structs.replace(recipe, faults=storm(recipe, 1)), tmp_path)
    check(run, undisturbed(3, 1, 14))
