"""A peer of another stage keeps what it takes: the state itself, or an older one and all gradients since. Bit for bit.

``shadow``: the keeper applies each streamed gradient to its copy. ``journal``: it only writes them down, and the
newcomer applies them. Either way a step counts as prepared only when the keeper has its gradient. (States in a
neighbour's memory: Wang et al., 2023, "Gemini"; that the gradient is enough to keep them up to date, and that it is
smaller by a factor of three to six, is ours.)
"""

from __future__ import annotations

from talkoot.train.recovery.ladder import Loss, Source, rungs


def _kept(rung: str, loss: Loss, stage: int) -> Source | str:
    keepers = loss.stages[stage].keepers
    if not keepers:
        return "nobody who kept its state is left"
    return Source(rung=rung, how="kept", step=loss.step, keeper=keepers[0])


@rungs.register("shadow")
def shadow(loss: Loss, stage: int) -> Source | str:
    """Serves while a keeper of the stage lives that has all of it."""
    return _kept("shadow", loss, stage)


@rungs.register("journal")
def journal(loss: Loss, stage: int) -> Source | str:
    """As :func:`shadow`."""
    return _kept("journal", loss, stage)
