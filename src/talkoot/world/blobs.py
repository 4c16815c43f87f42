"""A content-addressed store: bytes go in, their hash comes out, and nobody can change what a hash names."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, digest

WRITING = ".writing-"  # names of files that are not whole yet


class Blobs:
    """Blobs in a folder, or in memory when ``folder`` is None.

    Attributes:
        full: the disk takes nothing more, or is made to look so by a fault.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.full = folder, False
        self._memory: dict[str, bytes] = {}

    def shared(self) -> Blobs:
        """The same store as another peer sees it, whose disk may be full when others' are not."""
        other = Blobs(self.folder)
        other._memory = self._memory
        return other

    def put(self, data: bytes | memoryview) -> Digest:
        """Store ``data`` durably and return its name; storing it twice costs one copy.

        Raises:
            TalkootError: no space left, or the folder cannot be written; nothing half-written stays behind.
        """
        name = digest(data, "blob")
        if self.folder is None:
            self._check_space(name, data)
            self._memory[name] = bytes(data)
        elif not self.holds_whole(name):
            self.write(self._path(name), data)
        return name

    def write(self, target: Path, data: bytes | memoryview) -> None:
        """Write a file on the same disk; see :func:`write_atomically`."""
        self._check_space(str(target), data)
        write_atomically(target, data)

    def _check_space(self, where: str, data: bytes | memoryview) -> None:
        if self.full:
            raise _unwritable(where, data, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def holds_whole(self, name: str) -> bool:
        """Whether ``name`` is here with the bytes that it names; reads all of it."""
        try:
            self.get(name)
        except (KeyError, ValueError, OSError):  # absent; or damaged, which storing it again repairs
            return False
        return True

    def get(self, name: str) -> bytes:
        """The bytes of ``name``, checked against it.

        Raises:
            KeyError: not in this store.
            ValueError: the stored bytes were changed or cut short.
        """
        if self.folder is None:
            return self._memory[name]
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None
        if digest(data, "blob") != name:
            raise ValueError(f"blob {name[:8]} is damaged: its bytes hash to something else")
        return data

    def size(self, name: str) -> int | None:
        """Bytes of ``name`` as stored, unchecked; None when it is not there."""
        if self.folder is None:
            return len(self._memory[name]) if name in self._memory else None
        try:
            return self._path(name).stat().st_size
        except (KeyError, OSError):
            return None

    def __contains__(self, name: str) -> bool:
        if self.folder is None:
            return name in self._memory
        return _is_name(name) and self._path(name).exists()

    def keep_only(self, names: Iterable[str]) -> None:
        """Delete every other blob; files that are none of ours stay."""
        keep = set(names)
        for name in [name for name in self._memory if name not in keep]:
            del self._memory[name]
        if self.folder is not None and self.folder.exists():
            for path in self.folder.iterdir():
                if path.name not in keep and _is_name(path.name):
                    path.unlink(missing_ok=True)

    def drop(self, names: Iterable[str]) -> None:
        """Delete these blobs, where they are."""
        for name in names:
            self._memory.pop(name, None)
            if self.folder is not None and _is_name(name):
                (self.folder / name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if self.folder is None or not _is_name(name):
            raise KeyError(name)  # a stranger's name must never become a path
        return self.folder / name


def _is_name(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def sweep(folder: Path) -> None:
    """Remove what writers that were killed in the middle left behind; call it while nobody writes."""
    for path in folder.glob(f"{WRITING}*"):
        path.unlink(missing_ok=True)


def write_atomically(target: Path, data: bytes | memoryview) -> None:
    """Write a file so that it exists either whole or not at all, even through a crash or a full disk.

    Raises:
        TalkootError: the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=WRITING, dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = None
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself must survive a power cut
        finally:
            os.close(directory)
    except OSError as problem:
        raise _unwritable(str(target), data, problem) from problem
    finally:
        if temporary is not None:  # whatever went wrong, an interruption included
            Path(temporary).unlink(missing_ok=True)


def _unwritable(where: str, data: bytes | memoryview, problem: OSError) -> TalkootError:
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return TalkootError(
        "the disk is full" if full else "a file cannot be written",
        where=where,
        why=f"{memoryview(data).nbytes} bytes could not be written: {problem.strerror}",
        next="free some space and run the same command again: it resumes"
        if full
        else "name a folder that this user may write to",
    )
