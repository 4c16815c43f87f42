"""A run in rounds goes on from the newest stored states that are whole, and says so where some are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_rounds_kit import tiny

from talkoot.core.errors import TalkootError
from talkoot.core.fold import Entry
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.records import Warned
from talkoot.train.methods import check_fits, check_methods
from talkoot.train.recipe import Recipe
from talkoot.train.rounds.records import Kept
from talkoot.train.run import run_simulated
from talkoot.train.verify import verify
from talkoot.world.faults import Fault


def stop_after(folder: Path, recipe: Recipe, step: int) -> list[Entry]:
    """Run until a step is committed, as if the process had been killed there; the log so far."""

    class Killed(Exception):
        pass

    def observe(entry: Entry, _: object) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step >= step:
            raise Killed

    with pytest.raises(Killed):
        run_simulated(recipe, folder, observe)
    return entries(folder)


def entries(folder: Path) -> list[Entry]:
    log = Log(folder / LOG, readonly=True)
    try:
        return list(log.entries())
    finally:
        log.close()


def kept(found: list[Entry]) -> list[Kept]:
    return [entry.receipt.read(Kept) for entry in found if entry.receipt.op == "train.kept"]


def warnings(found: list[Entry]) -> str:
    return "\n".join(entry.receipt.read(Warned).text for entry in found if entry.receipt.op == "run.warning")


def damage(folder: Path, name: str) -> None:
    path = folder / "blobs" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["remove one", "damage all"])
def test_an_older_whole_set_is_taken_and_the_end_is_the_same(how, tmp_path):
    recipe = tiny(rounds=8, checkpoint_every=4)
    whole = run_simulated(recipe, tmp_path / "whole")
    folder = tmp_path / "run"
    sets = kept(stop_after(folder, recipe, 12))
    assert len(sets) >= 3
    if how == "remove one":
        (folder / "blobs" / sets[-1].blobs[0][1]).unlink()
    else:
        for _, name in sets[-1].blobs:
            damage(folder, name)
    result = run_simulated(recipe, folder)
    found = entries(folder)
    assert result.state_hash == whole.state_hash
    assert sets[-1].blobs[0][1] in warnings(found)
    resumed = [one.receipt for one in found if one.receipt.op == "train.rollback"]
    assert [one.step for one in resumed] == [sets[-2].round * recipe.mixing.inner_steps]
    assert verify(folder / LOG).faults == ()


def test_what_is_left_of_the_only_set_serves_and_the_log_says_that_it_is_another_run(tmp_path):
    recipe = tiny(rounds=6, checkpoint_every=4)
    folder = tmp_path / "run"
    sets = kept(stop_after(folder, recipe, 6))
    for one in sets[:-1]:
        for _, name in one.blobs:
            (folder / "blobs" / name).unlink(missing_ok=True)
    damage(folder, sets[-1].blobs[0][1])
    result = run_simulated(recipe, folder)
    assert result.finished
    assert "not the same run" in warnings(entries(folder))
    assert verify(folder / LOG).faults == ()


def test_without_any_state_the_run_starts_over_and_ends_the_same(tmp_path):
    recipe = tiny(rounds=6, checkpoint_every=4)
    whole = run_simulated(recipe, tmp_path / "whole")
    folder = tmp_path / "run"
    stop_after(folder, recipe, 6)
    for path in (folder / "blobs").iterdir():
        path.unlink()
    assert run_simulated(recipe, folder).state_hash == whole.state_hash


def test_a_model_has_no_more_fragments_than_layers(tmp_path):
    recipe = tiny(inner=6, mixing={"fragments": 4})
    with pytest.raises(TalkootError, match="fragments") as caught:
        run_simulated(recipe, tmp_path / "run")
    assert caught.value.where == "the recipe, key mixing.fragments"
    assert check_fits(tiny(inner=6, mixing={"fragments": 3}), _config()) is None


def _config():
    from talkoot.model.config import ModelConfig

    return ModelConfig.from_depth(1, 256)


@pytest.mark.parametrize(
    "fault",
    [Fault(peer="birch", step=1, phase="backward"), Fault(peer="lead", step=1, phase="commit", kind="disk_full")],
)
def test_faults_that_nobody_would_pass_are_refused(fault):
    with pytest.raises(TalkootError, match="never strike"):
        check_methods(msgspec.structs.replace(tiny(), faults=(fault,)))


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        ("noloco", {"wire_gradient": "int8"}),
        ("noloco", {"collective": "tree"}),
        ("none", {"wire": "bfloat16"}),
        ("diloco", {"density": 0.5}),
    ],
)
def test_settings_that_a_rule_does_not_read_are_refused(rule, setting):
    with pytest.raises(TalkootError, match="has no use for"):
        check_methods(tiny(rule=rule, mixing=setting))
