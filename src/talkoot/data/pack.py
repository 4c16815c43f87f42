"""Text to tokens on disk: one flat, memory-mapped file of ids and a small JSON file that says what they are.

``tokens.bin`` is little-endian uint16 (vocabulary up to 65,536) or uint32: documents one after another,
each followed by the end-of-text id. ``tokens.json`` beside it has count, dtype, digests of the bytes, of
the tokenizer and of the source, the source's name and the format's version. It is written last and removed
first, so that where it exists the pair is whole. For a file of tokens from elsewhere, ``NAME.bin`` with
``NAME.json`` works too; it must give ``dtype`` and ``tokenizer``, the rest is optional.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from talkoot.core.errors import TalkootError, nearest
from talkoot.data.source import Documents, read_documents

#: raised by one when the same text and tokenizer would give other bytes
VERSION = 1
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_BATCH_CHARS = 1 << 20  # documents tokenised at a time: enough for a tokenizer's threads, little memory
_BATCH_DOCUMENTS = 1024


class Tokenizer(Protocol):
    """What packing needs of a tokenizer; the id ``eos_id`` ends every document."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Text to ids, without special tokens."""
        ...

    def digest(self) -> str:
        """A string that changes when any text could get other ids."""
        ...


@runtime_checkable
class _Batched(Protocol):
    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class TokenFile:
    """Tokens on disk, opened by `TokenFile.open` or made by `pack`.

    Attributes:
        path: the ``.bin`` file.
        tokens: 1-D read-only memory map, uint16 or uint32.
        count: number of tokens.
        dtype: ``"uint16"`` or ``"uint32"``.
        digest: BLAKE2b-256 of the file's bytes in hex, or empty if its sidecar gives none.
        tokenizer: digest of the tokenizer that made the ids.
        source: the text's name, as the user wrote it.
        source_digest: digest of the text, or empty if it could not be told.
        version: of this format.
    """

    path: Path
    count: int
    dtype: str
    tokenizer: str
    digest: str = ""
    source: str = ""
    source_digest: str = ""
    version: int = VERSION
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16), repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path | str, *, tokenizer: Tokenizer | None = None, verify: bool = False) -> TokenFile:
        """Map a token file into memory.

        Args:
            folder: a folder that `pack` wrote, or a ``.bin`` file with its sidecar beside it.
            tokenizer: if given, the tokens must have been made by this one.
            verify: read the whole file and compare its digest (about 1 GB/s).

        Raises:
            TalkootError: missing, damaged, shortened or changed files; another tokenizer's tokens.
        """
        data = _data_path(Path(folder))
        known = _read_sidecar(data)
        size = _size(data)
        item = np.dtype(_DTYPES[known["dtype"]]).itemsize
        count = known.get("count", size // item)
        if size != count * item or count == 0:
            why = f"{size:,} bytes found, and {count:,} tokens of {known['dtype']} take {count * item:,}"
            raise _damaged(data, "no tokens in it" if size == 0 else why)
        file = cls(path=data, **{**known, "count": count}, tokens=np.memmap(data, _DTYPES[known["dtype"]], "r"))
        if tokenizer is not None and tokenizer.digest() != file.tokenizer:
            raise TalkootError(
                "these tokens were made by another tokenizer",
                where=str(data),
                why=f"made by {file.tokenizer}, and this run's tokenizer is {tokenizer.digest()}",
                next="use the tokenizer that made them, or pack the text again into another folder",
            )
        if verify:
            file.check()
        return file

    def check(self) -> None:
        """Read every byte and compare with the recorded digest; raises TalkootError where they differ."""
        if not self.digest:
            raise _damaged(_sidecar(self.path), "it records no digest to compare with", "add one, or do not verify")
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, _hasher).hexdigest()
        if found != self.digest:
            raise _damaged(self.path, f"BLAKE2b-256 of the bytes is {found}, recorded is {self.digest}")


def pack(documents: Iterable[str], tokenizer: Tokenizer, folder: Path, source: str) -> TokenFile:
    """Tokenise documents into ``folder/tokens.bin`` and ``tokens.json``; memory stays bounded.

    If ``documents`` come from `read_documents` and the folder holds tokens of the same text
    by the same tokenizer, those are opened and nothing is tokenised.

    Args:
        documents: strings; an empty one is passed over.
        tokenizer: its ``encode_batch`` is used where it has one.
        folder: made if it is missing. A reader sees the old tokens, none, or all of the new ones.
        source: what the text is called, for messages and the record.

    Raises:
        TalkootError: no text, ids beyond the vocabulary, disk full or read-only; nothing half-written stays.
    """
    source_digest = ""  # unknown for any other iterable, and for a source of which a part was taken already
    if isinstance(documents, Documents) and not documents.started:
        source_digest = documents.digest()
    if source_digest and (ready := _reusable(folder, tokenizer, source_digest)):
        return ready
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    data = folder / "tokens.bin"
    with _Partial(data) as partial:
        for ids in _token_batches(documents, tokenizer, source):
            partial.write(ids.astype(_DTYPES[dtype]).tobytes())
        count = partial.size // np.dtype(dtype).itemsize
        if not count:
            raise TalkootError(
                "there is no text to tokenise",
                where=source,
                why="no documents, or only empty ones",
                next="name a source that holds text",
            )
        record = TokenFile(data, count, dtype, tokenizer.digest(), partial.digest(), source, source_digest)
        partial.commit(outdated=_sidecar(data))
    known = asdict(record)
    del known["path"], known["tokens"]
    with _Partial(_sidecar(data)) as partial:
        partial.write((json.dumps(known, indent=1) + "\n").encode())
        partial.commit()
    return TokenFile.open(folder, tokenizer=tokenizer)


def load_tokens(source: str, tokenizer: Tokenizer, folder: Path, column: str = "text") -> TokenFile:
    """Tokens of any source: a ``.bin`` file is opened as it is, anything else is packed into ``folder`` once.

    Args:
        source: see `talkoot.data.source`; or a ``.bin`` file, or a folder that holds ``tokens.json``.
        tokenizer: makes the tokens, or must have made them.
        folder: where packed tokens are kept for the next run.
        column: of sources that have columns.
    """
    path = Path(source).expanduser()
    if path.suffix == ".bin" or (path / "tokens.json").is_file():
        return TokenFile.open(path, tokenizer=tokenizer)
    return pack(read_documents(source, column), tokenizer, folder, source)


def _reusable(folder: Path, tokenizer: Tokenizer, source_digest: str) -> TokenFile | None:
    if not (folder / "tokens.json").is_file():
        return None
    try:
        ready = TokenFile.open(folder, tokenizer=tokenizer)
    except TalkootError:  # damaged or another tokenizer's: the folder is a cache, so it is made again
        return None
    return ready if ready.source_digest == source_digest else None


def _token_batches(documents: Iterable[str], tokenizer: Tokenizer, source: str) -> Iterator[np.ndarray]:
    for texts in _text_batches(documents):
        if isinstance(tokenizer, _Batched):
            rows = tokenizer.encode_batch(texts)
        else:
            rows = [tokenizer.encode(text) for text in texts]
        ids = np.concatenate([np.asarray([*row, tokenizer.eos_id], dtype=np.int64) for row in rows])
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise TalkootError(
                "the tokenizer gives ids outside its vocabulary",
                where=source,
                why=f"ids from {ids.min()} to {ids.max()}, and the vocabulary has {tokenizer.vocab_size}",
                next="use a tokenizer whose vocab_size and eos_id fit its ids",
            )
        yield ids


def _text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in documents:
        if text:
            batch.append(text)
            chars += len(text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class _Partial:
    """A file that appears under its name only when it is whole; hashes what it writes."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._hash = path, 0, _hasher()

    def __enter__(self) -> _Partial:
        with _writing(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, self._name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        self._file = os.fdopen(handle, "wb")
        return self

    def write(self, data: bytes) -> None:
        with _writing(self.path.parent):
            self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def commit(self, outdated: Path | None = None) -> None:
        with _writing(self.path.parent):
            self._file.flush()
            os.fsync(self._file.fileno())  # a full disk may show only here
            self._file.close()
            os.chmod(self._name, 0o644)  # mkstemp's 0600 would lock a colleague out
            if outdated:
                outdated.unlink(missing_ok=True)
            os.replace(self._name, self.path)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()
        with contextlib.suppress(FileNotFoundError):  # committed
            os.unlink(self._name)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TalkootError(
            "the disk is full" if full else "the tokens cannot be written",
            where=str(folder),
            why=error.strerror or str(error),
            next=(
                "free some space or use a folder on another disk; about 2 to 4 bytes a token are needed"
                if full
                else "use a folder that you may write to"
            ),
        ) from error


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=32)


def _data_path(path: Path) -> Path:
    return path if path.suffix == ".bin" else path / "tokens.bin"


def _sidecar(data: Path) -> Path:
    return data.with_suffix(".json")


def _size(data: Path) -> int:
    try:
        return data.stat().st_size
    except OSError as error:
        raise _damaged(data, error.strerror or str(error)) from None


def _read_sidecar(data: Path) -> dict[str, Any]:
    path = _sidecar(data)
    try:
        known = json.loads(path.read_bytes())
    except OSError as error:
        what = f"{error.strerror}; a .bin file needs this sidecar to say its dtype and tokenizer"
        raise _damaged(path, what, 'pack the text first, or write {"dtype": ..., "tokenizer": ...}') from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not valid JSON: {error}") from None
    if not isinstance(known, dict):
        raise _damaged(path, f"a JSON object is needed, and it holds a {type(known).__name__}")
    texts = {key: known.get(key, "") for key in ("dtype", "tokenizer", "digest", "source", "source_digest")}
    for key, value in texts.items():
        if not isinstance(value, str) or (not value and key in ("dtype", "tokenizer")):
            raise _damaged(path, f"the key {key!r} must be a string, not {known.get(key)!r}")
    if texts["dtype"] not in _DTYPES:
        raise _damaged(path, f"dtype {texts['dtype']!r} is not supported: {nearest(texts['dtype'], _DTYPES)}")
    numbers = {key: known[key] for key in ("count", "version") if key in known}
    for key, value in numbers.items():
        if type(value) is not int or value < 0:
            raise _damaged(path, f"the key {key!r} must be a whole number, not {value!r}")
    if numbers.get("version", VERSION) != VERSION:
        raise _damaged(path, f"format version {numbers['version']}, and this talkoot reads {VERSION}")
    return {**texts, **numbers}


def _damaged(path: Path, why: str, next: str = "delete these tokens and pack the text again") -> TalkootError:
    return TalkootError("the tokens cannot be used", where=str(path), why=why, next=next)
