"""A link between two peers breaks while both still reach the lead; snapshots that are not this run's; a lying store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from test_train_kit import Fault, Run, replace, simulate, tiny

from talkoot.core.errors import TalkootError
from talkoot.core.log import Log
from talkoot.run.records import Gone
from talkoot.train import checkpoint
from talkoot.train.lead import Lead
from talkoot.train.messages import Saved
from talkoot.train.peer import Peer, train_peer
from talkoot.train.recipe import Recipe
from talkoot.train.records import Seated
from talkoot.train.verify import examine
from talkoot.world.api import FAILED
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

SLOW = Network(default=Link(bytes_per_s=1e5))
LEAD_FAR = {f"lead->{name}": Link(latency_s=0.4, bytes_per_s=1e5) for name in ("alder", "birch", "cedar", "dogwood")}


def on(network: Network, recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, network=network)


def cut(one: str, other: str, at: float, seconds: float) -> Callable[[Lead, Simulation], None]:
    def start(lead: Lead, simulation: Simulation) -> None:
        simulation.loop.call_at(at, simulation.fabric.partition, (one,), (other,))
        simulation.loop.call_at(at + seconds, simulation.fabric.heal)

    return start


def lost(run: Run) -> int:
    return len(run.facts("peer.lost", Gone))


@pytest.mark.parametrize("pair", [("alder", "cedar"), ("alder", "birch"), ("birch", "dogwood")])
def test_a_link_that_breaks_between_two_peers_costs_one_of_them_and_no_bits(pair):
    recipe = on(SLOW, tiny(steps=12))
    calm = simulate(recipe)
    middle = calm.entries[-1].receipt.ended / 2
    run = simulate(recipe, started=cut(*pair, middle, 4.0))
    assert lost(run) == 1
    assert run.result.state_hash == calm.result.state_hash
    assert examine(run.entries).faults == ()


def test_a_freeze_that_only_the_peers_notice_is_reported_to_the_lead():
    fault = Fault(peer="birch", step=1, phase="forward", kind="stop", seconds=2.7)
    network = Network(default=Link(bytes_per_s=1e5), links=LEAD_FAR)
    run = simulate(on(network, tiny(faults=(fault,))))
    assert run.result.state_hash == simulate(on(network, tiny())).result.state_hash


def test_snapshots_of_another_run_in_the_folder_are_not_used(tmp_path):
    simulate(msgspec.structs.replace(tiny(steps=4), seed=99), tmp_path)  # its log is gone, its snapshots lie there
    fault = Fault(peer="dogwood", step=3, phase="forward")
    other = Fault(peer="cedar", step=3, phase="forward")
    recipe = replace(tiny(steps=5, faults=(fault, other)), "train", checkpoint_every=0)
    run = simulate(recipe, tmp_path)
    assert run.result.state_hash == simulate(tiny(steps=5)).result.state_hash
    assert {seat.source for seat in run.facts("peer.seat", Seated)} == {"start"}
    shutil.rmtree(tmp_path)


class Forgetful(Peer):
    """Claims once to have saved a state that nobody finds in the store."""

    lied = False

    async def _save(self, step: int) -> None:
        if self.world.name == "alder" and not Forgetful.lied:
            Forgetful.lied = True
            await self.tell("saved", Saved(blob="0" * 64, size=9, tensors={}), step)
        else:
            await super()._save(step)


def test_a_state_that_is_not_in_the_store_makes_no_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr("talkoot.train.peer.Peer", Forgetful)
    run = simulate(tiny(), tmp_path)
    assert train_peer.__module__ == "talkoot.train.peer"
    assert [gone.reason for gone in run.facts("peer.lost", Gone)] == ["the state it says it saved is not in the store"]
    assert run.result.state_hash == simulate(tiny()).result.state_hash


async def rude(world: Any, argument: bytes) -> None:
    """The real program, but cedar once mixes with strangers, and once reports a failure without a word in it."""
    honest = world.send

    async def send(to: Any, topic: str, facts: Any = None, frames: Any = (), **fields: Any) -> None:
        if world.name == "cedar" and fields.get("step") == 1 and "said" not in _said:
            if topic.startswith("backward/"):
                await honest(to, f"mix/{fields['generation']}/1/0", None, (), **fields)
            if topic == "prepared":
                _said.add("said")
                await honest(to, FAILED, None)
        await honest(to, topic, facts, frames, **fields)

    world.send = send
    await train_peer(world, argument)


_said: set[str] = set()


def test_an_outsiders_mixing_is_ignored_and_a_failure_without_sense_expels_its_sender(monkeypatch):
    monkeypatch.setattr("talkoot.train.crew.Crew.program", f"{__name__}:rude")
    _said.clear()
    run = simulate(tiny())
    assert [gone.name for gone in run.facts("peer.lost", Gone)] == ["cedar"]
    assert run.result.state_hash == simulate(tiny()).result.state_hash


def lie_once(monkeypatch, **figures: float) -> None:
    """Have birch, who holds the last stage, state these figures once."""
    honest = Peer.tell

    async def tell(self: Peer, topic: str, facts: Any, step: int) -> None:
        if topic == "prepared" and self.world.name == "birch" and not _said:
            _said.add("said")
            losses = tuple((microbatch, figures.get("losses", loss)) for microbatch, loss in facts.losses)
            norms = tuple(figures.get("norms", norm) for norm in facts.norms)
            facts = msgspec.structs.replace(facts, losses=losses, norms=norms)
        await honest(self, topic, facts, step)

    _said.clear()
    monkeypatch.setattr(Peer, "tell", tell)


@pytest.mark.parametrize("figures", [{"losses": 1.7e308}, {"norms": 1.7e308}])
def test_figures_beyond_all_floats_end_in_a_diagnosis(figures, monkeypatch):
    lie_once(monkeypatch, **figures)
    with pytest.raises(TalkootError, match="training diverged"):
        simulate(tiny(replicas=1))


def test_a_negative_squared_norm_expels_its_sender(monkeypatch):
    lie_once(monkeypatch, norms=-1.0)
    run = simulate(tiny(replicas=1), held_out=0)
    assert [gone.name for gone in run.facts("peer.lost", Gone)] == ["birch"]
    assert run.result.state_hash == simulate(tiny(replicas=1)).result.state_hash


def test_the_log_is_on_the_disk_before_a_snapshot_pushes_out_another(tmp_path, monkeypatch):
    sync, prune = Log.sync, checkpoint.prune
    synced: list[tuple[Log, int]] = []
    at_prune: list[bool] = []

    def watched_sync(log: Log) -> None:
        sync(log)
        synced.append((log, len(log)))

    def watched_prune(*arguments: Any) -> None:
        log, length = synced[-1]
        at_prune.append(len(log) == length)
        prune(*arguments)

    monkeypatch.setattr(Log, "sync", watched_sync)
    monkeypatch.setattr(checkpoint, "prune", watched_prune)
    log = Log(tmp_path / "log.sqlite")
    simulate(tiny(), tmp_path, log=log)
    log.close()
    assert at_prune == [True, True, True]
