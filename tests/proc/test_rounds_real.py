"""Replicas as real processes: killed, stopped, joined and resumed, while the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from processes import Ran, alive, commits, descendants, execute, start, stop, tiny, to_toml, wait_for, write_text

from talkoot.core.fold import Entry
from talkoot.run.folder import LOG
from talkoot.run.records import Gone, Joined
from talkoot.train.recipe import Joiner, Mixing, Model, Recipe, Swarm
from talkoot.train.rounds.records import Averaged, Rounded
from talkoot.train.verify import verify

STALL_S = 2.5 + 5.0  # until a stopped process is noticed, and some grace


def job(folder: Path, *, rounds: int, replicas: int = 4, inner: int = 2, rule: str = "noloco", **swarm: Any) -> Recipe:
    recipe = tiny(
        write_text(folder),
        steps=rounds * inner,
        swarm=Swarm(stages=1, replicas=replicas, **swarm),
        microbatches=replicas,
        microbatch_size=1,
        checkpoint_every=0,
    )
    mixing, model = Mixing(rule=rule, inner_steps=inner), Model(depth=1, context=16)
    return msgspec.structs.replace(recipe, mixing=mixing, model=model)


def at(rounds: dict[int, Callable[[Any], bool]], inner: int = 2) -> Callable[[Any, Entry], None]:
    """Do something with the lead when so many rounds are committed, or as soon after as it can be done, once."""

    def observe(lead: Any, entry: Entry) -> None:
        if entry.receipt.op == "train.commit":
            for due in [number for number in sorted(rounds) if number <= entry.receipt.step // inner]:
                if rounds[due](lead):
                    del rounds[due]

    return observe


def send(number: int, name: str) -> Callable[[Any], bool]:
    """Strike a replica of that name, if one takes part."""

    def strike(lead: Any) -> bool:
        if name not in [lead.roster.name_of(peer) for peer in lead.arrived()]:
            return False
        try:
            os.kill(lead.world.pid(name), number)
        except (KeyError, ProcessLookupError):  # it has ended, and the lead is about to hear of it
            return False
        return True

    return strike


def rounds_of(ran: Ran) -> list[Rounded]:
    return [receipt.read(Rounded) for receipt in ran.receipts("train.round")]


def lost(ran: Ran) -> list[str]:
    return [receipt.read(Gone).name for receipt in ran.receipts("peer.lost")]


def sound(ran: Ran, folder: Path, rounds: int) -> None:
    """It came to its end, nobody stood still for long, nobody was restarted who was not lost, and the log verifies."""
    assert ran.result.finished
    findings = verify(folder / LOG)
    assert (findings.faults, findings.steps) == ((), 2 * rounds)
    assert max(facts.wait_s for facts in rounds_of(ran)) < STALL_S
    joined = [receipt.read(Joined).name for receipt in ran.receipts("peer.join")]
    assert all(joined.count(name) <= 1 + lost(ran).count(name) for name in joined)


def test_over_many_rounds_with_kills_stops_and_a_joiner_nobody_else_is_disturbed(tmp_path):
    rounds = 300
    names = ["alder", "birch", "cedar", "dogwood"]
    strikes = {20 * n: send(signal.SIGKILL, names[n % 4]) for n in range(1, 10)}
    strikes[110] = send(signal.SIGSTOP, "elm")
    pids: dict[str, set[int]] = {}

    def watch(lead: Any, entry: Entry) -> None:
        observe(lead, entry)
        if entry.receipt.op == "train.commit":
            for peer in lead.arrived():
                pids.setdefault(peer, set()).add(lead.world.process(lead.roster.name_of(peer)))

    observe = at(strikes)
    recipe = job(tmp_path, rounds=rounds, joiners=(Joiner(name="elm", step=60),))
    ran = execute(recipe, tmp_path / "run", observe=watch)
    assert not strikes
    sound(ran, tmp_path / "run", rounds)
    assert len(lost(ran)) == 10
    assert all(len(found - {0}) == 1 for found in pids.values())
    assert {facts.slot for facts in rounds_of(ran)} == set(range(5))
    assert any("odd" in facts.alone for facts in rounds_of(ran))


def test_a_run_without_faults_has_the_same_bits_in_both_worlds(tmp_path):
    for rule in ("noloco", "diloco"):
        recipe = job(tmp_path, rounds=6, replicas=3, rule=rule)
        real = execute(recipe, tmp_path / rule)
        simulated = execute(recipe, tmp_path / f"{rule}-simulated", sim=True)
        sound(real, tmp_path / rule, 6)
        assert real.result.state_hash == simulated.result.state_hash != ""


def test_a_group_of_all_goes_on_after_a_kill(tmp_path):
    recipe = job(tmp_path, rounds=30, replicas=3, rule="diloco")
    ran = execute(recipe, tmp_path / "run", observe=at({5: send(signal.SIGKILL, "birch")}))
    sound(ran, tmp_path / "run", 30)
    assert lost(ran) == ["birch"]
    (averaged,) = (receipt.read(Averaged) for receipt in ran.receipts("train.average"))
    assert averaged.replicas >= 2


def test_a_command_that_is_killed_goes_on_when_it_is_given_again(tmp_path):
    recipe = job(tmp_path, rounds=40, replicas=2)
    recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, checkpoint_every=20))
    plain = execute(recipe, tmp_path / "plain", sim=True)
    file, folder = to_toml(recipe, tmp_path / "recipe.toml"), tmp_path / "run"
    first = start("train", file, "--out", folder, folder=tmp_path)
    children: set[int] = set()
    try:
        wait_for(lambda: commits(folder) > 12, first)
        children = descendants(first.pid)
    finally:
        stop(first)
    wait_for(lambda: not any(map(alive, children)))
    second = start("train", file, "--out", folder, folder=tmp_path)
    try:
        wait_for(lambda: second.poll() is not None)
    finally:
        stop(second)
    assert second.returncode == 0
    findings = verify(folder / LOG)
    assert (findings.faults, findings.steps) == ((), 80)
    assert findings.final["run"].sessions == 2
    assert findings.final["run"].state_hash == plain.result.state_hash
