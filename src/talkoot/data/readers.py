"""Reading one file: text, JSON lines or Parquet, plain or gzipped, streamed, with errors that name the place.

A reader takes a path and a column name and yields documents. Memory stays bounded: text in pieces of
about ``PIECE`` characters, JSON line by line, Parquet a few hundred rows at a time.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

from talkoot.core.errors import TalkootError, nearest

#: characters after which a long text file is cut, at a line end, into a further document
PIECE = 1 << 20
#: characters that one JSON line may have; more is almost surely not JSON lines
LONGEST_LINE = 1 << 25


def read_text(path: Path, column: str) -> Iterator[str]:
    """A UTF-8 text file as one document, or, beyond ``PIECE`` characters, as several cut at line ends.

    Args:
        path: the file; ``.gz`` is unpacked. A byte order mark is dropped, line ends become newlines.
        column: not used; text has no columns.
    """
    pending = ""
    with _decoded(path) as stream:
        while piece := stream.read(PIECE):
            pending += piece
            while len(pending) >= PIECE:
                cut = pending.rfind("\n", 0, PIECE) + 1 or PIECE
                yield pending[:cut]
                pending = pending[cut:]
    if pending:
        yield pending


def read_jsonl(path: Path, column: str) -> Iterator[str]:
    """The string under ``column`` of every line's object, past blank lines, nulls and empty strings.

    Raises:
        TalkootError: with the line's number: broken JSON, not an object, no such column, not a string.
    """
    with _decoded(path) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE):
            number += 1
            if not line.isspace():
                where = f"{path}, line {number}"
                yield from only_text(_json_value(line, column, where), column, where)


def _json_value(line: str, column: str, where: str) -> object:
    if len(line) >= LONGEST_LINE:
        why = f"the line is longer than {LONGEST_LINE:,} characters; JSON lines hold one object a line"
        raise TalkootError("a line is too long", where=where, why=why, next="put each object on a line of its own")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TalkootError(
            "a line is not valid JSON",
            where=where,
            why=str(error) or type(error).__name__,
            next="repair or delete this line; each line must be one JSON object",
        ) from None
    if not isinstance(row, dict):
        why = f"the line holds a {type(row).__name__}, and an object with the key {column!r} is needed"
        raise TalkootError("a line is not an object", where=where, why=why, next='write {"text": "..."} lines')
    if column not in row:
        raise unknown_column(column, row, where)
    return row[column]


def read_parquet(path: Path, column: str) -> Iterator[str]:
    """The strings of one column of a Parquet file, in row order; nulls and empty strings are passed over."""
    arrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise unknown_column(column, names, str(path))
            for rows in file.iter_batches(batch_size=256, columns=[column]):
                for value in rows.column(0).to_pylist():
                    number += 1
                    yield from only_text(value, column, f"{path}, row {number}")
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error


def only_text(value: object, column: str, where: str) -> Iterator[str]:
    """The value of one row if it is text, nothing if it is null or empty, an error otherwise."""
    if value is None or value == "":
        return
    if not isinstance(value, str):
        raise TalkootError(
            f"column {column!r} is not text",
            where=where,
            why=f"it holds a {type(value).__name__}, and only strings can be tokenised",
            next="name a column of strings, or turn this one into strings first",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" alone is legal JSON but no text
        why = f"character {error.start} is half of a surrogate pair"
        raise TalkootError("the text is not valid Unicode", where=where, why=why, next="repair this row") from None
    yield value


def hash_file(path: Path) -> str:
    """BLAKE2b-256 of the file's bytes as stored, in hex."""
    with _reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def optional(module: str, where: object) -> ModuleType:
    """Import a package of the ``data`` extra, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise TalkootError(
            f"this source needs the package {name!r}",
            where=str(where),
            why=f"{name} is not installed; it is optional because only some sources need it",
            next="pip install 'talkoot[data]'",
        ) from None


def unknown_column(column: str, found: Iterable[str], where: str) -> TalkootError:
    """The error for a column that is not there, with the columns that are."""
    names = [str(name) for name in found]
    hint = nearest(column, names) if names else "there are no columns"
    return TalkootError(
        f"there is no column {column!r}",
        where=where,
        why=f"columns found: {', '.join(names) or 'none'}; {hint}",
        next="set the data column to one of them",
    )


@contextlib.contextmanager
def _decoded(path: Path) -> Iterator[io.TextIOBase]:
    with _reading(path), _bytes(path) as raw:
        try:
            # utf-8-sig drops the byte order mark that Windows editors put first
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline=None)
        except UnicodeDecodeError as error:
            offset = _first_bad_byte(path)
            raise TalkootError(
                "the file is not UTF-8 text",
                where=f"{path}, byte {offset}" + (" of the unpacked data" if _is_gzip(path) else ""),
                why=f"the byte 0x{error.object[error.start]:02x} cannot be decoded: {error.reason}",
                next="if it is text, convert it: iconv -f ENCODING -t UTF-8 OLD > NEW; if not, leave it out",
            ) from None


def _first_bad_byte(path: Path) -> int:
    # The decoder's own offset counts from its last buffer, so the file is walked again.
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with _bytes(path) as raw:
        while True:
            chunk, held = raw.read(1 << 16), len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return done - held + error.start
            if not chunk:
                return done
            done += len(chunk)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _unreadable(path, "gzip", error) from error
    except OSError as error:
        raise _unreadable(path, "", error) from error


def _unreadable(path: Path, form: str, error: Exception) -> TalkootError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TalkootError(
        f"the file cannot be read{f' as {form}' if form else ''}",
        where=str(path),
        why=why,
        next="check that the file is whole and that you may read it, then run the same command again",
    )


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _bytes(path: Path) -> BinaryIO:
    return cast(Any, gzip.open(path, "rb")) if _is_gzip(path) else path.open("rb")
