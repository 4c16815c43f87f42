"""Measuring a profile: peers time their links and one layer, in either world, over the transport that training uses.

Links are measured one at a time and machines one after another, so that no measurement disturbs another one. A link's
latency is half of the median round trip of a small message: clocks are not compared, so both directions get the mean.
Its bandwidth is what a large frame takes beyond that round trip; frames grow until one takes long enough to tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from statistics import median

import msgspec

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode, encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.model.config import ModelConfig
from talkoot.plan.profile import Node, Profile
from talkoot.run.greeting import Contact, Hello, Introduce
from talkoot.world.api import FAILED, HELLO, LOST, Blank, Frame, Host, Launch, Lost, Message, World
from talkoot.world.base import rebuild_failure
from talkoot.world.links import Link

ROUND_TRIPS = 9
TRANSFERS = 3
FIRST_BYTES, MAX_BYTES = 2**16, 2**24
TRANSFER_S = 0.25  # a frame that takes longer tells enough
LAYERS_TIMED = 9
MAX_SLOTS = 16
PATIENCE_S = 120.0  # for one answer


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What every probed peer is told at its launch.

    Attributes:
        config, context, samples: the model's shape, tokens per sample, and samples per microbatch.
        shared_by: peers that share this machine's memory.
    """

    config: ModelConfig
    context: int
    samples: int
    shared_by: int = 1


class Target(msgspec.Struct, frozen=True):
    """Lead to peer, ``probe/link``: measure the link to this peer."""

    peer: str


class Measured(msgspec.Struct, frozen=True):
    """Peer to lead, ``probe/measured``: a link from here to the target."""

    latency_s: float
    bytes_per_s: float


class Timed(msgspec.Struct, frozen=True):
    """Peer to lead, ``probe/timed``: what this machine can do."""

    layer_sample_s: float
    slots: int


async def probe_peer(world: World, argument: bytes) -> None:
    """A probed peer's program; ``argument`` is an encoded :class:`Probe`."""
    job, lead = decode(argument, Probe), world.lead
    if lead is None:
        raise ValueError("a probed peer needs a lead")
    await world.send(lead, HELLO, Hello(world.name, world.address, OLDEST_PROTOCOL, PROTOCOL))
    while True:
        message = await world.receive("introduce", "probe/ping", "probe/link", "probe/time", "stop", LOST)
        if message.topic == "probe/ping":
            await world.send(message.sender, "probe/pong")
        elif message.topic == LOST or message.sender != lead:
            if message.sender == lead:
                return
        elif message.topic == "introduce":
            for contact in message.read(Introduce).contacts:
                world.meet(PeerId(contact.peer), contact.address)
        elif message.topic == "probe/link":
            await world.send(lead, "probe/measured", await _measure(world, PeerId(message.read(Target).peer)))
        elif message.topic == "probe/time":
            await world.send(lead, "probe/timed", Timed(await _time_layer(world, job), _slots(world, job)))
        else:
            return


async def _measure(world: World, target: PeerId) -> Measured:
    await _round_trip(world, target)  # the first one also waits for the connection
    trip_s = median([await _round_trip(world, target) for _ in range(ROUND_TRIPS)])
    size = FIRST_BYTES
    while await _round_trip(world, target, size) - trip_s < TRANSFER_S and size < MAX_BYTES:
        size *= 2
    transfer_s = median([await _round_trip(world, target, size) for _ in range(TRANSFERS)]) - trip_s
    return Measured(trip_s / 2, size / max(transfer_s, 1e-9))


async def _round_trip(world: World, target: PeerId, size: int = 0) -> float:
    """Seconds until a message with a frame of ``size`` bytes is answered by an empty one."""
    frames: list[Frame] = [Blank(size) if world.kind == "simulated" else bytes(size)] if size else []
    started = world.now()
    await world.send(target, "probe/ping", None, frames)
    try:
        await world.receive("probe/pong", timeout=PATIENCE_S)
    except TimeoutError:
        raise TalkootError(
            "a link cannot be measured",
            where=f"from {world.name}",
            why=f"a message of {size} bytes was not answered within {PATIENCE_S:.0f} s",
            next="look at the network between these machines, then probe again",
            code=Exit.UNREACHABLE,
        ) from None
    return world.now() - started


async def _time_layer(world: World, job: Probe) -> float:
    """Seconds of one decoder layer's forward for one sample, the median of several."""
    config, work = job.config, _nothing
    flops = float(config.layer_flops(job.context)[1] * job.context)
    if world.kind == "real":
        work = _layer_forward(job)
        await world.compute(work, flops)  # the first one warms caches
    taken: list[float] = []
    for _ in range(LAYERS_TIMED):
        started = world.now()
        await world.compute(work, flops)
        taken.append(world.now() - started)
    return median(taken)


def _nothing() -> None:
    """What a simulated peer computes: only its cost counts."""


def _layer_forward(job: Probe) -> Callable[[], None]:
    import torch

    from talkoot.model.stage import Stage

    layer = Stage(job.config, 1, 2, seed=0)
    hidden = torch.zeros(1, job.context, job.config.width)

    def forward() -> None:
        with torch.no_grad():
            layer(hidden)

    return forward


def _slots(world: World, job: Probe) -> int:
    """Microbatches whose activations fit into half of this machine's free memory, 1 to 16; simulated ones have 3.

    A layer keeps about 34 numbers per token and unit of width for its backward, and the attention's weights twice per
    head (Korthikanti et al., 2022, "Reducing Activation Recomputation"), here of 4 bytes; a stage is taken to have
    all layers, which leaves room for weights and optimizer in a real one.
    """
    if world.kind == "simulated":
        return Node(name=world.name).slots
    config, tokens = job.config, job.context
    layer_bytes = 4 * tokens * (34 * config.width + 2 * config.heads * tokens)
    return max(
        1, min(MAX_SLOTS, free_memory_bytes() // (2 * job.shared_by * job.samples * config.layers * layer_bytes))
    )


def free_memory_bytes() -> int:
    """Memory that can be used without swapping; half of all where the system does not tell."""
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


async def probe(host: Host, names: Sequence[str], job: Probe, speeds: Sequence[float] = ()) -> Profile:
    """Start a peer per name and measure every link, in each direction, and every machine.

    Args:
        host: the lead's world; the peers it starts have ended when this returns.
        names: of the peers; at least one.
        job: the model whose layer is timed.
        speeds: of the peers, relative; missing ones are 1.

    Raises:
        TalkootError: a peer failed, was lost, or did not answer in time.
    """
    program = f"{probe_peer.__module__}:{probe_peer.__name__}"
    launched: set[PeerId] = set()
    for index, name in enumerate(names):
        speed = speeds[index] if index < len(speeds) else 1.0
        launched.add(host.identity(host.launch(Launch(name=name, program=program, argument=encode(job), speed=speed))))
    peers: dict[str, Contact] = {}
    while len(peers) < len(names):
        message = await _answer(host, HELLO)
        if message.sender in launched:
            hello = message.read(Hello)
            host.meet(message.sender, hello.address)
            peers[hello.name] = Contact(message.sender, hello.address)
    ids = {name: PeerId(peers[name].peer) for name in names}
    for name, peer in ids.items():
        others = tuple(contact for other, contact in peers.items() if other != name)
        await host.send(peer, "introduce", Introduce(others))
    links: dict[str, Link] = {}
    for one, other in permutations(names, 2):
        await host.send(ids[one], "probe/link", Target(ids[other]))
        found = (await _answer(host, "probe/measured")).read(Measured)
        links[f"{one}->{other}"] = Link(latency_s=found.latency_s, bytes_per_s=found.bytes_per_s)
    nodes: list[Node] = []
    for name, peer in ids.items():
        await host.send(peer, "probe/time")
        timed = (await _answer(host, "probe/timed")).read(Timed)
        nodes.append(Node(name=name, layer_sample_s=timed.layer_sample_s, slots=timed.slots))
    for peer in ids.values():
        await host.send(peer, "stop")
    await host.dismiss()
    return Profile(name="probed", nodes=tuple(nodes), links=links)


async def _answer(host: Host, topic: str) -> Message:
    try:
        message = await host.receive(topic, FAILED, LOST, timeout=20 * PATIENCE_S)
    except TimeoutError:
        raise _unreachable("no peer answered") from None
    if message.topic == FAILED:
        raise rebuild_failure(message)
    if message.topic == LOST:
        raise _unreachable(f"a peer was lost: {message.read(Lost).reason}")
    return message


def _unreachable(why: str) -> TalkootError:
    return TalkootError(
        "the network cannot be measured",
        where="talkoot doctor --probe",
        why=why,
        next="run `talkoot doctor`, then probe again",
        code=Exit.UNREACHABLE,
    )
