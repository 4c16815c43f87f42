"""The lead's real world: starts peers as processes, notices their end, and may disturb them.

Processes are forked from one warmed, single-threaded parent (forkserver) that has already imported what peers
need, so that eight peers start in the time of one. A peer dies with its lead.
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
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
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
REAP_SECONDS = 30.0  # a killed process with a GPU or much memory takes its time
LEAVE_SECONDS = 1.0  # for one that is just ending by itself


def _context(preload: tuple[str, ...]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["talkoot.world.real.host", *preload])
    return context


def peer_process(settings: bytes, program: str, argument: bytes, threads: int) -> None:
    """Body of a peer process."""
    gc.freeze()
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
        world = RealWorld(decode(settings, Settings))
        _die_with_parent(loop)
        if task is not None:
            loop.add_signal_handler(signal.SIGTERM, task.cancel)  # the lead dismisses us
        try:
            await run_program(world, load_and_run, argument)
        finally:
            await world.close()

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def _die_with_parent(loop: asyncio.AbstractEventLoop) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        loop.add_reader(parent.sentinel, os._exit, 0)


class RealHost(RealWorld):
    """A :class:`~talkoot.world.api.Host` on this machine.

    Args:
        settings: the lead's own.
        key: its identity; fresh when omitted.
        preload: modules that every peer needs (heavy ones, such as torch).
    """

    def __init__(self, settings: Settings, key: Key | None = None, preload: tuple[str, ...] = ()) -> None:
        super().__init__(settings, key)
        self._settings = settings
        self._context = _context(preload)
        self._processes: dict[str, BaseProcess] = {}
        self._launches = 0
        self._killed: set[str] = set()  # names whose latest process was sent SIGKILL by us
        self._identities: dict[str, PeerId] = {}

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
        )
        process: BaseProcess = self._context.Process(
            target=peer_process,
            args=(encode(settings), peer.program, peer.argument, peer.threads),
            name=f"talkoot-{peer.name}",
            daemon=True,
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

    def disturb(self, name: str, kind: str) -> None:
        if kind == "kill":
            self._killed.add(name)
        os.kill(self.pid(name), SIGNALS[kind])

    async def dismiss(self) -> None:
        loop = asyncio.get_running_loop()
        processes = list(self._processes.values())
        self._processes.clear()
        for process in processes:
            loop.remove_reader(process.sentinel)
            process.terminate()  # its program is cancelled
            _wake(process)  # or a frozen one would not hear that
        deadline = loop.time() + GOODBYE_SECONDS
        waiting = {process.sentinel: process for process in processes}
        while waiting and loop.time() < deadline:
            for sentinel in multiprocessing.connection.wait(list(waiting), timeout=0):
                waiting.pop(sentinel)  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        for process in waiting.values():
            if process.pid is not None:
                process.kill()
        for process in processes:
            process.join()


def _wake(process: BaseProcess) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


__all__ = ["RealHost", "peer_process"]
