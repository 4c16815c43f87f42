"""Bounded memory for long runs: curves that keep their extremes and lanes that keep their load.

A curve of any length is kept as about a thousand rows at most: the latest ones exactly, earlier ones as the
rows at which a value was smallest or largest in its stretch of steps. Stretches are powers of two, so that
thinning again later never loses an extreme that an earlier thinning kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

Row = tuple[float | None, ...]

BUCKETS = 160  # stretches of steps, each keeps up to two rows per watched column
TAIL = 256  # latest rows, kept exactly
RECENT = 12  # latest spans of a lane, kept exactly
MAX_SPANS = 4096  # of all lanes together


class Curve:
    """Rows over a growing first column (the step), thinned when there are too many.

    Args:
        watched: columns whose smallest and largest values survive thinning.
        buckets, tail: see above.
    """

    def __init__(self, *watched: int, buckets: int = BUCKETS, tail: int = TAIL) -> None:
        self._watched, self._buckets, self._tail = watched, buckets, tail
        self._limit = 2 * buckets * max(len(watched), 1) + 2 * tail
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Append a row; its step is larger than all others."""
        self.rows.append(row)
        if len(self.rows) > self._limit:
            old, tail = self.rows[: -self._tail], self.rows[-self._tail :]
            self.rows = thin(old, self._watched, self._buckets) + tail

    def cut(self, step: float) -> None:
        """Forget all rows whose step is larger than ``step``."""
        while self.rows and (self.rows[-1][0] or 0.0) > step:
            self.rows.pop()

    def columns(self, names: Iterable[str]) -> dict[str, list[float | None]]:
        """The rows as one list per column, ready for JSON."""
        return {name: [tidy(row[index]) for row in self.rows] for index, name in enumerate(names)}


def thin(rows: list[Row], watched: tuple[int, ...], buckets: int = BUCKETS) -> list[Row]:
    """The rows where a watched column is smallest or largest in its stretch, and the first and last row."""
    if len(rows) < 3:
        return rows
    first, last = rows[0][0] or 0.0, rows[-1][0] or 0.0
    stride = 2 ** max(0, math.ceil(math.log2(max(last - first, 1) / buckets)))
    keep = {0, len(rows) - 1}
    stretch: list[int] = []
    current = None
    for index, row in enumerate(rows):
        bucket = int((row[0] or 0.0) // stride)
        if bucket != current:
            keep |= _extremes(rows, stretch, watched)
            current, stretch = bucket, []
        stretch.append(index)
    keep |= _extremes(rows, stretch, watched)
    return [rows[index] for index in sorted(keep)]


def _extremes(rows: list[Row], stretch: list[int], watched: tuple[int, ...]) -> set[int]:
    kept: set[int] = set()
    for column in watched:
        known = [(value, index) for index in stretch if (value := rows[index][column]) is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    return kept


@dataclass(slots=True)
class Span:
    """A stretch of one peer's work, in seconds since the run began; ``void`` when a rollback undid it."""

    start: float
    end: float
    busy: float
    step: int
    void: bool = False


@dataclass(slots=True)
class Lane:
    """One peer's work over time."""

    spans: list[Span] = field(default_factory=list)
    recent: deque[Span] = field(default_factory=lambda: deque(maxlen=RECENT))


class Lanes:
    """The work of all peers, at one common resolution that coarsens as the run grows."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._width = 0.0  # spans that begin in the same stretch of this length are merged; 0 = none are

    def __getitem__(self, peer: str) -> Lane:
        return self._lanes.setdefault(peer, Lane())

    def add(self, peer: str, span: Span) -> None:
        """Add a span of work."""
        lane = self[peer]
        lane.recent.append(span)
        last = lane.spans[-1] if lane.spans else None
        if last is not None and self._same(last, span):
            lane.spans[-1] = _merged(last, span)
        else:
            lane.spans.append(Span(span.start, span.end, span.busy, span.step))
        while len(lane.spans) > self._allowed():
            self._coarsen(span.end)

    def void(self, step: int) -> None:
        """Mark work of ``step`` and later as undone."""
        for lane in self._lanes.values():
            for span in (*lane.spans, *lane.recent):
                span.void = span.void or span.step >= step

    def forget(self, peer: str) -> None:
        """Drop a lane."""
        self._lanes.pop(peer, None)

    def _allowed(self) -> int:
        return max(24, min(240, MAX_SPANS // max(len(self._lanes), 1)))

    def _same(self, one: Span, other: Span) -> bool:
        return self._width > 0 and one.start // self._width == other.start // self._width

    def _coarsen(self, now: float) -> None:
        finest = 2.0 ** math.ceil(math.log2(max(now, 1e-6) / self._allowed()))
        self._width = max(self._width * 2, finest)
        for lane in self._lanes.values():
            merged: list[Span] = []
            for span in lane.spans:
                if merged and self._same(merged[-1], span):
                    merged[-1] = _merged(merged[-1], span)
                else:
                    merged.append(span)
            lane.spans = merged


def _merged(one: Span, other: Span) -> Span:
    start, end = min(one.start, other.start), max(one.end, other.end)
    return Span(start, end, one.busy + other.busy, other.step, one.void and other.void)


def tidy(value: float | None) -> float | None:
    """A number fit for JSON: six significant digits, None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value
