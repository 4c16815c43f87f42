"""One process runs in a folder at a time, and everybody else can see which."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from talkoot.core.errors import TalkootError

LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it while the block runs.

    Raises:
        TalkootError: it cannot be made or written, or somebody else holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / LOCK).open("a+")
    except OSError as problem:
        raise TalkootError(
            "the run's folder cannot be used",
            where=str(folder),
            why=problem.strerror or str(problem),
            next="name a folder that this user may write to with --out",
        ) from problem
    with opened as file:
        if not _take(file):
            raise TalkootError(
                "this run is already going on",
                where=str(folder),
                why=f"process {holder(folder)} holds it",
                next=f"watch it with `talkoot watch`, stop it in order with `kill -INT {holder(folder)}`, "
                "or name another folder with --out",
            )
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def seized(folder: Path, process: int) -> Iterator[None]:
    """As :func:`locked`, also where ``process`` still holds the folder: it stands still, and this one takes its place.

    A lock cannot be taken from who has it, but its file can be replaced. The other one, should it go on, holds a lock
    that nobody looks at any more.

    Raises:
        TalkootError: as :func:`locked`; any other process holds it.
    """
    path = folder / LOCK
    if holder(folder) == str(process):
        path.rename(path.with_name(f"{LOCK}.of-{process}"))
    with locked(folder):
        path.with_name(f"{LOCK}.of-{process}").unlink(missing_ok=True)
        yield


def _take(file: IO[str], seconds: float = 0.5) -> bool:
    """Lock a file; a moment's patience, because whoever asks :func:`holder` holds it for an instant."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def holder(folder: Path) -> str:
    """Process id of whoever runs in ``folder`` now; empty when nobody does."""
    path = folder / LOCK
    if not path.exists():
        return ""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "unknown"
    return ""
