"""What flow routing could reach at best: central optima, as yardsticks for plans and tests.

A lane starts at a data node, visits one relay of every stage and returns to the same data node. With one data node
that is a flow in a ring cut open; with several, each data node's lanes are a commodity of their own, and a super-sink
would let microbatches come home to a stranger. Those cases are integer programs over arcs, solved by HiGHS (Huangfu
& Hall, 2018, "Parallelizing the dual revised simplex method"). The smallest possible largest lane is an integer
program over whole lanes, cheapest first: bisection finds how many of them the relaxation needs, which is already a
lower bound, and then as few more as whole numbers need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import highspy
import msgspec
import networkx as nx
import numpy as np

_networks: Any = nx  # its types are mostly unknown
_Solver: Any = highspy.Highs.__base__  # the wrapper's constructor prints a banner, before it can be silenced
MAX_LANES = 2_000_000  # that the largest-lane programs enumerate


class FlowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Peers, places and costs.

    Attributes:
        stages: peers by stage; ``stages[0]`` are the data nodes.
        slots: microbatches that a relay can hold, or that a data node wants to send.
        costs: ``costs[i][j]``: seconds of one hop from i to j; a missing pair has no link.
    """

    stages: tuple[tuple[str, ...], ...]
    slots: Mapping[str, int]
    costs: Mapping[str, Mapping[str, float]]

    def arcs(self) -> list[tuple[str, str, float]]:
        """(from, to, cost in seconds) of all links, stage by stage, the last stage's lead home."""
        ring = [*self.stages[1:], self.stages[0]]
        return [
            (i, j, self.costs[i][j])
            for here, there in zip(self.stages, ring, strict=True)
            for i in here
            for j in there
            if j in self.costs.get(i, {})
        ]

    def cost_of(self, lane: tuple[str, ...]) -> float:
        """Seconds of one lane: its data node, then its relays."""
        return sum(self.costs[i][j] for i, j in zip(lane, (*lane[1:], lane[0]), strict=True))


class Optimum(NamedTuple):
    """How many lanes there can be, and the least cost of so many, in seconds."""

    lanes: int
    cost_s: float


class LargestLane(NamedTuple):
    """Bounds in seconds on the largest lane of a maximum flow; equal unless time ran out."""

    lanes: int
    lower_s: float
    upper_s: float


def max_flow(problem: FlowProblem) -> int:
    """The largest number of lanes at once."""
    if len(problem.stages[0]) == 1:
        return int(_networks.maximum_flow_value(_graph(problem), "source", "sink"))
    return min_cost(problem).lanes


def min_cost(problem: FlowProblem) -> Optimum:
    """The least total cost of a maximum flow.

    Raises:
        ValueError: a program has no solution, which a flow always has.
    """
    if len(problem.stages[0]) == 1:
        graph = _graph(problem)
        flow = _networks.max_flow_min_cost(graph, "source", "sink")  # on whole nanoseconds: its simplex needs integers
        lanes = sum(flow["source"].values())
        cost = sum(
            count * data["seconds"]
            for i, j, data in graph.edges(data=True)
            if (count := flow[i][j]) and "seconds" in data
        )
        return Optimum(int(lanes), cost)
    lanes = round(_commodities(problem, None))
    return Optimum(lanes, _commodities(problem, lanes))


def _graph(problem: FlowProblem) -> Any:
    """The ring cut open at its only data node; every relay is an arc of its capacity."""
    (origin,) = problem.stages[0]
    graph = _networks.DiGraph()
    graph.add_edge("source", ("out", origin), capacity=problem.slots[origin], weight=0)
    graph.add_edge(("in", origin), "sink", capacity=problem.slots[origin], weight=0)
    for stage in problem.stages[1:]:
        for relay in stage:
            graph.add_edge(("in", relay), ("out", relay), capacity=problem.slots[relay], weight=0)
    for i, j, cost in problem.arcs():
        graph.add_edge(("out", i), ("in", j), weight=round(cost * 1e9), seconds=cost)
    return graph


def _commodities(problem: FlowProblem, lanes: int | None) -> float:
    """The largest flow (``lanes`` None), or the least cost of so many lanes; one commodity per data node."""
    columns = [
        (origin, i, j, cost)
        for origin in problem.stages[0]
        for i, j, cost in problem.arcs()
        if not {i, j} & (set(problem.stages[0]) - {origin})
    ]
    rows: dict[Any, dict[int, float]] = {}
    bounds: dict[Any, tuple[float, float]] = {}
    for at, (origin, i, j, _) in enumerate(columns):
        if i == origin:
            rows.setdefault("lanes", {})[at] = 1.0
            rows.setdefault(("slots", origin), {})[at] = 1.0
        else:
            rows.setdefault((origin, i), {})[at] = -1.0
        if j != origin:
            rows.setdefault((origin, j), {})[at] = 1.0
            rows.setdefault(("slots", j), {})[at] = 1.0
    for row in rows:
        bounds[row] = (0.0, float(problem.slots[row[1]])) if row[0] == "slots" else (0.0, 0.0)
    bounds["lanes"] = (0.0, math.inf) if lanes is None else (float(lanes), float(lanes))
    costs = [cost if lanes is not None else -1.0 * (i == origin) for origin, i, _, cost in columns]
    entries = [(list(entry), list(entry.values()), *bounds[row]) for row, entry in rows.items()]
    value = _solve(np.array(costs), entries)
    return -value if lanes is None else value


def _solve(costs: Any, rows: list[tuple[list[int], list[float], float, float]]) -> float:
    program = highspy.HighsLp()
    count = len(costs)
    program.num_col_, program.num_row_ = count, len(rows)
    program.col_cost_, program.col_lower_, program.col_upper_ = costs, np.zeros(count), np.full(count, math.inf)
    program.row_lower_ = np.array([low for _, _, low, _ in rows])
    program.row_upper_ = np.array([high for _, _, _, high in rows])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.cumsum([0, *(len(index) for index, *_ in rows)])
    program.a_matrix_.index_ = np.array([at for index, *_ in rows for at in index])
    program.a_matrix_.value_ = np.array([value for _, values, *_ in rows for value in values])
    program.integrality_ = [highspy.HighsVarType.kInteger] * count
    return _run(program, {})


def _run(program: Any, options: dict[str, float]) -> float:
    solver: Any = _Solver()
    solver.setOptionValue("output_flag", False)
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    fine = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kObjectiveTarget)
    if status in fine or (status == highspy.HighsModelStatus.kTimeLimit and "time_limit" in options):
        return solver.getInfo().objective_function_value
    raise ValueError(f"the program was not solved: {status}")


def min_largest_lane(problem: FlowProblem, time_limit_s: float = 60.0) -> LargestLane:
    """The least possible cost of the most expensive lane of a maximum flow.

    Args:
        time_limit_s: per integer program; ``upper_s`` is infinite when none was found.

    Raises:
        ValueError: there are no lanes, or more than :data:`MAX_LANES` different ones.
    """
    lanes = max_flow(problem)
    if not lanes:
        raise ValueError("no lane leads from a data node back to it")
    costs, members = _enumerate(problem)
    peers = [peer for stage in problem.stages for peer in stage]
    slots = np.array([problem.slots[peer] for peer in peers], dtype=float)

    def most(count: int, whole: bool) -> float:
        """How many lanes fit at once if only the cheapest ``count`` may be used."""
        program: Any = highspy.HighsLp()
        width = members.shape[1]
        program.num_col_, program.num_row_ = count, len(peers)
        program.col_cost_, program.col_lower_ = -np.ones(count), np.zeros(count)
        program.col_upper_ = np.full(count, float(lanes))
        program.row_lower_, program.row_upper_ = np.zeros(len(peers)), slots
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.arange(0, count * width + 1, width)
        program.a_matrix_.index_ = members[:count].ravel()
        program.a_matrix_.value_ = np.ones(count * width)
        if not whole:
            return -_run(program, {})
        program.integrality_ = [highspy.HighsVarType.kInteger] * count
        return -_run(program, {"time_limit": time_limit_s, "objective_target": 0.5 - lanes})

    low, high = 0, 64
    while high < len(costs) and most(high, False) < lanes - 1e-6:
        low, high = high, 2 * high
    high = min(high, len(costs))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if most(middle, False) >= lanes - 1e-6 else (middle, high)
    count = high
    while most(count, True) < lanes - 0.5:
        if count == len(costs):
            return LargestLane(lanes, float(costs[high - 1]), math.inf)
        count = min(len(costs), count + max(1, count // 100))
    return LargestLane(lanes, float(costs[high - 1]), float(costs[count - 1]))


def _enumerate(problem: FlowProblem) -> tuple[Any, Any]:
    """(costs in seconds ascending, the indices of each lane's peers) of all possible lanes."""
    number = {peer: at for at, peer in enumerate(peer for stage in problem.stages for peer in stage)}
    total = len(problem.stages[0]) * math.prod(map(len, problem.stages[1:]))
    if total > MAX_LANES:
        raise ValueError(f"{total} possible lanes are more than {MAX_LANES}")

    def hops(here: tuple[str, ...], there: tuple[str, ...]) -> Any:
        return np.array([[problem.costs.get(i, {}).get(j, math.inf) for j in there] for i in here])

    all_costs: list[Any] = []
    all_members: list[Any] = []
    for origin in problem.stages[0]:
        members, costs, here = np.array([[number[origin]]]), np.zeros(1), (origin,)
        last = np.zeros(1, dtype=int)
        for stage in problem.stages[1:]:
            costs = (costs[:, None] + hops(here, stage)[last]).ravel()
            last = np.tile(np.arange(len(stage)), len(members))
            added = np.array([number[peer] for peer in stage])[last]
            members = np.hstack([np.repeat(members, len(stage), axis=0), added[:, None]])
            here = stage
        all_costs.append(costs + hops(here, (origin,))[last, 0])
        all_members.append(members)
    costs, members = np.concatenate(all_costs), np.concatenate(all_members)
    order = np.argsort(costs, kind="stable")
    order = order[np.isfinite(costs[order])]
    return costs[order], members[order]
