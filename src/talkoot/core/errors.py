"""The one exception class that users see: what went wrong, where, why, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line; scripts may rely on them."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    FAILED_CHECK = 4
    INTERRUPTED = 130


class TalkootError(Exception):
    """A problem that the user can act on.

    Args:
        what: one sentence that names the problem.
        where: the file, key, port, peer or step it concerns.
        why: the cause, with the offending value and the permitted ones.
        next: the command or edit that repairs it.
        code: exit status of the command line.
    """

    def __init__(self, what: str, *, where: str, why: str, next: str, code: Exit = Exit.BAD_INPUT) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.next, self.code = what, where, why, next, code

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  why:   {self.why}\n  next:  {self.next}"

    def __reduce__(self):  # keyword-only arguments would otherwise be lost between processes
        return _rebuild, (type(self), self.what, self.where, self.why, self.next, self.code)


def _rebuild(kind: type[TalkootError], what: str, where: str, why: str, next: str, code: Exit) -> TalkootError:
    return kind(what, where=where, why=why, next=next, code=code)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``did you mean 'x'?`` or the list of what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"
