"""The lead is killed, frozen or cut off while a standby follows it: the run ends in the state it would have reached."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_train_kit import Fault, replace, tiny

from talkoot.core.errors import TalkootError
from talkoot.core.fold import Entry, State
from talkoot.run.folder import LOG
from talkoot.train.crew import Crew
from talkoot.train.lead import Lead
from talkoot.train.loop import Result
from talkoot.train.recipe import Recipe
from talkoot.train.records import Recovered
from talkoot.train.run import run_simulated
from talkoot.train.succession import Succession, Superseded
from talkoot.train.verify import Findings, verify
from talkoot.world.sim.simulation import Simulation

Struck = Callable[[Simulation, Entry], bool]  # called with each new entry until it has struck


SLOW_FLOPS = 2e7  # a step takes most of a second


class Ran(NamedTuple):
    """A run with a standby: what came out, and what its log proves."""

    result: Result
    found: Findings
    entries: list[Entry]
    leads: list[str]

    def ops(self, op: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.receipt.op == op]


def guarded(**options: Any) -> Recipe:
    return replace(tiny(**options), "swarm", standbys=1)


@cache
def undisturbed_hash(**options: Any) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_simulated(tiny(**options), Path(folder)).state_hash


def run(
    recipe: Recipe,
    folder: Path,
    strike: Struck = lambda simulation, entry: True,
    started: Callable[[Simulation], None] = lambda simulation: None,
) -> Ran:
    simulations: list[Simulation] = []
    entries: list[Entry] = []
    struck = [False]

    def begin(lead: Lead) -> None:
        simulations.append(lead.world._simulation)  # type: ignore[attr-defined]
        started(simulations[0])

    def observe(entry: Entry, _: State) -> None:
        del entries[entry.position - 1 :]
        entries.append(entry)
        if simulations and not struck[0]:
            struck[0] = strike(simulations[0], entry)

    result = run_simulated(recipe, folder, observe, begin)
    leads = [entry.receipt.peer for entry in entries if entry.receipt.op in ("run.start", "run.succeed")]
    return Ran(result, verify(folder / LOG), entries, leads)


def assert_as_if_nothing_had_happened(ran: Ran, successions: int = 1, **options: Any) -> None:
    assert ran.result.finished
    assert ran.found.faults == ()
    assert ran.found.final["run"].successions == successions
    assert len(set(ran.leads)) == successions + 1
    assert ran.result.state_hash == undisturbed_hash(**options) != ""
    if not ran.found.final["train"].rollbacks:
        assert set(Counter(entry.receipt.step for entry in ran.ops("train.commit")).values()) == {1}


def kill(simulation: Simulation, name: str = "lead") -> None:
    simulation.kill(simulation.of(name))


def remove_log(folder: Path) -> None:
    for path in folder.glob(f"{LOG}*"):
        path.unlink()


@pytest.mark.parametrize("seed", range(40))
def test_the_lead_killed_at_any_moment_changes_nothing(seed, tmp_path):
    moment = random.Random(seed).uniform(0.0042, 0.034)  # from the standby's appointment to the last step

    def strike(simulation: Simulation) -> None:
        kill(simulation)
        if seed % 2:  # and its machine with it: then nothing is left of what only it had written
            remove_log(tmp_path)

    ran = run(guarded(steps=6), tmp_path, started=lambda s: s.loop.call_at(moment, strike, s) and None)
    assert_as_if_nothing_had_happened(ran, steps=6)
    assert ran.found.lost == ()


def at(op: str, step: int, act: Callable[[Simulation], None] = kill) -> Struck:
    """Strike when an entry of this kind and step enters the log, before anybody else knows of it."""

    def strike(simulation: Simulation, entry: Entry) -> bool:
        hit = (entry.receipt.op, entry.receipt.step) == (op, step)
        if hit:
            act(simulation)
        return hit

    return strike


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("op", ["train.step", "train.commit", "train.checkpoint"])
def test_the_lead_killed_around_an_entry_changes_nothing(op, kept, tmp_path):
    step = 2 if op == "train.checkpoint" else 3

    def strike(simulation: Simulation) -> None:
        kill(simulation)
        if not kept:
            remove_log(tmp_path)

    ran = run(guarded(), tmp_path, at(op, step, strike))
    assert_as_if_nothing_had_happened(ran)


@pytest.mark.parametrize("step", [0, 3])
def test_the_lead_killed_between_the_standbys_word_and_the_peers_changes_nothing(step, tmp_path, monkeypatch):
    seal = Succession.seal
    sealed: list[int] = []

    async def seal_and_die(self: Succession) -> None:
        await seal(self)
        if not sealed and self._lead.step == step + 1:
            sealed.append(step)
            kill(self._lead.world._simulation)  # type: ignore[attr-defined]

    monkeypatch.setattr(Succession, "seal", seal_and_die)
    ran = run(guarded(), tmp_path)
    assert sealed
    assert_as_if_nothing_had_happened(ran)
    assert ran.ops("run.succeed")[0].receipt.step == step + 1  # the commit stood, though nobody had applied it


@pytest.mark.parametrize("peer", ["alder", "cedar"])
@pytest.mark.parametrize("seed", range(6))
def test_the_lead_killed_together_with_a_peer_changes_nothing(seed, peer, tmp_path):
    moment = random.Random(seed).uniform(0.0042, 0.024)

    def strike(simulation: Simulation) -> None:
        for name in ("lead", peer):
            kill(simulation, name)

    ran = run(guarded(), tmp_path, started=lambda s: s.loop.call_at(moment, strike, s) and None)
    assert_as_if_nothing_had_happened(ran)
    assert ran.found.lost == ran.found.replaced == (peer,)
    assert ran.found.final["train"].rollbacks == 0


@pytest.mark.parametrize("rung", ["shadow", "journal"])
@pytest.mark.parametrize("victim", ["alder", "birch", "cedar", "dogwood"])
def test_the_lead_lost_together_with_the_only_holder_of_a_stage_costs_no_step(rung, victim, tmp_path):
    """The peers tell the new lead what they keep for each other."""

    def both_a_little_later(simulation: Simulation) -> None:
        for name in ("lead", victim):
            simulation.loop.call_later(0.3, kill, simulation, name)

    shape = {"stages": 4, "replicas": 1}
    recipe = replace(replace(guarded(**shape), "recovery", ladder=(rung,)), "swarm", flops=SLOW_FLOPS)
    ran = run(recipe, tmp_path, at("train.commit", 2, both_a_little_later))
    assert ran.ops("train.rollback") == []
    assert [entry.receipt.read(Recovered).rung for entry in ran.ops("train.recover")] == [rung]
    assert_as_if_nothing_had_happened(ran, **shape)


@pytest.mark.parametrize("op", ["peer.lost", "peer.join", "peer.seat", "train.recover"])
def test_the_lead_killed_during_a_recovery_changes_nothing(op, tmp_path):
    lost: list[Entry] = []

    def strike(simulation: Simulation, entry: Entry) -> bool:
        lost.extend([entry] if entry.receipt.op == "peer.lost" else [])
        if lost and entry.receipt.op == op:
            kill(simulation)
            return True
        return False

    fault = Fault(peer="birch", step=2, phase="backward")
    ran = run(guarded(faults=(fault,), repair="restart"), tmp_path, strike)
    assert_as_if_nothing_had_happened(ran)
    assert "birch" in ran.found.replaced


@pytest.mark.parametrize("op", ["peer.lost", "train.rollback", "peer.join", "peer.seat", "train.recover"])
def test_the_lead_killed_while_everybody_goes_back_changes_nothing(op, tmp_path):
    lost: list[Entry] = []

    def strike(simulation: Simulation, entry: Entry) -> bool:
        lost.extend([entry] if entry.receipt.op == "peer.lost" else [])
        if lost and entry.receipt.op == op:
            kill(simulation)
            return True
        return False

    faults = tuple(Fault(peer=name, step=3, phase="begin") for name in ("cedar", "dogwood"))
    ran = run(guarded(faults=faults), tmp_path, strike)
    assert_as_if_nothing_had_happened(ran)
    assert ran.found.final["train"].rollbacks >= 1


def test_lead_after_lead_may_be_lost(tmp_path):
    killed: list[str] = []

    def strike(simulation: Simulation, entry: Entry) -> bool:
        name = ["lead", "standby", "standby2"][len(killed)]
        if entry.receipt.op == "train.commit" and entry.receipt.step == 4 * len(killed) + 1:
            kill(simulation, name)
            killed.append(name)
        return len(killed) == 3

    ran = run(guarded(steps=12), tmp_path, strike)
    assert_as_if_nothing_had_happened(ran, successions=3, steps=12)


@pytest.mark.parametrize("seed", range(6))
def test_a_standby_that_is_killed_is_replaced_and_nothing_else_changes(seed, tmp_path):
    moment = random.Random(seed).uniform(0.0042, 0.024)
    ran = run(guarded(), tmp_path, started=lambda s: s.loop.call_at(moment, kill, s, "standby") and None)
    assert_as_if_nothing_had_happened(ran, successions=0)
    named = [entry.receipt for entry in ran.ops("run.standby")]
    assert len(named) >= 2


def test_the_lead_may_be_lost_after_its_standby_was_replaced(tmp_path):
    def strike(simulation: Simulation, entry: Entry) -> bool:
        if (entry.receipt.op, entry.receipt.step) == ("train.commit", 1):
            kill(simulation, "standby")
        if entry.receipt.op == "train.commit" and entry.receipt.step == 9:
            kill(simulation)
            return True
        return False

    ran = run(guarded(steps=12), tmp_path, strike)
    assert_as_if_nothing_had_happened(ran, steps=12)


def test_a_frozen_lead_that_wakes_up_cannot_write_or_commit(tmp_path):
    def freeze(simulation: Simulation) -> None:
        simulation.freeze(simulation.of("lead"))
        simulation.loop.call_later(8.0, simulation.thaw, simulation.of("lead"))

    with pytest.raises(Superseded) as caught:
        run(guarded(), tmp_path, at("train.step", 2, freeze))
    assert "has taken over" in caught.value.why
    found = verify(tmp_path / LOG)
    assert found.faults == ()
    assert found.final["run"].successions == 1
    assert found.final["run"].state_hash == undisturbed_hash()


def test_a_frozen_successor_that_wakes_up_leaves_everybody_to_its_own_successor(tmp_path):
    def strike(simulation: Simulation, entry: Entry) -> bool:
        if (entry.receipt.op, entry.receipt.step) == ("train.commit", 1):
            kill(simulation)
        if (entry.receipt.op, entry.receipt.step) == ("train.step", 8):
            simulation.freeze(simulation.of("standby"))
            simulation.loop.call_later(2.6, simulation.thaw, simulation.of("standby"))
            return True
        return False

    ran = run(replace(guarded(steps=16), "swarm", flops=SLOW_FLOPS), tmp_path, strike)
    assert_as_if_nothing_had_happened(ran, successions=2, steps=16)
    assert ran.found.lost == ()
    ended = {entry.receipt.step: entry.receipt.ended for entry in ran.ops("train.commit")}
    assert ended[15] - ended[8] > 3.0  # it was awake by then


@pytest.fixture
def apart(monkeypatch):
    """Lead and standby are on machines of their own: neither can end the other."""
    put_down = Crew.put_down

    def put_down_here(self: Crew, name: str) -> None:
        if not name.startswith("standby"):
            put_down(self, name)

    monkeypatch.setattr(Crew, "put_down", put_down_here)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("step", [0, 2])
def test_a_lead_that_is_cut_off_from_everybody_cannot_commit(step, tmp_path):
    names = ("alder", "birch", "cedar", "dogwood", "standby")

    def cut_off(simulation: Simulation, entry: Entry) -> bool:
        if (entry.receipt.op, entry.receipt.step) == ("train.commit", step):
            simulation.partition(("lead",), names)
            remove_log(tmp_path)  # what it writes from here on is on its own machine
            return True
        return False

    with pytest.raises(Superseded) as caught:
        run(guarded(), tmp_path, cut_off)
    assert "too many of its peers" in caught.value.why
    found = verify(tmp_path / LOG)
    assert found.faults == ()
    assert found.final["run"].successions == 1
    assert found.final["run"].state_hash == undisturbed_hash()


def test_a_lead_with_most_of_the_peers_goes_on_without_a_standby_that_is_cut_off(tmp_path):
    def cut_off(simulation: Simulation) -> None:
        simulation.partition(("standby",), ("lead", "alder", "birch", "cedar", "dogwood"))

    ran = run(guarded(), tmp_path, at("train.commit", 2, cut_off))
    assert_as_if_nothing_had_happened(ran, successions=0)


@pytest.mark.usefixtures("apart")
def test_a_standby_with_half_of_the_peers_leads_and_the_lead_with_the_others_does_not(tmp_path):
    def split(simulation: Simulation) -> None:
        simulation.partition(("lead", "birch", "dogwood"), ("standby", "alder", "cedar"))
        simulation.loop.call_later(20.0, simulation.heal)  # or nobody called birch could ever be reached again
        remove_log(tmp_path)

    with pytest.raises(Superseded):
        run(guarded(), tmp_path, at("train.commit", 2, split))
    found = verify(tmp_path / LOG)
    assert found.faults == ()
    assert sorted(found.lost) == ["birch", "dogwood"]
    assert found.final["run"].state_hash == undisturbed_hash()


def test_without_a_standby_the_loss_of_the_lead_ends_the_simulation(tmp_path):
    ran = run(tiny(), tmp_path, at("train.commit", 2))
    assert not ran.result.finished


def test_the_loss_of_lead_and_standby_together_leaves_a_run_that_resumes(tmp_path):
    def both(simulation: Simulation) -> None:
        for name in ("lead", "standby"):
            kill(simulation, name)

    ran = run(guarded(), tmp_path, at("train.commit", 2, both))
    assert not ran.result.finished
    again = run(guarded(), tmp_path)
    assert again.result.finished
    assert again.result.state_hash == undisturbed_hash()
    assert again.found.faults == ()


def test_the_same_command_resumes_what_a_standby_had_led(tmp_path):
    killed: list[str] = []

    def strike(simulation: Simulation, entry: Entry) -> bool:
        if entry.receipt.op == "train.commit" and entry.receipt.step == 1:
            kill(simulation)
            killed.append("lead")
        if entry.receipt.op == "train.commit" and entry.receipt.step == 3:
            for name in ("standby", "standby2"):
                kill(simulation, name)
            return True
        return False

    assert not run(guarded(), tmp_path, strike).result.finished
    again = run(guarded(), tmp_path)
    assert again.result.state_hash == undisturbed_hash()
    assert again.found.final["run"].successions == 1
    assert again.found.final["run"].lead == again.found.final["run"].founder


def test_an_error_that_ends_the_run_ends_it_for_the_standby_too(tmp_path):
    with pytest.raises(TalkootError, match="diverged"):
        run(guarded(learning_rate=1e30, clip=0.0), tmp_path)
    found = verify(tmp_path / LOG)
    assert found.final["run"].successions == 0
    assert found.final["run"].ended == "training diverged"


def test_a_peer_that_alone_lost_the_lead_is_replaced(tmp_path):
    def cut(simulation: Simulation) -> None:
        lead, birch = simulation.of("lead").world.me, simulation.of("birch").world
        simulation.fabric._links.discard((birch.me, lead))
        birch.notice_loss(lead, "the link broke on this side only")

    ran = run(guarded(), tmp_path, at("train.commit", 2, cut))
    assert_as_if_nothing_had_happened(ran, successions=0)
    assert ran.found.lost == ("birch",)


def test_a_lead_that_was_stopped_in_the_middle_of_writing_keeps_the_file_and_the_run_gets_a_new_one(tmp_path):
    held: list[sqlite3.Connection] = []

    def hold(simulation: Simulation) -> None:
        held.append(sqlite3.connect(tmp_path / LOG, isolation_level=None))
        held[0].execute("BEGIN IMMEDIATE")
        kill(simulation)

    ran = run(guarded(), tmp_path, at("train.step", 2, hold))
    assert_as_if_nothing_had_happened(ran)
    held[0].execute("UPDATE receipts SET step = 99 WHERE position = 1")  # it goes on, where nobody looks
    held[0].execute("COMMIT")
    held[0].close()
    assert verify(tmp_path / LOG).receipts == ran.found.receipts
    assert not list(tmp_path.glob("*.new"))
