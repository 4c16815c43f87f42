"""One self-contained HTML file about a run: it opens from a disk, without a network or this program."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from talkoot.core.log import Log
from talkoot.serve.markup import Markup, tag
from talkoot.serve.render import page, static_text
from talkoot.serve.view import View
from talkoot.world.blobs import write_atomically

LOG_NAME = "log.sqlite"
REPORT_NAME = "report.html"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Check a run's whole log and write its report.

    Args:
        run_folder: the folder with ``log.sqlite``.
        out: the file to write; ``report.html`` in the run's folder when omitted.

    Returns:
        The file that was written.

    Raises:
        TalkootError: there is no log, it does not verify, or the file cannot be written.
    """
    log = Log(run_folder / LOG_NAME, readonly=True)
    try:
        view = View().advance_all(log.entries()).snapshot()
    finally:
        log.close()
    target = out if out is not None else run_folder / REPORT_NAME
    write_atomically(target, report_page(view).encode("utf-8"))
    return target


def report_page(view: dict[str, Any]) -> str:
    """The report as text. Only the scripts and styles whose hashes its policy names can ever run in it."""
    styles = [static_text("uPlot.min.css"), static_text("page.css")]
    scripts = [static_text("uPlot.iife.min.js"), static_text("page.js")]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_allow, scripts))}",
            f"style-src {' '.join(map(_allow, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    icon = base64.b64encode(static_text("icon.svg").encode()).decode()
    head = Markup(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" type="image/svg+xml" href="data:image/svg+xml;base64,{icon}">'
        + "".join(tag("style", Markup(text)) for text in styles)
    )
    foot = Markup(f"<script>{scripts[0]}</script>" + tag("script", Markup(scripts[1]), type="module"))
    note = "This file needs no network. It shows the log as it was when written."
    return page(view, head=head, foot=foot, live=False, note=note)


def _allow(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
