"""Peers negotiate lanes in virtual time, over a network that drops, repeats and delays their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from flow_network import draw
from talkoot.core.codec import decode, encode
from talkoot.core.ids import PeerId
from talkoot.plan.flow import FlowNode, Settings, flows
from talkoot.plan.flow_bounds import FlowProblem, max_flow, min_largest_lane
from talkoot.plan.flow_messages import Card
from talkoot.train.negotiate import collect, negotiate
from talkoot.world.api import HELLO, Launch, Message
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

SELF = "test_negotiate"
SETTINGS = Settings(heat=0.2, decay=0.8, period_s=0.1)


class Part(msgspec.Struct, frozen=True):
    """What a peer is told at its launch; costs are by name."""

    stage: int
    num_stages: int
    slots: int
    costs: dict[str, float]
    loss: float = 0.0
    generations: int = 1


class Here(msgspec.Struct, frozen=True):
    """A peer's greeting."""

    name: str
    address: str


class Contact(msgspec.Struct, frozen=True):
    """Somebody to know; ``known`` = from the start."""

    name: str
    peer: str
    address: str
    stage: int
    known: bool


class Contacts(msgspec.Struct, frozen=True):
    """All of them."""

    contacts: tuple[Contact, ...]


class LossyWorld:
    """A world that loses, repeats and delays what peers tell each other (not what they tell their lead)."""

    def __init__(self, world, loss: float) -> None:
        self._world, self._loss, self._chance = world, loss, world.random("loss")

    def __getattr__(self, name):
        return getattr(self._world, name)

    async def send(self, to, topic, body=None, frames=(), **where) -> None:
        if to == self._world.lead or not self._loss:
            await self._world.send(to, topic, body, frames, **where)
            return
        for _ in range(2 if self._chance.random() < self._loss else 1):
            if self._chance.random() >= self._loss:
                self._world.spawn(self._later(self._chance.random() * 0.1, to, topic, body, where), "late")

    async def _later(self, delay_s: float, to, topic, body, where) -> None:
        await self._world.sleep(delay_s)
        await self._world.send(to, topic, body, **where)


async def router(world, argument: bytes) -> None:
    """Greet, get to know the others, negotiate as often as told."""
    part = decode(argument, Part)
    await world.send(world.lead, HELLO, Here(world.name, world.address))
    contacts = (await world.receive("contacts")).read(Contacts).contacts
    card = Card(world.me, part.stage, world.address)
    node = FlowNode(card, part.num_stages, part.slots, chance=world.random("flow"), settings=SETTINGS)
    names = {contact.peer: contact.name for contact in contacts}
    for contact in contacts:
        if contact.peer != world.me and contact.known:
            world.meet(PeerId(contact.peer), contact.address)
            if contact.stage in (part.stage, node.before, node.after):
                node.met(contact.peer, contact.stage, part.costs.get(contact.name, 0.0), contact.address)
    lossy = LossyWorld(world, part.loss)
    for generation in range(part.generations):
        await negotiate(
            lossy,
            node,
            generation=generation,
            quiet_s=4.0,
            limit_s=600.0,
            reach=lambda card: part.costs.get(names[card.peer], 0.0),
        )
    await world.receive("stop")  # stay, or the others would mourn


async def introduce(world, problem: FlowProblem, parts: dict[str, Part], known: Callable[[str, str], bool]):
    """Launch everybody, and tell everybody about everybody; peer identities by name."""
    for name, part in parts.items():
        world.launch(Launch(name=name, program=f"{SELF}:router", argument=encode(part)))
    greetings: dict[str, Message] = {}
    while len(greetings) < len(parts):
        message = await world.receive(HELLO)
        greetings[message.read(Here).name] = message
    for name in sorted(greetings):
        world.meet(greetings[name].sender, greetings[name].read(Here).address)
    for name in sorted(greetings):
        contacts = tuple(
            Contact(other, hello.sender, hello.read(Here).address, parts[other].stage, known(name, other))
            for other, hello in sorted(greetings.items())
        )
        await world.send(greetings[name].sender, "contacts", Contacts(contacts))
    return {name: message.sender for name, message in greetings.items()}


def parts_of(problem: FlowProblem, **more) -> dict[str, Part]:
    stage = {peer: at for at, peers in enumerate(problem.stages) for peer in peers}
    return {
        peer: Part(at, len(problem.stages), problem.slots[peer], dict(problem.costs[peer]), **more)
        for peer, at in stage.items()
    }


def run(problem: FlowProblem, program, *, seed: int = 0, known=lambda name, other: True, **more):
    """Simulate a negotiation; ``program(world, peers)`` is the lead's part of it."""

    async def main(world):
        return await program(world, await introduce(world, problem, parts_of(problem, **more), known))

    network = Network(default=Link(latency_s=0.05, bytes_per_s=1e8, jitter_s=0.02))
    return Simulation(seed=seed, network=network).run(main)


def lanes_by_name(holdings, peers) -> list[tuple[str, ...]]:
    names = {peer: name for name, peer in peers.items()}
    return sorted(tuple(names[peer] for peer in lane) for lane in flows(holdings))


async def settle(world, peers):
    holdings = await collect(world, set(peers.values()), generation=0, limit_s=500.0)
    return lanes_by_name(holdings, peers), world.now()


def test_two_data_nodes_and_sixteen_relays_reach_the_maximum_flow():
    problem = draw(3, 2, relays=4, stages=4)
    lanes, seconds = run(problem, settle, loss=0.05)
    assert len(lanes) == max_flow(problem)
    assert max(map(problem.cost_of, lanes)) <= 1.2 * min_largest_lane(problem).lower_s
    assert seconds < 500.0  # quiet, not out of time


def test_the_same_seed_negotiates_the_same_lanes():
    problem = draw(4, 2, relays=3, stages=3)
    first, again = (run(problem, settle, seed=7, loss=0.05) for _ in range(2))
    assert first == again
    assert run(problem, settle, seed=8, loss=0.05)[1] != first[1]


def test_peers_are_introduced_by_other_peers():
    problem = draw(5, 2, relays=3, stages=3)
    line = [peer for stage in problem.stages for peer in stage]

    def known(name: str, other: str) -> bool:
        return abs(line.index(name) - line.index(other)) <= 2 or "d0" in (name, other)

    lanes, _ = run(problem, settle, known=known)
    assert len(lanes) == max_flow(problem)


def test_a_relay_killed_in_mid_negotiation_is_routed_around():
    problem = draw(6, 2, relays=4, stages=4)

    async def kill_one(world, peers):
        gathering = asyncio.create_task(settle(world, peers))
        await world.sleep(10.0)
        world.disturb("r2.0", "kill")
        return await gathering

    lanes, _ = run(problem, kill_one, loss=0.05)
    stages = tuple(tuple(peer for peer in stage if peer != "r2.0") for stage in problem.stages)
    rest = FlowProblem(stages=stages, slots=problem.slots, costs=problem.costs)
    assert len(lanes) == max_flow(rest)
    assert all("r2.0" not in lane for lane in lanes)


def test_the_next_generation_goes_on_from_where_the_last_one_ended():
    problem = draw(7, 1, relays=3, stages=3)

    async def twice(world, peers):
        first = await collect(world, set(peers.values()), generation=0, limit_s=500.0)
        before = world.now()
        second = await collect(world, set(peers.values()), generation=1, limit_s=500.0)
        return lanes_by_name(first, peers), lanes_by_name(second, peers), before, world.now() - before

    first, second, whole_s, more_s = run(problem, twice, generations=2)
    assert first == second
    assert more_s < whole_s / 2


def test_without_quiet_the_limit_ends_it():
    problem = draw(8, 1, relays=3, stages=3)

    async def hurried(world, peers):
        holdings = await collect(world, set(peers.values()), generation=0, limit_s=1.0)
        return len(holdings), len(peers)

    held, peers = run(problem, hurried)
    assert held == peers
