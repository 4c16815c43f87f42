"""Messages that are lost, late or of somebody else while stages are kept, computed again and given away."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from test_train_kit import Fault, Run, replace, simulate, tiny

from talkoot.run.records import Gone
from talkoot.train.messages import Ready
from talkoot.train.recipe import Recipe, peer_names
from talkoot.train.records import Blended, Recovered
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import SimulatedWorld

NAMES = peer_names(4)


def recipe(*ladder: str, faults: tuple[Fault, ...] = (), replicas: int = 1, steps: int = 7, **recovery: Any) -> Recipe:
    base = tiny(4, replicas, faults, steps=steps, checkpoint_every=100)
    return replace(base, "recovery", ladder=tuple(dict.fromkeys(ladder)), watchdog_s=2.0, **recovery)


@cache
def undisturbed() -> str:
    return simulate(tiny(4, 1, steps=7)).result.state_hash


def rungs_of(run: Run) -> list[str]:
    return [facts.rung for facts in run.facts("train.recover", Recovered)]


Sent = tuple[str, str, int]  # by whom, on which topic, in which step


def losing(monkeypatch: pytest.MonkeyPatch, lost: Callable[[Sent], bool]) -> list[Sent]:
    """Let the first message for which ``lost`` holds be damaged on its way; returns all that are sent."""
    real, sent = SimulatedWorld.send, list[Sent]()

    async def send(self: SimulatedWorld, to, topic, body=None, frames=(), *, generation=0, step=0) -> None:
        said = (self.name, topic, step)
        if lost(said) and not any(map(lost, sent)):
            self._damage_next = True
        sent.append(said)
        await real(self, to, topic, body, frames, generation=generation, step=step)

    monkeypatch.setattr(SimulatedWorld, "send", send)
    return sent


# -- computed again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_is_not_computed_again_from_what_a_lost_replica_of_its_neighbour_had_sent(stage, tmp_path):
    """Of two neighbouring stages, one lost both peers and the other one: that one's share of what was sent is gone."""
    names = peer_names(8)
    lost = (names[2 * stage], *names[2 * stage + 2 : 2 * stage + 4])
    faults = tuple(Fault(peer=name, step=3, phase="begin") for name in lost)
    run = simulate(recipe("replica", "replay", "checkpoint", faults=faults, replicas=2), tmp_path)
    assert all("replay" not in rung for rung in rungs_of(run))
    assert run.result.state_hash == undisturbed()


def test_after_the_next_snapshot_a_lost_replica_is_no_obstacle_any_more(tmp_path):
    names = peer_names(8)
    faults = (Fault(peer=names[2], step=1, phase="begin"), *(Fault(peer=n, step=6, phase="begin") for n in names[4:6]))
    wanted = recipe("replica", "replay", faults=faults, replicas=2)
    run = simulate(replace(wanted, "train", checkpoint_every=4), tmp_path)
    assert rungs_of(run)[-1] == "replay"
    assert run.result.state_hash == undisturbed()


# -- kept elsewhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["shadow", "journal"])
@pytest.mark.parametrize("topic", ["base", "gradient"])
def test_a_keeper_that_missed_a_state_or_a_gradient_is_not_taken_for_complete(rung, topic, monkeypatch, tmp_path):
    faults = (Fault(peer=NAMES[2], step=2, phase="begin"), Fault(peer=NAMES[0], step=6, phase="begin"))
    sent = losing(monkeypatch, lambda said: said[0] == NAMES[0] and said[1] == topic and said[2] >= 2)
    run = simulate(recipe(rung, faults=faults, refresh_every=100), tmp_path)
    assert rungs_of(run) == [rung, rung]
    assert len([said for said in sent if said[1] == "base" and said[0] == NAMES[0]]) == 2, "a new state was asked for"
    assert run.entries[-1].receipt.ended < 30
    assert run.result.state_hash == undisturbed()


def test_a_state_that_comes_before_the_word_that_it_is_to_be_kept_is_kept(tmp_path):
    faults = (Fault(peer=NAMES[2], step=2, phase="begin"), Fault(peer=NAMES[0], step=5, phase="begin"))
    slow = Link(latency_s=0.3)
    wanted = recipe("shadow", faults=faults)
    wanted = msgspec.structs.replace(wanted, network=Network(links={f"lead->{NAMES[2]}": slow}))
    run = simulate(wanted, tmp_path)
    assert rungs_of(run) == ["shadow", "shadow"]
    assert run.result.state_hash == undisturbed()


# -- several stages at once ------------------------------------------------------------------------------------------


def test_what_a_stage_was_blended_of_is_written_down_although_another_newcomer_fails(monkeypatch):
    names = peer_names(7)
    faults = tuple(Fault(peer=names[stage], step=3, phase="begin") for stage in (2, 5))
    base = tiny(7, 1, faults)
    model = msgspec.structs.replace(base.model, load=None, depth=6)
    swarm = msgspec.structs.replace(base.swarm, layout="ring", cut=(0, 1, 1, 1, 1, 1, 1))
    rules = msgspec.structs.replace(base.recovery, ladder=("blend",))
    real, lied = SimulatedWorld.send, list[str]()

    async def send(self: SimulatedWorld, to, topic, body=None, frames=(), *, generation=0, step=0) -> None:
        if topic == "ready" and self.name == names[5] and step == 3 and not lied:
            lied.append(self.name)
            body = Ready(4)
        await real(self, to, topic, body, frames, generation=generation, step=step)

    monkeypatch.setattr(SimulatedWorld, "send", send)
    run = simulate(msgspec.structs.replace(base, model=model, swarm=swarm, recovery=rules))
    assert sorted(facts.stage for facts in run.facts("train.blend", Blended)) == [2, 5]
    assert [facts.reason for facts in run.facts("peer.lost", Gone)][-1] == "it does not hold a usable state of stage 5"


# -- bytes that make no sense ----------------------------------------------------------------------------------------

Said = tuple[msgspec.Struct | None, list[bytes]]
MANGLES: dict[str, Callable[[Any, Any], Said]] = {
    "another body": lambda body, frames: (Gone(peer="x", name="y", reason="z"), [bytes(frame) for frame in frames]),
    "no frames": lambda body, frames: (body, []),
    "short frames": lambda body, frames: (body, [bytes(frame)[:-3] for frame in frames]),
    "many frames": lambda body, frames: (body, [b"12345678"] * 64),
    "zeros": lambda body, frames: (body, [bytes(len(frame) // 8) for frame in frames]),
    "a huge length": lambda body, frames: (body, [b"\xff" * 9 for _ in frames]),
}
TALK = {
    "shadow": ("state", "base", "gradient", "kept", "keeping"),
    "journal": ("state", "journal", "base", "gradient"),
    "replay": ("sent", "again", "hop"),
    "replica": ("state", "mix", "tie", "ready", "hop"),
}


@pytest.mark.parametrize("mangle", list(MANGLES))
@pytest.mark.parametrize(("rung", "topic"), [(rung, topic) for rung, topics in TALK.items() for topic in topics])
def test_bytes_that_make_no_sense_cost_time_and_nothing_else(rung, topic, mangle, monkeypatch, tmp_path):
    replicas = 2 if rung == "replica" else 1
    names = peer_names(4 * replicas)
    faults = tuple(
        Fault(peer=name, step=step, phase="begin") for name, step in ((names[1], 2), (names[2], 2), (names[0], 5))
    )
    wanted = recipe("replica", rung, "checkpoint", faults=faults, replicas=replicas, refresh_every=2)
    if topic == "tie":
        wanted = msgspec.structs.replace(wanted, model=tiny(tied=True).model)
    real, told = SimulatedWorld.send, list[str]()

    async def send(self: SimulatedWorld, to, topic_, body=None, frames=(), *, generation=0, step=0) -> None:
        if (
            topic_.partition("/")[0] == topic
            and step >= (0 if topic in ("base", "again") else 2)
            and self.name != "lead"
            and not told
        ):
            told.append(self.name)
            body, frames = MANGLES[mangle](body, frames)
        await real(self, to, topic_, body, frames, generation=generation, step=step)

    monkeypatch.setattr(SimulatedWorld, "send", send)
    run = simulate(wanted, tmp_path)
    assert told
    assert run.entries[-1].receipt.ended < 60
    if topic != "tie":
        assert run.result.state_hash == undisturbed()
