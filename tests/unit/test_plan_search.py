"""Routes: every plan is valid, whatever the sizes; the same seed gives the same plan; no plan undercuts its bound."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.plan.baselines import naive_skipping
from talkoot.plan.bounds import lower_bound
from talkoot.plan.conflicts import search_conflicts
from talkoot.plan.paths import trips
from talkoot.plan.playback import makespan
from talkoot.plan.problem import Lane, Problem, Routes, Rules, path_violations, violations
from talkoot.plan.published import published_problem
from talkoot.plan.routes_anneal import played_score
from talkoot.plan.routes_moves import MOVES
from talkoot.plan.routes_space import Space
from talkoot.plan.search import failure_costs, find_routes, improve_placement, judged, make_plan
from talkoot.plan.search_placement import all_reduce_s

GROUPS = ((0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19))
RULES = Rules(visits=4)


def problem_of(sizes: list[int], slots: list[int], seed: int) -> tuple[Problem, tuple[tuple[int, ...], ...]]:
    """A problem with random links and speeds, and its groups: nodes in order."""
    chance, count = Random(seed), sum(sizes)
    hop_s = tuple(tuple(0.0 if a == b else chance.uniform(0.1, 3.0) for b in range(count)) for a in range(count))
    problem = Problem(
        names=tuple(f"n{node}" for node in range(count)),
        hop_s=hop_s,
        busy_s=tuple(tuple(seconds / 2 for seconds in row) for row in hop_s),
        share_s=tuple(tuple(10 * seconds for seconds in row) for row in hop_s),
        layer_s=tuple(chance.choice([0.2, 0.4, 1.1]) for _ in range(count)),
        stage_layers=tuple(chance.choice([1, 2]) for _ in sizes),
        slots=tuple(slots[node % len(slots)] for node in range(count)),
    )
    ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return problem, tuple(tuple(range(a, b)) for a, b in pairwise(ends))


@st.composite
def cases(draw: st.DrawFn):
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=8))
    slots = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    visits = draw(st.integers(2, len(sizes)))
    microbatches = draw(st.integers(1, 20))
    return sizes, slots, visits, microbatches, draw(st.sampled_from(["equal", "free"])), draw(st.integers(0, 99))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_plan_is_valid_and_no_shorter_than_its_bound(case):
    sizes, slots, visits, microbatches, quotas, seed = case
    problem, groups = problem_of(sizes, slots, seed)
    rules = Rules(visits=visits)
    try:
        routes = find_routes(problem, groups, rules, microbatches, seed=seed, effort=60, quotas=quotas)
    except TalkootError:
        return  # what must not be refused is listed below
    assert violations(problem, routes, rules) == []
    assert routes.num_microbatches == microbatches
    assert all(lane.count > 0 for lane in routes.lanes)
    sent = [sum(lane.count for lane in routes.lanes if lane.origin == origin) for origin in groups[0]]
    assert quotas == "free" or max(sent) - min(sent) <= 1
    bound = lower_bound(problem, groups, rules, microbatches, quotas=quotas)
    assert makespan(problem, routes) >= bound.seconds * (1 - 1e-9)


@pytest.mark.parametrize("quotas", ["equal", "free"])
@pytest.mark.parametrize(
    ("sizes", "slots", "visits", "microbatches"),
    [
        ([5, 3, 3, 3, 3, 3], 3, 4, 30),  # every slot of every relay is used
        ([6, 4, 4, 4], 3, 3, 36),
        ([7, 5, 5, 5, 5, 5, 5, 5], 2, 6, 28),
        ([5, 3, 3, 3, 3, 3], 3, 6, 30),  # fewer lanes than the origins have slots
        ([4, 4, 4], 5, 2, 8),
        ([1, 1], 1, 2, 5),
        ([2, 1, 1], 1, 2, 6),
        ([3, 2, 2, 2, 2, 2, 2, 2], 1, 8, 6),
        ([2, 3, 1, 2], 4, 3, 7),  # visits do not divide
    ],
)
def test_sizes_that_fit_are_not_refused(sizes, slots, visits, microbatches, quotas):
    problem, groups = problem_of(sizes, [slots], 7)
    if visits == 8:
        quotas = "free"  # two slots per stage are not enough for three origins
    routes = find_routes(problem, groups, Rules(visits=visits), microbatches, seed=1, effort=50, quotas=quotas)
    assert violations(problem, routes, Rules(visits=visits)) == []
    assert routes.num_microbatches == microbatches


@pytest.mark.parametrize(
    ("sizes", "slots", "rules", "microbatches", "what"),
    [
        ([2, 1, 1, 1, 1, 1], 2, Rules(visits=2), 10, "reaches stage 5"),
        ([3, 1, 1], 2, Rules(visits=3), 6, "not enough slots"),
        ([2, 2], 0, Rules(visits=2), 6, "stage 0 can hold"),
        ([2, 2], 2, Rules(visits=3), 6, "visit 3 stages"),
        ([2, 2], 2, Rules(visits=2), 0, "needs microbatches"),
        ([1, 1, 1, 1, 1, 1], 1, RULES, 10, "evenly"),
    ],
)
def test_what_cannot_be_met_is_named(sizes, slots, rules, microbatches, what):
    problem, groups = problem_of(sizes, [slots], 0)
    with pytest.raises(TalkootError, match=what):
        find_routes(problem, groups, rules, microbatches, seed=0, effort=50)


def test_more_stages_than_nodes_are_refused():
    problem, _ = problem_of([1, 1, 1], [1], 0)
    with pytest.raises(TalkootError, match="4 stages need at least 4 nodes"):
        find_routes(
            Problem(
                **{name: getattr(problem, name) for name in problem.__struct_fields__} | {"stage_layers": (1,) * 4}
            ),
            ((0,), (1,), (2,), ()),
            RULES,
            4,
            seed=0,
        )


def test_the_same_seed_gives_the_same_plan():
    problem = published_problem(unit_error=False)
    one, two = (make_plan(problem, (5, 3, 3, 3, 3, 3), RULES, 30, seed=3, effort=100) for _ in range(2))
    assert one == two
    assert one.routes != find_routes(problem, one.routes.groups, RULES, 30, seed=4, effort=100)


def test_the_published_case_is_planned_as_well_as_by_its_authors_and_far_better_with_free_quotas():
    problem = published_problem()
    equal = make_plan(problem, GROUPS, RULES, 30, seed=0, effort=1000)
    assert equal.seconds <= 33.4
    assert equal.gap <= 0.08
    assert equal.violations == ()
    free = make_plan(problem, GROUPS, RULES, 30, seed=0, effort=2500, quotas="free")
    assert free.seconds <= 0.88 * equal.seconds


def test_a_bound_of_whole_lanes_lies_between_the_fluid_bound_and_every_plan():
    problem, groups = problem_of([3, 2, 2, 2], [2], 4)
    rules = Rules(visits=3)
    for quotas in ("equal", "free"):
        best = make_plan(problem, groups, rules, 12, seed=0, effort=2000, quotas=quotas)
        assert best.fluid_bound_s <= best.bound_s <= best.seconds
        for seed in range(5):
            routes = naive_skipping(problem, groups, rules, 12, seed=seed, quotas=quotas)
            assert makespan(problem, routes) >= judged(problem, routes, rules, quotas=quotas).bound_s


def test_a_single_path_is_its_own_bound():
    problem, groups = problem_of([1, 1, 1], [1], 8)
    plan = make_plan(problem, groups, Rules(visits=3, max_swaps=0), 4, seed=0, effort=10)
    assert plan.seconds == pytest.approx(plan.bound_s)
    assert plan.gap == pytest.approx(0.0, abs=1e-9)


def test_a_time_budget_ends_the_search_with_a_valid_plan():
    problem = published_problem()
    plan = make_plan(problem, (5, 3, 3, 3, 3, 3), RULES, 30, seed=0, effort=10**9, budget_s=0.5)
    assert plan.violations == ()


def test_contention_is_planned_for():
    problem = published_problem()
    plan = make_plan(problem, GROUPS, RULES, 30, seed=0, effort=300, contention=True)
    assert plan.seconds == makespan(problem, plan.routes, contention=True)


def test_moves_keep_what_must_hold():
    problem, groups = problem_of([4, 3, 3, 3, 3], [3], 5)
    for quotas in ("equal", "free"):
        space = Space(problem, groups, Rules(visits=3), 20, quotas)
        lanes = list(find_routes(problem, groups, Rules(visits=3), 20, seed=0, effort=10, quotas=quotas).lanes)
        chance, done = Random(0), dict.fromkeys((move for move, _ in MOVES), 0)
        for _ in range(1500):
            move = chance.choice(list(done))
            changed = move(space, lanes, *space.load(lanes), chance)
            if changed is None:
                continue
            done[move] += 1
            lanes = changed
            routes = Routes(groups=space.groups, lanes=tuple(lanes))
            assert violations(problem, routes, space.rules) == [], move
            assert routes.num_microbatches == 20
            sent = [sum(lane.count for lane in lanes if lane.origin == origin) for origin in groups[0]]
            assert quotas == "free" or max(sent) == min(sent), move
        assert all(count for move, count in done.items() if (move.__name__, quotas) != ("other_origin", "equal"))


def test_trips_are_permitted_and_come_in_order():
    problem, groups = problem_of([2, 2, 2, 2, 2], [2], 11)
    space = Space(problem, groups, RULES, 8)
    found = list(trips(space, 0, most=200))
    assert [trip.finish_s for trip in found] == sorted(trip.finish_s for trip in found)
    assert len({trip.relays for trip in found}) == len(found) > 50
    for trip in found:
        assert path_violations([space.stage_of[node] for node in trip.relays], RULES) == []
        alone = Routes(groups=space.groups, lanes=(Lane(0, trip.relays, 1),))
        assert makespan(problem, alone) == pytest.approx(trip.finish_s)


def test_a_trip_waits_for_what_is_reserved():
    problem, groups = problem_of([1, 1, 1], [2], 3)
    space = Space(problem, groups, Rules(visits=3), 2)
    free = next(trips(space, 0))
    busy = {free.relays[0]: [(0.0, 50.0)]}
    waiting = next(trips(space, 0, reserved=busy))
    assert waiting.finish_s > 50.0
    assert all(visit.start_s >= 50.0 for visit in waiting.visits if visit.node == free.relays[0])
    assert next(trips(space, 0, closed={free.relays[0]}), None) is None


def test_agreed_lanes_fit_and_avoiding_collisions_pays():
    first_s, agreed_s = [], []
    for seed in range(8):
        problem, groups = problem_of([4, 3, 3, 3], [3], seed)
        space = Space(problem, groups, Rules(visits=3), 24)
        score = played_score(space, contention=False)
        for found_s, avoided in ((first_s, False), (agreed_s, True)):
            lanes = search_conflicts(space, Random(0), score, effort=150, collisions=avoided)
            if lanes is not None:
                assert violations(problem, Routes(groups=groups, lanes=tuple(lanes)), space.rules) == []
            found_s.append(score(lanes) if lanes else 0.0)
    assert sum(found_s > 0 for found_s in first_s) >= 4  # the search may give up, but not mostly
    assert all(agreed <= first for agreed, first in zip(agreed_s, first_s, strict=True))
    assert sum(agreed_s) < 0.99 * sum(first_s)


def test_failures_are_priced_or_named_as_impossible():
    problem, groups = problem_of([3, 2, 2, 1], [4], 2)
    rules = Rules(visits=3)
    routes = find_routes(problem, groups, rules, 12, seed=0, effort=300)
    costs = {cost.node: cost for cost in failure_costs(problem, routes, rules)}
    assert sorted(costs) == list(range(8))
    assert costs[7].seconds is None
    assert costs[7].why == "stage 3 would be empty"
    assert all(cost.seconds and cost.ratio and not cost.why for node, cost in costs.items() if node != 7)


def test_a_refined_placement_is_predicted_and_played_faster():
    problem = published_problem(unit_error=False)
    refined = improve_placement(problem, GROUPS, RULES, 30, seed=0, quotas="free", effort=1500)
    assert list(map(len, refined)) == list(map(len, GROUPS))
    total_s = [
        make_plan(problem, groups, RULES, 30, seed=0, quotas="free", effort=300).seconds + all_reduce_s(problem, groups)
        for groups in (GROUPS, refined)
    ]
    assert total_s[1] < 0.9 * total_s[0]
    kept = improve_placement(problem, GROUPS, RULES, 30, seed=0, effort=300, keep_origins=True)
    assert kept[0] == GROUPS[0]
