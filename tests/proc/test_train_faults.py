"""Faults among real processes: how soon they are noticed, and that they leave no trace in the state."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import Ran, alive, execute, talkoot, tiny, to_toml, wait_for, write_text

from talkoot.core.fold import Entry
from talkoot.run.folder import LOG
from talkoot.run.records import Gone, Warned
from talkoot.train.checkpoint import manifests, read_manifest
from talkoot.train.recipe import Recipe, Recovery
from talkoot.train.verify import verify
from talkoot.world.faults import Fault

WATCHDOG_S = 3.0


def job(folder: Path, *faults: Fault, steps: int = 12, **train: Any) -> Recipe:
    recipe = tiny(write_text(folder), steps=steps, faults=faults, **train)
    return msgspec.structs.replace(recipe, recovery=Recovery(watchdog_s=WATCHDOG_S))


def undisturbed(recipe: Recipe, folder: Path) -> Ran:
    return execute(msgspec.structs.replace(recipe, faults=()), folder, sim=True)


def lost(ran: Ran) -> list[str]:
    return [receipt.read(Gone).name for receipt in ran.receipts("peer.lost")]


def same(ran: Ran, plain: Ran, folder: Path) -> None:
    assert ran.losses == plain.losses
    assert ran.result.state_hash == plain.result.state_hash != ""
    assert verify(folder / LOG).faults == ()


@pytest.mark.parametrize(
    ("number", "limit_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, WATCHDOG_S + 1.0)], ids=["killed", "stopped"]
)
def test_a_loss_is_noticed_in_time(number, limit_s, tmp_path):
    recipe = job(tmp_path)
    struck: list[float] = []
    victims: list[int] = []

    def observe(lead: Any, entry: Entry) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step == 3 and not struck:
            victims.append(lead.world.pid("cedar"))
            struck.append(time.time())
            os.kill(victims[0], number)

    ran = execute(recipe, tmp_path / "run", observe=observe)
    assert lost(ran) == ["cedar"]
    (gone,) = ran.receipts("peer.lost")
    assert gone.ended - struck[0] < limit_s
    wait_for(lambda: not alive(victims[0]))
    same(ran, undisturbed(recipe, tmp_path / "plain"), tmp_path / "run")


def test_a_stopped_peer_that_wakes_up_beside_its_replacement_has_no_say(tmp_path):
    """Nobody puts it down, and it wakes up when its replacement has begun to work."""
    recipe = job(tmp_path, steps=60)
    frozen: list[int] = []
    since: list[int] = []
    awake: list[int] = []

    def observe(lead: Any, entry: Entry) -> None:
        receipt = entry.receipt
        if receipt.op == "train.commit" and receipt.step == 3 and not frozen:
            lead.put_down = lambda name: lead.world._processes.pop(name, None)
            frozen.append(lead.world.pid("birch"))
            os.kill(frozen[0], signal.SIGSTOP)
        if receipt.op == "peer.lost":
            since.append(entry.position)
        if receipt.op == "peer.seat" and since and not awake:
            awake.append(entry.position)
            os.kill(frozen[0], signal.SIGCONT)

    try:
        ran = execute(recipe, tmp_path / "run", observe=observe)
        wait_for(lambda: not alive(frozen[0]))  # it heard that its lead hung up, and left
    finally:
        with suppress(ProcessLookupError):
            os.kill(frozen[0], signal.SIGKILL)
    assert awake
    assert lost(ran) == ["birch"]
    zombie = ran.receipts("peer.lost")[0].read(Gone).peer
    assert not [entry for entry in ran.entries if entry.receipt.peer == zombie and entry.position > since[0]]
    same(ran, undisturbed(recipe, tmp_path / "plain"), tmp_path / "run")


def test_a_peer_that_is_cut_off_is_replaced_and_a_short_cut_is_waited_for(tmp_path):
    recipe = job(
        tmp_path,
        Fault(peer="birch", step=3, phase="forward", kind="partition"),
        Fault(peer="cedar", step=6, phase="forward", kind="partition", seconds=0.5),
    )
    ran = execute(recipe, tmp_path / "run")
    assert lost(ran) == ["birch"]
    ended = {receipt.step: receipt.ended for receipt in ran.receipts("train.commit")}
    assert ended[3] - ended[2] < WATCHDOG_S + 1.0
    assert ended[6] - ended[5] > 0.5
    same(ran, undisturbed(recipe, tmp_path / "plain"), tmp_path / "run")


def test_damaged_messages_hung_peers_and_full_disks_cost_time_and_a_snapshot(tmp_path):
    recipe = job(
        tmp_path,
        Fault(peer="alder", step=2, phase="begin", kind="corrupt"),
        Fault(peer="cedar", step=3, phase="begin", kind="disk_full", seconds=3.0),  # less than dogwood hangs
        Fault(peer="dogwood", step=3, phase="begin", kind="disk_full"),
        Fault(peer="dogwood", step=5, phase="backward", kind="delay", seconds=1e6),
    )
    ran = execute(recipe, tmp_path / "run")
    assert lost(ran) == ["dogwood"]
    texts = [receipt.read(Warned).text for receipt in ran.receipts("run.warning")]
    assert any("a message was lost" in text for text in texts)
    assert any(text.startswith("no snapshot of step 4: ") and "the disk is full" in text for text in texts)
    assert [read_manifest(path).step for path in manifests(tmp_path / "run")] == [12, 8]
    same(ran, undisturbed(recipe, tmp_path / "plain"), tmp_path / "run")


def test_a_chaos_file_strikes_at_its_times_with_real_signals(tmp_path):
    recipe = to_toml(job(tmp_path, steps=400, checkpoint_every=0), tmp_path / "recipe.toml")
    chaos = tmp_path / "chaos.toml"
    chaos.write_text('[[faults]]\npeer = "birch"\nat_s = 1.0\n')
    done = talkoot("train", recipe, "--chaos", chaos, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = verify(tmp_path / "run" / LOG)
    assert (found.lost, found.faults) == (("birch",), ())
    plain = talkoot("train", recipe, "--sim", "--out", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert found.final["run"].state_hash == verify(tmp_path / "plain" / LOG).final["run"].state_hash
