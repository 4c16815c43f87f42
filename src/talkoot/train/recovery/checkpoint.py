"""Everybody goes back to the newest whole snapshot. Exact, but the steps since then are done again."""

from __future__ import annotations

from talkoot.train.recovery.ladder import Loss, Source, rungs


@rungs.register("checkpoint")
def checkpoint(loss: Loss, stage: int) -> Source | str:
    """Always serves: before the first snapshot the start is as good, being a function of the seed."""
    return Source(rung="checkpoint", how="rollback", step=loss.checkpoint or 0)
