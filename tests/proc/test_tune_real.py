"""Post-training with real processes: the rehearsal's bits, peers killed and frozen, and kill -9 of everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import alive, descendants, read_log, start, stop, talkoot, wait_for
from test_tune_kit import SMALL, Run, recipe, run

from talkoot.core.fold import fold
from talkoot.run.records import Gone
from talkoot.tune.policies.open import open_policy
from talkoot.tune.policies.spec import ModelSpec
from talkoot.tune.run import run_real

ROUNDS = 8


def write_recipe(folder: Path, **sections: object) -> Path:
    """The small recipe as a file."""
    tree = {**SMALL, **sections, "tune": {**SMALL["tune"], "rounds": ROUNDS, **dict(sections.get("tune", {}))}}  # type: ignore[arg-type]
    path = folder / "small.json"
    path.write_text(json.dumps(tree))
    return path


def rounds_done(folder: Path) -> int:
    return fold(read_log(folder))["tune"].furthest if read_log(folder) else 0


def test_real_peers_learn_the_same_as_rehearsed_ones(tmp_path):
    rehearsed = run(recipe())
    real = run_real(recipe(), tmp_path / "run")
    assert real.finished
    assert {name: peer["policy"] for name, peer in real.peers.items()} == rehearsed.hashes
    sent = {name: peer["sent_bytes"] for name, peer in real.peers.items()}
    assert sent == {name: 8 * peer["generated"] for name, peer in real.peers.items()}  # 8 bytes per token, to one other


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_peer_that_is_killed_or_frozen_is_replaced_and_the_other_goes_on(tmp_path, kind):
    fault = {"peer": "birch", "step": 2, "phase": "gather", "kind": kind}
    entries = []
    result = run_real(
        recipe(faults=[fault], tune={"rounds": 40}), tmp_path / "run", lambda entry, state: entries.append(entry)
    )
    done = Run(result, entries, fold(read_log(tmp_path / "run")))
    assert result.finished
    assert [gone.name for gone in done.facts("peer.lost", Gone)] == ["birch"]
    assert [update.round for update in done.updates("alder")] == list(range(40))
    assert max(update.waited_s for update in done.updates("alder")) < 12
    assert done.updates("birch")[-1].round == 39


def test_kill_9_of_everything_and_the_same_command_ends_with_the_same_bits(tmp_path):
    whole = run(recipe(tune={"rounds": ROUNDS}))
    stall = {"peer": "alder", "step": 5, "phase": "update", "kind": "delay", "seconds": 60.0}
    path = write_recipe(tmp_path, faults=[stall])
    process = start("tune", path, "--out", tmp_path / "run", folder=tmp_path)
    try:
        wait_for(lambda: rounds_done(tmp_path / "run") >= 5, process)
        peers = descendants(process.pid)
        process.kill()
        process.wait(10)
        wait_for(lambda: not any(map(alive, peers)))  # they do not outlive their lead
    finally:
        stop(process)
    path = write_recipe(tmp_path)
    done = talkoot("tune", path, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    view = json.loads(done.stdout)
    assert view["finished"]
    assert {name: peer["policy"] for name, peer in view["peers"].items()} == whole.hashes
    log = read_log(tmp_path / "run")
    resumed = Run(None, log, fold(log))  # type: ignore[arg-type]
    assert resumed.tuned.rollbacks == 1
    for name in ("alder", "birch"):
        standing = {update.round: update.learned for update in resumed.updates(name)}  # a round done again counts last
        assert standing == {update.round: update.learned for update in whole.updates(name)}


def test_a_user_sees_how_a_run_stands(tmp_path):
    run_real(recipe(), tmp_path / "run")
    shown = talkoot("status", tmp_path / "run")
    assert shown.returncode == 0, shown.stderr
    assert "alder" in shown.stdout
    assert "4 of 4" in shown.stdout
    assert json.loads(talkoot("status", tmp_path / "run", "--json").stdout)["round"] == 4
    assert talkoot("status", tmp_path / "run", "--check").returncode == 0


def test_a_policy_leaves_as_a_folder_that_others_load(tmp_path):
    result = run_real(recipe(), tmp_path / "run")
    whose = talkoot("export", tmp_path / "run", tmp_path / "model")
    assert whose.returncode == 2
    assert "--peer" in whose.stderr
    done = talkoot("export", tmp_path / "run", tmp_path / "model", "--peer", "birch")
    assert done.returncode == 0, done.stderr
    policy = open_policy(ModelSpec(load=str(tmp_path / "model")))
    assert policy.weights_hash() == result.peers["birch"]["policy"]
    assert talkoot("export", tmp_path / "run", tmp_path / "model", "--peer", "birch").returncode == 2  # it is in use


def test_wrong_recipes_are_told_as_such(tmp_path):
    path = write_recipe(tmp_path, rollout={"samples": 1})
    refused = talkoot("tune", path, "--out", tmp_path / "run")
    assert refused.returncode == 2
    assert "rollout.samples" in refused.stderr
    assert "Traceback" not in refused.stderr
