"""Another peer still holds the stage: the others go on at once, and a newcomer copies the state, bit for bit."""

from __future__ import annotations

from talkoot.train.recovery.ladder import Loss, Source, rungs


@rungs.register("replica")
def replica(loss: Loss, stage: int) -> Source | str:
    """Serves while the stage has a survivor."""
    if not loss.stages[stage].survivors:
        return "nobody holds it any more"
    return Source(rung="replica", how="copy", step=loss.step)
