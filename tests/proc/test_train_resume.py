"""The same command resumes: after kill -9, after Ctrl-C, from an older snapshot; and never twice at once."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess

import pytest
from processes import (
    DEADLINE,
    alive,
    commits,
    descendants,
    execute,
    read_log,
    standing_losses,
    start,
    stop,
    talkoot,
    tiny,
    to_toml,
    wait_for,
    write_text,
)

from talkoot.run.folder import LOG
from talkoot.run.records import Warned
from talkoot.train.checkpoint import newest
from talkoot.train.verify import verify
from talkoot.world.blobs import Blobs
from talkoot.world.faults import Fault

STEPS = 20
STALL = 12  # the run waits at this step, so that "in the middle" is the same place on every machine


@pytest.fixture
def job(tmp_path):
    """(recipe's path, run's folder, the undisturbed run) of a job that stalls once, for ``stalled(seconds)``."""
    text = write_text(tmp_path)
    undisturbed = execute(tiny(text, steps=STEPS), tmp_path / "undisturbed", sim=True)

    def make(seconds: float):
        stall = Fault(peer="alder", step=STALL, phase="forward", kind="delay", seconds=seconds)
        path = to_toml(tiny(text, steps=STEPS, faults=(stall,)), tmp_path / "recipe.toml")
        return path, tmp_path / "run", undisturbed

    return make


def assert_finishes_like(undisturbed, recipe, folder) -> dict:
    done = talkoot("train", recipe, "--out", folder, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    view = json.loads(done.stdout)
    assert view["finished"]
    assert view["step"] == STEPS
    assert view["state_hash"] == undisturbed.result.state_hash
    assert standing_losses(read_log(folder)) == undisturbed.losses
    found = verify(folder / LOG)
    assert (found.faults, found.steps) == ((), STEPS)
    return view


def test_a_lead_killed_in_the_middle_takes_its_workers_along_and_resumes(job, tmp_path):
    recipe, folder, undisturbed = job(600.0)
    lead = start("train", recipe, "--out", folder, folder=tmp_path)
    try:
        wait_for(lambda: commits(folder) >= STALL, lead)
        workers = descendants(lead.pid)
        assert len(workers) >= 4
    finally:
        stop(lead)  # SIGKILL
    wait_for(lambda: not any(map(alive, workers)))
    assert_finishes_like(undisturbed, recipe, folder)
    assert verify(folder / LOG).final["run"].sessions == 2


def test_ctrl_c_finishes_the_step_writes_a_snapshot_and_the_same_command_resumes(job, tmp_path):
    recipe, folder, undisturbed = job(3.0)
    lead = start("train", recipe, "--out", folder, folder=tmp_path)
    try:
        wait_for(lambda: commits(folder) >= STALL, lead)
        lead.send_signal(signal.SIGINT)
        assert lead.wait(DEADLINE) == 130
    finally:
        stop(lead)
    assert commits(folder) == STALL + 1  # the step that was under way, and no other
    manifest, warnings = newest(folder, Blobs(folder / "blobs"))
    assert (manifest.step, warnings) == (STALL + 1, [])
    said = (tmp_path / "said.txt").read_text()
    assert f"interrupted after {STALL + 1} steps" in said
    assert "Traceback" not in said
    assert_finishes_like(undisturbed, recipe, folder)
    assert verify(folder / LOG).final["train"].rollbacks == 0  # nothing had to be done twice


def test_a_second_process_on_the_folder_is_refused_and_named_the_first(job, tmp_path):
    recipe, folder, undisturbed = job(600.0)
    first = start("train", recipe, "--out", folder, folder=tmp_path)
    try:
        wait_for(lambda: commits(folder) >= STALL, first)
        second = talkoot("train", recipe, "--out", folder)
        assert second.returncode == 2
        assert f"process {first.pid} holds it" in second.stderr
        assert "Traceback" not in second.stderr
        view = json.loads(talkoot("status", folder, "--json").stdout)
        assert (view["running"], view["step"]) == (str(first.pid), STALL)
        assert first.poll() is None
    finally:
        stop(first)
    assert json.loads(talkoot("status", folder, "--json").stdout)["running"] == "no"
    assert_finishes_like(undisturbed, recipe, folder)


def half(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("what", ["manifest", "blob"])
def test_a_half_written_newest_snapshot_is_passed_over_and_named(what, tmp_path):
    text = write_text(tmp_path)
    undisturbed = execute(tiny(text, steps=12), tmp_path / "undisturbed", sim=True)
    folder = tmp_path / "run"
    execute(tiny(text, steps=8), folder, sim=True)
    manifest, _ = newest(folder, Blobs(folder / "blobs"))
    assert manifest.step == 8
    half(
        folder / "checkpoints/step-00000008.json" if what == "manifest" else folder / "blobs" / manifest.shards[0].blob
    )
    recipe = to_toml(tiny(text, steps=12), tmp_path / "recipe.toml")
    done = talkoot("train", recipe, "--out", folder, "--json", "--sim")
    assert done.returncode == 0, done.stdout + done.stderr
    warnings = [e.receipt.read(Warned).text for e in read_log(folder) if e.receipt.op == "run.warning"]
    assert len(warnings) == 1
    assert "step-00000008.json is damaged and was passed over" in warnings[0]
    # the schedule of the first 8 steps was that of an 8-step run, so only the steps are comparable, not the hash
    assert [e.receipt.step for e in read_log(folder) if e.receipt.op == "train.rollback"] == [4]
    assert json.loads(done.stdout)["step"] == undisturbed.result.step == 12
    assert verify(folder / LOG).faults == ()


def test_another_tokenizer_than_the_snapshots_is_refused_and_nothing_is_lost(tmp_path):
    text = write_text(tmp_path)
    folder = tmp_path / "run"
    before = execute(tiny(text, steps=4, tokenizer="bpe:300"), folder, sim=True).result
    other = tmp_path / "other"
    execute(tiny(text, steps=1, tokenizer="bytes"), other, sim=True)
    kept = (folder / "tokenizer/tokenizer.json").read_bytes()
    (folder / "tokenizer/tokenizer.json").write_bytes((other / "tokenizer/tokenizer.json").read_bytes())
    recipe = to_toml(tiny(text, steps=6, tokenizer="bpe:300"), tmp_path / "recipe.toml")
    refused = talkoot("train", recipe, "--out", folder, "--sim")
    assert refused.returncode == 2
    assert "tokenizer is not the one" in refused.stderr
    assert "Traceback" not in refused.stderr
    export = talkoot("export", folder, tmp_path / "model")
    assert (export.returncode, "tokenizer is not the one" in export.stderr) == (2, True)
    (folder / "tokenizer/tokenizer.json").write_bytes(kept)
    manifest, _ = newest(folder, Blobs(folder / "blobs"))
    assert manifest.state_hash == before.state_hash
    assert talkoot("train", recipe, "--out", folder, "--sim").returncode == 0


def test_a_log_of_a_newer_version_is_refused_by_every_verb(tmp_path):
    text = write_text(tmp_path)
    folder = tmp_path / "run"
    execute(tiny(text, steps=1), folder, sim=True)
    database = sqlite3.connect(folder / LOG)
    database.execute("PRAGMA user_version=99")
    database.close()
    recipe = to_toml(tiny(text, steps=1), tmp_path / "recipe.toml")
    for verb in (["train", recipe, "--out", folder], ["status", folder], ["replay", folder], ["report", folder]):
        refused = talkoot(*verb)
        assert refused.returncode == 2, verb
        assert "newer talkoot" in refused.stderr
        assert "pip install --upgrade talkoot" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_run_is_not_continued_with_another_recipe(tmp_path):
    text = write_text(tmp_path)
    folder = tmp_path / "run"
    execute(tiny(text, steps=2), folder, sim=True)
    recipe = to_toml(tiny(text, steps=3, learning_rate=0.5), tmp_path / "recipe.toml")
    refused = talkoot("train", recipe, "--out", folder, "--set", "seed=9", "--sim")
    assert refused.returncode == 2
    assert "differs in train.learning_rate, seed" in refused.stderr
    assert len(read_log(folder)) == len([e for e in read_log(folder) if e.receipt.generation == 0])


def mounted(folder, size: str) -> None:
    outcome = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if outcome.returncode:
        pytest.skip("mounting a small disk needs root: sudo, or a container with CAP_SYS_ADMIN")


def test_a_full_disk_loses_nothing_and_the_same_command_goes_on_when_there_is_space(tmp_path):
    text = write_text(tmp_path)
    undisturbed = execute(tiny(text, steps=8, depth=4), tmp_path / "undisturbed", sim=True)
    blobs = sum(path.stat().st_size for path in (tmp_path / "undisturbed/blobs").iterdir()) // 2  # two snapshots
    disk = tmp_path / "disk"
    disk.mkdir()
    recipe = to_toml(tiny(text, steps=8, depth=4), tmp_path / "recipe.toml")
    mounted(disk, str(blobs * 3 // 2 + 3_000_000))  # tokens, log and one snapshot fit; a second one does not
    try:
        full = talkoot("train", recipe, "--out", disk / "run")
        assert full.returncode == 2, full.stderr
        assert "the last state cannot be saved" in full.stderr
        assert "No space left on device" in full.stderr
        assert "run the same command again: it resumes" in full.stderr
        assert f"{disk}/run" in full.stderr
        assert "Traceback" not in full.stderr
        manifest, warnings = newest(disk / "run", Blobs(disk / "run/blobs"))
        assert (manifest.step, warnings) == (4, [])
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        done = talkoot("train", recipe, "--out", disk / "run", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state_hash"] == undisturbed.result.state_hash
        assert verify(disk / "run" / LOG).faults == ()
    finally:
        subprocess.run(["umount", disk], check=True)
