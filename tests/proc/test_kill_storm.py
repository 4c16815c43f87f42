"""The demo under a storm: every peer is killed at least once, two at once, one while it takes over; nothing shows in
the end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from talkoot.core.log import Log
from talkoot.recipes.demo import demo
from talkoot.run.folder import LOG
from talkoot.run.records import Gone
from talkoot.train.chaos import storm
from talkoot.train.loop import Result
from talkoot.train.recipe import Recipe
from talkoot.train.run import run_real, run_simulated
from talkoot.train.verify import verify
from talkoot.world.links import Network

STEPS = 16


def stormy(ladder: tuple[str, ...], seed: int | None) -> Recipe:
    calm = msgspec.structs.replace(demo(steps=STEPS), network=Network(), faults=())
    calm = msgspec.structs.replace(calm, recovery=msgspec.structs.replace(calm.recovery, ladder=ladder))
    return calm if seed is None else msgspec.structs.replace(calm, faults=storm(calm, seed, every_step=False))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_simulated(stormy(("replica", "checkpoint"), None), tmp_path_factory.mktemp("calm"))


def losses(folder: Path) -> list[str]:
    log = Log(folder / LOG)
    try:
        return [entry.receipt.read(Gone).name for entry in log.entries() if entry.receipt.op == "peer.lost"]
    finally:
        log.close()


@pytest.mark.parametrize(
    "ladder", [("replica", "shadow", "checkpoint"), ("replica", "replay", "checkpoint")], ids="-".join
)
def test_real_processes_in_a_kill_storm_end_with_the_undisturbed_losses_and_state(ladder, undisturbed, tmp_path):
    recipe = stormy(ladder, seed=5)
    result = run_real(recipe, tmp_path)
    lost = losses(tmp_path)
    assert set(lost) == set(recipe.swarm.peers), "every slot was killed"
    assert len(lost) > len(recipe.swarm.peers) + 1
    assert verify(tmp_path / LOG).faults == ()
    assert (result.loss, result.held_out) == (undisturbed.loss, undisturbed.held_out)
    assert result.state_hash == undisturbed.state_hash


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rung", ["shadow", "journal", "replay"])
def test_so_does_every_rehearsal_of_such_a_storm(rung, seed, undisturbed, tmp_path):
    result = run_simulated(stormy(("replica", rung, "checkpoint"), seed), tmp_path)
    assert len(losses(tmp_path)) > 4
    assert result.state_hash == undisturbed.state_hash
