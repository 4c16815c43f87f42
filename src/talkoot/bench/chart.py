"""Curves as a self-contained SVG: what every bench that trains draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from talkoot.serve.draw import ticks

COLOURS = ("#3f7d5c", "#b4552d", "#3b6ea5", "#8a5aa8", "#888", "#c29b2a", "#2a9d9d", "#a83a5f")
Line = Sequence[tuple[float, float]]

LEFT, WIDTH, HEIGHT = 60, 640, 320
ROW = 16  # of the legend, in pixels


def chart(
    title: str, x_label: str, lines: Mapping[str, Sequence[Line]], *, top: float = math.inf, log: bool = False
) -> str:
    """Curves by name, each of several runs.

    Args:
        title: says what the y axis is.
        x_label: what the x axis is.
        lines: points (x, y) of each run; x is at least 0; points whose x is not finite are left out.
        top: values above it are drawn at it.
        log: draw x by its logarithm; points at 0 are left out.
    """
    kept = {name: [_drawn(line, log) for line in runs] for name, runs in lines.items()}
    points = [point for runs in kept.values() for line in runs for point in line]
    begin, end = (min(x for x, _ in points) if log else 0.0), max(x for x, _ in points)
    low, high = min(y for _, y in points), min(top, max(y for _, y in points))
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-9
    head = 34 + ROW * -(-len(kept) // 2) + 12

    def at(x: float, y: float) -> str:
        share = (x - begin) / (end - begin or 1.0)
        return f"{LEFT + share * WIDTH:.1f},{head + (high - min(y, high)) / (high - low) * HEIGHT:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 30} {head + HEIGHT + 50}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{head + HEIGHT + 40}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for y in ticks(low, high):
        place = at(begin, y).split(",")[1]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{place}" y2="{place}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place}" dy="4" text-anchor="end">{y:.4g}</text>')
    for x, words in _marks(begin, end, log):
        place = at(x, low).split(",")[0]
        parts.append(f'<text x="{place}" y="{head + HEIGHT + 18}" text-anchor="middle">{words}</text>')
    for index, (name, runs) in enumerate(kept.items()):
        colour = COLOURS[index % len(COLOURS)]
        x, y = LEFT + 330 * (index % 2), 44 + ROW * (index // 2)
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(name)}</text>')
        for line in runs:
            drawn = " ".join(at(x, y) for x, y in line)
            parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(line: Line, log: bool) -> Line:
    finite = [(x, y) for x, y in line if math.isfinite(x)]
    return [(math.log10(x), y) for x, y in finite if x > 0] if log else finite


def _marks(begin: float, end: float, log: bool) -> list[tuple[float, str]]:
    """Places on the x axis, and what stands there."""
    if not log:
        return [(x, f"{x:,.4g}") for x in ticks(0.0, end)]
    found = [math.log10(base * 10.0**power) for power in range(-9, 13) for base in (1, 2, 5)]
    return [(x, f"{10**x:,.3g}") for x in found if begin <= x <= end]
