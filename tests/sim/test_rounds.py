"""Losses, stops, cuts and damage among replicas that step by themselves: the others go on, the log accounts for it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from test_rounds_kit import NAMES, Fault, Rounds, check, plain, simulate, tiny

from talkoot.core.errors import TalkootError
from talkoot.run.records import Gone, Warned
from talkoot.train.records import RolledBack, Seated
from talkoot.train.rounds.lead import RoundLead
from talkoot.train.rounds.records import Averaged
from talkoot.world.sim.simulation import Simulation

POINTS = ("begin", "forward", "mix", "idle")
ALL = [("diloco", "ring"), ("diloco", "tree"), ("diloco", "direct"), ("sparseloco", "ring"), ("streaming", "ring")]


def agreeing(rule: str, collective: str) -> dict[str, Any]:
    """The recipe's section for a rule of all."""
    return {"collective": collective, **({"fragments": 2, "overlap": 1} if rule == "streaming" else {})}


def restored(run: Rounds) -> set[str]:
    """Names that began again from another replica's weights."""
    return {facts.name for facts in run.facts("peer.seat", Seated) if facts.source.startswith("replica")}


def test_repeated_runs_end_with_the_same_bits(tmp_path):
    one, two = (simulate(tiny(), tmp_path / str(n)) for n in range(2))
    check(one, lost=set())
    assert one.result.state_hash == two.result.state_hash
    assert one.entries[-1].chain == two.entries[-1].chain
    other = simulate(msgspec.structs.replace(tiny(), seed=4))
    assert other.result.state_hash != one.result.state_hash


def test_of_an_odd_number_one_steps_alone_in_each_round():
    run = simulate(tiny(3))
    check(run, lost=set())
    alone = {(number, facts.slot) for _, number, facts in run.rounds if facts.alone}
    assert {number for number, _ in alone} == set(range(6))
    assert len(alone) == 6
    assert set(run.alone) == {"odd"}


@pytest.mark.parametrize("phase", POINTS)
@pytest.mark.parametrize("step", [0, 5, 11])
def test_a_kill_at_any_point_leaves_the_others_alone(step, phase):
    run = simulate(tiny(4, (Fault(peer="birch", step=step, phase=phase),), rounds=9))
    check(run, lost={"birch"})
    assert run.facts("train.rollback", RolledBack) == []
    assert restored(run) == {"birch"}
    assert {number for _, number, facts in run.rounds if facts.slot == 0} == set(range(9))


@pytest.mark.parametrize(("rule", "collective"), ALL)
@pytest.mark.parametrize("phase", POINTS)
def test_a_kill_in_a_group_of_all_leaves_the_others_with_equal_weights(rule, collective, phase):
    mixing = agreeing(rule, collective)
    fault = Fault(peer="cedar", step=5, phase=phase)
    run = simulate(tiny(4, (fault,), rounds=9, inner=3, rule=rule, mixing=mixing))
    check(run, lost={"cedar"})
    assert run.facts("train.rollback", RolledBack) == []
    assert restored(run) == {"cedar"}
    ends = {number: len(found) for number, found in run.ends().items()}
    if rule == "streaming":  # a donor merges what is under way before it gives, and its receipt says so
        ends = {number: found for number, found in ends.items() if number > 5}
    assert ends == dict.fromkeys(ends, 1)
    assert 8 in ends


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
@pytest.mark.parametrize("victims", [NAMES[:2], NAMES[1:]])
def test_several_killed_at_once_begin_again_from_the_survivors(victims, rule):
    faults = tuple(Fault(peer=name, step=5, phase="mix") for name in victims)
    run = simulate(tiny(4, faults, rounds=9, rule=rule))
    check(run, lost=set(victims))
    assert run.facts("train.rollback", RolledBack) == []
    assert restored(run) == set(victims)


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
@pytest.mark.parametrize(("every", "origin"), [(0, 0), (4, 8)])
def test_all_killed_at_once_go_back_to_what_was_stored(every, origin, rule, tmp_path):
    faults = tuple(Fault(peer=name, step=11, phase="mix") for name in NAMES)
    run = simulate(tiny(4, faults, rounds=8, rule=rule, checkpoint_every=every), tmp_path)
    check(run, lost=set(NAMES))
    assert [e.receipt.step for e in run.entries if e.receipt.op == "train.rollback"] == [origin]
    undisturbed = simulate(plain(run.lead.recipe), tmp_path / "plain")
    assert run.result.state_hash == undisturbed.result.state_hash


@pytest.mark.parametrize("phase", ["begin", "mix", "idle"])
@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_a_stopped_replica_costs_the_others_less_than_lease_and_grace(phase, rule):
    run = simulate(tiny(4, (Fault(peer="birch", step=5, phase=phase, kind="stop"),), rounds=9, rule=rule))
    check(run, lost={"birch"})
    assert restored(run) == {"birch"}


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_a_stopped_replica_that_wakes_up_beside_its_replacement_has_no_say(rule):
    """Nobody puts it down, and it wakes up when its replacement has begun to work."""
    woken: list[str] = []

    def arrange(lead: RoundLead, simulation: Simulation) -> None:
        lead.put_down = lambda name: simulation._by_name.pop(name, None)  # type: ignore[method-assign]
        arrive = lead.arrive

        def arriving(peer: Any, said: Any) -> None:
            arrive(peer, said)
            for frozen in simulation.fabric.peers.values():
                if frozen.frozen:
                    woken.append(frozen.world.me)
                    simulation.thaw(frozen)

        lead.arrive = arriving  # type: ignore[method-assign]

    fault = Fault(peer="birch", step=5, phase="begin", kind="stop")
    run = simulate(tiny(4, (fault,), rounds=40, rule=rule), started=arrange)
    check(run, lost={"birch"})
    (zombie,) = [facts.peer for facts in run.facts("peer.lost", Gone)]
    assert woken == [zombie]
    gone = next(entry.position for entry in run.entries if entry.receipt.op == "peer.lost")
    assert not [entry for entry in run.entries if entry.receipt.peer == zombie and entry.position > gone]


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
@pytest.mark.parametrize("seconds", [0.0, 1.0, 6.0])
def test_a_replica_that_is_cut_off_is_waited_for_or_replaced(seconds, rule):
    fault = Fault(peer="dogwood", step=5, phase="forward", kind="partition", seconds=seconds)
    run = simulate(tiny(4, (fault,), rounds=30, rule=rule))
    check(run, lost=set() if seconds == 1.0 else {"dogwood"})


def test_two_replicas_without_a_link_only_step_alone_with_each_other():
    def cut(lead: RoundLead, simulation: Simulation) -> None:
        simulation.loop.call_later(0.05, simulation.partition, ["alder"], ["birch"])

    run = simulate(tiny(4, rounds=40), started=cut)
    check(run, lost=set())
    inner = {(facts.slot, why) for _, _, facts in run.rounds for why in facts.alone}
    assert {slot for slot, _ in inner} == {0, 1}
    last = [facts for _, number, facts in run.rounds if number > 30 and facts.slot < 2]
    assert any(facts.partners for facts in last)


def test_two_replicas_meet_again_when_their_link_is_back():
    def cut(lead: RoundLead, simulation: Simulation) -> None:
        simulation.loop.call_later(0.05, simulation.partition, ["alder"], ["birch"])
        simulation.loop.call_later(4.0, simulation.heal)

    run = simulate(tiny(2, rounds=90, inner=4, swarm={"flops": 1e7}), started=cut)
    check(run, lost=set())
    met = [number for _, number, facts in run.rounds if facts.partners]
    assert any(facts.alone for _, _, facts in run.rounds)
    assert max(met) == 89


def test_in_a_group_of_all_one_of_two_without_a_link_is_replaced():
    def cut(lead: RoundLead, simulation: Simulation) -> None:
        simulation.loop.call_later(0.05, simulation.partition, ["alder"], ["birch"])
        simulation.loop.call_later(4.0, simulation.heal)

    run = simulate(tiny(4, rounds=20, rule="diloco"), started=cut)
    check(run)
    assert len(run.lost) >= 1
    assert {number: len(found) for number, found in run.ends().items()} == dict.fromkeys(range(20), 1)


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_a_damaged_message_is_not_merged_and_the_next_ones_are(rule):
    fault = Fault(peer="cedar", step=4, phase="begin", kind="corrupt")
    run = simulate(tiny(4, (fault,), rounds=8, rule=rule))
    if rule == "noloco":
        check(run, lost=set(), longest_s=1.0)
        alone = [(number, facts.slot) for _, number, facts in run.rounds if facts.alone]
        assert {number for number, _ in alone} == {2}
        assert len(alone) == 2
    else:  # all wait for it, until they are asked why
        check(run, lost=set(), longest_s=30.0)
        assert any("agreed on again" in facts.text for facts in run.facts("run.warning", Warned))
        assert {number: len(found) for number, found in run.ends().items()} == dict.fromkeys(range(8), 1)


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_a_short_delay_is_waited_for_and_a_hang_is_replaced(rule):
    short = Fault(peer="cedar", step=4, phase="begin", kind="delay", seconds=1.0)
    run = simulate(tiny(4, (short,), rounds=8, rule=rule))
    check(run, lost=set())
    hang = Fault(peer="cedar", step=4, phase="begin", kind="delay", seconds=1e6)
    run = simulate(tiny(4, (hang,), rounds=8, rule=rule))
    check(run, lost={"cedar"}, longest_s=60.0)


def test_a_replica_that_was_away_for_long_begins_again_from_the_others_weights():
    away = Fault(peer="cedar", step=20, phase="begin", kind="delay", seconds=8.0)
    run = simulate(tiny(4, (away,), rounds=80, inner=4, swarm={"flops": 1e7}, mixing={"deadline_s": 0.5}))
    check(run, lost=set())
    done = [number for _, number, facts in run.rounds if facts.slot == 2]
    assert len(done) < 80
    assert any("begins again" in facts.text for facts in run.facts("run.warning", Warned))
    late = [facts for _, number, facts in run.rounds if facts.slot == 2 and number > 60]
    assert sum(bool(facts.partners) for facts in late) > len(late) / 2


def test_a_full_disk_costs_a_stored_state_and_nothing_else(tmp_path):
    fault = Fault(peer="birch", step=3, phase="begin", kind="disk_full", seconds=0.05)
    run = simulate(tiny(4, (fault,), rounds=9, checkpoint_every=4), tmp_path)
    check(run, lost=set())
    assert any("could not store" in facts.text for facts in run.facts("run.warning", Warned))
    undisturbed = simulate(plain(run.lead.recipe), tmp_path / "plain")
    assert run.result.state_hash == undisturbed.result.state_hash
    kept, all_kept = (
        [e.receipt.step for e in one.entries if e.receipt.op == "train.kept"] for one in (run, undisturbed)
    )
    assert set(kept) < set(all_kept)


@pytest.mark.parametrize("rule", ["noloco", "diloco", "none"])
def test_a_replica_that_diverges_is_replaced(rule, monkeypatch):
    from talkoot.train.rounds.tensors import TensorReplica

    honest, struck = TensorReplica.step, []

    def step(self: Any, step: int, rate: float) -> tuple[float, float]:
        if step == 7 and not struck and self._mine == range(1, 2):
            struck.append(step)
            self._stage.put_weights(self._stage.weights() * math.nan)
        return honest(self, step, rate)

    monkeypatch.setattr(TensorReplica, "step", step)
    run = simulate(tiny(4, rounds=9, rule=rule))
    check(run, lost={"birch"})
    assert struck == [7]
    assert restored(run) == {"birch"}
    assert all(math.isfinite(facts.loss) for _, _, facts in run.rounds)


def test_when_all_diverge_the_run_says_so():
    with pytest.raises(TalkootError, match="training diverged"):
        simulate(tiny(4, rounds=9, learning_rate=1e30, clip=0.0))


@pytest.mark.parametrize("rule", ["noloco", "diloco"])
def test_without_replacements_the_others_finish(rule):
    fault = Fault(peer="birch", step=5, phase="mix")
    run = simulate(tiny(4, (fault,), rounds=9, rule=rule, swarm={"respawn": False}))
    check(run, lost={"birch"})
    (averaged,) = run.facts("train.average", Averaged)
    assert averaged.replicas == 3


def test_without_replacements_a_run_that_loses_all_says_so():
    faults = tuple(Fault(peer=name, step=5, phase="mix") for name in NAMES)
    with pytest.raises(TalkootError, match="no replica is left"):
        simulate(tiny(4, faults, rounds=9, swarm={"respawn": False}))


def test_a_replica_that_never_gets_anywhere_is_given_up():
    faults = tuple(Fault(peer="birch", step=0, phase="assign") for _ in range(40))
    with pytest.raises(TalkootError, match="keeps dying"):
        simulate(tiny(4, faults, rounds=300))


def test_a_swarm_that_stands_still_is_reported():
    def freeze(lead: RoundLead, simulation: Simulation) -> None:
        def silence() -> None:
            for body in simulation.fabric.peers.values():
                if body.world.name != "lead":
                    body.world.send = lambda *args, **more: simulation.loop.create_future()

        simulation.loop.call_later(0.1, silence)

    with pytest.raises(TalkootError, match="stands still"):
        simulate(tiny(2, rounds=50, patience_s=5.0), started=freeze)


@pytest.mark.parametrize("balance", [True, False])
def test_unequal_replicas_do_as_many_steps_as_they_can_and_count_by_them(balance):
    speeds = (1.0, 1.0, 0.5, 0.5)
    run = simulate(tiny(4, rounds=12, inner=4, mixing={"balance": balance}, swarm={"speeds": speeds, "flops": 1e7}))
    check(run, lost=set())
    steps = {facts.slot: facts.steps for _, _, facts in run.rounds}
    assert steps == ({0: 4, 1: 4, 2: 2, 3: 2} if balance else dict.fromkeys(range(4), 4))
    assert bool(run.lead.mixed.idle < 0.05) == balance
