"""Bounds: below every iteration that can be played, equal to the full program, and as published."""

from __future__ import annotations

import random
from itertools import pairwise, permutations, product

import highspy
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from random_routes import cases, random_problem
from talkoot.plan import bounds
from talkoot.plan.bounds import lower_bound, skipping_cut
from talkoot.plan.playback import makespan
from talkoot.plan.problem import Lane, Problem, Routes, Rules, path_violations


def all_paths(groups, rules: Rules) -> list[tuple[int, ...]]:
    """Every permitted path, by trying all."""
    orders = permutations(range(1, len(groups)), rules.visits - 1)
    permitted = [order for order in orders if not path_violations(list(order), rules)]
    return [path for order in permitted for path in product(groups[0], *(groups[stage] for stage in order))]


def whole_program(problem: Problem, groups, rules: Rules, total: int, least: int, most: int) -> float:
    """The linear program with all paths listed, written down once more and solved at once."""
    stage_of = {node: stage for stage, group in enumerate(groups) for node in group}
    paths = all_paths(groups, rules)
    stages, placed = len(groups), sorted(stage_of)
    matrix: list[list[float]] = []
    limits: list[tuple[float, float]] = []

    def held(path: tuple[int, ...], node: int) -> float:
        if node not in path:
            return 0.0
        rest = path[path.index(node) :]
        links = sum(problem.hop_s[a][b] + problem.hop_s[b][a] for a, b in pairwise((*rest, path[0])))
        return links + sum(2.5 * problem.forward_s(n, stage_of[n]) for n in rest) + problem.loss_s(path[0])

    for node in placed:
        once = 2.5 * problem.forward_s(node, stage_of[node])
        work = [once * (node in path) + problem.loss_s(node) * (path[0] == node) for path in paths]
        matrix.append([-1.0, *work])
    for origin in groups[0]:
        matrix.append([-problem.slots[origin], *(held(path, origin) for path in paths)])
    for group in groups[1:]:
        slots = sum(problem.slots[node] for node in group)
        matrix.append([-slots, *(sum(held(path, node) for node in group) for path in paths)])
    limits += [(-np.inf, 0.0)] * len(matrix)
    visits = total * (rules.visits - 1) / (stages - 1)
    for group in groups[1:]:
        matrix.append([0.0, *(float(any(node in path for node in group)) for path in paths)])
        limits.append((np.floor(visits), np.ceil(visits)))
    for origin in groups[0]:
        matrix.append([0.0, *(float(path[0] == origin) for path in paths)])
        limits.append((least, most))
    matrix.append([0.0, *[1.0] * len(paths)])
    limits.append((total, total))
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    for index in range(len(paths) + 1):
        solver.addCol(float(index == 0), 0.0, highspy.kHighsInf, 0, np.array([], dtype=np.int32), np.array([]))
    for row, (low, high) in zip(matrix, limits, strict=True):
        solver.addRow(low, high, len(row), np.arange(len(row), dtype=np.int32), np.array(row, dtype=float))
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        pytest.skip("no mixture of these paths is even")
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return solver.getInfo().objective_function_value


def linear_bound(problem: Problem, groups, rules: Rules, total: int, quotas: bounds.Quotas) -> float:
    """The bound without waves: a microbatch in each of very many slots needs no second wave."""
    network = bounds._Network(problem, groups, rules)
    return bounds._Program(network, total, quotas).solve().seconds


@pytest.mark.parametrize("seed", range(12))
def test_generated_columns_reach_the_optimum_over_all_paths(seed: int) -> None:
    chance = random.Random(seed)
    stages = chance.randint(3, 6)
    problem, groups = random_problem(chance, [chance.randint(1, 3) for _ in range(stages)])
    rules = Rules(visits=chance.randint(2, stages), max_advance=chance.randint(2, 4), max_swap=chance.randint(0, 2))
    origins, total = len(groups[0]), chance.randint(1, 20)
    if not all_paths(groups, rules):
        pytest.skip("nothing is permitted")
    kinds: list[tuple[bounds.Quotas, int, int]] = [
        ("equal", total // origins, -(-total // origins)),
        ("free", 0, total),
    ]
    for quotas, least, most in kinds:
        expected = whole_program(problem, groups, rules, total, least, most)
        assert linear_bound(problem, groups, rules, total, quotas) == pytest.approx(expected, rel=3e-6)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_iteration_is_shorter_than_its_bound(case) -> None:
    problem, routes, rules = case
    total = routes.num_microbatches
    visits = [0] * problem.num_stages
    by_origin = dict.fromkeys(routes.groups[0], 0)
    stage_of = routes.stage_of()
    for lane in routes.lanes:
        by_origin[lane.origin] += lane.count
        for node in lane.relays:
            visits[stage_of[node]] += lane.count
    if not total or max(visits[1:]) - min(visits[1:]) > 1:
        return
    kinds: list[bounds.Quotas] = ["free"]
    if max(by_origin.values()) - min(by_origin.values()) <= 1:
        kinds.append("equal")
    for quotas in kinds:
        bound = lower_bound(problem, routes.groups, rules, total, quotas=quotas)
        for contention in (False, True):
            assert makespan(problem, routes, contention=contention) >= bound.seconds * (1 - 1e-9)


def full_routes(chance: random.Random, problem: Problem, groups) -> Routes:
    """A full pipeline: as many lanes as fit, each origin's with as many microbatches."""
    free = list(problem.slots)
    lanes: list[Lane] = []
    for _ in range(3):
        for origin in groups[0]:
            path = [origin, *(max(group, key=lambda node: (free[node], chance.random())) for group in groups[1:])]
            if all(free[node] for node in path):
                for node in path:
                    free[node] -= 1
                lanes.append(Lane(origin, tuple(path[1:]), chance.randint(1, 3)))
    return Routes(groups=groups, lanes=tuple(lanes))


@pytest.mark.parametrize("seed", range(25))
def test_no_full_pipeline_is_shorter_than_its_bound(seed: int) -> None:
    chance = random.Random(seed)
    problem, groups = random_problem(chance, [chance.randint(1, 3) for _ in range(chance.randint(2, 6))])
    routes = full_routes(chance, problem, groups)
    rules = Rules(visits=problem.num_stages, max_swap=0)
    bound = lower_bound(problem, groups, rules, routes.num_microbatches, quotas="free")
    assert bound.seconds > 0
    assert makespan(problem, routes) >= bound.seconds * (1 - 1e-9)


def test_a_lone_lane_meets_its_bound() -> None:
    chance = random.Random(3)
    problem, groups = random_problem(chance, [1, 1, 1])
    routes = Routes(groups=groups, lanes=(Lane(groups[0][0], (groups[1][0], groups[2][0]), 4),))
    problem = msgspec.structs.replace(problem, slots=(1, 1, 1))
    bound = lower_bound(problem, groups, Rules(visits=3, max_swap=0), 4)
    assert bound.seconds == pytest.approx(makespan(problem, routes))
    assert "4 microbatches in 1 slots" in bound.binding


def test_a_slow_node_that_everybody_needs_binds_by_its_work() -> None:
    chance = random.Random(3)
    problem, groups = random_problem(chance, [2, 1, 3])
    slow = groups[1][0]
    layers = tuple(9.0 if node == slow else 0.1 for node in range(6))
    problem = msgspec.structs.replace(problem, layer_s=layers, slots=(9,) * 6, stage_layers=(1, 1, 1))
    bound = lower_bound(problem, groups, Rules(visits=3), 12)
    assert bound.seconds == pytest.approx(12 * 2.5 * 9.0)
    assert bound.binding == f"work of node-{slow}"


def test_deep_models_get_a_bound_too_and_never_a_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    problem, groups = random_problem(chance, [3, 2, 2, 2, 2, 2])
    rules = Rules(visits=4, max_swap=1)
    exact = [linear_bound(problem, groups, rules, 30, quotas) for quotas in ("equal", "free")]
    monkeypatch.setattr(bounds, "MOST_STATES", 0)
    rough = [linear_bound(problem, groups, rules, 30, quotas) for quotas in ("equal", "free")]
    assert 0 < rough[0] <= exact[0] * (1 + 1e-9)
    assert 0 < rough[1] <= exact[1] * (1 + 1e-9)


def test_an_impossible_skip_ratio_is_refused() -> None:
    problem, groups = random_problem(random.Random(1), [1, 1, 1])
    with pytest.raises(ValueError, match="no path of 4 stages out of 3"):
        lower_bound(problem, groups, Rules(visits=4), 6)
    assert lower_bound(problem, groups, Rules(visits=2), 0).seconds == 0.0


@pytest.mark.parametrize(
    ("stages", "visits", "compute", "latency"), [(6, 4, 0.40, 0.60), (4, 3, 0.333, 0.50), (8, 6, 0.286, 0.464)]
)
def test_skipping_saves_at_best_what_the_sizes_say(stages: int, visits: int, compute: float, latency: float) -> None:
    assert skipping_cut(stages, visits) == pytest.approx((compute, latency), abs=5e-4)
    assert skipping_cut(stages, stages) == (0, 0)
