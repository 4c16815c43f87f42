"""What a peer sees of the outside: a clock, a network, a blob store, randomness and `spawn`.

Peer code is an ordinary coroutine ``async def program(world, argument: bytes)``. It takes time, messages and
chance from its :class:`World` only, which is why the same code runs in virtual time and for real. Waiting is
asyncio's: tasks, cancellation and ``asyncio.timeout`` work in both worlds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from talkoot.core.codec import decode
from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.world.blobs import Blobs
from talkoot.world.faults import Fault

T = TypeVar("T")

LOST = "world/lost"  # a peer this one talks to, or a launch (sender ``launch:TICKET``), is gone; body: Lost
FAILED = "world/failed"  # a peer reports its own fatal error; body: Failure
HELLO = "hello"  # the only topic that strangers may send


class Blank:
    """A frame without content that still takes its time on a simulated link; real worlds refuse it."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


Frame: TypeAlias = "bytes | bytearray | memoryview | Blank"


def frame_bytes(frame: Frame) -> int:
    """Size of a frame in bytes."""
    return len(frame) if isinstance(frame, bytes | bytearray) else frame.nbytes


class Message:
    """A delivered message.

    Attributes:
        sender: who signed it (in a simulation: who sent it).
        topic: what it is about; receivers select by it.
        generation, step: the part of the run it belongs to.
        body: MessagePack of the topic's own struct; :meth:`read` decodes it.
        frames: raw buffers beside the body (tensors).
    """

    __slots__ = ("arrival", "body", "frames", "generation", "sender", "step", "topic")

    def __init__(
        self,
        sender: PeerId,
        topic: str,
        generation: int,
        step: int,
        body: bytes,
        frames: Sequence[Frame] = (),
    ) -> None:
        self.sender, self.topic, self.generation, self.step = sender, topic, generation, step
        self.body, self.frames = body, frames
        self.arrival = 0  # order of arrival, set by the mailbox

    def read(self, kind: type[T]) -> T:
        """The body as ``kind``; ValueError when it is not one."""
        return decode(self.body, kind)

    @property
    def nbytes(self) -> int:
        """Payload size in bytes."""
        return len(self.body) + sum(map(frame_bytes, self.frames))

    def __repr__(self) -> str:
        return f"Message({self.topic!r} from {self.sender[:8]}, generation {self.generation}, step {self.step})"


class Lost(msgspec.Struct, frozen=True):
    """Body of a :data:`LOST` notice."""

    reason: str


class Failure(msgspec.Struct, frozen=True):
    """Body of a :data:`FAILED` notice: a user-facing error that crossed the network."""

    what: str
    where: str
    why: str
    next: str
    code: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a peer.

    Attributes:
        name: the peer's human name; unique among living peers.
        program: ``package.module:function`` of the coroutine to run.
        argument: bytes for the program.
        speed: compute speed relative to an unhindered peer (0.5 = takes twice as long).
        faults: what is to go wrong with it, and when.
        threads: compute threads.
        host: its world is a :class:`Host`: it may start peers itself.
        orphan_s: how long it outlives its lead, in the hope of another one that it can :meth:`World.follow`.
    """

    name: str
    program: str
    argument: bytes = b""
    speed: float = 1.0
    faults: tuple[Fault, ...] = ()
    threads: int = 1
    host: bool = False
    orphan_s: float = 0.0


class World(Protocol):
    """A peer's view of its surroundings; see the module's text."""

    kind: Literal["simulated", "real"]
    run: RunId
    name: str
    key: Key
    blobs: Blobs
    address: str  # how others reach this peer
    lead: PeerId | None  # the peer that launched this one, or the one that it follows by now

    @property
    def me(self) -> PeerId:
        """This peer's identity."""
        ...

    @property
    def refused(self) -> Mapping[str, int]:
        """How many incoming messages were dropped because something about them was wrong, by reason."""
        ...

    def now(self) -> float:
        """Seconds: virtual time from 0, or Unix time."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def meet(self, peer: PeerId, address: str) -> None:
        """Learn where a peer lives; messages from peers one has not met wait until then.

        From here on its end or silence is reported once, by a :data:`LOST` notice. ValueError when the
        address is malformed or not the peer's own.
        """
        ...

    def follow(self, lead: PeerId) -> None:
        """Belong to another lead from now on (or be one's own): the end of the first one means nothing any more."""
        ...

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
        """Queue a message; delivery is in order per pair of peers, and lost with a lost peer.

        Goes nowhere, without an error, when ``to`` was not met or its link broke; meeting it again opens a
        new link. The sender may change its buffers at once: writable ones are copied, read-only ones are not.

        Raises:
            ValueError: more or larger parts than a receiver accepts, frames beside a :data:`HELLO`, or the
                topic :data:`LOST`, which only a world itself reports.
        """
        ...

    async def receive(self, *topics: str, timeout: float | None = None) -> Message:
        """The next message on any of ``topics``; raises TimeoutError after ``timeout`` seconds."""
        ...

    def pending(self, *topics: str) -> bool:
        """Whether a message on any of ``topics`` waits already."""
        ...

    def discard(self, stale: Callable[[Message], bool]) -> None:
        """Drop waiting messages for which ``stale`` holds."""
        ...

    async def compute(self, work: Callable[[], T], flops: float) -> T:
        """Run ``work`` on this peer's processor; ``flops`` is what it costs in virtual time."""
        ...

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine beside the caller; it dies with the peer."""
        ...

    def random(self, purpose: str) -> random.Random:
        """A generator seeded by (run, peer name, purpose)."""
        ...

    def expect(self, faults: Iterable[Fault]) -> None:
        """Let these faults strike this peer from here on, times counted from now; a launched one's are known."""
        ...

    async def reached(self, step: int, phase: str, *, late: bool = False) -> None:
        """Mark a named point of the work; planned faults strike here, with ``late`` those of earlier steps, too."""
        ...


class Host(World, Protocol):
    """The world of a peer that may start and disturb others: the lead."""

    async def warm(self) -> None:
        """Prepare for the first :meth:`launch`, which else takes as long as this: seconds, spent beside the caller."""
        ...

    def launch(self, peer: Launch) -> str:
        """Start a peer; it introduces itself with a :data:`HELLO`.

        Returns a ticket ``launch:N``. When the peer ends, this world also gets a :data:`LOST` notice with the
        ticket as its sender: a peer that dies before its hello has no other name.
        """
        ...

    def identity(self, ticket: str) -> PeerId:
        """The identity that the launch with this ticket gave its peer; nobody else may claim the name."""
        ...

    def process(self, name: str) -> int:
        """Process id of the named peer, for another host on this machine; 0 = there is none."""
        ...

    def adopt(self, name: str, process: int) -> None:
        """Take charge of a peer that another host on this machine started: :meth:`disturb` and :meth:`dismiss` reach
        it from here on (on Linux; elsewhere it has to end by itself)."""
        ...

    def disturb(self, name: str, kind: str) -> None:
        """Inject a fault now: ``kill``, ``stop`` or ``continue`` the named peer."""
        ...

    async def dismiss(self) -> None:
        """End every peer that is still running and wait for it."""
        ...

    def abandon(self) -> None:
        """Leave every peer to whoever leads it now: this world's own end will not touch them."""
        ...


Program: TypeAlias = Callable[[Any, bytes], Awaitable[None]]
