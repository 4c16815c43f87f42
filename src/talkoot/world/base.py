"""What both worlds share: the mailbox, acquaintances, randomness, and the frame around a program."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, HELLO, LOST, Failure, Frame, Lost, Message, Program, World, frame_bytes
from talkoot.world.blobs import Blobs
from talkoot.world.faults import SIGNALLED, Fault, FaultPlan
from talkoot.world.mailbox import Mailbox

MAX_STRANGERS = 256  # messages from peers one has not met yet, kept until the introduction arrives
MAX_STRANGERS_BYTES = 512 * 2**20
MAX_FRAME_BYTES = 2**31 - 1  # what one AES-GMAC call takes
MAX_FRAMES = 64
MAX_TOPIC = 120
MAX_BODY_BYTES = 15 * 2**20


class PeerWorld:
    """The world-independent half of a :class:`~talkoot.world.api.World`."""

    def __init__(
        self,
        *,
        run: RunId,
        name: str,
        key: Key,
        seed: int,
        blobs: Blobs,
        lead: PeerId | None,
    ) -> None:
        self.run, self.name, self.key, self.seed, self.blobs, self.lead = run, name, key, seed, blobs, lead
        self.faults = FaultPlan(())
        self._pauses: list[float] = []  # delays whose time has come
        self._damage_next = False  # the next message with frames
        self.address = ""
        self.mailbox = Mailbox()
        self._met: dict[PeerId, str] = {key.peer: ""}
        self._strangers: list[Any] = []
        self._strangers_bytes = 0

    @property
    def me(self) -> PeerId:
        return self.key.peer

    def random(self, purpose: str) -> random.Random:
        text = repr((self.seed, self.name, purpose)).encode()
        return random.Random(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big"))

    def meet(self, peer: PeerId, address: str) -> None:
        self._met[peer] = address
        waiting, self._strangers, self._strangers_bytes = self._strangers, [], 0
        for held in waiting:
            self.resubmit(held)

    def follow(self, lead: PeerId) -> None:
        self.lead = lead

    def hold(self, held: Any, nbytes: int) -> None:
        """Keep what a peer not met yet sent: its introduction may come. Too much is dropped, and counted."""
        if len(self._strangers) < MAX_STRANGERS and self._strangers_bytes + nbytes <= MAX_STRANGERS_BYTES:
            self._strangers.append(held)
            self._strangers_bytes += nbytes
        else:
            self.mailbox.dropped += 1

    def resubmit(self, held: Any) -> None:
        """Look again at something held."""
        raise NotImplementedError

    def pending(self, *topics: str) -> bool:
        return self.mailbox.holds(*topics)

    def discard(self, stale: Callable[[Message], bool]) -> None:
        self.mailbox.discard(stale)

    # -- faults ----------------------------------------------------------------------------------------------

    def expect(self, faults: Iterable[Fault]) -> None:
        self.faults = FaultPlan(faults)
        for fault in self.faults.timed():
            asyncio.get_running_loop().call_later(fault.at_s or 0.0, self._strike, fault)

    async def reached(self, step: int, phase: str, *, late: bool = False) -> None:
        fault = self.faults.at(step, phase, late=late)
        if fault is not None:
            self._strike(fault)
        while self._pauses:
            await self.sleep(self._pauses.pop())

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def _strike(self, fault: Fault) -> None:
        later = asyncio.get_running_loop().call_later
        if fault.kind in SIGNALLED:
            self._signal(fault)
        elif fault.kind == "delay":
            self._pauses.append(fault.seconds)
        elif fault.kind == "corrupt":
            self._damage_next = True
        elif fault.kind == "partition":
            self._cut_off(frozenset(fault.peers))
            if fault.seconds:
                later(fault.seconds, self._rejoin)
        else:
            self.fill_disk(fault.seconds)

    def fill_disk(self, seconds: float = 0.0) -> None:
        """Let this peer's store take nothing more, for some time or (0) for good."""
        self.blobs.full = True
        if seconds:
            asyncio.get_running_loop().call_later(seconds, setattr, self.blobs, "full", False)

    def _takes_damage(self, frames: Sequence[Frame]) -> bool:
        """Whether a message with these frames is the one to be damaged on its way."""
        damaged, self._damage_next = self._damage_next and bool(frames), self._damage_next and not frames
        return damaged

    def _signal(self, fault: Fault) -> None:
        """Kill or freeze this peer."""
        raise NotImplementedError

    def _cut_off(self, companions: frozenset[str]) -> None:
        """Let nothing pass between this peer and others than those named."""
        raise NotImplementedError

    def _rejoin(self) -> None:
        """End that; what was sent over links that did not break arrives late, as in TCP."""
        raise NotImplementedError

    def notice_loss(self, peer: PeerId, reason: str) -> None:
        """Tell the program that a peer is gone."""
        body = msgspec.msgpack.encode(Lost(reason))
        self.mailbox.put(Message(peer, LOST, 0, 0, body))


def check_outgoing(topic: str, body: bytes, frames: Sequence[Frame]) -> None:
    """Refuse to send what no receiver accepts, in a rehearsal as on the real wire.

    Raises:
        ValueError: naming the topic and the limit.
    """
    sizes = [frame_bytes(frame) for frame in frames]
    if len(sizes) > MAX_FRAMES or any(size > MAX_FRAME_BYTES for size in sizes):
        raise ValueError(f"{topic!r} is too large to send: {len(sizes)} frames of {sizes} bytes")
    if len(topic) > MAX_TOPIC or len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{topic[:MAX_TOPIC]!r} is too large to send: its body has {len(body)} bytes")
    if any(isinstance(frame, memoryview) and not frame.c_contiguous for frame in frames):
        raise ValueError(f"{topic!r} cannot be sent: a frame is one contiguous stretch of memory")
    if topic == LOST:
        raise ValueError(f"{topic!r} is reserved: a world reports losses itself")
    if topic in (HELLO, FAILED) and frames:
        raise ValueError(f"a {topic!r} message carries no frames")


def load_program(path: str) -> Program:
    """The coroutine function that ``package.module:function`` names."""
    module, _, function = path.partition(":")
    return cast(Program, getattr(importlib.import_module(module), function))


async def run_program(world: World, program: Program, argument: bytes) -> None:
    """Run a peer to its end and tell the lead of the error that ended it.

    An error that a user can act on ends the peer quietly. Any other one is a bug in peer code: it is reported
    with ``Exit.BUG``, so that nobody takes it for a crash and starts the peer again, and then raised.
    """
    try:
        await program(world, argument)
    except Exception as problem:  # a supervisor: whatever it is, it must not die unheard with the peer
        cause = _single(problem)
        if world.lead is None:
            raise cause from None
        if not isinstance(cause, TalkootError):
            await _report(world, world.lead, _bug(cause))
            raise
        await _report(world, world.lead, cause)


def _single(problem: Exception) -> Exception:
    """What a task group wrapped around a single error, unwrapped."""
    if not isinstance(problem, ExceptionGroup):
        return problem
    inner = cast("ExceptionGroup[Exception]", problem).exceptions
    return _single(inner[0]) if len(inner) == 1 else cast(Exception, problem)


async def _report(world: World, lead: PeerId, problem: TalkootError) -> None:
    failure = failure_of(problem)
    await world.send(lead, FAILED, msgspec.structs.replace(failure, where=f"peer {world.name}: {failure.where}"))
    await asyncio.sleep(0)  # let the message leave before the peer does


def _bug(problem: Exception) -> TalkootError:
    deepest = traceback.extract_tb(problem.__traceback__)[-1]
    return TalkootError(
        "a peer's program has a bug",
        where=f"{Path(deepest.filename).name}, line {deepest.lineno}",
        why=f"{type(problem).__name__}: {problem}",
        next="report it with the traceback that the peer printed; starting it again will not help",
        code=Exit.BUG,
    )


def failure_of(problem: TalkootError) -> Failure:
    """A user's error as the body of a message; :func:`rebuild_failure` makes it one again."""
    return Failure(problem.what, problem.where, problem.why, problem.next, problem.code)


def rebuild_failure(message: Message) -> TalkootError:
    """The error that a message with a :class:`Failure` carries; a code that is no failure's counts as a bug.

    Raises:
        ValueError: the body is not a :class:`Failure`.
    """
    failure = message.read(Failure)
    known = failure.code in set(Exit) - {Exit.DONE}
    code = Exit(failure.code) if known else Exit.BUG
    return TalkootError(failure.what, where=failure.where, why=failure.why, next=failure.next, code=code)


__all__ = ["PeerWorld", "check_outgoing", "failure_of", "load_program", "rebuild_failure", "run_program"]
