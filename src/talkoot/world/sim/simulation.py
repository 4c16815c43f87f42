"""The simulated world: peers are coroutines, links are arithmetic, and a run is a function of its seed.

Tensors and training are real; only time, the network and the processors' speeds are modelled. A message takes
its size over the link's bandwidth (a directed link carries one at a time), then the link's delay; order per
pair is kept. A computation takes its flops over the peer's speed, one at a time per peer. A link opens when a
peer meets another and breaks once: a killed peer is noticed by those who met it after :data:`KILL_NOTICE`
seconds plus the link, a frozen or cut-off one after :data:`FREEZE_NOTICE` (both as measured on the ZeroMQ
engine). What is sent over a broken link is lost; meeting again opens a new one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from talkoot.core.codec import encode
from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, HELLO, Frame, Launch, Message
from talkoot.world.base import PeerWorld, check_outgoing, load_program, run_program
from talkoot.world.blobs import Blobs
from talkoot.world.faults import Fault
from talkoot.world.links import Network
from talkoot.world.sim.fabric import FREEZE_NOTICE, KILL_NOTICE, Body, Fabric
from talkoot.world.sim.identity import simulated_key
from talkoot.world.sim.loop import Deadlock, VirtualLoop

T = TypeVar("T")

PEER_FLOPS = 60e9  # of a peer of speed 1: one 2026 server core in float32, by `talkoot doctor`


class Computed(NamedTuple):
    """One computation: whose, what was called, and from when until when; a killed peer's ends with its death."""

    peer: PeerId
    name: str
    work: Callable[[], Any]
    start: float
    end: float


class LeadKilled(Exception):
    """The lead was killed; whoever could take its place has ended as well by now."""


class Simulation:
    """A closed universe of peers in virtual time.

    Args:
        seed: everything that is random here derives from it.
        network: the links.
        folder: where blobs lie; in memory when None.
        peer_flops: floating-point operations per second of a peer of speed 1.
        diary: take down every computation.
        start_s: virtual time at which it begins; a run's later session begins after all that its log holds.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        network: Network | None = None,
        folder: Path | None = None,
        peer_flops: float = PEER_FLOPS,
        diary: bool = False,
        start_s: float = 0.0,
    ) -> None:
        self.seed, self.network, self.peer_flops = seed, network or Network(), peer_flops
        self.run_id = RunId(f"sim-{seed}")
        self.blobs = Blobs(folder / "blobs" if folder else None)
        self.loop = VirtualLoop(self._explain, start_s)
        self.waits = 0  # sleeps and computations ended
        self._diary: list[Computed] | None = [] if diary else None
        self.fabric = Fabric(self.loop, self.network, seed)
        self._peers = self.fabric.peers
        self._by_name: dict[str, Body] = {}
        self._incarnations: dict[str, int] = {}
        self._launches = 0
        self._identities: dict[str, PeerId] = {}
        self._problem: BaseException | None = None

    @property
    def events(self) -> int:
        """Messages delivered, sleeps and computations ended."""
        return self.waits + self.fabric.delivered

    @property
    def computations(self) -> list[Computed]:
        """Everything that was computed, in the order of its beginning; empty without a diary."""
        return [
            done._replace(end=max(done.start, min(done.end, self._peers[done.peer].killed_at)))
            for done in self._diary or ()
        ]

    def run(self, program: Callable[[SimulatedWorld], Coroutine[Any, Any, T]], name: str = "lead") -> T:
        """Run ``program`` as the lead until it returns; everything it launched ends with it. Works once.

        A lead that fails or is killed does not end the simulation while peers live that are hosts themselves: they
        may go on in its place. What became of the lead is told afterwards.

        Raises:
            LeadKilled: it was killed.
        """
        try:
            return self.loop.run_until_complete(self._run(program, name))
        finally:
            unfinished = asyncio.all_tasks(self.loop)  # after a deadlock or an interruption
            for task in unfinished:
                task.cancel()
            if unfinished:
                with suppress(Deadlock):
                    self.loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
            self.loop.close()

    async def _run(self, program: Callable[[SimulatedWorld], Coroutine[Any, Any, T]], name: str) -> T:
        lead = self._add(Launch(name=name, program=""), lead=None)
        task = lead.spawn(program(lead), name)
        body = self._peers[lead.me]
        try:
            await asyncio.wait([task])
            failed = body.killed_at < math.inf or (not task.cancelled() and task.exception() is not None)
            if failed and body.alive:
                self._end(body)
                self.fabric.gone(body, "it left")
            while failed and (hosts := [peer for peer in self._peers.values() if peer.host and peer.alive]):
                await asyncio.wait([task for peer in hosts for task in peer.tasks])
            if self._problem is not None:
                raise self._problem
            if body.killed_at < math.inf:
                raise LeadKilled
            return await task
        finally:
            for peer in list(self._peers.values()):
                self._end(peer)
            leftovers = [task for peer in self._peers.values() for task in peer.tasks]
            await asyncio.gather(*leftovers, return_exceptions=True)

    def _add(self, launch: Launch, lead: PeerId | None) -> SimulatedWorld:
        incarnation = self._incarnations[launch.name] = self._incarnations.get(launch.name, 0) + 1
        key = simulated_key(self.seed, launch.name, incarnation)
        world = SimulatedWorld(self, launch.name, key, lead)
        world.body.speed = launch.speed
        self._peers[world.me] = self._by_name[launch.name] = world.body
        world.expect(launch.faults)
        return world

    def launch(self, launch: Launch, lead: SimulatedWorld) -> str:
        """Start a peer; see :meth:`talkoot.world.api.Host.launch`."""
        old = self._by_name.get(launch.name)
        if old is not None and old.alive:
            raise ValueError(f"a peer named {launch.name} is already running")
        program = load_program(launch.program)
        world = self._add(launch, lead.me)
        world.meet(lead.me, lead.address)
        peer = self._peers[world.me]
        task = world.spawn(run_program(world, program, launch.argument), launch.name)
        task.add_done_callback(lambda task: self._ended(peer, task))
        self._launches += 1
        peer.launcher, peer.ticket, peer.host = lead, f"launch:{self._launches}", launch.host
        self._identities[peer.ticket] = peer.world.me
        return peer.ticket

    def _ended(self, peer: Body, task: asyncio.Task[Any]) -> None:
        if not peer.alive:
            return
        problem = None if task.cancelled() else task.exception()
        self._end(peer)
        if problem is None:
            self.fabric.gone(peer, "it left")
            return
        self._problem = problem  # a bug in peer code must surface, not look like a crash
        for other in list(self._peers.values()):
            self._end(other)

    def identity(self, ticket: str) -> PeerId:
        """Who was launched with this ticket."""
        return self._identities[ticket]

    def kill(self, peer: Body) -> None:
        """SIGKILL: the peer is gone at once, with what had not left it yet; those who met it notice."""
        if peer.alive:
            peer.killed_at = self.loop.time()
            self._end(peer)
            self.fabric.gone(peer, "its connection closed")

    def _end(self, peer: Body) -> None:
        peer.alive = False
        for task in list(peer.tasks):
            task.cancel()

    def freeze(self, peer: Body) -> None:
        """SIGSTOP: the peer stands still at its next use of the world; others notice by its silence."""
        if not peer.alive or peer.frozen:
            return
        thawed = peer.thawed = asyncio.Event()
        self.fabric.silent(peer, thawed)

    def thaw(self, peer: Body) -> None:
        """SIGCONT."""
        if peer.thawed is not None:
            peer.thawed.set()

    def partition(self, *groups: Sequence[str]) -> None:
        """Cut every link between peers (names) of different groups; both sides notice after a while."""
        self.fabric.partition(*groups)

    def heal(self) -> None:
        """End all partitions. What was sent over links that did not break arrives late, as in TCP."""
        self.fabric.heal()

    def note(self, computation: Computed) -> None:
        """Write a computation that begins into the diary, if there is one."""
        if self._diary is not None:
            self._diary.append(computation)

    def of(self, name: str) -> Body:
        """The latest peer of that name; KeyError when there is none."""
        return self._by_name[name]

    def peer(self, identity: PeerId) -> Body:
        """The peer of that identity, dead or alive."""
        return self._peers[identity]

    async def end_launched_by(self, world: SimulatedWorld) -> None:
        """End all peers that ``world`` started, and wait for them."""
        ending = [peer for peer in self._peers.values() if peer.launcher is world and peer.alive]
        for peer in ending:
            self._end(peer)
        await asyncio.gather(*(task for peer in ending for task in peer.tasks), return_exceptions=True)

    def _explain(self) -> str:
        def doings() -> Iterator[str]:
            for peer in self._peers.values():
                if peer.alive and peer.frozen:
                    yield f"{peer.world.name} is frozen"
                elif peer.alive:
                    yield f"{peer.world.name} waits for {', '.join(peer.world.mailbox.wanted) or 'nothing'}"

        return "; ".join(doings()) or "no peer is alive"


class _Damaged(Message):
    """One that its receiver's check refuses."""

    __slots__ = ()


class SimulatedWorld(PeerWorld):
    """A simulated peer's :class:`~talkoot.world.api.Host`."""

    kind: Literal["simulated", "real"] = "simulated"

    def __init__(self, simulation: Simulation, name: str, key: Key, lead: PeerId | None) -> None:
        run, blobs = simulation.run_id, simulation.blobs.shared()
        super().__init__(run=run, name=name, key=key, seed=simulation.seed, blobs=blobs, lead=lead)
        self.address = f"sim:{name}"
        self.refused: dict[str, int] = {}  # reason -> messages dropped
        self._simulation = simulation
        self.body = Body(self)

    def meet(self, peer: PeerId, address: str) -> None:
        self._simulation.fabric.connect(self.me, peer, address)
        super().meet(peer, address)

    def resubmit(self, held: Message) -> None:
        if isinstance(held, _Damaged):
            self.refused["bad tag"] = self.refused.get("bad tag", 0) + 1
            return
        launched = self._simulation.peer(held.sender).launcher is self
        if held.sender in self._met or held.topic == HELLO or (held.topic == FAILED and launched):
            self.mailbox.put(held)
        else:
            self.hold(held, held.nbytes)

    def now(self) -> float:
        return self._simulation.loop.time()

    async def _pass(self) -> None:
        """Where a dead peer ends and a frozen one stands still."""
        peer = self.body
        if not peer.alive:
            raise asyncio.CancelledError
        while peer.thawed is not None and not peer.thawed.is_set():
            await peer.thawed.wait()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._simulation.waits += 1
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
        encoded = b"" if body is None else encode(body)
        check_outgoing(topic, encoded, frames)
        # Copies, because on a real wire the receiver never shares memory with the sender.
        copies = [bytes(frame) if isinstance(frame, memoryview | bytearray) else frame for frame in frames]
        kind = _Damaged if to != self.me and self._takes_damage(copies) else Message
        message = kind(self.me, topic, generation, step, encoded, copies)
        self._simulation.fabric.transmit(self.body, to, message)

    async def receive(self, *topics: str, timeout: float | None = None) -> Message:
        if timeout is None:
            message = await self.mailbox.take(*topics)
        else:
            async with asyncio.timeout(timeout):
                message = await self.mailbox.take(*topics)
        try:
            await self._pass()
        except asyncio.CancelledError:
            self.mailbox.restore(message)
            raise
        return message

    async def compute(self, work: Callable[[], T], flops: float) -> T:
        await self._pass()
        result = work()
        peer, simulation = self.body, self._simulation
        start = max(simulation.loop.time(), peer.busy_until)
        peer.busy_until = start + flops / (simulation.peer_flops * peer.speed)
        simulation.note(Computed(self.me, self.name, work, start, peer.busy_until))
        await asyncio.sleep(peer.busy_until - simulation.loop.time())
        simulation.waits += 1
        await self._pass()
        return result

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks = self.body.tasks
        tasks[task] = None
        task.add_done_callback(lambda task: tasks.pop(task, None))
        return task

    async def reached(self, step: int, phase: str, *, late: bool = False) -> None:
        await super().reached(step, phase, late=late)
        await self._pass()

    def _signal(self, fault: Fault) -> None:
        if fault.kind == "kill":
            self._simulation.kill(self.body)
            return
        self._simulation.freeze(self.body)
        if fault.seconds:
            self._simulation.loop.call_later(fault.seconds, self._simulation.thaw, self.body)

    def _cut_off(self, companions: frozenset[str]) -> None:
        self._simulation.fabric.isolate(self.body, companions)

    def _rejoin(self) -> None:
        self._simulation.fabric.rejoin(self.body)

    async def warm(self) -> None:
        return

    def launch(self, peer: Launch) -> str:
        return self._simulation.launch(peer, self)

    def identity(self, ticket: str) -> PeerId:
        return self._simulation.identity(ticket)

    def process(self, name: str) -> int:
        return 0

    def adopt(self, name: str, process: int) -> None:
        return  # names are enough here

    def disturb(self, name: str, kind: str) -> None:
        simulation, peer = self._simulation, self._simulation.of(name)
        if not peer.alive:
            raise KeyError(name)
        {"kill": simulation.kill, "stop": simulation.freeze, "continue": simulation.thaw}[kind](peer)

    async def dismiss(self) -> None:
        await self._pass()  # the dead do nothing on their way out
        await self._simulation.end_launched_by(self)

    def abandon(self) -> None:
        for peer in self._simulation.fabric.peers.values():
            if peer.launcher is self:
                peer.launcher = None


__all__ = ["FREEZE_NOTICE", "KILL_NOTICE", "LeadKilled", "SimulatedWorld", "Simulation"]
