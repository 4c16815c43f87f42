"""Baselines: valid, and as good as they are meant to be."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from talkoot.plan.baselines import bottleneck_matching, cost_aware, naive_skipping, straight
from talkoot.plan.playback import makespan, play
from talkoot.plan.problem import Problem, Rules, violations
from talkoot.plan.published import published_problem
from talkoot.plan.search import find_routes

GROUPS = ((0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19))
RULES = Rules(visits=4)


def random_problem(count: int, seed: int) -> Problem:
    chance = Random(seed)
    hop_s = tuple(tuple(0.0 if a == b else chance.uniform(0.1, 3.0) for b in range(count)) for a in range(count))
    return Problem(
        names=tuple(f"n{node}" for node in range(count)),
        hop_s=hop_s,
        busy_s=hop_s,
        share_s=hop_s,
        layer_s=(0.3,) * count,
        stage_layers=(1, 1),
        slots=(2,) * count,
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_bottleneck_matching_has_the_fastest_slowest_link(seed):
    problem = random_problem(8, seed)
    left, right = (0, 1, 2, 3), (4, 5, 6, 7)

    def slowest(pairs) -> float:
        return max(problem.hop_s[a][b] + problem.hop_s[b][a] for a, b in pairs)

    found = bottleneck_matching(problem, left, right)
    assert sorted(found) == list(left)
    assert sorted(found.values()) == list(right)
    assert slowest(found.items()) == min(slowest(zip(left, order, strict=True)) for order in permutations(right))
    assert len(bottleneck_matching(problem, left[:2], right)) == 2
    assert len(bottleneck_matching(problem, left, right[:3])) == 3


def test_straight_pipelines_visit_all_stages_one_forward_one_backward():
    problem = published_problem()
    routes = straight(problem, GROUPS, 27)
    assert violations(problem, routes, Rules(visits=6)) == []
    assert sorted(lane.count for lane in routes.lanes) == [3] * 9
    assert len({lane.origin for lane in routes.lanes}) == 3
    assert len({lane.relays for lane in routes.lanes}) == 3  # a pipeline's lanes share their nodes
    held, most = {}, {}
    for span in sorted(play(problem, routes).spans, key=lambda span: span.start_s):
        held[span.node] = held.get(span.node, 0) + {"forward": 1, "loss": 0, "backward": -1}[span.phase]
        most[span.node] = max(most.get(span.node, 0), held[span.node])
    assert max(most.values()) <= 3


def test_pipelines_of_unlike_groups_are_as_many_as_the_smallest_group():
    problem = published_problem()
    groups = ((0, 3), (15, 8, 14), (1,), (16, 12, 13), (5, 18, 7), (17, 2, 19))
    routes = straight(problem, groups, 7)
    assert violations(problem, routes, Rules(visits=6)) == []
    assert [lane.count for lane in routes.lanes] == [3, 2, 2]


def test_naive_skipping_is_random_balanced_and_in_order():
    problem = published_problem()
    one, same, other = (naive_skipping(problem, GROUPS, RULES, 30, seed=seed) for seed in (0, 0, 1))
    assert one == same != other
    assert violations(problem, one, Rules(visits=4, max_swap=0)) == []


def test_each_step_from_full_pipelines_to_our_routes_pays():
    problem = published_problem(unit_error=False)
    full = makespan(problem, straight(problem, GROUPS, 30))
    naive = [makespan(problem, naive_skipping(problem, GROUPS, RULES, 30, seed=seed)) for seed in range(5)]
    aware = makespan(problem, cost_aware(problem, GROUPS, RULES, 30, seed=0))
    ours = makespan(problem, find_routes(problem, GROUPS, RULES, 30, seed=0, effort=1000))
    assert full > sum(naive) / 5 > aware > ours
    assert ours <= 0.45 * full
    assert ours <= 0.70 * sum(naive) / 5
