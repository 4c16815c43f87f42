"""What the loss of each single node would cost."""

from __future__ import annotations

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.plan.playback import makespan
from talkoot.plan.problem import Problem, Routes, Rules
from talkoot.plan.routes_space import Quotas
from talkoot.plan.search_routes import find_routes

QUICK = 400


class FailureCost(msgspec.Struct, frozen=True):
    """The iteration without one node, with as many microbatches.

    Attributes:
        node: which is lost.
        seconds: of the iteration over new routes among the others; None = impossible.
        ratio: of these to the seconds of the iteration with all nodes; None = impossible.
        why: why it is impossible; empty otherwise.
    """

    node: int
    seconds: float | None
    ratio: float | None
    why: str = ""


def failure_costs(
    problem: Problem,
    routes: Routes,
    rules: Rules,
    *,
    seed: int = 0,
    quotas: Quotas = "equal",
    effort: int = QUICK,
    contention: bool = False,
) -> tuple[FailureCost, ...]:
    """For each placed node what the iteration would cost without it, quickly planned anew; stage by stage.

    The others keep their stages. A node without lanes costs nothing.

    Args:
        problem: costs in seconds.
        routes: valid ones, with all nodes.
        rules: which paths are permitted.
        seed, quotas, effort, contention: as for `find_routes`.
    """
    whole_s = makespan(problem, routes, contention=contention)
    working = {node for lane in routes.lanes if lane.count for node in (lane.origin, *lane.relays)}
    costs: list[FailureCost] = []
    for stage, group in enumerate(routes.groups):
        for node in group:
            if len(group) == 1:
                costs.append(FailureCost(node, None, None, f"stage {stage} would be empty"))
                continue
            left = tuple(tuple(other for other in others if other != node) for others in routes.groups)
            if node not in working:
                costs.append(FailureCost(node, whole_s, 1.0))
                continue
            try:
                new = find_routes(
                    problem,
                    left,
                    rules,
                    routes.num_microbatches,
                    seed=seed,
                    effort=effort,
                    quotas=quotas,
                    contention=contention,
                )
            except TalkootError as refusal:
                costs.append(FailureCost(node, None, None, f"{refusal}".splitlines()[0]))
                continue
            seconds = makespan(problem, new, contention=contention)
            costs.append(FailureCost(node, seconds, seconds / whole_s))
    return tuple(costs)
