"""A whole plan in one call: placement, routes, the played iteration, its bound, and what a failure would cost."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import cast

import msgspec

from talkoot.plan.bounds import lower_bound
from talkoot.plan.placement import check_placement, place
from talkoot.plan.playback import makespan
from talkoot.plan.problem import Problem, Routes, Rules, violations
from talkoot.plan.routes_program import lanes_bound_s
from talkoot.plan.routes_space import Quotas, Space
from talkoot.plan.search_failures import FailureCost, failure_costs
from talkoot.plan.search_placement import all_reduce_s, improve_placement
from talkoot.plan.search_routes import EFFORT, find_routes

__all__ = ["FailureCost", "Plan", "failure_costs", "find_routes", "improve_placement", "judged", "make_plan"]

# Shares of the time budget that the genetic placement and its refinement may take.
PLACE_SHARE, IMPROVE_SHARE = 0.2, 0.4


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Routes, and how good they are.

    Attributes:
        routes: groups and lanes.
        seconds: of the played iteration, without the all-reduce inside the stages.
        bound_s: no routes over these groups take less.
        fluid_bound_s: nor does any execution whose microbatches change paths at will; at most ``bound_s``.
        binding: what it is that takes this long, in words.
        all_reduce_s: of the most burdened node, once an iteration, after these seconds; see `all_reduce_s`.
        violations: hard constraints that are broken; empty.
    """

    routes: Routes
    seconds: float
    bound_s: float
    fluid_bound_s: float
    binding: str
    all_reduce_s: float
    violations: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How much longer than the bound, relative to it."""
        return self.seconds / self.bound_s - 1 if self.bound_s > 0 else 0.0


def make_plan(
    problem: Problem,
    sizes_or_groups: Sequence[int] | Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    seed: int,
    quotas: Quotas = "equal",
    budget_s: float | None = None,
    effort: int = EFFORT,
    contention: bool = False,
    all_reduce_every: float = 1.0,
) -> Plan:
    """Place nodes unless groups are given, and find routes.

    Args:
        problem: costs in seconds.
        sizes_or_groups: nodes per stage, to be placed; or the nodes of each stage, which are left there.
        rules: which paths are permitted.
        num_microbatches: of one iteration, over all origins.
        seed: the same plan for the same seed, unless ``budget_s`` cuts the search short.
        quotas: see `find_routes`.
        budget_s: seconds of wall time for all of it (the bound, a second or so, excepted).
        effort: iterations predicted for the placement, and half of those played for the routes.
        contention: network cards send and receive one transfer at a time.
        all_reduce_every: see `improve_placement`.

    Raises:
        TalkootError: a constraint that cannot be met.
    """
    began_s = monotonic()
    if all(isinstance(size, int) for size in sizes_or_groups):
        sizes = cast("Sequence[int]", sizes_or_groups)
        groups = place(problem, sizes, seed=seed, budget_s=None if budget_s is None else budget_s * PLACE_SHARE)
        groups = improve_placement(
            problem,
            groups,
            rules,
            num_microbatches,
            seed=seed,
            quotas=quotas,
            effort=effort,
            budget_s=None if budget_s is None else budget_s * IMPROVE_SHARE,
            all_reduce_every=all_reduce_every,
        )
    else:
        groups = check_placement(problem, cast("Sequence[Sequence[int]]", sizes_or_groups))
    routes = find_routes(
        problem,
        groups,
        rules,
        num_microbatches,
        seed=seed,
        effort=2 * effort,
        budget_s=None if budget_s is None else max(budget_s - (monotonic() - began_s), 0.0),
        quotas=quotas,
        contention=contention,
    )
    return judged(problem, routes, rules, quotas=quotas, contention=contention)


def judged(problem: Problem, routes: Routes, rules: Rules, *, quotas: Quotas, contention: bool = False) -> Plan:
    """Routes, whoever made them, played, checked, and held against their bound."""
    seconds = makespan(problem, routes, contention=contention)
    total = routes.num_microbatches
    bound = lower_bound(problem, routes.groups, rules, total, quotas=quotas)
    whole_s = lanes_bound_s(Space(problem, routes.groups, rules, total, quotas), bound.seconds, seconds)
    return Plan(
        routes=routes,
        seconds=seconds,
        bound_s=whole_s,
        fluid_bound_s=bound.seconds,
        binding=bound.binding if whole_s == bound.seconds else "paths and slots of whole lanes that skip evenly",
        all_reduce_s=all_reduce_s(problem, routes.groups),
        violations=tuple(violations(problem, routes, rules)),
    )
