"""Wanted files out of a package's archive: bounded, regular files only, never outside the folder, nothing executed."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, cast

from talkoot.core.errors import TalkootError
from talkoot.data.corpora.files import LARGEST_FILE

MOST_BYTES, MOST_FILES = 1 << 30, 100_000


class _Writer:
    """Writes members below a folder and keeps count of what they take."""

    def __init__(self, root: Path, wanted: Iterable[str]) -> None:
        self.root, self.wanted = root, tuple(wanted)
        self.files = self.bytes = 0

    def wants(self, name: str) -> bool:
        """Whether the text of the corpus is in this member.

        Raises:
            ValueError: the name points outside.
        """
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise ValueError(f"it holds a file that would lie outside the folder: {name!r}")
        return any(fnmatchcase(str(path), pattern) for pattern in self.wanted)

    def write(self, name: str, size: int, stream: IO[bytes]) -> None:
        """Copy one member.

        Raises:
            ValueError: it, or all together, is too large.
        """
        self.files, self.bytes = self.files + 1, self.bytes + size
        if size > LARGEST_FILE or self.bytes > MOST_BYTES or self.files > MOST_FILES:
            raise ValueError(f"it unpacks to more than {MOST_FILES:,} files, {MOST_BYTES:,} bytes or has a huge file")
        path = self.root / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file)


def unpack(archive: Path, root: Path, wanted: Iterable[str]) -> int:
    """Write the wanted files of ``archive`` (.deb, .whl, .zip or .tar.*) below ``root``; how many there were.

    A deb's content comes from ``dpkg-deb``, which unpacks but never installs.

    Raises:
        TalkootError: the archive is broken, too large, or tries to leave the folder.
    """
    writer = _Writer(root, wanted)
    try:
        if archive.suffix == ".deb":
            _undeb(archive, writer)
        elif archive.suffix in (".whl", ".zip"):
            _unzip(archive, writer)
        else:
            with archive.open("rb") as stream:
                _untar(stream, "r|*", writer)
    except (ValueError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise broken(archive.name, str(error) or type(error).__name__) from error
    return writer.files


def broken(where: str, why: str) -> TalkootError:
    """The error about a package that cannot be used."""
    next = "fetch it again; if that does not help, the package has changed and its corpus needs another description"
    return TalkootError("the package cannot be used", where=where, why=why, next=next)


def _untar(stream: IO[bytes], mode: str, writer: _Writer) -> None:
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for member in tar:
            if member.isreg() and writer.wants(member.name):  # links and devices are never made
                content = tar.extractfile(member)
                if content is not None:
                    writer.write(member.name, member.size, content)


def _unzip(archive: Path, writer: _Writer) -> None:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            if not member.is_dir() and writer.wants(member.filename):
                with packed.open(member) as content:  # reads no more than the size that the directory gives
                    writer.write(member.filename, member.file_size, content)


def _undeb(archive: Path, writer: _Writer) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", str(archive.resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        stream = cast("IO[bytes]", process.stdout)
        try:
            _untar(stream, "r|", writer)
            while stream.read(1 << 16):  # the padding behind the archive: a closed pipe would look like a failure
                pass
            status = process.wait()
        finally:
            process.kill()
    if status:
        raise ValueError("dpkg-deb cannot read it to its end")
