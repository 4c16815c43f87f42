"""The files of an unpacked package as text, in the same order everywhere."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

#: bytes that one file may have once unpacked; more is no text that anybody wrote
LARGEST_FILE = 1 << 27


def files(root: Path, *suffixes: str, without: Iterable[str] = ()) -> Iterator[Path]:
    """Regular files below ``root`` by the order of their paths.

    Args:
        suffixes: one of which the name must end in; none for all.
        without: names of folders to leave out, wherever they stand.
    """
    barred = frozenset(without)
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts):
        inner = path.relative_to(root).parts
        fits = barred.isdisjoint(inner[:-1]) and (not suffixes or path.name.endswith(suffixes))
        if fits and path.is_file() and not path.is_symlink():
            yield path


def read(path: Path) -> str:
    """A file as text with plain line ends: UTF-8, or else Latin-1; ``.gz`` is unpacked; empty if it is binary.

    Raises:
        ValueError: it is larger than anybody's text, or its compression is broken.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} is not whole: {error}") from error
    if len(data) > LARGEST_FILE:
        raise ValueError(f"{path.name} has more than {LARGEST_FILE:,} bytes")
    return decode(data)


def decode(data: bytes) -> str:
    """Bytes as text with plain line ends; empty if they are no text."""
    if b"\0" in data:
        return ""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def whole_files(root: Path, *suffixes: str, without: Iterable[str] = ()) -> Iterator[str]:
    """Every file as one document, as it is."""
    return (read(path) for path in files(root, *suffixes, without=without))
