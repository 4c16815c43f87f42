"""Chaos files, what is still ahead of whom, storms and traces."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.train.chaos import Docket, storm, trace, with_chaos
from talkoot.train.recipe import Recipe, Swarm, Train, peer_names
from talkoot.world.faults import Fault, FaultPlan

RECIPE = Recipe(train=Train(steps=20, microbatches=4), swarm=Swarm(stages=2, replicas=2))


def write(tmp_path, text: str):
    path = tmp_path / "chaos.toml"
    path.write_text(text)
    return path


def test_a_chaos_file_adds_its_faults_to_the_recipes_own(tmp_path):
    own = msgspec.structs.replace(RECIPE, faults=(Fault(peer="alder", step=1, phase="mix"),))
    path = write(
        tmp_path,
        """
        [[faults]]
        peer = "birch"
        step = 3
        phase = "backward"

        [[faults]]
        peers = ["birch", "cedar"]
        kind = "partition"
        at_s = 12.5
        seconds = 3

        [[faults]]
        peer = "lead"
        kind = "disk_full"
        step = 4
        phase = "save"
        """,
    )
    faults = with_chaos(own, path).faults
    assert faults[0] is own.faults[0]
    assert faults[1:] == (
        Fault(peer="birch", step=3, phase="backward"),
        Fault(peers=("birch", "cedar"), kind="partition", at_s=12.5, seconds=3.0),
        Fault(peer="lead", kind="disk_full", step=4, phase="save"),
    )
    assert with_chaos(own, None) is own


GOOD = '[[faults]]\npeer = "birch"\nstep = 3\nphase = "mix"\n[[faults]]\n'


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ('peer = "brich"\nstep = 1\nphase = "mix"', "faults[1].peer", "did you mean 'birch'?"),
        ('peer = "birch"\nstep = 1\nphase = "fwd"', "faults[1].phase", "did you mean 'forward'?"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nkind = "kil"', "faults[1].kind", "did you mean 'kill'?"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nsecond = 1', "faults[1].second", "did you mean 'seconds'?"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nseconds = -1', "faults[1].seconds", "at least 0"),
        ('peer = "birch"\nstep = 1\nphase = "mix"\nat_s = 1', "faults[1].at_s", "either"),
        ('peer = "birch"', "faults[1].at_s", "either"),
        ('peer = "birch"\nphase = "mix"', "faults[1].step", "at least 0"),
        ('peer = "birch"\nstep = "1"\nphase = "mix"', "faults[1].step", "Expected"),
        ('peer = "lead"\nstep = 1\nphase = "mix"', "faults[1].peer", "the lead can have a full disk"),
    ],
)
def test_a_fault_that_could_never_strike_is_refused_with_its_entry_and_the_nearest_name(text, where, hint, tmp_path):
    path = write(tmp_path, GOOD + text + "\n")
    with pytest.raises(TalkootError, match="the chaos file cannot be used") as caught:
        with_chaos(RECIPE, path)
    assert caught.value.where == f"{path}, key {where}"
    assert hint in caught.value.why


def test_files_that_are_none_and_unknown_tables_are_refused(tmp_path):
    for text, why in (("[[faults]", "not TOML"), ("[[fault]]\n", "did you mean 'faults'?")):
        with pytest.raises(TalkootError, match="the chaos file cannot be used") as caught:
            with_chaos(RECIPE, write(tmp_path, text))
        assert why in caught.value.why
    with pytest.raises(TalkootError) as caught:
        with_chaos(RECIPE, tmp_path / "none.toml")
    assert "No such file" in caught.value.why


def test_a_plan_gives_late_faults_only_where_they_are_asked_for():
    plan = FaultPlan([Fault(peer="a", step=2, phase="assign"), Fault(peer="a", at_s=3.0)])
    assert plan.at(3, "assign") is None
    assert plan.at(1, "assign", late=True) is None
    assert plan.at(3, "assign", late=True) == Fault(peer="a", step=2, phase="assign")
    assert plan.timed() == [Fault(peer="a", at_s=3.0)]
    assert plan.timed() == []


# -- the docket ----------------------------------------------------------------------------------------------------

KILLS = {phase: Fault(peer="a", step=3, phase=phase) for phase in ("assign", "forward", "mix", "commit", "idle")}


def ahead(docket: Docket, step: int) -> set[str]:
    return {fault.phase for fault in docket.of("a", step)}


def test_a_replacement_gets_what_its_name_still_has_before_it():
    docket = Docket([*KILLS.values(), Fault(peer="b", step=9, phase="mix"), Fault(peer="a", step=2, phase="mix")])
    assert len(docket.of("a", 0)) == 6
    docket.strike_off("a", range(3, 4), seated=True, held=True)
    assert ahead(docket, 3) == {"assign", "mix", "commit", "idle"}
    docket.strike_off("a", range(3, 4), seated=False, held=False)
    assert ahead(docket, 3) == {"mix", "commit", "idle"}
    docket.strike_off("a", range(3, 4), seated=True, held=True)
    assert ahead(docket, 3) == {"commit", "idle"}
    docket.strike_off("a", range(4, 5), seated=True, held=True)
    assert len(docket.of("a", 4)) == 1, "killed at the commit it did not get idle"
    assert docket.of("a", 5) == ()
    assert docket.of("b", 5) == (Fault(peer="b", step=9, phase="mix"),)


def test_what_struck_before_the_killer_is_gone_and_what_comes_after_stays():
    slow, brief, later = (
        Fault(peer="a", step=3, phase=phase, kind=kind, seconds=1.0)
        for phase, kind in (("begin", "delay"), ("forward", "stop"), ("prepare", "corrupt"))
    )
    docket = Docket([later, brief, slow, Fault(peer="a", step=3, phase="mix", kind="partition")])
    docket.strike_off("a", range(3, 4), seated=True, held=True)
    assert docket.of("a", 3) == (later,)


def test_a_loss_that_no_fault_explains_strikes_nothing_off():
    docket = Docket([Fault(peer="a", step=3, phase="mix"), Fault(peer="a", step=3, phase="prepare", kind="corrupt")])
    docket.strike_off("a", range(2, 3), seated=True, held=True)
    docket.strike_off("a", range(3, 4), seated=False, held=False)
    assert ahead(docket, 3) == {"mix", "prepare"}


def test_after_a_rollback_faults_are_dropped_by_how_far_the_run_had_come():
    docket = Docket([KILLS["assign"], KILLS["mix"], KILLS["commit"]])
    docket.strike_off("a", range(3, 4), seated=False, held=True)  # everybody's seat was vacated before it was missed
    assert ahead(docket, 3) == {"assign", "commit"}


def test_times_count_from_the_launch_and_signals_are_not_the_peers_to_strike():
    kinds = ("kill", "stop", "delay", "corrupt")
    docket = Docket([Fault(peer="a", at_s=10.0, kind=kind) for kind in kinds])
    assert docket.of("a", 0, 4.0) == tuple(Fault(peer="a", at_s=6.0, kind=kind) for kind in ("delay", "corrupt"))
    assert docket.of("a", 0, 10.0) == ()
    assert [fault.kind for name, fault in docket.signals()] == ["kill", "stop"]


def test_a_group_is_ahead_of_each_of_its_members():
    docket = Docket([Fault(peers=("a", "b"), step=1, phase="mix", kind="partition")])
    assert docket.of("a", 0) == docket.of("b", 0) != ()
    docket.strike_off("a", range(1, 2), seated=True, held=True)
    assert docket.of("a", 1) == ()
    assert docket.of("b", 1) != ()


# -- storms and traces ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.sampled_from([(2, 2), (4, 1), (1, 3), (3, 2)]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_storm_kills_everybody_two_neighbours_at_once_and_one_in_recovery(seed, layout, every_step):
    stages, replicas = layout
    swarm = Swarm(stages=stages, replicas=replicas)
    recipe = Recipe(train=Train(steps=20, microbatches=4), swarm=swarm)
    kills = storm(recipe, seed, every_step=every_step)
    assert kills == storm(recipe, seed, every_step=every_step)
    msgspec.structs.replace(recipe, faults=kills)  # all of them can strike
    assert {kill.kind for kill in kills} == {"kill"}
    assert {kill.peer for kill in kills} == set(swarm.peers)
    at = Counter((kill.step, kill.phase) for kill in kills)
    pairs = [[swarm.peers[kill.peer] for kill in kills if (kill.step, kill.phase) == key] for key in at if at[key] > 1]
    assert [abs(a - b) for a, b in pairs] == ([1] if stages > 1 else [])
    (again,) = [kill for kill in kills if kill.phase == "assign"]
    assert any((kill.peer, kill.step) == (again.peer, again.step) for kill in kills if kill is not again)
    steps = {kill.step for kill in kills}
    assert (steps == set(range(1, 19))) or not every_step
    assert steps <= set(range(1, 19))


def test_a_storm_over_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="takes 8 steps, the run has 5"):
        storm(msgspec.structs.replace(RECIPE, train=Train(steps=5, microbatches=4)), 1)


def test_a_trace_has_the_rate_it_says_and_is_keyed_by_seconds():
    names = peer_names(8)
    kills = trace(0.1, names, 1000.0, seed=5)
    assert len(kills) == pytest.approx(800, abs=5 * 800**0.5)
    times = [kill.at_s for kill in kills]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 3.6e6
    assert set(Counter(kill.peer for kill in kills)) == set(names)
    assert [kill for kill in kills if kill.peer == "birch"] == list(trace(0.1, ["birch"], 1000.0, seed=5))
    assert trace(0.0, names, 1000.0, seed=5) == ()
    assert kills != trace(0.1, names, 1000.0, seed=6)
    with pytest.raises(ValueError, match="cannot be drawn"):
        trace(-0.1, names, 1.0, seed=5)
