"""The run's clock, and who worked when by it.

Times are seconds that the run was up. Only the lead's clock moves time on, or, in runs without commits, what half of
the peers agree on (where experts are made: of those whose job goes on); a single peer's own account of its hours is
clipped to it.
"""

from __future__ import annotations

import math

from talkoot.core.receipt import Receipt
from talkoot.serve.series import Lanes, Span

MAX_PENDING = 4096


class Hours:
    """Attributes: ``now``, seconds; ``lanes``, the work that is over."""

    def __init__(self) -> None:
        self.now, self.lanes = 0.0, Lanes()
        self._lead, self._base = "", 0.0
        self._pending: list[tuple[str, int, float, float, float]] = []

    def clock(self, receipt: Receipt) -> None:
        """A receipt of the lead says how late it is."""
        if receipt.op in ("run.start", "run.resume") and math.isfinite(receipt.started):
            self._lead = receipt.peer
            self._base = receipt.started - self.now
        elif receipt.op == "run.succeed":
            self._lead = receipt.peer  # whose clock is taken to agree with the old lead's
        if receipt.peer == self._lead:
            self.reach(receipt.ended)
        if receipt.op == "run.end":
            self._lead = ""  # what is written down afterwards, maybe days later, is not the run's time

    def reach(self, time: float) -> None:
        """It is this late at least, in world time."""
        self.now = max(self.now, self._seconds(time))

    def work(self, receipt: Receipt, start: float, busy_s: float) -> None:
        """A peer's account of its work from ``start`` (world time) to the receipt's end."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append((receipt.peer, receipt.step, start, receipt.ended, busy_s))

    def settle(self, *, over: bool = False) -> None:
        """Draw what was told, clipped to now. ``over``: only what has ended; the rest waits."""
        waiting = []
        for one in self._pending:
            peer, step, start, end, busy = one
            if over and self._seconds(end) > self.now:
                waiting.append(one)
                continue
            start, end = (min(max(self._seconds(time), 0.0), self.now) for time in (start, end))
            if end > start:
                busy = min(busy, end - start) if math.isfinite(busy) else 0.0
                self.lanes.add(peer, Span(start, end, max(busy, 0.0), step))
        self._pending = waiting

    def clear(self) -> None:
        """Forget what was told and not drawn."""
        self._pending.clear()

    def _seconds(self, time: float) -> float:
        return time - self._base if math.isfinite(time) else self.now
