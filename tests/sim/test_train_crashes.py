"""Crashes, freezes and delays anywhere cost time and nothing else: the final state keeps its bits."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_train_kit import Fault, Run, simulate, tiny

from talkoot.core.log import Log
from talkoot.run.records import Gone
from talkoot.train.lead import Lead
from talkoot.train.recipe import PHASES, Recipe, Swarm, peer_names
from talkoot.train.records import Mended, Recovered, RolledBack, Seated, Worked
from talkoot.train.verify import Findings, examine, verify
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

SEEDS = 48


@cache
def undisturbed(stages: int, replicas: int, tied: bool = False) -> str:
    return simulate(tiny(stages, replicas, tied=tied)).result.state_hash


def check(run: Run, expected: str) -> Findings:
    """The final state is the undisturbed one, and the log accounts for each microbatch once."""
    findings = examine(run.entries)
    assert findings.faults == ()
    assert findings.steps == run.lead.recipe.train.steps
    counted = _standing_microbatches(run)
    assert counted == Counter(
        (step, stage, microbatch)
        for step in range(findings.steps)
        for stage in range(run.lead.num_stages)
        for microbatch in range(run.lead.recipe.train.microbatches)
    )
    assert run.result.state_hash == expected
    return findings


def _standing_microbatches(run: Run) -> Counter[tuple[int, int, int]]:
    """How often each (step, stage, microbatch) is in a commit that stands, counted from the log by hand."""
    by_id = {entry.id: entry.receipt for entry in run.entries}
    commits: dict[int, Any] = {}
    for entry in run.entries:
        if entry.receipt.op == "train.rollback":
            commits = {step: receipt for step, receipt in commits.items() if step < entry.receipt.step}
        if entry.receipt.op == "train.commit":
            assert entry.receipt.step not in commits
            commits[entry.receipt.step] = entry.receipt
    counted: Counter[tuple[int, int, int]] = Counter()
    for step, receipt in commits.items():
        for work in (by_id[parent].read(Worked) for parent in receipt.parents):
            counted.update((step, work.stage, microbatch) for microbatch in work.microbatches)
    return counted


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("assign", "save", "loss", "give")])
@pytest.mark.parametrize(
    ("replicas", "victim"), [(r, name) for r in (1, 2) for name in peer_names(2 * r)], ids=lambda value: str(value)
)
def test_a_crash_at_any_point_of_any_peer_leaves_no_trace_in_the_state(replicas, victim, phase, tmp_path):
    log = Log(tmp_path / "log.sqlite")
    run = simulate(tiny(2, replicas, (Fault(peer=victim, step=3, phase=phase),)), tmp_path, log=log)
    log.close()
    assert [gone.name for gone in run.facts("peer.lost", Gone)] == [victim]
    findings = check(run, undisturbed(2, replicas))
    assert verify(tmp_path / "log.sqlite") == findings
    if replicas == 1:
        assert findings.replaced == (victim,)
        assert len(run.facts("train.rollback", RolledBack)) == 1
    else:
        assert run.facts("train.rollback", RolledBack) == []
    dealt_with = [*run.facts("train.recover", Recovered), *run.facts("train.mend", Mended)]
    if (
        phase not in ("commit", "idle") or replicas == 1
    ):  # after the last commit of a run that ends nobody needs to recover
        assert [facts.lost for facts in dealt_with] == [(victim,)]
    if replicas == 2 and phase not in ("commit", "idle"):
        assert len(run.facts("train.mend", Mended)) == 1, "the step itself is saved"


def test_a_newcomer_gets_its_state_from_the_surviving_replica():
    recipe = tiny(2, 2, (Fault(peer="birch", step=1, phase="forward"),), steps=12)
    run = simulate(recipe)
    seats = [facts for facts in run.facts("peer.seat", Seated) if facts.name == "birch"]
    assert [facts.source for facts in seats] == ["start", "replica"]


def test_both_replicas_of_a_stage_crashing_in_one_step_means_going_back_to_the_snapshot(tmp_path):
    faults = (Fault(peer="cedar", step=3, phase="backward"), Fault(peer="dogwood", step=3, phase="mix"))
    run = simulate(tiny(2, 2, faults), tmp_path)
    check(run, undisturbed(2, 2))
    assert [e.receipt.step for e in run.entries if e.receipt.op == "train.rollback"] == [2]
    assert {facts.source for facts in run.facts("peer.seat", Seated)} == {"start", "snapshot of step 2"}


def test_everybody_crashing_at_once_means_going_back_to_the_snapshot(tmp_path):
    faults = tuple(Fault(peer=name, step=3, phase="forward") for name in peer_names(4))
    check(simulate(tiny(2, 2, faults), tmp_path), undisturbed(2, 2))


@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0], ids=["forever", "briefly", "too long"])
@pytest.mark.parametrize("phase", ["begin", "backward", "mix", "commit"])
def test_a_peer_that_stands_still_is_waited_for_or_replaced(phase, seconds):
    fault = Fault(peer="birch", step=1, phase=phase, kind="stop", seconds=seconds)
    run = simulate(tiny(2, 2, (fault,)))
    check(run, undisturbed(2, 2))
    lost = {gone.name for gone in run.facts("peer.lost", Gone)}
    assert lost == (set() if seconds == 1.0 else {"birch"})


def test_the_donor_dying_while_it_seats_a_newcomer_does_not_hang_the_newcomer(tmp_path):
    """The donor of stage 0 is killed between the request for its state and its answer."""

    def kill_the_donor(lead: Lead, simulation: Simulation) -> None:
        tell = lead.tell

        async def telling(peer: Any, topic: str, facts: Any, step: int) -> None:
            if topic == "give":
                simulation.kill(simulation.peer(peer))
            await tell(peer, topic, facts, step)

        lead.tell = telling  # type: ignore[method-assign]

    faults = (Fault(peer="birch", step=1, phase="forward"),)
    run = simulate(tiny(2, 2, faults, patience_s=30.0), tmp_path, started=kill_the_donor)
    check(run, undisturbed(2, 2))
    assert {gone.name for gone in run.facts("peer.lost", Gone)} >= {"alder", "birch"}


def test_a_peer_that_dies_before_its_hello_is_started_again():
    def kill_at_birth(lead: Lead, simulation: Simulation) -> None:
        simulation.loop.call_soon(lambda: simulation.kill(simulation.of("cedar")))

    run = simulate(tiny(), started=kill_at_birth)
    check(run, undisturbed(2, 2))
    assert Counter(facts.name for facts in run.facts("peer.seat", Seated)) == Counter(peer_names(4))


def storm(seed: int) -> tuple[Recipe, Any]:
    """A random recipe, and hits at random times on whoever bears the name then (a replacement, for instance)."""
    chance = random.Random(seed)
    stages, replicas = chance.choice([(1, 2), (2, 1), (2, 2), (2, 3), (4, 2), (3, 1)])
    names = peer_names(stages * replicas)
    kinds = ("kill", "kill", "kill", "stop", "delay")
    steps = [chance.randrange(4) for _ in range(2)]
    faults = tuple(
        Fault(
            peer=chance.choice(names),
            step=chance.choice(steps),  # often two at the same step
            phase=chance.choice(PHASES),
            kind=chance.choice(kinds),
            seconds=chance.choice([0.0, 0.3, 2.0, 6.0]),
        )
        for _ in range(chance.randrange(4))
    )
    link = Link(
        latency_s=chance.choice([0.0005, 0.02]),
        bytes_per_s=chance.choice([1e5, 1e7]),
        jitter_s=chance.choice([0.0, 0.03]),
        loss=chance.choice([0.0, 0.2]),
    )
    recipe = msgspec.structs.replace(
        tiny(stages, replicas, faults, tied=chance.random() < 0.3), network=Network(default=link)
    )
    horizon = chance.choice([0.05, 1.0, 5.0])
    hits = [(chance.random() * horizon, chance.choice(names), chance.choice(kinds)) for _ in range(chance.randrange(5))]
    after_notice = [(chance.randrange(1, 4), chance.choice(names), chance.random() * 0.05) for _ in range(2)]

    def arrange(lead: Lead, simulation: Simulation) -> None:
        def hit(name: str, kind: str) -> None:
            body = simulation.of(name)
            if kind == "kill":
                simulation.kill(body)
            else:
                simulation.freeze(body)
                simulation.loop.call_later(chance.choice([0.2, 9.0]), simulation.thaw, body)

        for when, name, kind in hits:
            simulation.loop.call_at(when, hit, name, kind)
        losses = 0
        strike_off = lead.strike_off

        def striking_off(peer: Any, reason: str) -> None:  # while the swarm recovers, and newcomers are seated
            nonlocal losses
            strike_off(peer, reason)
            losses += 1
            for number, name, delay in after_notice:
                if number == losses:
                    simulation.loop.call_later(delay, hit, name, "kill")

        lead.strike_off = striking_off  # type: ignore[method-assign]

    return recipe, arrange


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_storm_of_faults_ends_in_the_undisturbed_state(seed, tmp_path):
    recipe, arrange = storm(seed)
    replay = f'pytest "tests/sim/test_train_crashes.py::test_any_storm_of_faults_ends_in_the_undisturbed_state[{seed}]"'
    try:
        run = simulate(recipe, tmp_path if seed % 2 else None, started=arrange)
        tied = str(recipe.model.load).endswith("/tied-2")
        check(run, undisturbed(recipe.swarm.stages, recipe.swarm.replicas, tied))
    except Exception as problem:
        problem.add_note(f"seed {seed}; replay: {replay}\n{Path(__file__).name}: {recipe.swarm} {recipe.faults}")
        raise


def test_the_storms_are_storms():
    """The seeds above do what they are for: losses, several in one run, losses during recovery, rollbacks."""
    runs = []
    for seed in range(0, SEEDS, 5):
        recipe, arrange = storm(seed)
        runs.append(simulate(recipe, started=arrange))
    lost = [len(run.facts("peer.lost", Gone)) for run in runs]
    assert sum(count >= 1 for count in lost) > len(runs) / 2
    assert sum(count >= 3 for count in lost) >= 3
    assert any(run.facts("train.rollback", RolledBack) for run in runs)
    assert any(len(facts.lost) > 1 for run in runs for facts in run.facts("train.recover", Recovered))


def test_work_of_an_older_generation_does_not_speak_in_the_name_of_a_newer_one():
    """Survivors still compute the abandoned step while a newcomer's state crosses a slow link.

    What they have summed so far belongs to another sharing-out of the microbatches than the one that follows.
    """
    swarm = Swarm(stages=1, replicas=4, speeds=(1e-3, 1e-3, 1e-3, 3e-4))
    recipe = tiny(1, 4, (Fault(peer="dogwood", step=1, phase="begin"),), microbatches=7)
    network = Network(default=Link(latency_s=0.0005, bytes_per_s=1e5))
    recipe = msgspec.structs.replace(recipe, swarm=swarm, network=network)
    joined: list[str] = []
    said: Counter[tuple[str, str, str]] = Counter()

    def arrange(lead: Lead, simulation: Simulation) -> None:
        admit, transmit = lead.roster.admit, simulation.fabric.transmit

        def admitting(peer: Any, name: str, address: str) -> None:
            admit(peer, name, address)
            joined.append(name)
            if len(joined) == 5:
                simulation.loop.call_later(0.02, simulation.kill, simulation.of("cedar"))

        def transmitting(source: Any, to: Any, message: Any) -> None:
            said[source.world.me, to, f"{message.topic} {message.generation} {message.step}"] += 1
            transmit(source, to, message)

        lead.roster.admit = admitting  # type: ignore[method-assign]
        simulation.fabric.transmit = transmitting  # type: ignore[method-assign]

    run = simulate(recipe, started=arrange)
    assert joined[4] == "dogwood"
    assert [gone.name for gone in run.facts("peer.lost", Gone)] == ["dogwood", "cedar"]
    check(run, simulate(tiny(1, 1, microbatches=7)).result.state_hash)
    twice = {what for (_, _, what), count in said.items() if count > 1 and what.startswith(("mix", "prepared"))}
    assert twice == set(), "nobody mixes or reports a step twice in one generation"


def test_a_loss_while_the_swarm_waits_for_a_replacement_is_part_of_the_same_recovery(tmp_path):
    def kill_alder_too(lead: Lead, simulation: Simulation) -> None:
        strike_off, struck = lead.strike_off, []

        def striking_off(peer: Any, reason: str) -> None:
            strike_off(peer, reason)
            if not struck:
                simulation.loop.call_later(0.0001, simulation.kill, simulation.of("alder"))
            struck.append(peer)

        lead.strike_off = striking_off  # type: ignore[method-assign]

    recipe = tiny(2, 1, (Fault(peer="birch", step=3, phase="forward"),))
    run = simulate(recipe, tmp_path, started=kill_alder_too)
    check(run, undisturbed(2, 1))
    assert [facts.lost for facts in run.facts("train.recover", Recovered)] == [("birch", "alder")]
    notices = [entry.receipt.ended for entry in run.entries if entry.receipt.op == "peer.lost"]
    recovered = next(entry.receipt for entry in run.entries if entry.receipt.op == "train.recover")
    assert recovered.read(Recovered).pause_s == recovered.ended - notices[0], "counted from the first loss"
