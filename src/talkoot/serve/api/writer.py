"""From tokens to text as it can be shown: whole characters only, and nothing of a stop sequence."""

from __future__ import annotations

from collections.abc import Sequence

from talkoot.model.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_PATIENCE = 4  # tokens that may spell one character together; what is broken after that many stays broken


class Writer:
    """One answer's text, in the making.

    Args:
        tokenizer: of the model that speaks.
        stops: texts before which the answer ends.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._from = self._read = 0  # what is decoded again for context, and what is decoded already
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was shown."""
        return self._text[: self._shown]

    def push(self, token: int) -> str:
        """One more token; what can be shown now. Nothing more comes once ``stopped``."""
        self._ids.append(token)
        fresh = self._unread()
        if fresh.endswith(_BROKEN) and len(self._ids) - self._read < _PATIENCE:
            return ""
        self._from, self._read = self._read, len(self._ids)
        return self._show(fresh)

    def end(self) -> str:
        """No more tokens come: what was still held back."""
        return self._show(self._rest(), last=True)

    def pass_on(self, tokenizer: Tokenizer, *, same: bool) -> list[int]:
        """Another model goes on: the answer so far in its ids, exactly where the tokenizer is the ``same``."""
        if not same:
            self._text += self._rest()
            self._ids = tokenizer.encode(self._text)
            self._from = self._read = len(self._ids)
        self._tokenizer = tokenizer
        return list(self._ids)

    def _unread(self) -> str:
        """Text of the tokens not read yet; the ones before are decoded with them, since some tokenizers join words."""
        before = self._tokenizer.decode(self._ids[self._from : self._read])
        return self._tokenizer.decode(self._ids[self._from :])[len(before) :]

    def _rest(self) -> str:
        """The same, whole or not, as it is."""
        fresh = self._unread()
        self._from = self._read = len(self._ids)
        return fresh

    def _show(self, fresh: str, *, last: bool = False) -> str:
        if self.stopped:
            return ""
        self._text += fresh
        found = [place for stop in self._stops if (place := self._text.find(stop, self._shown)) >= 0]
        end = min(found, default=len(self._text) if last else len(self._text) - self._tempting())
        self.stopped = bool(found)
        shown, self._shown = self._text[self._shown : end], max(end, self._shown)
        return shown

    def _tempting(self) -> int:
        """Characters at the end that may become a stop sequence."""
        tail = self._text[self._shown :]
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if tail.endswith(stop[:size]))
        return max(sizes, default=0)
