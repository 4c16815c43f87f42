"""``talkoot bench``: repeat a claim."""

from __future__ import annotations

import sys
from pathlib import Path

from talkoot import bench
from talkoot.bench.outcome import Options, Outcome
from talkoot.cli.output import print_json, print_table, say
from talkoot.core.errors import Exit


def run(name: str, *, quick: bool, seeds: int, out: Path | None, as_json: bool) -> None:
    """Measure, show, keep; exits with 4 when a bar does not hold."""
    if not name:
        _list(as_json)
        return
    outcome: Outcome = bench.load(name).measure(Options(quick=quick, seeds=seeds))
    saved = outcome.save(out) if out is not None else []
    if as_json:
        print_json(outcome.plain())
    else:
        _show(outcome)
        for path in saved:
            say(f"wrote {path}")
    if not outcome.passed:
        sys.exit(Exit.FAILED_CHECK)


def _list(as_json: bool) -> None:
    claims = {name: bench.claim(name) for name in bench.names()}
    if as_json:
        print_json(claims)
    else:
        print_table(list(claims.items()), ("bench", "claim"))


def _show(outcome: Outcome) -> None:
    print(f"{outcome.claim}\n{outcome.unit}; {outcome.world}\n")
    rows = [
        (row.name, f"{row.median:,.4g}", f"{min(row.values):,.4g} .. {max(row.values):,.4g}", row.note)
        for row in outcome.rows
    ]
    print_table(rows, ("", "median", "range", "note"))
    print()
    for bar in outcome.bars:
        print(f"{'PASS' if bar.holds else 'FAIL'}  {bar.text}: {bar.measured:.4g}")
    for note in outcome.notes:
        print(f"note: {note}")
