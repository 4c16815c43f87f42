"""The lead's real world: starts peers as processes, notices their end, and may disturb them.

Processes are forked from one warmed, single-threaded parent (forkserver) that has already imported what peers
need, so that eight peers start in the time of one. A peer dies with its lead, or after its ``orphan_s``, unless it
follows another one by then.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import msgspec

from talkoot.core.codec import decode, encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.keys import Key
from talkoot.world.api import Launch, World
from talkoot.world.base import load_program, run_program
from talkoot.world.real.peer import RealWorld, Settings

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
GOODBYE_SECONDS = 5.0
_children = cast("set[BaseProcess]", vars(sys.modules[BaseProcess.__module__])["_children"])
REAP_SECONDS = 30.0  # a killed process with a GPU or much memory takes its time
LEAVE_SECONDS = 1.0  # for one that is just ending by itself


def _context(preload: tuple[str, ...]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["talkoot.world.real.host", *preload])
    return context


def peer_process(
    settings: bytes, program: str, argument: bytes, threads: int, preload: tuple[str, ...] | None = None
) -> None:
    """Body of a peer process; one with ``preload`` starts peers itself."""
    gc.freeze()
    _show_name(decode(settings, Settings).name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the lead's to handle; it dismisses its peers
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for a torch that is imported from here on

    async def load_and_run(world: World, argument: bytes) -> None:
        await cast(RealWorld, world).ready()
        coroutine = load_program(program)
        if torch := cast(Any, sys.modules.get("torch")):  # perhaps imported before the fork
            torch.set_num_threads(threads)
        await coroutine(world, argument)

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        own = decode(settings, Settings)
        world = RealWorld(own) if preload is None else RealHost(own, preload=preload)
        _die_with_parent(loop, world, own.orphan_s)
        if task is not None:
            loop.add_signal_handler(signal.SIGTERM, task.cancel)  # the lead dismisses us
        try:
            await run_program(world, load_and_run, argument)
        finally:
            await world.close()

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def _show_name(name: str) -> None:
    """Let the system's tools tell peers apart, where it can be done without a library."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"talkoot-{name}"[:15])


def _die_with_parent(loop: asyncio.AbstractEventLoop, world: World, orphan_s: float) -> None:
    parent, lead = multiprocessing.parent_process(), world.lead

    def end() -> None:
        if world.lead == lead:
            os._exit(0)

    def orphaned(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        loop.call_later(orphan_s, end)

    if parent is not None:
        loop.add_reader(parent.sentinel, orphaned, parent.sentinel)


def _nothing() -> None:
    return


class RealHost(RealWorld):
    """A :class:`~talkoot.world.api.Host` on this machine.

    Args:
        settings: the lead's own.
        key: its identity; fresh when omitted.
        preload: modules that every peer needs (heavy ones, such as torch).
    """

    def __init__(self, settings: Settings, key: Key | None = None, preload: tuple[str, ...] = ()) -> None:
        super().__init__(settings, key)
        self._settings, self._preload = settings, preload
        if multiprocessing.parent_process() is not None:
            # What this process starts must not live in its parent's folder for sockets: it goes with the parent.
            cast(Any, multiprocessing.current_process())._config.pop("tempdir", None)
        self._context = _context(preload)
        self._processes: dict[str, BaseProcess] = {}
        self._launches = 0
        self._killed: set[str] = set()  # names whose latest process was sent SIGKILL by us
        self._identities: dict[str, PeerId] = {}
        self._adopted: dict[str, tuple[int, int]] = {}  # by name, process id and a descriptor that means that process

    async def warm(self) -> None:
        await asyncio.to_thread(self._start_nothing)

    def _start_nothing(self) -> None:
        """The first process of a forkserver has to wait for its imports."""
        process = self._context.Process(target=_nothing, daemon=True)
        process.start()
        process.join()

    def launch(self, peer: Launch) -> str:
        old = self._processes.get(peer.name)
        if old is not None:
            killed = peer.name in self._killed
            old.join(REAP_SECONDS if killed else LEAVE_SECONDS)
            if old.is_alive() and not killed:
                raise ValueError(f"a peer named {peer.name} is already running")
            if old.is_alive():
                raise TalkootError(
                    f"the peer named {peer.name} was killed and is still there",
                    where=f"process {old.pid}",
                    why=f"it did not end within {REAP_SECONDS:.0f} s",
                    next="look at that process: it may be stuck in the kernel, on a device or a disk",
                    code=Exit.UNREACHABLE,
                )
        self._release(peer.name)
        secret = os.urandom(32)  # goes to the process through a pipe, and nowhere else
        identity = Key(secret).peer
        self._launched.add(identity)
        settings = msgspec.structs.replace(
            self._settings,
            secret=secret,
            name=peer.name,
            port=0,
            speed=peer.speed,
            faults=peer.faults,
            lead=self.me,
            lead_address=self.address,
            orphan_s=peer.orphan_s,
        )
        process: BaseProcess = self._context.Process(
            target=peer_process,
            args=(encode(settings), peer.program, peer.argument, peer.threads, self._preload if peer.host else None),
            name=f"talkoot-{peer.name}",
            daemon=not peer.host,  # daemons may not have children
        )
        process.start()
        self._processes[peer.name] = process
        self._killed.discard(peer.name)
        self._launches += 1
        ticket = f"launch:{self._launches}"
        self._identities[ticket] = identity
        asyncio.get_running_loop().add_reader(process.sentinel, self._exited, peer.name, ticket, process)
        return ticket

    def identity(self, ticket: str) -> PeerId:
        return self._identities[ticket]

    def _exited(self, name: str, ticket: str, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        if self._processes.get(name) is process:
            del self._processes[name]
        reason = f"process {process.pid} ended with code {process.exitcode}"
        self.spawn(self._report_exit(PeerId(ticket), reason), "exit")

    async def _report_exit(self, ticket: PeerId, reason: str) -> None:
        await self._endpoint.drained()
        self.notice_loss(ticket, reason)

    def pid(self, name: str) -> int:
        """Process id of a running peer; KeyError when there is none."""
        pid = self._processes[name].pid
        if pid is None:
            raise KeyError(name)
        return pid

    def process(self, name: str) -> int:
        if name in self._adopted:
            return self._adopted[name][0]
        return self.pid(name) if name in self._processes else 0

    def adopt(self, name: str, process: int) -> None:
        if sys.platform == "linux" and process != self.process(name):
            self._release(name)
            with suppress(ProcessLookupError):
                self._adopted[name] = (process, os.pidfd_open(process))

    def _release(self, name: str) -> None:
        if name in self._adopted:
            os.close(self._adopted.pop(name)[1])

    def disturb(self, name: str, kind: str) -> None:
        if name in self._adopted:
            _signal(self._adopted[name][1], SIGNALS[kind])
            return
        if kind == "kill":
            self._killed.add(name)
        os.kill(self.pid(name), SIGNALS[kind])

    def abandon(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes.values():
            loop.remove_reader(process.sentinel)
            _children.discard(process)  # or the interpreter would end or await it at its own exit
        self._processes.clear()
        for name in list(self._adopted):
            self._release(name)

    async def dismiss(self) -> None:
        loop = asyncio.get_running_loop()
        processes = list(self._processes.values())
        self._processes.clear()
        for process in processes:
            loop.remove_reader(process.sentinel)
            process.terminate()  # its program is cancelled
            _wake(process)  # or a frozen one would not hear that
        adopted = [descriptor for _, descriptor in self._adopted.values()]
        for descriptor in adopted:
            for number in (signal.SIGTERM, signal.SIGCONT):
                _signal(descriptor, number)
        deadline = loop.time() + GOODBYE_SECONDS
        waiting = {process.sentinel: process.kill for process in processes}
        waiting |= {descriptor: partial(_signal, descriptor, signal.SIGKILL) for descriptor in adopted}
        while waiting and loop.time() < deadline:
            for sentinel in multiprocessing.connection.wait(list(waiting), timeout=0):
                waiting.pop(sentinel)  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        for kill in waiting.values():
            kill()
        for process in processes:
            process.join()
        for name in list(self._adopted):
            self._release(name)


def _signal(descriptor: int, number: signal.Signals) -> None:
    """Signal the very process that a descriptor means; nothing happens when it is gone."""
    if sys.platform == "linux":
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)


def _wake(process: BaseProcess) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


__all__ = ["RealHost", "peer_process"]
