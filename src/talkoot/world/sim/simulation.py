"""The simulated world: peers are coroutines, links are arithmetic, and a run is a function of its seed.

Tensors and training are real; only time, the network and the processors' speeds are modelled. A message takes its
size over the link's bandwidth (a directed link carries one message at a time), then the link's delay; order per
pair is kept. A computation takes its flops over the peer's speed, one at a time per peer. A killed peer is noticed
by those who talk to it after :data:`KILL_NOTICE` seconds plus the link, a frozen or cut-off one after
:data:`FREEZE_NOTICE` (both as measured on the ZeroMQ engine).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from talkoot.core.codec import encode
from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.world.api import HELLO, Frame, Launch, Message
from talkoot.world.base import PeerWorld, load_program, run_program
from talkoot.world.blobs import Blobs
from talkoot.world.faults import FaultPlan
from talkoot.world.links import Network
from talkoot.world.sim.loop import VirtualLoop

T = TypeVar("T")

KILL_NOTICE = 0.012
FREEZE_NOTICE = 2.5
ENVELOPE_BYTES = 320  # header and signature of the real wire format
PEER_FLOPS = 20e9  # what a peer of speed 1 does per second: one core, as measured by `talkoot doctor`


@dataclass
class _Peer:
    """One simulated peer and what the simulation knows about it."""

    world: SimulatedWorld
    speed: float = 1.0
    faults: FaultPlan = field(default_factory=lambda: FaultPlan(()))
    alive: bool = True
    thawed: asyncio.Event | None = None  # set unless frozen; None = never frozen so far
    busy_until: float = 0.0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    launcher: SimulatedWorld | None = None
    ticket: str = ""


class Simulation:
    """A closed universe of peers in virtual time.

    Args:
        seed: everything that is random here derives from it.
        network: the links.
        folder: where blobs lie; in memory when None.
        peer_flops: floating-point operations per second of a peer of speed 1.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        network: Network | None = None,
        folder: Path | None = None,
        peer_flops: float = PEER_FLOPS,
    ) -> None:
        self.seed, self.network, self.peer_flops = seed, network or Network(), peer_flops
        self.run_id = RunId(f"sim-{seed}")
        self.blobs = Blobs(folder / "blobs" if folder else None)
        self.loop = VirtualLoop(self._explain)
        self.events = 0  # messages delivered, sleeps and computations ended
        self.chance = random.Random(seed)
        self._peers: dict[PeerId, _Peer] = {}
        self._by_name: dict[str, _Peer] = {}
        self._incarnations: dict[str, int] = {}
        self._launches = 0
        self._link_free: dict[tuple[str, str], float] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._talked: set[tuple[PeerId, PeerId]] = set()
        self._cut: set[frozenset[str]] = set()
        self._problem: BaseException | None = None

    def run(self, program: Callable[[SimulatedWorld], Coroutine[Any, Any, T]], name: str = "lead") -> T:
        """Run ``program`` as the lead until it returns; everything it launched ends with it."""
        return self.loop.run_until_complete(self._run(program, name))

    async def _run(self, program: Callable[[SimulatedWorld], Coroutine[Any, Any, T]], name: str) -> T:
        lead = self._add(Launch(name=name, program=""), lead=None)
        task = lead.world.spawn(program(lead.world), name)
        try:
            return await task
        except asyncio.CancelledError:
            if self._problem is not None:
                raise self._problem from None
            raise
        finally:
            for peer in list(self._peers.values()):
                self._end(peer)
            leftovers = [task for peer in self._peers.values() for task in peer.tasks]
            await asyncio.gather(*leftovers, return_exceptions=True)

    def _add(self, launch: Launch, lead: PeerId | None) -> _Peer:
        incarnation = self._incarnations[launch.name] = self._incarnations.get(launch.name, 0) + 1
        world = SimulatedWorld(self, launch.name, Key.derived(self.seed, launch.name, incarnation), lead)
        peer = _Peer(world, launch.speed, FaultPlan(launch.faults))
        self._peers[world.me] = self._by_name[launch.name] = peer
        return peer

    def launch(self, launch: Launch, lead: SimulatedWorld) -> str:
        """Start a peer; see :meth:`talkoot.world.api.Host.launch`."""
        old = self._by_name.get(launch.name)
        if old is not None and old.alive:
            raise ValueError(f"a peer named {launch.name} is already running")
        peer = self._add(launch, lead.me)
        peer.world.meet(lead.me, lead.address)
        self._talked.add((lead.me, peer.world.me))  # the launcher watches what it launched
        program = load_program(launch.program)
        task = peer.world.spawn(run_program(peer.world, program, launch.argument), launch.name)
        task.add_done_callback(lambda task: self._ended(peer, task))
        self._launches += 1
        peer.launcher, peer.ticket = lead, f"launch:{self._launches}"
        return peer.ticket

    def _ended(self, peer: _Peer, task: asyncio.Task[Any]) -> None:
        if not peer.alive:
            return
        problem = None if task.cancelled() else task.exception()
        self._end(peer)
        if problem is None:
            self._tell_losses(peer, KILL_NOTICE, "it left")
            self._tell_launcher(peer, "it left")
            return
        self._problem = problem  # a bug in peer code must surface, not look like a crash
        for other in list(self._peers.values()):
            self._end(other)

    def kill(self, peer: _Peer) -> None:
        """SIGKILL: the peer is gone at once; those who talk to it notice."""
        if peer.alive:
            self._end(peer)
            self._tell_losses(peer, KILL_NOTICE, "its connection closed")
            self._tell_launcher(peer, "it was killed")

    def _tell_launcher(self, peer: _Peer, reason: str) -> None:
        if peer.launcher is not None:
            notice = peer.launcher.notice_loss
            self.loop.call_later(KILL_NOTICE, notice, PeerId(peer.ticket), reason)

    def _end(self, peer: _Peer) -> None:
        peer.alive = False
        for task in list(peer.tasks):
            task.cancel()

    def freeze(self, peer: _Peer) -> None:
        """SIGSTOP: the peer stands still at its next use of the world; others notice by its silence."""
        if peer.thawed is None:
            peer.thawed = asyncio.Event()
        peer.thawed.clear()
        self._tell_losses(peer, FREEZE_NOTICE, "its heartbeat stopped", only_if=lambda: not peer.thawed.is_set())

    def thaw(self, peer: _Peer) -> None:
        """SIGCONT."""
        if peer.thawed is not None:
            peer.thawed.set()

    def partition(self, *groups: Sequence[str]) -> None:
        """Cut every link between peers (names) of different groups; both sides notice after a while."""
        for index, group in enumerate(groups):
            for other in groups[index + 1 :]:
                self._cut |= {frozenset((a, b)) for a in group for b in other}
        for source, target in sorted(self._talked):
            pair = frozenset((self._peers[source].world.name, self._peers[target].world.name))
            if pair in self._cut:
                self._notice(source, target, FREEZE_NOTICE, "no answer across the network")
                self._notice(target, source, FREEZE_NOTICE, "no answer across the network")

    def heal(self) -> None:
        """End all partitions; what was sent meanwhile stays lost."""
        self._cut.clear()

    def _tell_losses(
        self, peer: _Peer, after: float, reason: str, only_if: Callable[[], bool] = lambda: True
    ) -> None:
        me = peer.world.me
        others = {a if b == me else b for a, b in self._talked if me in (a, b)}
        for other in sorted(others):
            self._notice(other, me, after, reason, only_if)

    def _notice(
        self, who: PeerId, about: PeerId, after: float, reason: str, only_if: Callable[[], bool] = lambda: True
    ) -> None:
        observer, subject = self._peers[who], self._peers[about]
        link = self.network.link(subject.world.name, observer.world.name)

        def tell() -> None:
            if observer.alive and only_if():
                observer.world.notice_loss(about, reason)

        self.loop.call_later(after + link.latency_s, tell)

    def transmit(self, source: _Peer, to: PeerId, message: Message) -> None:
        """Put a message on the link; it arrives later, or never."""
        target = self._peers.get(to)
        if target is None or not target.alive:
            return
        names = (source.world.name, target.world.name)
        if self._cut and frozenset(names) in self._cut:
            return
        self._talked.add((source.world.me, to))
        link = self.network.link(*names)
        now = self.loop.time()
        sent = max(now, self._link_free.get(names, 0.0)) + (message.nbytes + ENVELOPE_BYTES) / link.bytes_per_s
        self._link_free[names] = sent
        arrival = max(sent + link.delay(self.chance), self._last_arrival.get(names, 0.0))
        self._last_arrival[names] = arrival
        self.loop.call_at(arrival, self._arrive, target, message)

    def _arrive(self, target: _Peer, message: Message) -> None:
        if target.alive:
            self.events += 1
            target.world.resubmit(message)

    def of(self, name: str) -> _Peer:
        """The latest peer of that name; KeyError when there is none."""
        return self._by_name[name]

    def _explain(self) -> str:
        waiting = [
            f"{peer.world.name} waits for {', '.join(peer.world.mailbox.wanted) or 'nothing'}"
            for peer in self._peers.values()
            if peer.alive
        ]
        return "; ".join(waiting) or "no peer is alive"


class SimulatedWorld(PeerWorld):
    """A simulated peer's :class:`~talkoot.world.api.Host`."""

    kind = "simulated"

    def __init__(self, simulation: Simulation, name: str, key: Key, lead: PeerId | None) -> None:
        super().__init__(
            run=simulation.run_id, name=name, key=key, seed=simulation.seed, blobs=simulation.blobs, lead=lead
        )
        self.address = f"sim:{name}"
        self._simulation = simulation

    @property
    def _self(self) -> _Peer:
        return self._simulation._peers[self.me]

    def resubmit(self, held: Message) -> None:
        if held.sender in self._met or held.topic == HELLO:
            self.mailbox.put(held)
        else:
            self.hold(held, held.nbytes)

    def now(self) -> float:
        return self._simulation.loop.time()

    async def _pass(self) -> None:
        """Where a dead peer ends and a frozen one stands still."""
        peer = self._self
        if not peer.alive:
            raise asyncio.CancelledError
        if peer.thawed is not None and not peer.thawed.is_set():
            await peer.thawed.wait()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._simulation.events += 1
        await self._pass()

    async def send(
        self,
        to: PeerId,
        topic: str,
        body: msgspec.Struct | None = None,
        frames: Sequence[Frame] = (),
        *,
        generation: int = 0,
        step: int = 0,
    ) -> None:
        await self._pass()
        # Copies, because on a real wire the receiver never shares memory with the sender.
        copies = [bytes(frame) if isinstance(frame, memoryview | bytearray) else frame for frame in frames]
        message = Message(self.me, topic, generation, step, b"" if body is None else encode(body), copies)
        self._simulation.transmit(self._self, to, message)

    async def receive(self, *topics: str, timeout: float | None = None) -> Message:
        if timeout is None:
            message = await self.mailbox.take(*topics)
        else:
            async with asyncio.timeout(timeout):
                message = await self.mailbox.take(*topics)
        await self._pass()
        return message

    async def compute(self, work: Callable[[], T], flops: float) -> T:
        await self._pass()
        result = work()
        peer, simulation = self._self, self._simulation
        start = max(simulation.loop.time(), peer.busy_until)
        peer.busy_until = start + flops / (simulation.peer_flops * peer.speed)
        await asyncio.sleep(peer.busy_until - simulation.loop.time())
        simulation.events += 1
        await self._pass()
        return result

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks = self._self.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def reached(self, step: int, phase: str) -> None:
        fault = self._self.faults.at(step, phase)
        if fault is None:
            return
        if fault.kind == "kill":
            self._simulation.kill(self._self)
        elif fault.kind == "stop":
            self._simulation.freeze(self._self)
            if fault.seconds:
                self._simulation.loop.call_later(fault.seconds, self._simulation.thaw, self._self)
        else:
            await self.sleep(fault.seconds)
        await self._pass()

    def launch(self, peer: Launch) -> str:
        return self._simulation.launch(peer, self)

    def disturb(self, name: str, kind: str) -> None:
        simulation = self._simulation
        {"kill": simulation.kill, "stop": simulation.freeze, "continue": simulation.thaw}[kind](simulation.of(name))

    async def dismiss(self) -> None:
        for peer in list(self._simulation._peers.values()):
            if peer is not self._self:
                self._simulation._end(peer)


__all__ = ["FREEZE_NOTICE", "KILL_NOTICE", "SimulatedWorld", "Simulation"]
