"""``talkoot status`` of a run that makes experts: who does what, and how far each job is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from talkoot.blend.train.records import BlendState
from talkoot.cli.output import print_json, print_table, run_head
from talkoot.core.fold import State
from talkoot.serve.words import decimals, duration


def show_blend(state: State, blend: BlendState, extra: Mapping[str, Any], *, as_json: bool) -> None:
    """Print it.

    Args:
        state, blend: folded from the log, and its chapter ``blend``.
        extra: further facts of the run (``running``).
    """
    view = {
        **run_head(state, extra),
        "peers": sorted(blend.present),
        "jobs_done": sum(job.done for job in blend.jobs.values()),
        "planned": msgspec.to_builtins(blend.planned),
        "jobs": {name: msgspec.to_builtins(job, enc_hook=dict) for name, job in blend.jobs.items()},
    }
    if as_json:
        print_json(view)
        return
    shown = ("world", "receipts", "log_hash", "ended", "sessions", "running", "jobs_done")
    rows = [(key, view.get(key) or "-") for key in shown]
    planned = blend.planned
    allocation = f"{planned.allocation}, {planned.flops:.3g} operations" if planned else "not yet"
    print_table([*rows, ("peers here", ", ".join(view["peers"]) or "none"), ("experts planned", allocation)])
    if blend.jobs:
        print()
        print_table(
            [
                (
                    name,
                    "done" if job.done else "under way",
                    job.steps or "-",
                    "-" if job.loss is None else decimals(job.loss, 4),
                    decimals(job.losses["validation"], 4) if "validation" in job.losses else "-",
                    duration(job.busy_s),
                    job.peer or "-",
                )
                for name, job in blend.jobs.items()
            ],
            ("job", "", "steps", "loss", "held-out", "busy", "peer"),
        )
