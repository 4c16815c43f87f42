"""Straight pipelines in which every second microbatch swaps the first two relay stages, and the last two.

So the second relay stage learns the first one's job, and the last but one the last one's: an edge that is lost can
then be a copy of its only neighbour (CheckFree+; Blagoev et al., 2025, arXiv 2506.15461). A step takes as long as in
order, but is worth less: see ``talkoot bench recovery``. Evaluations go in order.
"""

from __future__ import annotations

import msgspec

from talkoot.plan.steps import StepPlan, View, planners
from talkoot.plan.straight import straight

LEAST_STAGES = 5  # the origins' and four of relays: both pairs must be there, and be different ones


@planners.register("swapped")
def swapped(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`.

    Peers are shared out as by ``straight``; microbatches of odd number swap.

    Raises:
        ValueError: no ring, or one of less than four relay stages.
    """
    if not view.ring or view.num_stages < LEAST_STAGES:
        raise ValueError("swapped needs a ring with at least four relay stages")
    plan = straight(view)
    order = list(range(view.num_stages))
    order[1:3], order[-2:] = order[2:0:-1], order[:-3:-1]
    paths = tuple(
        msgspec.structs.replace(path, hops=tuple(path.hops[stage] for stage in order)) if path.microbatch % 2 else path
        for path in plan.paths
    )
    return msgspec.structs.replace(plan, paths=paths)
