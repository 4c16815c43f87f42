"""``talkoot report``: one self-contained page."""

from __future__ import annotations

from pathlib import Path

from talkoot.cli.output import print_json, say
from talkoot.serve.report import write_report


def run(run: Path, *, out: Path | None, as_json: bool) -> None:
    """Write the report and say where it lies."""
    path = write_report(run, out)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        say(f"report: {path}")
