"""Whatever is lost, whoever holds or keeps what is needed brings it back bit for bit; what cannot be is refused."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
from test_train_kit import Fault, Run, simulate, tiny

from talkoot.train.recipe import Recipe, peer_names
from talkoot.train.records import Recovered, RolledBack, Seated
from talkoot.train.verify import examine

STAGES = 4


def recipe(*ladder: str, faults: tuple[Fault, ...] = (), stages: int = STAGES, **recovery) -> Recipe:
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
@pytest.mark.parametrize("rung", ["shadow", "journal"])
def test_two_adjacent_stages_come_back_bit_for_bit(rung, first, tmp_path):
    names = peer_names(STAGES)
    faults = tuple(Fault(peer=names[stage], step=3, phase="forward") for stage in (first, first + 1))
    run = simulate(recipe(rung, faults=faults), tmp_path)
    assert set(recovered(run)) == {rung}
    assert run.facts("train.rollback", RolledBack) == []
    assert run.result.state_hash == undisturbed()
    words = {facts.source for facts in run.facts("peer.seat", Seated)}
    assert any(rung in word for word in words)
