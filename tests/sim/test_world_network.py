"""The simulated network: arithmetic, order, loss, partitions, and who hears of whose end when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import world_conformance as conformance
from talkoot.core.ids import PeerId
from talkoot.world.api import LOST, Blank, Launch, Lost
from talkoot.world.links import Link, Network
from talkoot.world.sim.fabric import ENVELOPE_BYTES, FREEZE_NOTICE, KILL_NOTICE
from talkoot.world.sim.simulation import Simulation
from world_conformance import PUPPET, Cast, Number


def simulate(program, **network):
    return Simulation(network=Network(default=Link(**network))).run(program)


def test_bandwidth_latency_and_queueing_are_exact():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        await world.sleep(10)
        start = world.now()
        for size in (1000, 5000):
            await cast.ping("a", frames=[Blank(size)])
        body = len(b"\x81\xa6number\x00")
        sizes = [size + body + ENVELOPE_BYTES for size in (1000, 5000)]
        # There: the second waits for the first; back: each leaves when it arrived, and the link is free by then.
        there = [start + sizes[0] / 1000 + 2, start + sum(sizes) / 1000 + 2]
        for arrival, size in zip(there, sizes, strict=True):
            await cast.next("pong")
            assert world.now() == pytest.approx(arrival + size / 1000 + 2, abs=1e-6)

    simulate(main, latency_s=2.0, bytes_per_s=1000)


def test_directions_and_overrides():
    links = {"lead->a": Link(latency_s=3), "b->lead": Link(latency_s=0.25)}
    network = Network(default=Link(latency_s=1), links=links)
    assert network.link("lead", "a").latency_s == 3
    assert network.link("a", "lead").latency_s == 3
    assert network.link("lead", "b").latency_s == 0.25
    assert network.link("a", "b").latency_s == 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), jitter=st.floats(0, 1), loss=st.floats(0, 0.9))
def test_jitter_and_loss_keep_order_and_lose_nothing(seed, jitter, loss):
    async def main(world):
        cast = Cast(world)
        ticket = world.launch(Launch(name="a", program=PUPPET))
        hello = await world.receive("hello")
        cast.peers["a"], cast.tickets["a"] = hello.sender, PeerId(ticket)
        world.meet(hello.sender, hello.read(conformance.Hello).address)
        for number in range(60):
            await cast.ping("a", number)
        return [(await world.receive("pong")).read(Number).number for _ in range(60)]

    simulation = Simulation(seed=seed, network=Network(default=Link(jitter_s=jitter, loss=loss)))
    assert simulation.run(main) == list(range(60))


def test_loss_costs_round_trips():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        start = world.now()
        for _ in range(200):
            await cast.ping("a")
            await cast.next("pong")
        return world.now() - start

    clean, lossy = simulate(main, latency_s=0.01), simulate(main, latency_s=0.01, loss=0.5)
    # Half of all messages are sent again, half of those once more...: one more round trip each, on average.
    assert 1.5 < (lossy - clean) / (400 * 0.02) * 2 < 2.5


def notices(world):
    """Losses that the lead has been told of so far, as (sender, reason)."""
    found = []

    def keep(message):
        found.append((message.sender, message.read(Lost).reason))
        return True

    world.discard(lambda message: message.topic == LOST and keep(message))
    return found


def test_a_partition_is_noticed_from_both_sides_and_healed_by_meeting_again():
    simulation = Simulation()

    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b")
        await cast.introduce("a", to="b")
        await cast.introduce("b", to="a")
        started = world.now()
        simulation.partition(["a"], ["b"])
        gone = {(await cast.next("gone")).sender for _ in range(2)}
        assert gone == {cast.peers["a"], cast.peers["b"]}
        assert world.now() - started == pytest.approx(FREEZE_NOTICE, abs=0.1)
        await cast.introduce("a", to="b")  # in vain
        assert (await cast.next("gone")).sender == cast.peers["b"]
        simulation.heal()
        await cast.order("a", "say", peer=cast.peers["b"], count=2)
        assert (await cast.order("b", "listen", count=2)).text == ""
        await cast.introduce("a", to="b")
        await cast.introduce("b", to="a")
        await cast.order("a", "say", peer=cast.peers["b"], count=2)
        assert (await cast.order("b", "listen", count=2)).text == "0,1"

    simulation.run(main)


def test_a_short_partition_delays_and_loses_nothing():
    simulation = Simulation()

    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b", "c")
        for cut in (1, 2):  # each shorter than the notice, together longer
            simulation.partition(["lead", "b"], ["a"])
            await cast.ping("a", cut)
            await cast.ping("b", 7)
            assert (await cast.next("pong")).sender == cast.peers["b"]
            await world.sleep(0.8 * FREEZE_NOTICE)
            assert not world.pending("pong")
            simulation.heal()
            assert (await cast.next("pong")).read(Number).number == cut
        await world.sleep(3 * FREEZE_NOTICE)
        assert notices(world) == []

    simulation.run(main)


def test_what_a_killed_peer_had_not_sent_yet_is_lost():
    simulation = Simulation(network=Network(default=Link(bytes_per_s=1000)))

    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        for size in (100, 100, 100_000):
            await cast.ping("a", frames=[Blank(size)])
        await world.sleep(103)
        simulation.partition(["lead"], ["a"])  # what it sends now stalls, and dies with it
        await cast.command("a", "leave")
        world.disturb("a", "kill")
        simulation.heal()
        await cast.losses(2)
        await cast.silence("farewell", seconds=1000)
        return [(await cast.next("pong")).nbytes for _ in range(2)]

    assert simulation.run(main) == [109, 109]


def test_a_message_still_leaving_dies_with_its_sender():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        await cast.command("a", "leave")  # 16 MiB at 1 MB/s
        await world.sleep(5)
        assert notices(world) == []
        message = await cast.next("farewell")
        assert message.nbytes == 2**24
        assert set(await cast.losses(2)) == {cast.peers["a"], cast.tickets["a"]}
        await cast.enter("b")
        await cast.ping("b", frames=[Blank(10**7)])
        await world.sleep(15)  # it is sending the pong
        world.disturb("b", "kill")
        await cast.losses(2)
        await cast.silence("pong", seconds=1000)

    simulate(main, bytes_per_s=1e6)


def test_notices_come_when_they_should():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b")
        start = world.now()
        world.disturb("a", "kill")
        await cast.losses(1)
        assert world.now() - start == pytest.approx(KILL_NOTICE)  # the launcher hears from its own machine
        await cast.losses(1)
        assert world.now() - start == pytest.approx(KILL_NOTICE + 0.5)
        start = world.now()
        world.disturb("b", "stop")
        world.disturb("b", "stop")
        await cast.losses(1)
        assert world.now() - start == pytest.approx(FREEZE_NOTICE + 0.5)
        world.disturb("b", "kill")  # what is frozen can be killed, and is not lost twice
        assert set(await cast.losses(1)) == {cast.tickets["b"]}
        await cast.silence(LOST, seconds=100)

    simulate(main, latency_s=0.5)


def test_freezing_and_thawing_in_turn_is_no_silence():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        for _ in range(4):
            world.disturb("a", "stop")
            await world.sleep(0.8 * FREEZE_NOTICE)
            world.disturb("a", "continue")
            world.disturb("a", "continue")
        await cast.ping("a", 1)
        await cast.next("pong")
        await world.sleep(10)
        assert notices(world) == []

    Simulation().run(main)


def test_whoever_meets_a_frozen_peer_hears_of_it():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b")
        world.disturb("a", "stop")
        await cast.introduce("a", to="b")
        assert (await cast.next("gone")).read(conformance.Done).text == cast.peers["a"]

    Simulation().run(main)
