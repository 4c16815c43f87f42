"""Newcomers, their donors, the mean at the end, and runs that are stopped and go on."""

from __future__ import annotations

from typing import Any

import pytest
from test_rounds_kit import NAMES, Fault, Joiner, Rounds, check, plain, simulate, tiny

from talkoot.core.fold import Entry
from talkoot.core.log import Log
from talkoot.train.records import Seated
from talkoot.train.rounds import joining
from talkoot.train.rounds.lead import RoundLead
from talkoot.train.rounds.records import Averaged
from talkoot.world.sim.simulation import Simulation

SLOW = {"flops": 1e7}  # rounds of a tenth of a second, longer than anything takes on the network


def sources(run: Rounds, name: str) -> list[str]:
    return [facts.source for facts in run.facts("peer.seat", Seated) if facts.name == name]


def digests_agree(run: Rounds) -> bool:
    return all(len(found) == 1 for found in run.ends().values())


@pytest.mark.parametrize("swarm", [{}, SLOW], ids=["short rounds", "long rounds"])
@pytest.mark.parametrize(("rule", "donors"), [("noloco", 1), ("noloco", 3), ("diloco", 1), ("none", 1)])
def test_joiners_come_at_any_time_and_take_part(rule, donors, swarm):
    joiners = (Joiner(name="elm", step=0), Joiner(name="fir", step=7), Joiner(name="gum", step=8))
    mixing = {"joiner_donors": donors}
    run = simulate(tiny(3, rounds=14, rule=rule, joiners=joiners, mixing=mixing, swarm=swarm))
    check(run, lost=set())
    for name in ("elm", "fir", "gum"):
        (source,) = sources(run, name)
        assert source.count(",") == donors - 1
    assert {facts.slot for _, number, facts in run.rounds if number == 13} == set(range(6))
    (averaged,) = run.facts("train.average", Averaged)
    assert averaged.replicas == 6
    assert rule != "diloco" or digests_agree(run)


def test_with_streamed_fragments_a_newcomer_lacks_nothing():
    mixing = {"fragments": 2, "overlap": 2}
    joiner = (Joiner(name="elm", step=8),)
    run = simulate(tiny(3, rounds=12, inner=4, rule="streaming", joiners=joiner, mixing=mixing, swarm=SLOW))
    check(run, lost=set())
    assert sources(run, "elm")
    assert {number: len(found) for number, found in run.ends().items() if number > 8} == {9: 1, 10: 1, 11: 1}


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_the_death_of_a_donor_at_any_chunk_is_survived_by_another_donor(rule, chunk, monkeypatch):
    monkeypatch.setattr(joining, "CHUNK_BYTES", 4096)
    given: list[str] = []

    def arrange(lead: RoundLead, simulation: Simulation) -> None:
        transmit = simulation.fabric.transmit

        def transmitting(source: Any, to: Any, message: Any) -> None:
            transmit(source, to, message)
            if message.topic == "chunk" and (not given or source.world.name == given[0]):
                given.append(source.world.name)
                if len(given) == chunk:
                    simulation.kill(source)

        simulation.fabric.transmit = transmitting  # type: ignore[method-assign]

    run = simulate(tiny(4, rounds=20, rule=rule, joiners=(Joiner(name="elm", step=4),), swarm=SLOW), started=arrange)
    check(run, lost={given[0]})
    (source,) = sources(run, "elm")
    assert source.removeprefix("replica ") in set(NAMES) - {given[0]}
    assert rule != "diloco" or digests_agree(run)


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_the_death_of_a_newcomer_while_it_fetches_harms_nobody(rule):
    fault = Fault(peer="elm", step=0, phase="assign")
    run = simulate(tiny(4, (fault,), rounds=20, rule=rule, joiners=(Joiner(name="elm", step=4),), swarm=SLOW))
    check(run, lost={"elm"})
    assert len(sources(run, "elm")) == 1


@pytest.mark.parametrize("phase", ["assign", "give"])
def test_faults_around_a_replacement_strike_once(phase):
    faults = (Fault(peer="birch", step=4, phase="mix"), Fault(peer="birch", step=4, phase=phase))
    if phase == "give":
        faults = (faults[0], *(Fault(peer=name, step=4, phase="give") for name in ("alder", "cedar")))
    run = simulate(tiny(4, faults, rounds=20, swarm=SLOW))
    check(run)
    assert run.lost[0] == "birch"
    assert len(run.lost) == len(faults)
    assert {number for _, number, facts in run.rounds if facts.slot == 3} == set(range(20))


def on(topic: str, act: Any, count: int = 1) -> Any:
    """Do something when the lead sends its ``count``-th message of that topic."""

    def arrange(lead: RoundLead, simulation: Simulation) -> None:
        tell, told = lead.tell, []

        async def telling(peer: Any, what: str, facts: Any, step: int) -> None:
            await tell(peer, what, facts, step)
            if what == topic:
                told.append(peer)
                if len(told) == count:
                    act(lead, simulation, peer)

        lead.tell = telling  # type: ignore[method-assign]

    return arrange


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_death_while_the_mean_is_collected_leaves_the_mean_of_the_others(rule, count):
    kill = on("collect", lambda lead, simulation, peer: simulation.kill(simulation.peer(peer)), count)
    run = simulate(tiny(4, rounds=6, rule=rule), started=kill)
    check(run)
    assert len(run.lost) == 1
    (averaged,) = run.facts("train.average", Averaged)
    assert averaged.replicas == 3


def test_all_dying_while_the_mean_is_collected_go_back_to_what_was_stored(tmp_path):
    def kill(lead: RoundLead, simulation: Simulation, peer: Any) -> None:
        for body in [simulation.of(name) for name in NAMES]:
            simulation.kill(body)

    run = simulate(tiny(4, rounds=6, checkpoint_every=4), tmp_path, started=on("collect", kill))
    check(run, lost=set(NAMES))
    undisturbed = simulate(plain(run.lead.recipe), tmp_path / "plain")
    assert run.result.state_hash == undisturbed.result.state_hash


def stop_after(rounds: int) -> tuple[Any, Any]:
    """An observer that has the lead stop when so many rounds are committed, and how to hand it the lead."""
    leads: list[RoundLead] = []

    def observe(entry: Entry, state: Any) -> None:
        if entry.receipt.op == "train.commit" and state["train"].step >= rounds * 2:
            leads[0].stop_requested = True

    return observe, lambda lead, simulation: leads.append(lead)


@pytest.mark.parametrize("rule", ["noloco", "diloco", "sparseloco"])
def test_a_run_that_is_stopped_and_goes_on_ends_with_the_same_bits(rule, tmp_path):
    recipe = tiny(3, rounds=10, rule=rule, checkpoint_every=4, swarm=SLOW)
    undisturbed = simulate(recipe, tmp_path / "plain")
    observe, started = stop_after(4)
    log = Log(tmp_path / "log.sqlite")
    stopped = simulate(recipe, tmp_path, log=log, observer=observe, started=started)
    assert not stopped.result.finished
    assert 8 <= stopped.result.step < 20
    run = simulate(recipe, tmp_path, log=log)
    log.close()
    check(run, lost=set())
    assert run.result.state_hash == undisturbed.result.state_hash


@pytest.mark.parametrize("swarm", [{}, SLOW], ids=["short rounds", "long rounds"])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_stop_is_heard_wherever_the_replicas_are(rounds, swarm, tmp_path):
    observe, started = stop_after(rounds)
    recipe = tiny(4, rounds=40, swarm=swarm)
    run = simulate(recipe, tmp_path, observer=observe, started=started)
    assert run.lost == []
    assert run.result.step < 80
    assert {facts.slot for _, number, facts in run.rounds if number == run.result.step // 2 - 1} == set(range(4))


@pytest.mark.parametrize("every", [0, 6])
def test_a_lead_that_dies_without_a_word_is_started_again(every, tmp_path):
    recipe = tiny(4, rounds=12, checkpoint_every=every)
    undisturbed = simulate(recipe, tmp_path / "plain")

    class Died(BaseException):
        pass

    def die(entry: Entry, state: Any) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step == 16:
            raise Died

    log = Log(tmp_path / "log.sqlite")
    with pytest.raises(Died):
        simulate(recipe, tmp_path, log=log, observer=die)
    run = simulate(recipe, tmp_path, log=log)
    log.close()
    check(run, lost=set())
    assert run.result.state_hash == undisturbed.result.state_hash
