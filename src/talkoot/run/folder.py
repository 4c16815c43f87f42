"""A run's folder: its key, its log's name, whether it is continued in its own world, and how a run is asked to stop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from talkoot.core.errors import TalkootError
from talkoot.core.fold import Entry
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.run.records import Start

LOG = "log.sqlite"
SESSION_GAP_S = 1.0  # of virtual time, between the last receipt of a session and the first of the next


class Stoppable(Protocol):
    """A lead that stops in order once this is set."""

    stop_requested: bool


def lead_key(path: Path) -> Key:
    """The key that signs for the lead; a new one where there is none."""
    if not path.exists():
        Key().save(path)
    return Key.load(path)


def next_session_s(log: Log) -> float:
    """Virtual time in seconds at which a rehearsal's next session begins: after all that its log holds. Its peers have
    the same keys as before, so with the same times their receipts would be the old ones over again."""
    count = len(log)
    return next(log.entries(count, count)).receipt.ended + SESSION_GAP_S if count else 0.0


def check_same_world(start: Start | None, world: str, folder: Path) -> None:
    """Refuse to continue a rehearsal for real, or the other way round: their times cannot stand in one log.

    Raises:
        TalkootError: the run belongs to the other world.
    """
    if start is not None and start.world != world:
        raise TalkootError(
            f"this folder holds a {start.world} run",
            where=str(folder),
            why=f"a {world} run was asked for",
            next="name another folder with --out, or continue it in its own world (--sim or not)",
        )


def check_same_key(first: Entry | None, key: Key, path: Path) -> None:
    """Refuse to resume a run without the key that began it: its log would not verify.

    Raises:
        TalkootError: ``path`` holds another key, because it was lost and is new.
    """
    if first is not None and first.receipt.peer != key.peer:
        raise TalkootError(
            "the key of this run is missing",
            where=str(path),
            why=f"the run was begun by {first.receipt.peer[:8]}, this key is {key.peer[:8]}",
            next="restore the file from a backup, or start a new run with --out",
        )


def stop_on_signals(lead: Stoppable) -> None:
    """First Ctrl-C: finish the step, save, leave. Second: leave at once."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def stop() -> None:
        if lead.stop_requested and task is not None:
            task.cancel()
        lead.stop_requested = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


@contextmanager
def stop_on_interrupt(lead: Stoppable) -> Iterator[None]:
    """The same for a simulation, whose event loop knows no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if lead.stop_requested:
            raise KeyboardInterrupt
        lead.stop_requested = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def folder_name(name: str) -> str:
    """A run's name as a folder below ``runs``: a stranger's recipe must not choose where we write."""
    if not name.strip() or name == ".." or Path(name).name != name or "\0" in name:
        raise TalkootError(
            "the recipe cannot be used",
            where="the recipe, key name",
            why=f"{name!r} is not the plain name of a folder",
            next="choose a name without slashes, or name the run's folder with --out",
        )
    return name
