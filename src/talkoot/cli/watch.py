"""``talkoot watch``: the live page."""

from __future__ import annotations

from pathlib import Path

from talkoot.cli.output import say
from talkoot.serve.dashboard import serve_dashboard


def run(run: Path, *, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted."""
    serve_dashboard(run, host=host, port=port, token=token, ready=lambda url: say(f"watching {run} at {url}"))
