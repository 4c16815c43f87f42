"""The timetable of a link, and the half of a shaped link that stamps and holds back, in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.keys import Key
from talkoot.world.api import Launch, Message
from talkoot.world.links import ENVELOPE_BYTES, Link, LinkClock, Network
from talkoot.world.mailbox import MESSAGE_BYTES
from talkoot.world.real.peer import Settings
from talkoot.world.real.shape import DUE, Shaper
from talkoot.world.real.wire import Address, read_address, write_address
from talkoot.world.sim.loop import VirtualLoop
from talkoot.world.sim.simulation import Simulation

SENDER, RECEIVER = PeerId("5e" * 32), PeerId("4e" * 32)
NETWORK = Network(links={"a->b": Link(latency_s=0.05, bytes_per_s=1e7), "b->a": Link(latency_s=0.2, bytes_per_s=1e6)})


def in_virtual_time(work):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


class Pair:
    """Two shapers, a's and b's, and what b's delivered when."""

    def __init__(self, network=NETWORK, **limits):
        self.loop = asyncio.get_running_loop()
        self.got: list[tuple[float, str, bytes]] = []
        self.a = Shaper(network, "a", random.Random(1), lambda message: None)
        self.b = Shaper(network, "b", random.Random(2), self.deliver, **limits)
        self.a.introduce(RECEIVER, "b")

    def deliver(self, message):
        self.got.append((self.loop.time(), message.topic, message.body))

    def send(self, topic, nbytes=0, body=b""):
        stamped = self.a.stamp(RECEIVER, body, len(body) + nbytes)
        return Message(SENDER, topic, 0, 0, stamped, [bytes(nbytes)])


# -- the timetable -----------------------------------------------------------------------------------------------------


def test_a_link_carries_one_message_at_a_time():
    clock, link, chance = LinkClock(), Link(latency_s=0.5, bytes_per_s=1000), random.Random(0)
    payload = 1000 - ENVELOPE_BYTES
    assert clock.book(link, 10.0, payload, chance) == (11.0, 11.5)
    assert clock.book(link, 10.2, payload, chance) == (12.0, 12.5)  # it waited for the first
    assert clock.book(link, 20.0, payload, chance) == (21.0, 21.5)  # the link had become free


@settings(max_examples=50, deadline=None)
@given(
    sends=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**7)), min_size=1, max_size=20),
    jitter=st.floats(0, 1),
    loss=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
def test_arrivals_keep_the_order_and_are_never_early(sends, jitter, loss, seed):
    link, clock, chance = Link(latency_s=0.03, jitter_s=jitter, loss=loss), LinkClock(), random.Random(seed)
    now = last = 0.0
    for pause, nbytes in sends:
        now += pause
        sent, arrival = clock.book(link, now, nbytes, chance)
        assert sent >= now + nbytes / link.bytes_per_s
        assert arrival >= sent + link.latency_s
        assert arrival > last
        last = arrival
        assert clock.after_last(0.0) > arrival
        assert clock.after_last(arrival + 1) == arrival + 1


# -- stamping and holding back -----------------------------------------------------------------------------------------


def test_shaped_messages_arrive_when_the_simulated_network_delivers_them():
    sizes = [100_000, 0, 3, 500_000, 7]

    async def shaped():
        pair = Pair()
        for number, size in enumerate(sizes):
            pair.b.hold(pair.send(str(number), size))
            await asyncio.sleep(0.004)
        await asyncio.sleep(1)
        return [when for when, _, _ in pair.got]

    assert in_virtual_time(shaped) == simulated_arrivals(sizes, 0.004)


def simulated_arrivals(sizes, pause):
    """When messages from a to b arrive in the simulation, sent one every ``pause`` seconds from 0 on."""
    arrivals: list[float] = []
    simulation = Simulation(network=NETWORK)

    async def lead(world):
        other = simulation._add(Launch(name="b", program=""), lead=None)
        world.meet(other.me, other.address)
        other.meet(world.me, world.address)

        async def listen():
            for _ in sizes:
                await other.receive("said")
                arrivals.append(other.now())

        listener = other.spawn(listen(), "listener")
        for size in sizes:
            await world.send(other.me, "said", None, [bytes(size)])
            await world.sleep(pause)
        await listener

    simulation.run(lead, name="a")
    return arrivals


def test_messages_are_delivered_whole_in_order_and_without_their_stamp():
    async def main():
        pair = Pair(Network(default=Link(latency_s=0.01, jitter_s=1.0)))
        for number in range(30):
            pair.b.hold(pair.send("said", number, b"%d" % number))
        assert pair.got == []
        await asyncio.sleep(1.1)
        assert [body for _, _, body in pair.got] == [b"%d" % number for number in range(30)]

    in_virtual_time(main)


def test_a_late_message_does_not_overtake_those_that_are_due_too():
    async def main():
        pair = Pair()
        first, second = pair.send("first"), pair.send("second")
        pair.b.hold(first)
        pair.loop._jump.now = 5.0  # this peer computed in line until now, and no timer could run
        pair.b.hold(second)
        await asyncio.sleep(1)
        assert [(when, topic) for when, topic, _ in pair.got] == [(5.0, "first"), (5.0, "second")]

    in_virtual_time(main)


def test_an_empty_body_is_not_held_back():
    async def main():
        pair = Pair()
        pair.b.hold(Message(SENDER, "world/heard", 0, 0, b""))
        assert [topic for _, topic, _ in pair.got] == ["world/heard"]

    in_virtual_time(main)


def test_what_a_lost_peer_had_on_its_way_is_dropped_and_nobody_elses():
    async def main():
        pair = Pair()
        pair.b.hold(pair.send("lost"))
        other = pair.send("kept")
        other.sender = RECEIVER
        pair.b.hold(other)
        pair.b.forget(SENDER)
        pair.b.forget(PeerId("launch:1"))
        await asyncio.sleep(1)
        assert [topic for _, topic, _ in pair.got] == ["kept"]

    in_virtual_time(main)


def test_memory_is_bounded_and_given_back():
    async def main():
        pair = Pair(limit=2 * (1000 + DUE.size + MESSAGE_BYTES))
        for _ in range(3):
            for number in range(3):
                pair.b.hold(pair.send(str(number), 1000))
            await asyncio.sleep(1)
            pair.b.hold(pair.send("forgotten", 1000))
            pair.b.forget(SENDER)
        assert [topic for _, topic, _ in pair.got] == ["0", "1"] * 3
        assert pair.b.dropped == 3

    in_virtual_time(main)


@pytest.mark.parametrize("body", [b"1234567", struct.pack(">d", math.nan), struct.pack(">d", math.inf)])
def test_a_stamp_that_makes_no_sense_drops_the_message(body):
    async def main():
        pair = Pair()
        pair.b.hold(Message(SENDER, "said", 0, 0, body))
        await asyncio.sleep(1)
        assert (pair.got, pair.b.dropped) == ([], 1)

    in_virtual_time(main)


def test_the_backlog_is_the_time_until_the_last_arrival():
    async def main():
        pair = Pair()
        assert pair.a.backlog_s() == 0
        pair.send("said", 10**6 - ENVELOPE_BYTES)
        assert pair.a.backlog_s() == pytest.approx(0.15)
        await asyncio.sleep(0.1)
        assert pair.a.backlog_s() == pytest.approx(0.05)
        await asyncio.sleep(0.1)
        assert pair.a.backlog_s() == 0

    in_virtual_time(main)


# -- settings and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alder", "lead", "my peer#1", "ä->b", "%23", ""])
@pytest.mark.parametrize("curve", ["", "#" * 40])
def test_an_address_may_carry_the_peers_name(name, curve):
    key = Key()
    address = Address("tcp://127.0.0.1:99", curve, "ab" * 32, name)
    text = write_address(key, address)
    assert read_address(key.peer, text) == address
    if name:
        with pytest.raises(ValueError):
            read_address(key.peer, text.replace(f"{'ab' * 32}#", f"{'ab' * 32}#x"))


def test_settings_cross_to_the_peers_whole():
    before = Settings(run="r", name="lead", network=NETWORK, emulate_flops=1e9)
    assert decode(encode(before), Settings) == before
    assert decode(encode(Settings(run="r", name="lead")), Settings).network is None


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(TalkootError, match="one machine"):
        Settings(run="r", name="lead", host="0.0.0.0", network=NETWORK)
    for flops in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(TalkootError, match="processor"):
            Settings(run="r", name="lead", emulate_flops=flops)
