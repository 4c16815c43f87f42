"""Peers that die, freeze and wake up again: the run ends in the very state that it would have reached undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from processes import DEADLINE, Ran, alive, execute, tiny, wait_for, write_text

from talkoot.core.fold import Entry
from talkoot.run.folder import LOG
from talkoot.run.records import Gone
from talkoot.train.recipe import Recipe, Swarm
from talkoot.train.records import Seated
from talkoot.train.verify import verify
from talkoot.world.faults import Fault

NOTICE_SECONDS = 20.0  # heartbeats notice a frozen peer in 2.5 s; the rest is for a loaded machine


def assert_same(ran: Ran, undisturbed: Ran) -> None:
    assert ran.result.finished
    assert ran.losses == undisturbed.losses
    assert ran.result.state_hash == undisturbed.result.state_hash != ""


def at_commit(step: int, act):
    """An observer that calls ``act(lead)`` once, when ``step`` is committed for the first time."""
    waiting = [act]

    def observe(lead, entry):
        if entry.receipt.op == "train.commit" and entry.receipt.step == step and waiting:
            waiting.pop()(lead)

    return observe


def until_replaced(recipe: Recipe, folder: Path, name: str, act: Callable[[Any], None] = lambda lead: None) -> Ran:
    """Run until the peer ``name`` was lost, came back, and took part in a step; ``act(lead)`` at the third step."""
    seats: list[str] = []
    strike = at_commit(3, act)

    def observe(lead: Any, entry: Entry) -> None:
        strike(lead, entry)
        if entry.receipt.op == "peer.seat":
            seats.append(entry.receipt.read(Seated).name)
        elif entry.receipt.op == "train.commit" and seats.count(name) == 2:
            lead.stop_requested = True  # however long its start takes on a busy machine

    return execute(recipe, folder, observe=observe)


def up_to(step: int, recipe: Recipe, folder: Path) -> Ran:
    """The undisturbed run, stopped after as many steps."""

    def observe(lead: Any, entry: Entry) -> None:
        if entry.receipt.op == "train.commit" and entry.receipt.step == step - 1:
            lead.stop_requested = True

    return execute(recipe, folder, sim=True, observe=observe)


def test_a_peer_killed_in_mid_backward_costs_nothing_but_time(tmp_path):
    text = write_text(tmp_path)
    fault = Fault(peer="birch", step=3, phase="backward", kind="kill")
    ran = until_replaced(tiny(text, steps=5000, checkpoint_every=0, faults=(fault,)), tmp_path / "run", "birch")
    plain = up_to(ran.result.step, tiny(text, steps=5000, checkpoint_every=0), tmp_path / "plain")
    assert ran.losses == plain.losses
    assert ran.result.state_hash == plain.result.state_hash != ""
    found = verify(tmp_path / "run" / LOG)
    assert (found.lost, found.replaced, found.faults) == (("birch",), ("birch",), ())
    assert found.steps == ran.result.step > 3
    assert found.final["train"].rollbacks == 0  # its replica had everything


def test_a_process_killed_from_outside_is_replaced(tmp_path):
    text = write_text(tmp_path)
    recipe = tiny(text, steps=5000, checkpoint_every=0)
    killed: list[int] = []

    def kill(lead) -> None:
        killed.append(lead.world.pid("cedar"))
        os.kill(killed[0], signal.SIGKILL)

    ran = until_replaced(recipe, tmp_path / "run", "cedar", kill)
    plain = up_to(ran.result.step, recipe, tmp_path / "plain")
    assert ran.losses == plain.losses
    assert ran.result.state_hash == plain.result.state_hash != ""
    found = verify(tmp_path / "run" / LOG)
    assert (found.lost, found.replaced, found.faults) == (("cedar",), ("cedar",), ())
    assert not alive(killed[0])


def test_a_frozen_peer_holds_the_run_up_for_seconds_only(tmp_path):
    text = write_text(tmp_path)
    undisturbed = execute(tiny(text, steps=12), tmp_path / "plain", sim=True)
    frozen: list[int] = []

    def freeze(lead) -> None:
        frozen.append(lead.world.pid("birch"))
        os.kill(frozen[0], signal.SIGSTOP)

    try:
        ran = execute(tiny(text, steps=12), tmp_path / "run", observe=at_commit(3, freeze))
    finally:
        with suppress(ProcessLookupError):
            os.kill(frozen[0], signal.SIGKILL)
    assert_same(ran, undisturbed)
    ended = {receipt.step: receipt.ended for receipt in ran.receipts("train.commit")}
    assert ended[4] - ended[3] < NOTICE_SECONDS
    assert [receipt.read(Gone).name for receipt in ran.receipts("peer.lost")] == ["birch"]
    wait_for(lambda: not alive(frozen[0]))


def test_a_zombie_that_thaws_changes_nothing(tmp_path):
    text = write_text(tmp_path)
    swarm = Swarm(stages=2, replicas=2, respawn=False)  # nobody puts it down: it sleeps through the others' work
    undisturbed = execute(tiny(text, steps=40), tmp_path / "plain", sim=True)
    frozen: list[int] = []
    lost_after: list[int] = []

    def observe(lead, entry) -> None:
        receipt = entry.receipt
        if receipt.op == "peer.lost":
            lost_after.append(entry.position)
        elif receipt.op == "train.commit" and receipt.step == 3:
            frozen.append(lead.world.pid("birch"))
            os.kill(frozen[0], signal.SIGSTOP)
        elif receipt.op == "train.commit" and receipt.step == 8:
            os.kill(frozen[0], signal.SIGCONT)

    try:
        ran = execute(tiny(text, steps=40, swarm=swarm), tmp_path / "run", observe=observe)
    finally:
        with suppress(ProcessLookupError):
            os.kill(frozen[0], signal.SIGKILL)
    assert_same(ran, undisturbed)
    gone = [receipt.read(Gone) for receipt in ran.receipts("peer.lost")]
    assert [facts.name for facts in gone] == ["birch"]
    late = [entry for entry in ran.entries if entry.receipt.peer == gone[0].peer and entry.position > lost_after[0]]
    assert not late
    found = verify(tmp_path / "run" / LOG)
    assert (found.lost, found.replaced, found.faults) == (("birch",), (), ())


def test_a_whole_stage_lost_goes_back_to_the_snapshot_and_ends_in_the_same_state(tmp_path):
    text = write_text(tmp_path)
    undisturbed = execute(tiny(text, steps=10), tmp_path / "plain", sim=True)

    def kill_stage(lead) -> None:
        for pid in [lead.world.pid("cedar"), lead.world.pid("dogwood")]:
            os.kill(pid, signal.SIGKILL)

    ran = execute(tiny(text, steps=10), tmp_path / "run", observe=at_commit(6, kill_stage))
    assert_same(ran, undisturbed)
    assert {receipt.step for receipt in ran.receipts("train.rollback")} == {4}  # the newest snapshot's step
    found = verify(tmp_path / "run" / LOG)
    assert sorted(found.lost) == sorted(found.replaced) == ["cedar", "dogwood"]
    assert found.faults == ()
    sources = [receipt.read(Seated).source for receipt in ran.receipts("peer.seat")][4:]
    assert "snapshot of step 4" in sources
    assert ran.entries[-1].receipt.ended - ran.entries[0].receipt.started < DEADLINE
