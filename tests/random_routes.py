"""Random problems with random valid routes, for the properties of whatever plays or bounds them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from talkoot.plan.problem import Lane, Matrix, Problem, Routes, Rules, path_violations


def random_matrix(chance: random.Random, nodes: int, low: float, high: float) -> Matrix:
    """Directed figures, 0 on the diagonal."""
    return tuple(tuple(0.0 if a == b else chance.uniform(low, high) for b in range(nodes)) for a in range(nodes))


def random_problem(chance: random.Random, sizes: list[int]) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
    """Unlike nodes, links, stages and slots; and a placement, in shuffled order."""
    nodes = sum(sizes)
    order = chance.sample(range(nodes), nodes)
    groups = tuple(tuple(order[sum(sizes[:k]) : sum(sizes[: k + 1])]) for k in range(len(sizes)))
    problem = Problem(
        names=tuple(f"node-{index}" for index in range(nodes)),
        hop_s=random_matrix(chance, nodes, 0.3, 3.0),
        busy_s=random_matrix(chance, nodes, 0.0, 0.3),
        share_s=random_matrix(chance, nodes, 1.0, 9.0),
        layer_s=tuple(chance.choice([0.05, 0.1, 0.4]) for _ in range(nodes)),
        stage_layers=tuple(chance.randint(1, 5) for _ in sizes),
        slots=tuple(chance.randint(1, 4) for _ in range(nodes)),
    )
    return problem, groups


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Routes, Rules]:
    """A problem, and routes that break nothing but, perhaps, even skipping."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    stages = draw(st.integers(2, 6))
    rules = Rules(visits=draw(st.integers(2, stages)))
    problem, groups = random_problem(chance, [draw(st.integers(1, 3)) for _ in range(stages)])
    free = list(problem.slots)
    lanes: list[Lane] = []
    for _ in range(draw(st.integers(1, 12))):
        order = chance.sample(range(1, stages), rules.visits - 1)
        if path_violations(order, rules):
            order = sorted(order)
        if path_violations(order, rules):
            continue
        path = [chance.choice(groups[stage]) for stage in (0, *order)]
        if all(free[node] for node in path):
            for node in path:
                free[node] -= 1
            lanes.append(Lane(path[0], tuple(path[1:]), draw(st.integers(0, 3))))
    return problem, Routes(groups=groups, lanes=tuple(lanes)), rules
