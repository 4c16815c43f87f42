"""Follows a run's log while it grows and keeps the newest picture of it for everybody who watches."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from talkoot.core.errors import TalkootError
from talkoot.core.log import Log
from talkoot.run.lock import LOCK, holder
from talkoot.serve.render import chart_data, fragments
from talkoot.serve.report import LOG_NAME
from talkoot.serve.view import View

CHUNK = 1000  # receipts read before the page is brought up to date: a long log shows its progress
LOCKED = ("locked", "busy")  # SQLite's words for a log that can be read a moment later


@dataclass(frozen=True)
class Picture:
    """A finished picture of the run; never changed once published."""

    number: int
    view: dict[str, Any]
    parts: dict[str, str] = field(repr=False)
    data: dict[str, Any] = field(repr=False)

    def news(self, before: Picture | None) -> dict[str, Any]:
        """What a page that shows ``before`` must replace to show this one."""
        known = before.parts if before is not None else {}
        changed = {name: html for name, html in self.parts.items() if known.get(name) != html}
        news: dict[str, Any] = {"number": self.number, "fragments": changed}
        if before is None or before.data != self.data:
            news["data"] = self.data
        news["title"] = f"{self.view['run'].get('name', 'no run yet')} · talkoot"
        return news


class Follower:
    """Reads new receipts about once a second, in a thread, and publishes pictures.

    Args:
        run_folder: the run's folder; the log in it may still be missing.
        interval: seconds between looks at the log.
    """

    def __init__(self, run_folder: Path, interval: float = 1.0) -> None:
        self._path = run_folder / LOG_NAME
        self._interval = interval
        self._view = View()
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()
        self.closing = False
        self.picture = self._paint("")

    async def run(self) -> None:
        """Follow until cancelled."""
        while not self.closing:
            began = time.monotonic()
            picture = await asyncio.to_thread(self._look)
            if picture is not None:
                async with self._changed:
                    self.picture = picture
                    self._changed.notify_all()
            await asyncio.sleep(max(self._interval - (time.monotonic() - began), 0.02))

    async def close(self) -> None:
        """End all streams, so that a server that waits for its clients can stop."""
        async with self._changed:
            self.closing = True
            self._changed.notify_all()

    async def after(self, before: Picture | None, patience: float) -> Picture | None:
        """The first picture newer than ``before``; None after ``patience`` seconds or when closing."""
        try:
            async with asyncio.timeout(patience), self._changed:
                await self._changed.wait_for(lambda: self.closing or self.picture is not before)
        except TimeoutError:
            return None
        return None if self.closing else self.picture

    def _look(self) -> Picture | None:
        """Read what is new for about one interval; runs in a thread, one at a time."""
        before, problem = (self._view.position, self._view.chain), ""
        deadline = time.monotonic() + self._interval
        try:
            self._read(deadline)
        except TalkootError as trouble:
            if any(word in trouble.why for word in LOCKED):
                return None
            problem = str(trouble)
        now = (self._view.position, self._view.chain)
        known = (self.picture.view["problem"], self.picture.view["session"]["status"])
        if now == before and known == (problem, self._status()):
            return None
        return self._paint(problem)

    def _read(self, deadline: float) -> None:
        if not self._path.exists():
            self._view = View() if self._view.position else self._view
            return
        log = Log(self._path, readonly=True)
        try:
            while time.monotonic() < deadline:
                first = self._view.position + 1
                length = len(log)
                if length < self._view.position:
                    self._view = View()  # somebody began a new run in this folder
                    continue
                if length < first:
                    return
                self._advance(log, first)
        finally:
            log.close()

    def _advance(self, log: Log, first: int) -> None:
        for entry in log.entries(first, first + CHUNK - 1):
            try:
                self._view.advance(entry)
            except ValueError:
                self._view = View()  # the log was replaced by another one
                return

    def _status(self) -> str:
        """What the log says, unless it ends in the middle: then whether its writer still holds the run's lock."""
        status = self._view.session["status"]
        lock = self._path.with_name(LOCK)
        return "stopped" if status == "running" and lock.exists() and not holder(self._path.parent) else status

    def _paint(self, problem: str) -> Picture:
        view: dict[str, Any] = self._view.snapshot() | {"problem": problem}
        view["session"] = {**view["session"], "status": self._status()}
        plain = json.loads(json.dumps(view, allow_nan=False))  # nothing in it may change under a reader
        return Picture(next(self._numbers), plain, fragments(plain), chart_data(plain))
