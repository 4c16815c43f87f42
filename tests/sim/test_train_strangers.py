"""Strangers and liars: what they say changes nothing, and a peer whose word cannot be taken is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from test_train_kit import Run, simulate, tiny

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL
from talkoot.core.keys import Key
from talkoot.core.receipt import Receipt, Signed, body, sign
from talkoot.run.greeting import Hello
from talkoot.run.records import Gone
from talkoot.train.lead import Lead
from talkoot.train.messages import Prepared
from talkoot.train.peer import train_peer
from talkoot.train.records import Worked
from talkoot.train.verify import examine
from talkoot.world.api import HELLO, LOST, Launch
from talkoot.world.sim.simulation import Simulation

HERE = __name__
HELLOS: dict[str, msgspec.Struct | None] = {
    "another protocol": Hello("mallory", "sim:mallory", PROTOCOL + 9, PROTOCOL + 9),
    "a name that is taken": Hello("alder", "sim:mallory", OLDEST_PROTOCOL, PROTOCOL),
    "a name that nobody waits for": Hello("mallory", "sim:mallory", OLDEST_PROTOCOL, PROTOCOL),
    "no body at all": None,
    "a body of another kind": Gone(peer="x", name="y", reason="z"),
}


def undisturbed() -> str:
    return simulate(tiny()).result.state_hash


async def mallory(world: Any, argument: bytes) -> None:
    """Says one hello when everybody has a seat, then some nonsense, and stays."""
    await world.sleep(0.02)
    await world.send(world.lead, HELLO, HELLOS[argument.decode()])
    await world.send(world.lead, "prepared", Prepared(losses=((0, 0.0),), norms=(1.0,)), generation=0, step=1)
    await world.receive(LOST, "stop")


@pytest.mark.parametrize("kind", list(HELLOS))
def test_a_strangers_hello_and_its_answers_change_nothing(kind):
    def invite(lead: Lead, simulation: Simulation) -> None:
        launch = Launch(name="mallory", program=f"{HERE}:mallory", argument=kind.encode())
        simulation.loop.call_soon(lambda: lead.world.launch(launch))

    run = simulate(tiny(), started=invite)
    assert run.result.state_hash == undisturbed()
    assert run.lead.state["peers"].joined == 4
    assert run.facts("peer.lost", Gone) == []


def resigned(signed: Signed, key: Key, **values: Any) -> Signed:
    """The same receipt with other values, properly signed by ``key``."""
    return sign(msgspec.structs.replace(signed.open(), **values), key)


def other_share(receipt: Receipt) -> Any:
    return body(msgspec.structs.replace(receipt.read(Worked), microbatches=(0, 1, 2, 3, 4)))


STRANGER = Key.derived("stranger")
LIES = {
    "no receipt": lambda p, key: msgspec.structs.replace(p, receipt=None),
    "another step": lambda p, key: msgspec.structs.replace(p, receipt=resigned(p.receipt, key, step=0)),
    "another run": lambda p, key: msgspec.structs.replace(p, receipt=resigned(p.receipt, key, run="other")),
    "another generation": lambda p, key: msgspec.structs.replace(p, receipt=resigned(p.receipt, key, generation=7)),
    "another's receipt": lambda p, key: msgspec.structs.replace(
        p, receipt=resigned(p.receipt, STRANGER, peer=STRANGER.peer)
    ),
    "a forged signature": lambda p, key: msgspec.structs.replace(p, receipt=Signed(p.receipt.raw, b"\0" * 64)),
    "work that it was not given": lambda p, key: msgspec.structs.replace(
        p, receipt=resigned(p.receipt, key, body=other_share(p.receipt.open()))
    ),
    "a missing loss": lambda p, key: msgspec.structs.replace(p, losses=p.losses[1:]),
    "another kind of answer": lambda p, key: Gone(peer="x", name="y", reason="z"),
}
_told: set[str] = set()  # lies already told, so that a replacement is honest


async def sometimes_liar(world: Any, argument: bytes) -> None:
    """The real program, but the peer cedar lies once, at step 1."""
    honest = world.send
    kind = _kind[0]

    async def send(to: Any, topic: str, facts: Any = None, frames: Any = (), **fields: Any) -> None:
        if world.name == "cedar" and topic == "prepared" and fields["step"] == 1 and kind not in _told:
            _told.add(kind)
            facts = LIES[kind](facts, world.key)
        await honest(to, topic, facts, frames, **fields)

    world.send = send
    await train_peer(world, argument)


_kind = [""]


@pytest.mark.parametrize("kind", list(LIES))
def test_a_peer_whose_word_cannot_be_taken_is_replaced_and_the_step_done_again(kind, monkeypatch):
    monkeypatch.setattr("talkoot.train.crew.Crew.program", f"{HERE}:sometimes_liar")
    _told.clear()
    _kind[0] = kind
    run: Run = simulate(tiny())
    assert _told == {kind}
    assert [facts.name for facts in run.facts("peer.lost", Gone)] == ["cedar"]
    assert examine(run.entries).faults == ()
    assert run.result.state_hash == undisturbed()


def test_this_modules_programs_are_coroutines():
    assert asyncio.iscoroutinefunction(mallory)
    assert asyncio.iscoroutinefunction(sometimes_liar)
