"""Whatever is lost, whoever holds or keeps what is needed brings it back bit for bit; what cannot be is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from test_train_kit import Fault, Run, model_folder, simulate, tiny

from talkoot.core.errors import Exit
from talkoot.core.fold import Entry, State
from talkoot.train.recipe import Recipe, peer_names
from talkoot.train.records import Blended, Committed, Recovered, RolledBack, Seated
from talkoot.train.recovery import Unrecoverable, rungs
from talkoot.train.verify import examine
from talkoot.world.sim.simulation import Simulation

STAGES = 4


def recipe(*ladder: str, faults: tuple[Fault, ...] = (), stages: int = STAGES, **recovery: Any) -> Recipe:
    base = tiny(stages, 1, faults)
    return msgspec.structs.replace(base, recovery=msgspec.structs.replace(base.recovery, ladder=ladder, **recovery))


@cache
def undisturbed(stages: int = STAGES) -> str:
    return simulate(tiny(stages, 1)).result.state_hash


def recovered(run: Run) -> list[str]:
    return [facts.rung for facts in run.facts("train.recover", Recovered)]


@pytest.mark.parametrize("rung", ["shadow", "journal", "replay"])
@pytest.mark.parametrize("phase", ["begin", "forward", "backward", "mix", "prepare", "commit"])
@pytest.mark.parametrize("victim", peer_names(STAGES))
def test_a_lost_stage_comes_back_bit_for_bit_without_a_rollback(rung, phase, victim, tmp_path):
    run = simulate(recipe(rung, faults=(Fault(peer=victim, step=3, phase=phase),)), tmp_path)
    assert recovered(run) == [rung]
    assert run.facts("train.rollback", RolledBack) == []
    assert examine(run.entries).faults == ()
    assert run.result.state_hash == undisturbed()


@pytest.mark.parametrize("first", range(STAGES - 1))
@pytest.mark.parametrize("rung", ["shadow", "journal", "replay"])
def test_two_adjacent_stages_come_back_bit_for_bit(rung, first, tmp_path):
    names = peer_names(STAGES)
    faults = tuple(Fault(peer=names[stage], step=3, phase="forward") for stage in (first, first + 1))
    run = simulate(recipe(rung, faults=faults), tmp_path)
    assert set(recovered(run)) == {rung}
    assert run.facts("train.rollback", RolledBack) == []
    assert run.result.state_hash == undisturbed()
    words = {facts.source for facts in run.facts("peer.seat", Seated)}
    assert any(rung in word or (rung == "replay" and "neighbours" in word) for word in words)


@pytest.mark.parametrize("planner", ["straight", "swapped"])
@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (2, 3, 4), (0, 5, 6), (0, 1, 2, 3, 4, 5)])
def test_any_run_of_lost_stages_of_a_ring_is_computed_again_together(planner, lost, tmp_path):
    faults = tuple(Fault(peer=NAMES[stage], step=3, phase="begin") for stage in lost)
    run = simulate(deep("replay", faults=faults, planner=planner), tmp_path)
    assert recovered(run) == ["replay"]
    assert run.facts("train.rollback", RolledBack) == []
    assert run.result.state_hash == simulate(deep("replay", planner=planner)).result.state_hash


def test_stages_that_lost_both_replicas_are_computed_again_by_all_four(tmp_path):
    faults = tuple(Fault(peer=name, step=3, phase="begin") for name in peer_names(8)[2:6])
    base = tiny(4, 2, faults)
    wanted = msgspec.structs.replace(
        base, recovery=msgspec.structs.replace(base.recovery, ladder=("replica", "replay"))
    )
    run = simulate(wanted, tmp_path)
    assert recovered(run) == ["replay"]
    assert run.result.state_hash == undisturbed()


# -- nobody has it any more --------------------------------------------------------------------------------------


def deep(
    *ladder: str, faults: tuple[Fault, ...] = (), planner: str = "straight", checkpoint_every: int = 2, **recovery: Any
) -> Recipe:
    """A ring: embedding and head at the first peer, six blocks at six others."""
    base = tiny(7, 1, faults, planner=planner, checkpoint_every=checkpoint_every)
    model = msgspec.structs.replace(base.model, load=str(model_folder(False, blocks=6)))
    swarm = msgspec.structs.replace(base.swarm, layout="ring", cut=(0, 1, 1, 1, 1, 1, 1))
    rules = msgspec.structs.replace(base.recovery, ladder=ladder, **recovery)
    return msgspec.structs.replace(base, model=model, swarm=swarm, recovery=rules)


NAMES = peer_names(7)


@pytest.mark.parametrize("merge", ["norm", "uniform", "copy", "random"])
@pytest.mark.parametrize("moments", ["neighbours", "reset"])
def test_a_stage_nobody_has_is_made_of_its_neighbours_and_the_log_says_so(merge, moments, tmp_path):
    run = simulate(deep("blend", faults=(Fault(peer=NAMES[3], step=3, phase="forward"),), merge=merge, moments=moments))
    assert recovered(run) == ["blend"]
    (blended,) = run.facts("train.blend", Blended)
    assert (blended.stage, blended.merge, blended.moments) == (3, merge, moments)
    assert [stage for _, stage, _ in blended.sources] == [2, 4]
    assert all(norm > 0 for _, _, norm in blended.sources)
    assert run.facts("train.rollback", RolledBack) == []
    assert run.result.state_hash != simulate(deep("blend")).result.state_hash
    commits = run.facts("train.commit", Committed)
    assert [dict(facts.bumps) for facts in commits] == [{}, {}, {}, {3: 1.1}, {3: 1.1}]


def test_the_ends_are_copied_and_their_neighbours_have_learnt_their_work(tmp_path):
    faults = (Fault(peer=NAMES[1], step=3, phase="forward"), Fault(peer=NAMES[6], step=4, phase="forward"))
    run = simulate(deep("blend", faults=faults, planner="swapped"))
    assert [facts.sources[0][1] for facts in run.facts("train.blend", Blended)] == [2, 5]
    assert run.facts("train.commit", Committed)[0].stages[1] == (0, 2, 1, 3, 4, 6, 5)


def test_the_embedding_comes_back_with_its_moments_while_the_rest_is_only_approximated(tmp_path):
    faults = (Fault(peer=NAMES[0], step=3, phase="forward"),)
    run = simulate(deep("shadow", "blend", faults=faults, planner="swapped", guarded=(0,)))
    assert recovered(run) == ["shadow"]
    assert run.result.state_hash == simulate(deep("blend", planner="swapped")).result.state_hash


@pytest.mark.parametrize("phase", ["begin", "forward"])  # at once, and one after the other in the same step
@pytest.mark.parametrize("victims", [(2, 3), (0, 0), (1, 2), (5, 6)])
def test_two_adjacent_losses_are_refused_where_there_is_only_the_approximate_rung(victims, phase, tmp_path):
    faults = tuple(Fault(peer=NAMES[stage], step=3, phase=phase) for stage in sorted(set(victims)))
    with pytest.raises(Unrecoverable) as caught:
        simulate(deep("blend", faults=faults))
    assert set(caught.value.reasons) <= set(victims)
    assert all("blend" in said for said in caught.value.reasons.values())
    assert caught.value.code == Exit.UNREACHABLE
    assert "shadow" in caught.value.next


def test_a_blend_with_the_lost_moments_is_an_ablation_that_needs_somebody_who_keeps_them(tmp_path):
    fault = (Fault(peer=NAMES[3], step=3, phase="forward"),)
    run = simulate(deep("blend", "shadow", faults=fault, moments="exact"))
    assert recovered(run) == ["blend"]
    with pytest.raises(Unrecoverable, match="moments"):
        simulate(deep("blend", faults=fault, moments="exact"))


def test_the_bump_of_a_blended_stage_decays(tmp_path):
    run = simulate(deep("blend", faults=(Fault(peer=NAMES[3], step=2, phase="forward"),), bump=1.4, bump_decay=0.5))
    factors = [dict(facts.bumps).get(3) for facts in run.facts("train.commit", Committed)]
    assert factors == [None, None, pytest.approx(1.4), pytest.approx(1.2), pytest.approx(1.1)]


@pytest.mark.parametrize("rung", ["shadow", "journal", "replay"])
def test_what_a_blend_made_comes_back_as_exactly_as_anything_else(rung, tmp_path, monkeypatch):
    """Its update count and its learning rate are part of the state."""
    real, victim = rungs[rung], NAMES[3]
    monkeypatch.setitem(rungs._entries, rung, lambda loss, stage: "not yet" if loss.step < 2 else real(loss, stage))

    def run(kill_after: int) -> Run:
        universe: list[Simulation] = []

        def observe(entry: Entry, _: State) -> None:
            if entry.receipt.op == "train.commit" and entry.receipt.step == kill_after:
                universe[0].kill(universe[0].of(victim))

        fault = Fault(peer=victim, step=1, phase="forward")
        return simulate(
            deep(rung, "blend", faults=(fault,), moments="reset", bump=1.3, checkpoint_every=3),
            tmp_path / str(kill_after),
            observer=observe,
            started=lambda lead, simulation: universe.append(simulation),
        )

    once, twice = run(99), run(3)
    assert recovered(once) == ["blend"]
    assert recovered(twice) == ["blend", rung]
    assert twice.result.state_hash == once.result.state_hash
