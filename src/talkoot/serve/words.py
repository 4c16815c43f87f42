"""Plain words for people: names made safe to show, and numbers in the form one would say them."""

from __future__ import annotations

import math
from collections.abc import Mapping

MAX_NAME = 40
MAX_TEXT = 240
UNKNOWN = "\N{EN DASH}"
REASONS = {"odd": "odd one out", "gone": "partner gone", "late": "partner late", "no word": "no word from the partner"}


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Text from a log, fit for one line: no invisible or direction-changing characters, length bounded."""
    text = text[: 4 * limit]
    text = "".join(c if c.isprintable() else ("\N{REPLACEMENT CHARACTER}" if c > " " else " ") for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def name_of(text: str) -> str:
    """A peer's or run's name from a log, fit for a label."""
    return clean(text, MAX_NAME).strip() or "(no name)"


def count(value: float | None) -> str:
    """A quantity: ``1,234``, ``5.6 M``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def size(value: float | None) -> str:
    """Bytes: ``3.4 MB``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """A length of time: ``4.2 s``, ``3 min 20 s``, ``5 h 10 min``, ``3 d 4 h``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 9.95:
        if seconds >= 0.95 or seconds == 0:
            return f"{seconds:.1f} s"
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1000:.2g} ms"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def clock(seconds: float | None) -> str:
    """A point on the run's clock: ``4.2 s``, ``3:20``, ``1:05:09``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    whole = round(seconds)
    if seconds < 10 and seconds != whole:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
    if whole < 60:
        return f"{whole} s"
    minutes = f"{whole // 60 % 60}:{whole % 60:02}"
    return minutes if whole < 3600 else f"{whole // 3600}:{minutes.zfill(5)}"


def decimals(value: float | None, digits: int = 3) -> str:
    """A measured number: ``2.314``."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def figures(value: float | None, digits: int = 3) -> str:
    """A number of any size, to so many significant digits: ``0.0123``, ``187``."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{float(f'{value:.{digits}g}'):.10g}"


def reasons(why: Mapping[str, int], most: int = 4) -> str:
    """Why exchanges came to nothing, the most frequent first: ``odd one out 9, partner late 2``."""
    return ", ".join(f"{REASONS.get(reason, reason)} {n}" for reason, n in list(why.items())[:most])


def share(value: float | None) -> str:
    """A share of one as percent."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"
