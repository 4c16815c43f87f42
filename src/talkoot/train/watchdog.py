"""Noticing that nothing moves although everybody seems to be alive: a frozen program, a deadlock, a lost message.

Connections and heartbeats notice a machine that is gone, not one that is stuck. While the lead waits for peers, each
of their messages, and each *pulse* that tells of more work done, is progress. When there was none for
three times what is usual (the longest pause of such a wait, averaged exponentially), and at least for the floor, those
who still owe something are asked for a sign of life. Who gives none in as long again is lost; so is who has work that
it could do and has done none of it over two questions. When all only wait, a message was lost: what was under way is
done again, and the next time the watchdog waits twice as long, in case the network is merely slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable

import msgspec

FACTOR = 3.0  # how many usual pauses are too many
WEIGHT = 0.2  # of the newest pause in the average


class Pulse(msgspec.Struct, frozen=True):
    """Peer to lead, ``pulse``: how many pieces of work it did so far, whether it waits for others, what it refused.

    ``refused`` counts messages that were damaged, or otherwise no good: one more and somebody waits in vain.
    """

    work: int
    waits: bool
    refused: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: whom to ask for a sign of life, whom to give up and why, or why everything has to be done again."""

    probe: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    why: str = ""
    again: bool = False


class Watchdog:
    """See the module's text. No I/O, no clock: times are handed in.

    Args:
        floor_s: seconds without progress that are never too long.

    Attributes:
        asked: whether signs of life were asked for and may still come.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s, self._armed = floor_s, False
        self._usual_s: dict[str, float] = {}  # by kind of wait
        self._key: tuple[str, Hashable] | None = None
        self._longest_s = self._slow_s = 0.0
        self._moved_at = self._due = math.inf
        self.asked = False
        self._answers: dict[str, Pulse] = {}
        self._idle: dict[str, int] = {}  # questions over which a peer that could work has not
        self._known: dict[str, Pulse] = {}
        self._stalls = 0

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which somebody is asked; as long again may the answer take."""
        usual = self._usual_s.get(self._key[0], 0.0) if self._key else 0.0
        return max(FACTOR * usual, self._floor_s) * 2**self._stalls

    @property
    def due(self) -> float:
        """When :meth:`look` is called next, if nothing happens before; never while nobody waits."""
        return self._due if self._armed and self._key else math.inf

    def wait(self, kind: str, what: Hashable, now: float, slow_s: float = 0.0) -> None:
        """From here on something of this kind is owed; the same ``what`` again continues the wait for it.

        Args:
            slow_s: how long all may wait, or be deaf, without a sign that a message was lost: something large is on
                its way, or being loaded.
        """
        if self._key != (kind, what):
            self._learn()
            self._key, self._longest_s, self._moved_at = (kind, what), 0.0, now
        self._slow_s = slow_s
        self.moved(now)

    def _learn(self) -> None:
        if self._key is not None:
            kind = self._key[0]
            before = self._usual_s.get(kind, self._longest_s)
            self._usual_s[kind] = before + WEIGHT * (self._longest_s - before)

    def rest(self) -> None:
        """Nobody waits any more, because somebody was lost or all is done again; there is nothing to learn from it."""
        self._key = None

    def committed(self) -> None:
        """A step was committed: from the first one on, the watchdog is awake."""
        self._armed, self._stalls = True, 0

    def moved(self, now: float) -> None:
        """Something owed has come, or come nearer."""
        self._longest_s = max(self._longest_s, now - self._moved_at)
        self._moved_at, self.asked = now, False
        self._idle.clear()
        self._due = now + self.limit_s

    def hear(self, peer: str, pulse: Pulse, now: float) -> bool:
        """Take a pulse from somebody who owes something; whether it tells of progress."""
        known, self._known[peer] = self._known.get(peer), pulse
        if known is not None and pulse.work > known.work:
            self.moved(now)
            return True
        if self.asked:
            refused = pulse.refused - (known.refused if known else 0) + self._answers.get(peer, _CALM).refused
            self._answers[peer] = msgspec.structs.replace(pulse, refused=refused)
        return False

    def look(self, now: float, owing: Collection[str]) -> Verdict:
        """What is to be done now, when the time has come or an answer did."""
        if self.asked and all(peer in self._answers for peer in owing):
            return self._judge(now, owing)
        if now < self.due:
            return Verdict()
        if not self.asked:
            return self._ask(now, owing)
        if now - self._moved_at < self._slow_s:  # who loads something large is deaf meanwhile
            return self._ask(now, owing)
        silent = tuple(sorted(set(owing) - self._answers.keys()))
        return Verdict(lost=silent, why=f"it gave no sign of life for {self.limit_s:.1f} s")

    def _ask(self, now: float, owing: Collection[str]) -> Verdict:
        self.asked, self._answers, self._due = True, {}, now + self.limit_s
        return Verdict(probe=tuple(sorted(owing)))

    def _judge(self, now: float, owing: Collection[str]) -> Verdict:
        self.asked, self._due = False, now + self.limit_s
        busy = sorted(peer for peer in owing if not self._answers[peer].waits)
        for peer in busy:
            self._idle[peer] = self._idle.get(peer, 0) + 1
        stuck = tuple(peer for peer in busy if self._idle[peer] >= 2)
        quiet_s = now - self._moved_at
        if stuck:
            return Verdict(lost=stuck, why=f"it has work that it could do, and did none for {quiet_s:.1f} s")
        refused = any(self._answers[peer].refused > 0 for peer in owing)
        if busy or (quiet_s < self._slow_s and not refused):
            return Verdict()
        self._stalls += 1
        return Verdict(again=True, why=f"all waited for each other for {quiet_s:.1f} s: a message was lost")


_CALM = Pulse(0, True)


__all__ = ["Pulse", "Verdict", "Watchdog"]
