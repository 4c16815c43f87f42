"""Nobody has the state: the stage is made anew of its neighbours, and the run is from then on approximate.

Each decoder block of the lost stage becomes a mean of its neighbours' blocks, weighed by the norms of their last
gradients
before clipping: a larger one marks a neighbour that is less converged and hands over part of its work. At the ends of
    the
pipeline, where there is one neighbour, it is copied; with planner ``swapped`` that neighbour has learnt the work.
(Blagoev et al., 2025, "CheckFree" and "CheckFree+", arXiv 2506.15461; it promises no convergence, and neither do we.)
"""

from __future__ import annotations

from talkoot.train.recovery.ladder import Loss, Share, Source, rungs

SMALLEST = 1e-12  # of a norm: both may be 0


@rungs.register("blend")
def blend(loss: Loss, stage: int) -> Source | str:
    """Serves for a stage of decoder blocks alone whose neighbours both live."""
    held = loss.stages[stage]
    if held.ends:
        return "it holds the embedding or the head, which no neighbour resembles"
    beside = loss.neighbours(stage)
    lost = [s for s in beside if not loss.stages[s].survivors or loss.stages[s].approximated]
    if lost or not beside:
        return f"its neighbours {lost} are lost with it" if lost else "it has no neighbour with decoder blocks"
    if loss.exact_moments and not held.keepers:
        return "nobody keeps its moments"
    norms = [max(loss.stages[neighbour].gradient_norm, SMALLEST) for neighbour in beside]
    shares = tuple(Share(loss.stages[s].survivors[0], s, norm) for s, norm in zip(beside, norms, strict=True))
    keeper = held.keepers[0] if loss.exact_moments else None
    return Source(rung="blend", how="blend", step=loss.step, keeper=keeper, shares=shares, exact=False)
