"""What every bench returns, and how it is shown and kept."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How thorough to be: ``quick`` for a first look and CI; ``seeds`` for repetition."""

    quick: bool = False
    seeds: int = 3


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender: the median of its repeated measurements with their range.

    Attributes:
        name: who.
        values: all measurements, in the bench's unit.
        note: published figure or remark.
    """

    name: str
    values: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        """Middle measurement (mean of the two middle ones)."""
        ordered, count = sorted(self.values), len(self.values)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A stated requirement and whether the measurement meets it."""

    text: str
    measured: float
    holds: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A bench's result.

    Attributes:
        name, claim: as ``talkoot bench`` lists them.
        world: where it was measured, in words.
        unit: of every row's values.
        rows, bars, notes: contenders, requirements, remarks.
        extras: further files that ``save`` writes, such as plots and timelines: text by file name.
    """

    name: str
    claim: str
    world: str
    unit: str
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()
    extras: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        """Whether every stated bar holds."""
        return all(bar.holds for bar in self.bars)

    def plain(self) -> dict[str, Any]:
        """As JSON-able data: medians included, extra files left out."""
        data = msgspec.to_builtins(self)
        del data["extras"]
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain["median"] = row.median
        return {"passed": self.passed, **data}

    def save(self, folder: Path) -> list[Path]:
        """Write ``NAME.json``, ``NAME.svg`` and the extra files."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            f"{self.name}.json": json.dumps(self.plain(), indent=1) + "\n",
            f"{self.name}.svg": self.svg(),
            **self.extras,
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        return [folder / name for name in texts]

    def svg(self) -> str:
        """Horizontal bars of the medians, with the range as a thin line."""
        top, left, width, line = 56, 230, 420, 34
        most = max((max(row.values) for row in self.rows), default=1.0) or 1.0
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 110} '
            f'{top + line * len(self.rows) + 24}" font-family="system-ui, sans-serif" font-size="13">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="12" y="22" font-size="15" font-weight="600">{escape(self.claim)}</text>',
            f'<text x="12" y="42" fill="#666">{escape(self.unit)}; median and range; {escape(self.world)}</text>',
        ]
        for index, row in enumerate(self.rows):
            y, scale = top + line * index, width / most
            low, high = min(row.values) * scale, max(row.values) * scale
            parts += [
                f'<text x="{left - 10}" y="{y + 17}" text-anchor="end">{escape(row.name)}</text>',
                f'<rect x="{left}" y="{y + 4}" width="{row.median * scale:.1f}" height="18" fill="#3f7d5c"/>',
                f'<line x1="{left + low:.1f}" x2="{left + high:.1f}" y1="{y + 13}" y2="{y + 13}" stroke="#111"/>',
                f'<text x="{left + high + 8:.1f}" y="{y + 17}">{row.median:,.4g}</text>',
            ]
        return "\n".join([*parts, "</svg>"]) + "\n"
