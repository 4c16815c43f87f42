"""The simulated world: what every world promises, and what only this one does."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

import world_conformance as conformance
from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.world.api import LOST, Blank, Launch, Lost
from talkoot.world.links import Link, Network
from talkoot.world.sim.fabric import ENVELOPE_BYTES, FREEZE_NOTICE, KILL_NOTICE
from talkoot.world.sim.loop import Deadlock
from talkoot.world.sim.simulation import SimulatedWorld, Simulation
from world_conformance import PUPPET, Cast, Number

SELF = "test_world_simulated"


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check):
    Simulation(seed=conformance.SEED).run(check)


def simulate(program, **network):
    return Simulation(network=Network(default=Link(**network))).run(program)


def trace(seed: int, **link) -> str:
    """A hash of every delivery of a busy run: time, pair, topic, contents."""
    simulation = Simulation(seed=seed, network=Network(default=Link(**link)))
    hasher = hashlib.blake2b()
    original = SimulatedWorld.resubmit

    class Traced(SimulatedWorld):
        def resubmit(self, held):
            hasher.update(repr((self.now(), self.name, held.sender, held.topic, held.body)).encode())
            original(self, held)

    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b", "c")
        for name in ("a", "b", "c"):
            for other in {"a", "b", "c"} - {name}:
                await cast.introduce(name, to=other)
        for name, to in (("a", "b"), ("b", "c"), ("c", "a")):
            await cast.order(name, "say", peer=cast.peers[to], count=30)
        for name in ("a", "b", "c"):
            await cast.order(name, "listen", count=30, seconds=20)
        world.disturb("b", "kill")
        await cast.losses(2)
        return simulation.events

    SimulatedWorld.resubmit = Traced.resubmit
    try:
        events = simulation.run(main)
    finally:
        SimulatedWorld.resubmit = original
    return f"{hasher.hexdigest()} {events} {simulation.loop.time()!r}"


def test_same_seed_same_history():
    assert trace(1, jitter_s=0.01, loss=0.1) == trace(1, jitter_s=0.01, loss=0.1)
    assert len({trace(seed, jitter_s=0.01) for seed in range(5)}) == 5


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


def test_virtual_time_costs_nothing():
    async def main(world):
        await world.sleep(365 * 86400.0)
        return world.now()

    assert Simulation().run(main) == pytest.approx(365 * 86400.0)


def test_computations_share_one_processor():
    async def main(world):
        started = world.now()
        work = [world.spawn(world.compute(lambda: 1, 10.0), str(index)) for index in range(3)]
        assert [await task for task in work] == [1, 1, 1]
        return world.now() - started

    assert Simulation(peer_flops=5.0).run(main) == pytest.approx(6.0)


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


async def sleeper(world, argument):
    await world.sleep(1)
    await world.send(world.lead, "hello", conformance.Hello("sleeper", world.address))
    try:
        await world.receive("never")
    finally:
        with pytest.raises(asyncio.CancelledError):
            await world.send(world.lead, "ghost")


def test_the_dead_do_not_speak():
    async def main(world):
        cast = Cast(world)
        await cast.enter("sleeper", program=f"{SELF}:sleeper")
        world.disturb("sleeper", "kill")
        await cast.losses(2)
        await cast.silence("ghost")

    Simulation().run(main)


async def cancelled_while_frozen(world, argument):
    await world.send(world.lead, "hello", conformance.Hello(world.name, world.address))
    receiver = world.spawn(world.receive("ping"), "receiver")
    await asyncio.sleep(2)  # the machine's own clock: this task does not stand still
    receiver.cancel()
    await asyncio.gather(receiver, return_exceptions=True)
    await world.send(world.lead, "got", (await world.receive("ping")).read(Number))


def test_cancelling_a_frozen_receiver_loses_nothing():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a", program=f"{SELF}:cancelled_while_frozen")
        world.disturb("a", "stop")
        await cast.ping("a", 5)
        await world.sleep(2.1)
        world.disturb("a", "continue")
        return (await cast.next("got")).read(Number).number

    assert Simulation().run(main) == 5


def test_a_bug_in_a_peer_surfaces_as_itself():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a")
        await cast.command("a", "bug")
        await world.receive("never")

    with pytest.raises(ZeroDivisionError):
        Simulation().run(main)


async def grouped(world, argument):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fails())
        await world.receive("never")


async def fails():
    raise TalkootError("no such file", where="a.txt", why="it is gone", next="bring it")


def test_errors_inside_task_groups_cross_as_well():
    async def main(world):
        world.launch(Launch(name="a", program=f"{SELF}:grouped"))
        message = await world.receive(LOST, "world/failed")
        raise conformance.rebuild_failure(message)

    with pytest.raises(TalkootError, match="no such file"):
        Simulation().run(main)


def test_the_leads_own_error_is_its_own():
    async def main(world):
        await Cast(world).enter("a")
        await fails()

    with pytest.raises(TalkootError, match="no such file"):
        Simulation().run(main)


def test_an_unknown_program_is_refused_at_once():
    async def main(world):
        with pytest.raises(ModuleNotFoundError):
            world.launch(Launch(name="a", program="no.such:program"))
        await Cast(world).enter("a")  # the name is still free

    Simulation().run(main)


def test_a_deadlock_names_who_waits_for_what():
    async def main(world):
        cast = Cast(world)
        await cast.enter("a", "b", "c")
        world.disturb("b", "stop")
        world.disturb("c", "kill")
        await cast.losses(3)
        await world.receive("x", "y")

    with pytest.raises(Deadlock) as caught:
        Simulation().run(main)
    text = str(caught.value)
    assert "lead waits for x, y" in text
    assert "a waits for do, ping, world/lost" in text
    assert "b is frozen" in text
    assert "c waits" not in text


def test_two_hundred_peers():
    names = [f"p{index}" for index in range(200)]

    async def main(world):
        cast = Cast(world)
        await cast.enter(*names)
        assert len(set(cast.peers.values())) == 200
        for index, name in enumerate(names):
            await cast.introduce(names[index - 1], to=name)
            await cast.introduce(name, to=names[index - 1])
        for index, name in enumerate(names):
            await cast.order(name, "say", peer=cast.peers[names[index - 1]], count=3)
        for name in names:
            assert (await cast.order(name, "listen", count=3)).text == "0,1,2"
        for name in names[:100]:
            world.disturb(name, "kill")
        await cast.losses(200)
        gone = {(await cast.next("gone")).sender for _ in range(2)}
        assert gone == {cast.peers["p100"], cast.peers["p199"]}

    Simulation().run(main)
