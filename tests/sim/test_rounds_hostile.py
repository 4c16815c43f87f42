"""Nonsense, lies and forged logs: refused by whoever meets them, and the run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rounds_kit import Rounds, check, simulate, tiny

from talkoot.core.codec import encode
from talkoot.core.fold import Entry
from talkoot.core.keys import Key as Pen
from talkoot.core.receipt import Signed, body, sign
from talkoot.train.messages import Cut
from talkoot.train.records import Committed
from talkoot.train.rounds.lead import TOPICS, RoundLead
from talkoot.train.rounds.messages import (
    Arrived,
    Ask,
    Chunk,
    Collected,
    Diverging,
    Done,
    Fetch,
    Key,
    Offer,
    Part,
    Place,
    Refused,
    Standing,
    Took,
    View,
)
from talkoot.train.rounds.peer import FROM_LEAD, FROM_REPLICAS, RoundPeer
from talkoot.train.rounds.records import Rounded, Viewed
from talkoot.train.verify import examine
from talkoot.world.api import Message
from talkoot.world.sim.simulation import Simulation

FAR = 2**40
KEYS = [Key(1, 0, 1), Key(3, 0, 2**32), Key(2, 5, 1), Key(2, -1, 1), Key(-1, 0, 1), Key(FAR, 0, FAR), Key(4, 0, FAR)]
SENSE: dict[str, list[Any]] = {
    "offer": [Offer(key) for key in KEYS],
    "took": [Took(key) for key in KEYS],
    "refused": [Refused(key, "no") for key in KEYS],
    "part": [Part(key, hop) for key in KEYS for hop in (0, 1, -1, FAR)],
    "standing": [Standing(key, of) for key in KEYS for of in (0, 1, 4, -1, FAR)],
    "ask": [Ask(key) for key in KEYS],
    "fetch": [Fetch(0), Fetch(FAR), Fetch(-1)],
    "later": [Fetch(0), Fetch(FAR), Fetch(-1)],
    "chunk": [Chunk(0, 0, 1, ""), Chunk(FAR, -1, FAR, "x"), Chunk(2, 0, 0, "x")],
    "weights": [Fetch(0)],
    "view": [View(number=FAR, places=(Place("x", "y", "z", 0, 0, 0),), until=0)],
    "collect": [Fetch(0)],
    "arrived": [Arrived(round=FAR), Arrived(round=-1), Arrived(round=0, donors=("x",))],
    "behind": [Fetch(0), Fetch(FAR), Fetch(-1)],
    "round": [Done(receipt=Signed(b"", b"")), Done(receipt=Signed(b"\x80", b"x" * 64))],
    "diverged": [Diverging(FAR, "")],
    "collected": [Collected(blob="x", averaged=FAR), Collected(problem="none")],
    "cut": [Cut("x", "y")],
}
FRAMES = st.lists(st.binary(max_size=40), max_size=3)
words = st.one_of(
    st.tuples(st.sampled_from(sorted({*TOPICS, *FROM_REPLICAS, *FROM_LEAD})), st.binary(max_size=40), FRAMES),
    st.sampled_from(sorted(SENSE)).flatmap(
        lambda topic: st.tuples(st.just(topic), st.sampled_from(SENSE[topic]).map(encode), FRAMES)
    ),
)


def saying(source: str, targets: list[str], said: list[tuple[str, bytes, list[bytes]]]) -> Callable[..., None]:
    """Have a peer say that to others in the middle of the run."""

    def arrange(lead: RoundLead, simulation: Simulation) -> None:
        def say(topic: str, text: bytes, frames: list[bytes]) -> None:
            for target in targets:
                speaker, listener = simulation.of(source), simulation.of(target)
                if speaker.alive:
                    message = Message(speaker.world.me, topic, lead.generation, 3, text, frames)
                    simulation.fabric.transmit(speaker, listener.world.me, message)

        for number, words in enumerate(said):
            simulation.loop.call_later(0.03 + 0.002 * number, say, *words)

    return arrange


@settings(max_examples=12, deadline=None)
@given(st.lists(words, min_size=20, max_size=40), st.sampled_from(["noloco", "diloco"]))
def test_nonsense_from_a_member_ends_no_replica_and_no_lead(said, rule):
    run = simulate(tiny(4, rounds=8, rule=rule), started=saying("birch", ["alder", "cedar", "lead"], said))
    check(run, longest_s=60.0)
    assert set(run.lost) <= {"birch", "alder", "cedar"}
    assert rule == "noloco" or {len(found) for found in run.ends().values()} == {1}


def test_a_promise_about_a_view_that_there_is_not_binds_nobody():
    said = [("ask", encode(Ask(Key(number, 0, FAR))), list[bytes]()) for number in range(8)] * 5
    run = simulate(tiny(4, rounds=8, rule="diloco"), started=saying("birch", ["alder", "cedar"], said))
    check(run, lost=set())


@settings(max_examples=8, deadline=None)
@given(st.lists(words, min_size=20, max_size=40))
def test_nonsense_from_a_replica_that_was_struck_off_changes_nothing(said):
    """Its process goes on, beside its replacement."""
    zombie: list[Any] = []

    def strike(lead: RoundLead, simulation: Simulation) -> None:
        lead.put_down = lambda name: simulation._by_name.pop(name, None)  # type: ignore[method-assign]

        def say(topic: str, text: bytes, frames: list[bytes]) -> None:
            for listener in list(simulation.fabric.peers.values()):
                if listener.alive and listener is not zombie[0]:
                    message = Message(zombie[0].world.me, topic, lead.generation, 3, text, frames)
                    simulation.fabric.transmit(zombie[0], listener.world.me, message)

        for number, words in enumerate(said):
            simulation.loop.call_later(0.06 + 0.002 * number, say, *words)

        def lose() -> None:
            zombie.append(simulation.of("birch"))
            lead.world.notice_loss(zombie[0].world.me, "for a test")

        simulation.loop.call_later(0.03, lose)

    run = simulate(tiny(4, rounds=30), started=strike)
    check(run, lost={"birch"})


def lie(done: Done, key: Pen, **values: Any) -> Done:
    return msgspec.structs.replace(done, receipt=sign(msgspec.structs.replace(done.receipt.open(), **values), key))


def facts(done: Done, key: Pen, **values: Any) -> Done:
    return lie(done, key, body=body(msgspec.structs.replace(done.receipt.open().read(Rounded), **values)))


STRANGER = Pen.derived("stranger")
LIES: dict[str, Callable[[Done, Pen], Any]] = {
    "another's receipt": lambda done, key: lie(done, STRANGER, peer=STRANGER.peer),
    "a forged signature": lambda done, key: msgspec.structs.replace(done, receipt=Signed(done.receipt.raw, b"\0" * 64)),
    "another run": lambda done, key: lie(done, key, run="other"),
    "another generation": lambda done, key: lie(done, key, generation=7),
    "half a round": lambda done, key: lie(done, key, step=done.receipt.open().step + 1),
    "a round from the future": lambda done, key: lie(done, key, step=2000),
    "a round that is over": lambda done, key: lie(done, key, step=0),
    "another slot": lambda done, key: facts(done, key, slot=0),
    "more steps": lambda done, key: facts(done, key, steps=3),
    "more tokens": lambda done, key: facts(done, key, tokens=10**6),
    "a view to come": lambda done, key: facts(done, key, view=99),
    "a loss that is none": lambda done, key: facts(done, key, loss=float("nan")),
    "a measure that is none": lambda done, key: facts(done, key, wait_s=float("inf")),
    "another kind of word": lambda done, key: Fetch(3),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_replica_whose_word_cannot_be_taken_is_replaced(kind, monkeypatch):
    told: list[str] = []
    honest = RoundPeer.tell

    async def tell(self: RoundPeer, topic: str, said: Any) -> None:
        if topic == "round" and self.world.name == "cedar" and self.round > 3 and not told:
            told.append(kind)
            said = LIES[kind](said, self.world.key)
        await honest(self, topic, said)

    monkeypatch.setattr(RoundPeer, "tell", tell)
    run = simulate(tiny(4, rounds=9))
    check(run, lost={"cedar"})
    assert told == [kind]


def test_a_partner_that_sends_what_is_no_number_or_far_away_is_not_merged(monkeypatch):
    from talkoot.train.rounds.tensors import TensorReplica

    honest = TensorReplica.message

    def message(self: TensorReplica, key: Any, weight: float) -> Any:
        made = honest(self, key, weight)
        if self._mine == range(1, 2) and key[0] >= 2:
            made = [b"\xff" * len(made[0]), *made[1:]] if key[0] % 2 else [b"\x47" * len(made[0]), *made[1:]]
        return made

    monkeypatch.setattr(TensorReplica, "message", message)
    run = simulate(tiny(4, rounds=10, swarm={"respawn": False}))
    check(run)
    met = [facts for _, number, facts in run.rounds if number >= 2 and "birch" in facts.partners]
    assert met == []
    refused = {why for _, number, facts in run.rounds for why in facts.alone if number >= 2}
    assert any("not finite" in why for why in refused)
    assert any("too far away" in why for why in refused)


def test_thirty_of_a_hundred_swaps_alone_cost_less_than_one_percent(monkeypatch):
    import random

    from talkoot.train.rounds.swap import Swap

    recipe = tiny(4, rounds=60, inner=8, learning_rate=4e-3, microbatches=4, microbatch_size=4)
    plain = simulate(recipe, held_out=8)
    begin, chance = Swap.begin, random.Random(1)
    draws: dict[int, float] = {}

    async def sometimes(self: Swap) -> None:
        await begin(self)
        if draws.setdefault(self.key.round, chance.random()) < 0.3 and not self.why:
            self.why = "for a test"

    monkeypatch.setattr(Swap, "begin", sometimes)
    alone = simulate(recipe, held_out=8)
    share = sum(not facts.partners for _, _, facts in alone.rounds) / len(alone.rounds)
    assert 0.2 < share < 0.45
    assert alone.result.held_out is not None
    assert plain.result.held_out is not None
    assert alone.result.held_out < 1.01 * plain.result.held_out


# -- logs that an honest lead does not write -------------------------------------------------------------------


@cache
def honest() -> Rounds:
    return simulate(tiny(3, rounds=5))


def changed(entries: list[Entry], number: int, op: str, **values: Any) -> list[Entry]:
    """The entries with the ``number``-th receipt of that operation changed."""
    at = [index for index, entry in enumerate(entries) if entry.receipt.op == op][number]
    receipt = msgspec.structs.replace(entries[at].receipt, **values)
    return [*entries[:at], dataclasses.replace(entries[at], receipt=receipt), *entries[at + 1 :]]


def restated(entries: list[Entry], number: int, op: str, kind: type[Any], **values: Any) -> list[Entry]:
    receipt = [entry.receipt for entry in entries if entry.receipt.op == op][number]
    return changed(entries, number, op, body=body(msgspec.structs.replace(receipt.read(kind), **values)))


def cited(entries: list[Entry], number: int) -> tuple[str, ...]:
    return [entry.receipt for entry in entries if entry.receipt.op == "train.commit"][number].parents


FORGERIES: dict[str, tuple[Callable[[list[Entry]], list[Entry]], str]] = {
    "a replica left out": (lambda log: changed(log, 2, "train.commit", parents=cited(log, 2)[:2]), "leaves out"),
    "a receipt cited again": (lambda log: changed(log, 2, "train.commit", parents=cited(log, 1)), "already counted"),
    "a receipt that there is not": (
        lambda log: changed(log, 2, "train.commit", parents=(*cited(log, 2), "none")),
        "unknown",
    ),
    "a replica counted twice": (
        lambda log: restated(log, 4, "train.round", Rounded, slot=0),
        "twice|did not take part",
    ),
    "another peer's round": (lambda log: changed(log, 4, "train.round", peer="0" * 64), "did not take part"),
    "another round's receipt": (lambda log: changed(log, 4, "train.round", step=8), "another round's"),
    "other tokens": (lambda log: restated(log, 1, "train.commit", Committed, tokens=7), "other losses or tokens"),
    "more steps": (lambda log: restated(log, 4, "train.commit", Committed, steps=3), "cannot have had|gaps"),
    "a replica that was never there": (
        lambda log: restated(log, 0, "train.view", Viewed, names=("alder", "birch", "elm")),
        "did not take part",
    ),
    "a replica that came later": (
        lambda log: restated(log, 0, "train.view", Viewed, since=(0, 0, 3)),
        "did not take part",
    ),
    "a view without sense": (lambda log: restated(log, 0, "train.view", Viewed, slots=(0, 1, 1)), "has no sense"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_log_that_no_honest_lead_writes_is_found_out(kind):
    forge, words = FORGERIES[kind]
    entries = honest().entries
    assert examine(entries).faults == ()
    faults = examine(forge(entries)).faults
    assert any(word in fault for fault in faults for word in words.split("|"))


def test_the_log_counts_steps_and_not_rounds():
    findings = examine(honest().entries)
    assert (findings.steps, findings.faults, findings.lost) == (10, (), ())
