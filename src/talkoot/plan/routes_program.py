"""The best lanes where nobody waits for anybody: an integer program over cheap paths.

A column is a path with the number of microbatches that a lane carries over it; its value is how many lanes do so. The
rows are what any routes obey: slots of each node, even skipping, quotas, and all microbatches. Only columns whose lane
is back within T seconds take part, and bisection finds the smallest T for which lanes exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

import highspy
import numpy as np

from talkoot.plan.paths import trips
from talkoot.plan.problem import Lane
from talkoot.plan.routes_space import Lanes, Space

# Paths per origin; branch-and-bound nodes per program; how close the smallest T is found, relative to it.
PATHS, NODES, CLOSE = 400, 200, 0.01
# Costs grow with this power of a lane's seconds, so that few lanes are among the slowest.
POWER = 4


class QuietSolver(highspy.Highs):
    """HiGHS on one thread and without its callbacks, whose start prints a banner to standard output."""

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)

    def enableCallbacks(self) -> None:
        """Do not."""


def cheapest_lanes(space: Space, start: Lanes, *, deadline_s: float = float("inf")) -> Lanes:
    """Lanes whose slowest is as fast as the program finds, waiting left out; never slower than ``start``.

    With equal quotas every origin keeps the counts of its lanes in ``start``.

    Args:
        space: the problem.
        start: valid lanes; their paths are columns too, so that the program always has an answer.
        deadline_s: monotonic time at which the search ends early.
    """
    paths = {(lane.origin, lane.relays): 0.0 for lane in start}
    for origin in space.origins:
        paths.update(((origin, path), 0.0) for path in _spread_paths(space, origin))
    for origin, relays in paths:
        paths[origin, relays] = space.rtt_s(origin, relays)
    best = start
    high = max(lane.count * paths[lane.origin, lane.relays] for lane in start)
    low = max(min(s for (o, _), s in paths.items() if o == lane.origin) for lane in start)
    low = low if space.quotas == "equal" else 0.0
    low = max(low, _least_s(space, paths))
    first = True
    while high > low * (1 + CLOSE) and monotonic() < deadline_s:
        middle = low * (1 + CLOSE / 2) if first else (low + high) / 2
        found = _solve(space, paths, start, middle, deadline_s)
        if found is None:
            low = middle
        else:
            best = found
            high = max(lane.count * paths[lane.origin, lane.relays] for lane in found)
        first = False
    return best


def _least_s(space: Space, paths: Mapping[tuple[int, tuple[int, ...]], float]) -> float:
    """Below this, even the cheapest paths of all slots carry too few microbatches."""
    trip = {origin: min(s for (o, _), s in paths.items() if o == origin) for origin in space.origins}
    slots, total = space.problem.slots, space.num_microbatches
    ends = sorted(lap * trip[o] for o in space.origins for _ in range(slots[o]) for lap in range(1, total + 1))
    shares = [total // len(trip), -(-total // len(trip))]
    if space.quotas == "equal":
        return max((-(-shares[0] // slots[origin]) * trip[origin] for origin in trip), default=0.0)
    return ends[total - 1]


def _spread_paths(space: Space, origin: int) -> list[tuple[int, ...]]:
    """The cheapest paths of an origin, and for each relay the cheapest that visit it, each set of nodes once."""
    kept: dict[frozenset[int], tuple[int, ...]] = {}
    for trip in trips(space, origin, most=PATHS):
        kept.setdefault(frozenset(trip.relays), trip.relays)
    for group in space.groups[1:]:
        for node in group:
            others = [other for other in group if other != node]
            for trip in trips(space, origin, closed=others, most=20):
                kept.setdefault(frozenset(trip.relays), trip.relays)
    return list(kept.values())


def _solve(
    space: Space, paths: Mapping[tuple[int, tuple[int, ...]], float], start: Lanes, most_s: float, deadline_s: float
) -> Lanes | None:
    """Lanes that are all back within ``most_s``, or None if there are none, or none were found."""
    counts = {
        origin: sorted({lane.count for lane in start if lane.origin == origin})
        if space.quotas == "equal"
        else list(range(1, space.num_microbatches + 1))
        for origin in space.origins
    }
    columns = [
        Lane(origin, relays, count)
        for (origin, relays), seconds in paths.items()
        for count in counts[origin]
        if count * seconds <= most_s
    ]
    if not columns:
        return None
    solver, slots = QuietSolver(), space.problem.slots
    solver.setOptionValue("mip_max_nodes", NODES)
    solver.setOptionValue("mip_rel_gap", 0.3)
    solver.setOptionValue("time_limit", max(min(deadline_s - monotonic(), 60.0), 0.1))
    for low, high in _limits(space, start):
        solver.addRow(low, high, 0, np.array([], dtype=np.int32), np.array([]))
    rank = {node: row for row, node in enumerate(space.stage_of)}
    num_nodes, num_stages = len(rank), len(space.groups)
    for index, lane in enumerate(columns):
        rows: dict[int, float] = {rank[node]: 1.0 for node in (lane.origin, *lane.relays)}
        rows |= {num_nodes + space.stage_of[node] - 1: lane.count for node in lane.relays}
        rows[num_nodes + num_stages - 1 + space.origins.index(lane.origin)] = lane.count
        rows[num_nodes + num_stages - 1 + len(space.origins)] = lane.count
        cost = (lane.count * paths[lane.origin, lane.relays] / most_s) ** POWER
        most = min(slots[node] for node in (lane.origin, *lane.relays))
        values = np.array(list(rows.values()), dtype=np.float64)
        solver.addCol(cost, 0.0, float(most), len(rows), np.array(list(rows), dtype=np.int32), values)
        solver.changeColIntegrality(index, highspy.HighsVarType.kInteger)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = solver.getSolution().col_value
    return [lane for lane, value in zip(columns, values, strict=True) for _ in range(round(value))]


def _limits(space: Space, start: Lanes) -> list[tuple[float, float]]:
    """Of the rows: slots of the placed nodes, visits of the stages, quotas of the origins, all microbatches."""
    total, stages = space.num_microbatches, len(space.groups) - 1
    visits = total * (space.rules.visits - 1)
    even = (visits // max(stages, 1), -(-visits // max(stages, 1)))
    limits = [(0, space.problem.slots[node]) for node in space.stage_of] + [even] * stages
    for origin in space.origins:
        share = sum(lane.count for lane in start if lane.origin == origin)
        limits.append((share, share) if space.quotas == "equal" else (0, total))
    return [(float(low), float(high)) for low, high in [*limits, (total, total)]]
