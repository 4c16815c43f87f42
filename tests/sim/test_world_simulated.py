"""The simulated world: what every world promises, and what only this one does."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

import world_conformance as conformance
from talkoot.core.errors import TalkootError
from talkoot.world.api import LOST, Launch
from talkoot.world.links import Link, Network
from talkoot.world.sim.loop import Deadlock
from talkoot.world.sim.simulation import SimulatedWorld, Simulation
from world_conformance import Cast, Number

SELF = "test_world_simulated"


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check):
    Simulation(seed=conformance.SEED).run(check)


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
