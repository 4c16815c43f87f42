"""The append-only run log: signed receipts in one SQLite file (WAL), readable while it is written.

Each row stores the receipt's exact bytes, its signature and the hash chain up to it, so any reader can check
everything again. One writer, any number of readers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import Entry, State, advance, link, next_entry
from talkoot.core.ids import Digest
from talkoot.core.receipt import Signed

LOG_VERSION = 1
BUSY_MS = 30_000
_SCHEMA = """
CREATE TABLE receipts (
    position INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    op TEXT NOT NULL,
    step INTEGER NOT NULL,
    peer TEXT NOT NULL,
    chain TEXT NOT NULL,
    raw BLOB NOT NULL,
    signature BLOB NOT NULL
) STRICT;
CREATE INDEX receipts_by_op ON receipts (op, step);
"""
_COLUMNS = "position, id, op, step, peer, chain, raw, signature"
_BUSY = "stop the other process that uses this file, then run the same command again: it resumes"
_ACCESS = "name a folder that exists and that this user may write to"
_FULL = "free some space and run the same command again: it resumes"
_SURROUNDINGS = {
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_READONLY: _ACCESS,
    sqlite3.SQLITE_PERM: _ACCESS,
    sqlite3.SQLITE_CANTOPEN: _ACCESS,
    sqlite3.SQLITE_IOERR: _FULL,
    sqlite3.SQLITE_FULL: _FULL,
}


class Log:
    """An open run log.

    Args:
        path: the file; ``None`` keeps the log in memory (simulations and tests).
        readonly: refuse to create or change it.

    Attributes:
        full: the disk takes nothing more, or is made to look so by a fault.

    Raises:
        TalkootError: the file is missing, is not a talkoot log, or was written by a newer talkoot.
    """

    def __init__(self, path: Path | None, *, readonly: bool = False) -> None:
        self.path, self.full = path, False
        if readonly and (path is None or not path.exists()):
            raise TalkootError(
                "there is no run log",
                where=str(path),
                why="the file does not exist",
                next="name a run's folder: train, tune, blend train and demo make them below runs/",
            )
        try:
            self._database = sqlite3.connect(
                _address(path, readonly), uri=path is not None, isolation_level=None, timeout=BUSY_MS / 1000
            )
        except sqlite3.OperationalError as problem:
            raise _cannot("opened", path, problem) from problem
        try:
            self._prepare(readonly)
        except sqlite3.DatabaseError as problem:
            self._database.close()
            if getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _SURROUNDINGS:
                raise _cannot("opened", path, problem) from problem
            raise TalkootError(
                "this is not a talkoot run log",
                where=str(path),
                why=str(problem),
                next="restore the file from a backup, or start the run in an empty folder",
            ) from problem
        except TalkootError:
            self._database.close()
            raise

    def _prepare(self, readonly: bool) -> None:
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version > LOG_VERSION:
            raise TalkootError(
                "this log was written by a newer talkoot",
                where=str(self.path),
                why=f"its format is {version}, this talkoot reads up to {LOG_VERSION}",
                next="upgrade talkoot: pip install --upgrade talkoot",
            )
        tables = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and (readonly or tables):
            raise sqlite3.DatabaseError("the database holds no receipts table of ours")
        if version == 0:
            self._database.executescript(
                f"PRAGMA journal_mode=WAL; BEGIN; {_SCHEMA} PRAGMA user_version={LOG_VERSION}; COMMIT;"
            )
        self._database.execute(f"SELECT {_COLUMNS} FROM receipts LIMIT 0")  # somebody else's, if it lacks these
        self._database.execute("PRAGMA synchronous=NORMAL")

    def append(self, signed: Signed, state: State) -> tuple[Entry, State]:
        """Verify, fold and store one receipt.

        The state is folded *before* the row is written, so a receipt that the fold refuses never enters the
        log. A receipt that is already there changes nothing and returns its old entry.

        Raises:
            ValueError: bad signature, or refused by the fold.
            TalkootError: the disk is full, the file cannot be written, or ``state`` is not this log's state.
        """
        try:
            known = self._database.execute("SELECT position FROM receipts WHERE id=?", (signed.id,)).fetchone()
            head = self._database.execute(
                "SELECT position, chain FROM receipts ORDER BY position DESC LIMIT 1"
            ).fetchone()
        except sqlite3.OperationalError as problem:
            raise _cannot("read", self.path, problem) from problem
        if known:
            return next(self.entries(known[0], known[0])), state
        entry = next_entry(state, signed)
        after = advance(state, entry)
        if (head or (0, State().chain)) != (state.position, state.chain):
            raise self._two_writers(entry.position)
        receipt = entry.receipt
        row = (entry.position, entry.id, receipt.op, receipt.step, receipt.peer, entry.chain)
        try:
            if self.full:
                raise sqlite3.OperationalError("database or disk is full")
            self._database.execute(
                "INSERT INTO receipts VALUES (?,?,?,?,?,?,?,?)", (*row, signed.raw, signed.signature)
            )
        except sqlite3.IntegrityError as problem:
            raise self._two_writers(entry.position) from problem
        except sqlite3.OperationalError as problem:
            raise _cannot("written", self.path, problem) from problem
        return entry, after

    def _two_writers(self, position: int) -> TalkootError:
        return TalkootError(
            "two writers on one log",
            where=str(self.path),
            why=f"receipt {position} does not follow what the file holds: somebody else wrote to it",
            next="stop the other process that runs in this folder (talkoot status FOLDER names it)",
        )

    def entries(self, first: int = 1, last: int | None = None) -> Iterator[Entry]:
        """Entries ``first`` to ``last`` inclusive, decoded and with signatures checked.

        Raises:
            TalkootError: a row's bytes, signature, columns or place in the chain is wrong.
        """
        position = max(first, 1)
        try:
            before = self.chain_at(position - 1)
            for row in self._rows(first, last):
                entry = _check(row, position, before)
                before = entry.chain
                position += 1
                yield entry
        except (ValueError, sqlite3.DatabaseError) as problem:
            raise TalkootError(
                "the run log does not verify",
                where=f"{self.path}, receipt {position}",
                why=str(problem),
                next="restore the log from a backup; what follows this receipt cannot be trusted",
                code=Exit.FAILED_CHECK,
            ) from problem

    def chain_at(self, position: int) -> Digest:
        """The stored hash chain up to an entry; its start where there is no such entry."""
        row = self._database.execute("SELECT chain FROM receipts WHERE position=?", (position,)).fetchone()
        return Digest(row[0]) if row else State().chain

    def _rows(self, first: int, last: int | None) -> Iterator[tuple[Any, ...]]:
        query = f"SELECT {_COLUMNS} FROM receipts WHERE position BETWEEN ? AND ? ORDER BY position"
        return self._database.execute(query, (first, 2**62 if last is None else last))

    def signed(self, first: int = 1, last: int | None = None) -> Iterator[Signed]:
        """The stored bytes and signatures, unchecked: what one copies to somebody who checks them."""
        for row in self._rows(first, last):
            yield Signed(*row[-2:])

    def __len__(self) -> int:
        return self._database.execute("SELECT coalesce(max(position), 0) FROM receipts").fetchone()[0]

    def sync(self) -> None:
        """Return when all appended receipts are on the disk itself; WAL alone only survives the end of the process.

        Raises:
            TalkootError: the disk reports an error.
        """
        if self.path is None:
            return
        for path in (self.path.with_name(f"{self.path.name}-wal"), self.path):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # no -wal file: everything is in the database
            try:
                os.fsync(descriptor)
            except OSError as problem:
                raise TalkootError(
                    "the run log cannot be written",
                    where=str(path),
                    why=problem.strerror or str(problem),
                    next=_FULL,
                ) from problem
            finally:
                os.close(descriptor)

    def is_free(self, seconds: float) -> bool:
        """Whether this process can write within so many seconds: no other one stands still in the middle of it."""
        self._database.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        finally:
            self._database.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        return True

    def close(self) -> None:
        """Flush and close; a closed log cannot be used again."""
        self._database.close()


def put_in_place(path: Path, receipts: Iterable[Signed]) -> None:
    """Put a log of these receipts where a log is that another process holds and does not let go of.

    Whoever has the old file open keeps it, and reaches nobody with what it writes there.

    Raises:
        ValueError: a receipt is not acceptable.
        TalkootError: the disk is full or not writable.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    log, state = Log(fresh), State()
    for signed in receipts:
        _, state = log.append(signed, state)
    log.sync()
    log.close()
    for suffix in ("-wal", "-shm"):  # first: they must not be taken for the new file's
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    fresh.replace(path)


def _address(path: Path | None, readonly: bool) -> str:
    if path is None:
        return ":memory:"
    # as_uri escapes what a folder's name may hold (?, #, %) and SQLite would read as part of the address
    address = f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
    # An auditor's copy may lie where not even a lock file can be made; without a -wal file nobody writes to it.
    if readonly and not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists():
        address += "&immutable=1"
    return address


def _check(row: tuple[Any, ...], position: int, before: str) -> Entry:
    found, name, op, step, peer, chain, raw, signature = row
    signed = Signed(raw, signature)
    if found != position:
        raise ValueError(f"it is missing; receipt {found} comes next")
    receipt = signed.open()
    if (name, op, step, peer) != (signed.id, receipt.op, receipt.step, receipt.peer):
        raise ValueError("the columns beside it say something else than the receipt")
    if link(before, signed.id) != chain:
        raise ValueError("it does not continue the hash chain")
    return Entry(position, signed.id, receipt, Digest(chain))


def _cannot(do: str, path: Path | None, problem: sqlite3.DatabaseError) -> TalkootError:
    """The error for a log that is fine but whose surroundings are not: disk, permissions, another process."""
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return TalkootError(
        f"the run log cannot be {do}",
        where=str(path),
        why=str(problem),
        next=_SURROUNDINGS.get(code, _FULL),
    )
