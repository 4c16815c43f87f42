"""Experts trained by real processes: the rehearsal's bits, a peer killed, and kill -9 of everything."""

from __future__ import annotations

import json
from pathlib import Path

from processes import alive, descendants, read_log, start, stop, talkoot, wait_for
from test_blend_kit import recipe, run, weights

from talkoot.blend.train.run import train_experts
from talkoot.core.fold import fold


def write_recipe(folder: Path, **sections: object) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps(recipe(**sections).plain()))
    return path


def test_a_killed_peers_work_is_taken_over_and_experts_have_the_rehearsals_bits(tmp_path):
    run(recipe(), tmp_path / "rehearsed")
    fault = {"peer": "birch", "step": 8, "phase": "slice"}
    assert train_experts(recipe(faults=[fault]), tmp_path / "real").finished
    assert any(entry.receipt.op == "peer.lost" for entry in read_log(tmp_path / "real"))
    assert weights(tmp_path / "real") == weights(tmp_path / "rehearsed")


def test_kill_9_of_everything_and_the_same_command_ends_with_the_same_bits(tmp_path):
    run(recipe(), tmp_path / "rehearsed")
    stall = {"peer": "alder", "step": 8, "phase": "slice", "kind": "delay", "seconds": 60.0}
    path = write_recipe(tmp_path, faults=[stall], peers=[{}])
    out = tmp_path / "run"
    process = start("blend", "train", path, "--out", out, folder=tmp_path)
    try:
        wait_for(lambda: sum(entry.receipt.op == "blend.slice" for entry in read_log(out)) >= 3, process)
        peers = descendants(process.pid)
        process.kill()
        process.wait(10)
        wait_for(lambda: not any(map(alive, peers)))  # they do not outlive their lead
    finally:
        stop(process)
    done = talkoot("blend", "train", write_recipe(tmp_path), "--out", out, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["finished"]
    assert weights(out) == weights(tmp_path / "rehearsed")
    assert fold(read_log(out))["run"].sessions == 2
    status = json.loads(talkoot("status", out, "--json").stdout)
    assert status["jobs"]["expert/birds"]["done"]
    assert talkoot("status", out, "--check").returncode == 0
    assert "birds" in talkoot("blend", "show", out).stdout
