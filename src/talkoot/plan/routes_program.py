"""The best lanes where nobody waits for anybody, and a bound by them: an integer program over paths.

A column is a path with the number of microbatches that a lane carries over it; its value is how many lanes do so. The
rows are what any routes obey: slots of each node, even skipping, quotas, and all microbatches. Only columns whose lane
is back within T seconds take part, and bisection finds the smallest T for which lanes exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TypeAlias

import highspy
import numpy as np

from talkoot.plan.paths import trips
from talkoot.plan.problem import Lane
from talkoot.plan.routes_space import Lanes, Space

# Paths per origin; branch-and-bound nodes per program; how close the smallest T is found, relative to it.
PATHS, NODES, CLOSE = 400, 200, 0.01
# More paths of an origin, or more columns of a program, than this are not looked at for a bound.
EVERY, MOST_COLUMNS = 4000, 8000
# Costs grow with this power of a lane's seconds, so that few lanes are among the slowest.
POWER = 4


Paths: TypeAlias = Mapping[tuple[int, tuple[int, ...]], float]


class QuietSolver(highspy.Highs):
    """HiGHS without its callbacks, whose start prints a banner to standard output, and without parallel search.

    Its number of threads stays as it is: the first solver in a process decides that, and later ones may not differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("parallel", "off")

    def enableCallbacks(self) -> None:
        """Do not."""


def cheapest_lanes(space: Space, start: Lanes, *, deadline_s: float = float("inf")) -> list[Lanes]:
    """Lanes whose slowest is as fast as the program finds, waiting left out, and what it met on its way there.

    The fastest come first, ``start`` last. Where lanes wait for each other, a slower answer may be the better one.

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
    met = [start]
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
            met.insert(0, found)
            high = max(lane.count * paths[lane.origin, lane.relays] for lane in found)
        first = False
    return met


def _least_s(space: Space, paths: Paths) -> float:
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


def _solve(space: Space, paths: Paths, start: Lanes, most_s: float, deadline_s: float) -> Lanes | None:
    """Lanes that are all back within ``most_s``, or None if there are none, or none were found."""
    counts, shares = dict[int, Iterable[int]](), dict[int, tuple[int, int]]()
    for origin in space.origins:
        own = [lane.count for lane in start if lane.origin == origin]
        equal = space.quotas == "equal"
        counts[origin] = sorted(set(own)) if equal else range(1, space.num_microbatches + 1)
        shares[origin] = (sum(own), sum(own)) if equal else (0, space.num_microbatches)
    columns = _columns(paths, counts, most_s)
    costs = [(lane.count * paths[lane.origin, lane.relays] / most_s) ** POWER for lane in columns]
    return _run(space, columns, costs, shares, deadline_s)[1]


def lanes_bound_s(space: Space, low_s: float, high_s: float) -> float:
    """A bound, at least ``low_s``, of iterations over lanes: below it no set of lanes is back in time.

    Unlike the bound of a linear program it heeds that lanes are whole, that each keeps to one path, and that slots are
    nodes' own, not their stage's. Found by bisection up to ``high_s``, the seconds of some valid iteration. Where
    there are too many paths to list, it is ``low_s``.
    """
    paths: dict[tuple[int, tuple[int, ...]], float] = {}
    for origin in space.origins:
        every: dict[frozenset[int], tuple[int, ...]] = {}
        for number, trip in enumerate(trips(space, origin, most=EVERY)):
            if number == EVERY - 1:
                return low_s
            every.setdefault(frozenset(trip.relays), trip.relays)
        paths.update({(origin, relays): space.rtt_s(origin, relays) for relays in every.values()})
    total, origins = space.num_microbatches, len(space.origins)
    share = (total // origins, -(-total // origins)) if space.quotas == "equal" else (0, total)
    shares = dict.fromkeys(space.origins, share)
    step = CLOSE
    while high_s > low_s * (1 + CLOSE):
        step *= 2  # upwards from the low end, because the columns multiply with the seconds
        middle_s = min(low_s * (1 + step), (low_s + high_s) / 2)
        columns = _columns(paths, dict.fromkeys(space.origins, range(1, share[1] + 1)), middle_s)
        if len(columns) > MOST_COLUMNS:
            break
        proven, found = _run(space, columns, [0.0] * len(columns), shares, float("inf"))
        if found is not None:
            high_s = middle_s
        elif proven:
            low_s = middle_s
        else:
            break
    return low_s


def _columns(paths: Paths, counts: Mapping[int, Iterable[int]], most_s: float) -> Lanes:
    return [
        Lane(origin, relays, count)
        for (origin, relays), seconds in paths.items()
        for count in counts[origin]
        if count * seconds <= most_s
    ]


def _run(
    space: Space, columns: Lanes, costs: list[float], shares: Mapping[int, tuple[int, int]], deadline_s: float
) -> tuple[bool, Lanes | None]:
    """(whether the answer is proven, lanes or None).

    Rows: slots of the placed nodes, visits of the other stages, quotas of the origins, all microbatches.
    """
    solver, slots = QuietSolver(), space.problem.slots
    solver.setOptionValue("mip_max_nodes", NODES)
    solver.setOptionValue("mip_rel_gap", 0.3)
    if deadline_s < float("inf"):
        solver.setOptionValue("time_limit", max(deadline_s - monotonic(), 0.1))
    total, stages = space.num_microbatches, len(space.groups) - 1
    visits = total * (space.rules.visits - 1)
    even = (visits // max(stages, 1), -(-visits // max(stages, 1)))
    limits = [(0, slots[node]) for node in space.stage_of] + [even] * stages
    for low, high in [*limits, *(shares[origin] for origin in space.origins), (total, total)]:
        solver.addRow(float(low), float(high), 0, np.array([], dtype=np.int32), np.array([]))
    rank = {node: row for row, node in enumerate(space.stage_of)}
    first_stage, first_origin = len(rank), len(rank) + stages
    for index, lane in enumerate(columns):
        rows: dict[int, int] = {rank[node]: 1 for node in (lane.origin, *lane.relays)}
        rows |= {first_stage + space.stage_of[node] - 1: lane.count for node in lane.relays}
        rows[first_origin + space.origins.index(lane.origin)] = lane.count
        rows[first_origin + len(space.origins)] = lane.count
        most = min(slots[node] for node in (lane.origin, *lane.relays))
        values = np.array(list(rows.values()), dtype=np.float64)
        solver.addCol(costs[index], 0.0, float(most), len(rows), np.array(list(rows), dtype=np.int32), values)
        solver.changeColIntegrality(index, highspy.HighsVarType.kInteger)
    if solver.run() == highspy.HighsStatus.kError:
        raise RuntimeError(f"HiGHS refused the program: {solver.getModelStatus()}")
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible, None
    values = solver.getSolution().col_value
    return True, [lane for lane, value in zip(columns, values, strict=True) for _ in range(round(value))]
