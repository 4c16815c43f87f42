"""Fetched corpora on this machine: where they lie, what is written about them, and reading them back.

``CACHE/corpora/NAME/`` has ``documents.jsonl.gz`` and ``manifest.json``; CACHE is ``$TALKOOT_CACHE``, else
``talkoot`` in ``$XDG_CACHE_HOME`` (``~/.cache``). The folder gets its name once it is whole, so whatever has the name
is whole.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.data import readers
from talkoot.data.corpora.corpus import Corpus, corpora
from talkoot.data.corpora.parcel import Parcel

DOCUMENTS, MANIFEST, VERSION = "documents.jsonl.gz", "manifest.json", 1
_STALE_S = 24 * 3600.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``manifest.json`` says.

    Attributes:
        version: of this format.
        name, what, licence, kind: of the corpus.
        parcels: what it was made from; the last one held the text.
        documents: how many, exact duplicates and empty ones dropped.
        text_bytes: of their UTF-8.
        stored_bytes: of ``documents.jsonl.gz``.
        digest: BLAKE2b-256 in hex of the documents' JSON lines.
    """

    version: int = VERSION
    name: str
    what: str
    licence: str
    kind: str
    parcels: tuple[Parcel, ...]
    documents: int
    text_bytes: int
    stored_bytes: int
    digest: str


def folder(name: str) -> Path:
    """Where the corpus of that name lies, or will."""
    chosen = os.environ.get("TALKOOT_CACHE", "")
    system = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    base = Path(chosen) if chosen else Path(system) / "talkoot"
    return base.expanduser() / "corpora" / name


def cached(name: str) -> Manifest | None:
    """The manifest of a corpus that was fetched; None while it was not.

    Raises:
        TalkootError: no corpus has that name, or its folder is damaged.
    """
    corpora[name]
    place = folder(name)
    if not (place / MANIFEST).is_file():
        return None
    try:
        manifest = msgspec.json.decode((place / MANIFEST).read_bytes(), type=Manifest)
        size = (place / DOCUMENTS).stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(place, str(error)) from error
    if manifest.version != VERSION or size != manifest.stored_bytes or manifest.name != name:
        raise _damaged(place, f"{DOCUMENTS} has {size} bytes, the manifest says {manifest.stored_bytes}")
    return manifest


def documents(name: str) -> Iterator[str]:
    """The documents of a corpus that was fetched, in their order."""
    return readers.read_jsonl(folder(name) / DOCUMENTS, "text")


def keep(name: str, make: Callable[[Corpus, Path], tuple[Iterator[str], tuple[Parcel, ...]]]) -> Manifest:
    """Store what ``make`` gets, whole or not at all; where another process was faster, its result counts.

    Args:
        name: of the corpus.
        make: ``(corpus, scratch folder)`` to documents and what they were made from; the folder is removed afterwards.

    Raises:
        TalkootError: the disk is full, or the cache cannot be written; and whatever ``make`` raises.
    """
    place, corpus = folder(name), corpora[name]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=place.parent) as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            manifest = _write(name, corpus, whole, *make(corpus, Path(scratch)))
            with contextlib.suppress(OSError):  # a folder with content has the name already
                whole.rename(place)
    except OSError as error:
        raise TalkootError(
            "the corpus cannot be stored",
            where=str(place),
            why=error.strerror or str(error),
            next="free some space, or name another folder in TALKOOT_CACHE, and run the same command again",
        ) from error
    return cached(name) or manifest


def _sweep(place: Path) -> None:
    """Remove what fetches left that were killed long ago."""
    for old in place.parent.glob(f".{place.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old)


def _write(name: str, corpus: Corpus, whole: Path, texts: Iterator[str], parcels: tuple[Parcel, ...]) -> Manifest:
    seen, size, total = set[bytes](), 0, hashlib.blake2b(digest_size=32)
    with (whole / DOCUMENTS).open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        for text in texts:
            raw = text.encode("utf-8", "replace")
            mark = hashlib.blake2b(raw, digest_size=16).digest()
            if not text.strip() or mark in seen:
                continue
            seen.add(mark)
            size += len(raw)
            line = msgspec.json.encode({"text": raw.decode()}) + b"\n"
            if len(line) >= readers.LONGEST_LINE:
                raise ValueError(f"a document has {len(raw):,} bytes, which is no text that anybody wrote")
            total.update(line)
            packed.write(line)
    if not seen:
        why = f"{parcels[-1].package} {parcels[-1].version} holds no document that its description finds"
        raise TalkootError("the corpus is empty", where=name, why=why, next="use another corpus")
    manifest = Manifest(
        name=name,
        what=corpus.what,
        licence=corpus.licence,
        kind=corpus.kind,
        parcels=parcels,
        documents=len(seen),
        text_bytes=size,
        stored_bytes=(whole / DOCUMENTS).stat().st_size,
        digest=total.hexdigest(),
    )
    (whole / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def _damaged(place: Path, why: str) -> TalkootError:
    next = f"remove the folder, and the corpus is fetched again: rm -r {place}"
    return TalkootError("a fetched corpus is damaged", where=str(place), why=why, next=next)
