"""The process of the lead is killed, frozen or interrupted, and a standby is there: for real."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from processes import alive, commits, descendants, execute, read_log, start, stop, tiny, to_toml, wait_for, write_text

from talkoot.core.errors import Exit
from talkoot.run.folder import LOG
from talkoot.run.lock import holder
from talkoot.train.recipe import Recipe
from talkoot.train.verify import verify

STEPS = 60


def prepare(folder: Path, steps: int = STEPS) -> tuple[Recipe, Path]:
    recipe = tiny(write_text(folder), steps=steps, checkpoint_every=0)
    return recipe, to_toml(recipe, folder / "recipe.toml")


def has(folder: Path, op: str) -> bool:
    return any(entry.receipt.op == op for entry in read_log(folder))


def assert_led_on(folder: Path, recipe: Recipe) -> None:
    """The log holds one whole run, led by two, that ended as if by one."""
    found = verify(folder / "run" / LOG)
    assert found.faults == ()
    assert (found.steps, found.lost) == (STEPS, ())
    assert found.final["run"].successions == 1
    assert found.final["train"].rollbacks == 0
    undisturbed = execute(recipe, folder / "plain", sim=True)
    assert found.final["run"].state_hash == undisturbed.result.state_hash != ""


def test_a_killed_lead_is_replaced_by_its_standby_and_nothing_is_left_running(tmp_path):
    recipe, file = prepare(tmp_path)
    run = tmp_path / "run"
    process = start("train", file, "--standby", 1, "--out", run, folder=tmp_path)
    processes: set[int] = set()
    try:
        wait_for(lambda: commits(run) >= 5, process)
        processes |= descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: has(run, "run.succeed"))
        successor = int(holder(run) or 0)
        processes |= descendants(successor) if successor else set()
        wait_for(lambda: has(run, "run.end"))
        wait_for(lambda: not any(map(alive, processes)))
        assert not holder(run)
    finally:
        stop(process)
        for pid in filter(alive, processes):
            os.kill(pid, signal.SIGKILL)
    assert_led_on(tmp_path, recipe)


def test_a_peer_that_freezes_under_its_second_lead_is_replaced_and_not_left_behind(tmp_path):
    recipe, file = prepare(tmp_path)
    run = tmp_path / "run"
    process = start("train", file, "--standby", 1, "--out", run, folder=tmp_path)
    processes: set[int] = set()
    try:
        wait_for(lambda: commits(run) >= 5, process)
        processes |= descendants(process.pid)
        launched = {pid for child in processes for pid in descendants(child)}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: has(run, "run.succeed"))
        os.kill(min(launched - {int(holder(run))}), signal.SIGSTOP)
        wait_for(lambda: has(run, "run.end"))
        wait_for(lambda: not any(map(alive, processes)))
    finally:
        stop(process)
        for pid in filter(alive, processes):
            os.kill(pid, signal.SIGKILL)
    found = verify(run / LOG)
    assert found.faults == ()
    assert len(found.lost) == 1
    undisturbed = execute(recipe, tmp_path / "plain", sim=True)
    assert found.final["run"].state_hash == undisturbed.result.state_hash != ""


def test_a_frozen_lead_that_wakes_up_after_the_takeover_ends_with_a_clear_error_and_writes_nothing(tmp_path):
    recipe, file = prepare(tmp_path)
    run = tmp_path / "run"
    process = start("train", file, "--standby", 1, "--out", run, folder=tmp_path)
    processes: set[int] = set()
    try:
        wait_for(lambda: commits(run) >= 5, process)
        processes |= descendants(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: has(run, "run.succeed"))
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == Exit.UNREACHABLE
        said = (tmp_path / "said.txt").read_text()
        assert "this lead has lost its run" in said
        assert "its standby has taken over under generation 1" in said
        wait_for(lambda: has(run, "run.end"))
        wait_for(lambda: not any(map(alive, processes)))
    finally:
        stop(process)
        for pid in filter(alive, processes):
            os.kill(pid, signal.SIGKILL)
    entries = read_log(run)
    old = entries[0].receipt.peer
    taken = next(entry.position for entry in entries if entry.receipt.op == "run.succeed")
    assert all(entry.position < taken for entry in entries if entry.receipt.peer == old)
    assert_led_on(tmp_path, recipe)


def test_a_lead_that_wakes_up_late_takes_nothing_along_that_its_successor_needs(tmp_path):
    """By then the successor has a forkserver of its own, and after that it must still be able to start peers."""
    _, file = prepare(tmp_path, steps=2000)
    run = tmp_path / "run"
    process = start("train", file, "--standby", 1, "--out", run, folder=tmp_path)
    processes: set[int] = set()
    try:
        wait_for(lambda: commits(run) >= 5, process)
        processes |= descendants(process.pid)
        launched = {pid for child in processes for pid in descendants(child)}
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: sum(entry.receipt.op == "run.standby" for entry in read_log(run)) >= 2)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == Exit.UNREACHABLE
        successor = int(holder(run) or 0)
        os.kill(min(launched - {successor}), signal.SIGKILL)
        wait_for(lambda: has(run, "peer.lost"))
        before = commits(run)
        wait_for(lambda: commits(run) > before + 20)
        processes |= descendants(successor)
        os.kill(successor, signal.SIGINT)
        wait_for(lambda: has(run, "run.end"))
        wait_for(lambda: not any(map(alive, processes)))
    finally:
        stop(process)
        for pid in filter(alive, processes):
            os.kill(pid, signal.SIGKILL)
    assert verify(run / LOG).faults == ()


def test_interrupting_the_lead_ends_its_standby_too(tmp_path):
    _, file = prepare(tmp_path)
    run = tmp_path / "run"
    process = start("train", file, "--standby", 1, "--out", run, folder=tmp_path)
    processes: set[int] = set()
    try:
        wait_for(lambda: commits(run) >= 3, process)
        processes |= descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == Exit.INTERRUPTED
        wait_for(lambda: not any(map(alive, processes)))
    finally:
        stop(process)
        for pid in filter(alive, processes):
            os.kill(pid, signal.SIGKILL)
    found = verify(run / LOG)
    assert (found.final["run"].ended, found.final["run"].successions) == ("interrupted", 0)
