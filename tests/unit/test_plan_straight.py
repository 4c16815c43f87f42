"""Straight pipelines: valid, proportional, lean, repeatable, and never waiting in a circle."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.plan import planners
from talkoot.plan.steps import Hop, Path, Seat, StepPlan, View, Work
from talkoot.plan.steps import validate as validate_view
from talkoot.plan.straight import share


def straight(seats: list[Seat], num_stages: int, num_microbatches: int) -> StepPlan:
    return planners["straight"](View(seats=seats, num_stages=num_stages, num_microbatches=num_microbatches))


def validate(plan: StepPlan, seats: list[Seat], num_stages: int, num_microbatches: int) -> None:
    validate_view(plan, View(seats=seats, num_stages=num_stages, num_microbatches=num_microbatches))


@st.composite
def swarms(draw) -> tuple[list[Seat], int, int]:
    """Seats with unlike numbers of peers per stage and uneven speeds; stages; microbatches."""
    stages = draw(st.integers(1, 6))
    speeds = st.sampled_from([1.0, 0.5, 0.3, 0.1]) | st.floats(0.01, 1.0)
    seats = [
        Seat(f"{stage}-{index}", stage, draw(speeds))
        for stage in range(stages)
        for index in range(draw(st.integers(1, 4)))
    ]
    return draw(st.permutations(seats)), stages, draw(st.integers(1, 16))


def play(plan: StepPlan, num_stages: int, chance: random.Random | None = None) -> tuple[set[str], dict[str, int]]:
    """Follow all orders, whoever can move first or in a random order; (peers that got stuck, most held by each)."""
    stage_of = {hop.peer: hop.stage for path in plan.paths for hop in path.hops}
    at, held, peak = (dict.fromkeys(plan.orders, 0) for _ in range(3))
    done: set[tuple[str, int, int]] = set()

    def can_move(peer: str) -> bool:
        if at[peer] == len(plan.orders[peer]):
            return False
        work, stage = plan.orders[peer][at[peer]], stage_of[peer]
        if work.phase == "forward":
            return stage == 0 or ("forward", work.microbatch, stage - 1) in done
        return stage == num_stages - 1 or ("backward", work.microbatch, stage + 1) in done

    while movers := [peer for peer in plan.orders if can_move(peer)]:
        peer = chance.choice(movers) if chance else movers[0]
        work = plan.orders[peer][at[peer]]
        done.add((work.phase, work.microbatch, stage_of[peer]))
        at[peer] += 1
        held[peer] += 1 if work.phase == "forward" else -1
        peak[peer] = max(peak[peer], held[peer])
    return {peer for peer in plan.orders if at[peer] < len(plan.orders[peer])}, peak


@settings(max_examples=300, deadline=None)
@given(swarms())
def test_every_plan_is_valid_and_can_be_followed_to_its_end_without_a_cyclic_wait(swarm):
    seats, stages, microbatches = swarm
    plan = straight(seats, stages, microbatches)
    validate(plan, seats, stages, microbatches)
    stuck, peak = play(plan, stages)
    assert stuck == set()
    stage_of = {seat.peer: seat.stage for seat in seats}
    for peer, most in peak.items():
        assert most <= stages - stage_of[peer], "1F1B holds at most its distance to the last stage plus one"


def test_the_swarm_on_which_plain_1f1b_orders_waited_in_a_circle_completes():
    """Found by search: with per-peer 1F1B orders alone, 6% of uneven swarms of three and more stages got stuck."""
    speeds = [(0.1, 0.3, 0.5), (1.0,), (0.3, 0.1, 0.5), (1.0,), (0.9625791139290099, 0.4662439652517581)]
    seats = [Seat(f"{s}-{i}", s, speed) for s, row in enumerate(speeds) for i, speed in enumerate(row)]
    assert play(straight(seats, 5, 13), 5)[0] == set()


@settings(max_examples=60, deadline=None)
@given(swarms(), st.integers(0, 9))
def test_completion_does_not_depend_on_who_happens_to_be_faster_than_planned(swarm, seed):
    seats, stages, microbatches = swarm
    assert play(straight(seats, stages, microbatches), stages, random.Random(seed))[0] == set()


@settings(max_examples=60, deadline=None)
@given(swarms())
def test_shares_are_proportional_to_speed_contiguous_and_complete(swarm):
    seats, stages, microbatches = swarm
    plan = straight(seats, stages, microbatches)
    for stage in range(stages):
        served = [path.hops[stage].peer for path in plan.paths]
        present = [seat for seat in seats if seat.stage == stage]
        total = sum(seat.speed for seat in present)
        counts = Counter(served)
        for seat in present:
            assert abs(counts[seat.peer] - microbatches * seat.speed / total) < 1 + 1e-9
        assert len([1 for a, b in itertools.pairwise(served) if a != b]) == len(counts) - 1


@settings(max_examples=60, deadline=None)
@given(swarms(), st.randoms(use_true_random=False))
def test_the_plan_depends_on_who_is_there_not_on_the_order_in_which_they_are_listed(swarm, chance):
    seats, stages, microbatches = swarm
    shuffled = list(seats)
    chance.shuffle(shuffled)
    assert straight(seats, stages, microbatches) == straight(shuffled, stages, microbatches)


def test_equal_peers_follow_the_textbook_order():
    plan = straight([Seat(f"p{stage}", stage) for stage in range(3)], 3, 4)
    text = {peer: " ".join(w.phase[0] + str(w.microbatch) for w in order) for peer, order in plan.orders.items()}
    assert text == {
        "p0": "f0 f1 f2 b0 f3 b1 b2 b3",
        "p1": "f0 f1 b0 f2 b1 f3 b2 b3",
        "p2": "f0 b0 f1 b1 f2 b2 f3 b3",
    }


def test_fast_peers_meet_fast_peers_along_a_path():
    seats = [Seat("slow0", 0, 0.5), Seat("fast0", 0), Seat("slow1", 1, 0.5), Seat("fast1", 1)]
    plan = straight(seats, 2, 6)
    assert Counter(tuple(hop.peer for hop in path.hops) for path in plan.paths) == {
        ("fast0", "fast1"): 4,
        ("slow0", "slow1"): 2,
    }


def test_a_stage_without_peers_is_refused():
    with pytest.raises(ValueError, match="stage 1"):
        straight([Seat("p", 0)], 2, 3)


@given(st.integers(0, 40), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_a_share_gives_out_everything_and_nobody_is_off_by_one_or_more(count, weights):
    parts = share(count, weights)
    assert sum(parts) == count
    assert all(abs(part - count * w / sum(weights)) < 1 + 1e-9 for part, w in zip(parts, weights, strict=True))


def test_a_share_breaks_ties_to_the_earlier():
    assert share(5, [1.0, 1.0, 1.0]) == [2, 2, 1]


SEATS = [Seat("a", 0), Seat("b", 1), Seat("c", 1)]


def plan_of(*paths: tuple[int, list[tuple[int, str]]], orders: dict[str, list[tuple[str, int]]]) -> StepPlan:
    return StepPlan(
        tuple(Path(m, tuple(Hop(stage, peer) for stage, peer in hops)) for m, hops in paths),
        {peer: tuple(Work(phase, m) for phase, m in works) for peer, works in orders.items()},
    )


def both(microbatch: int) -> list[tuple[str, int]]:
    return [("forward", microbatch), ("backward", microbatch)]


GOOD = [(0, [(0, "a"), (1, "b")]), (1, [(0, "a"), (1, "c")])]
ORDERS = {"a": both(0) + both(1), "b": both(0), "c": both(1)}


def test_a_good_plan_passes():
    validate(plan_of(*GOOD, orders=ORDERS), SEATS, 2, 2)


@pytest.mark.parametrize(
    ("paths", "orders", "message"),
    [
        (GOOD[:1], {"a": both(0), "b": both(0)}, "each microbatch exactly once"),
        ([GOOD[0], GOOD[0]], ORDERS, "each microbatch exactly once"),
        ([GOOD[0], (2, GOOD[1][1])], ORDERS, "each microbatch exactly once"),
        ([GOOD[0], (1, [(1, "c"), (0, "a")])], ORDERS, "microbatch 1 does not visit the stages in order"),
        ([GOOD[0], (1, [(0, "a")])], ORDERS, "microbatch 1 does not visit the stages in order"),
        ([GOOD[0], (1, [(0, "b"), (1, "c")])], ORDERS, "which lacks stage 0"),
        ([GOOD[0], (1, [(0, "a"), (1, "stranger")])], ORDERS, "visits stranger"),
        (GOOD, ORDERS | {"b": both(0)[:1]}, "the order of b"),
        (GOOD, ORDERS | {"b": both(0) + both(0)}, "the order of b"),
        (GOOD, ORDERS | {"b": both(1)}, "the order of b"),
        (GOOD, ORDERS | {"stranger": both(1)}, "the order of stranger"),
        (GOOD, {"a": ORDERS["a"], "b": ORDERS["b"]}, "c is on a path but has no order"),
    ],
)
def test_a_bad_plan_is_refused_with_its_first_violation(paths, orders, message):
    with pytest.raises(ValueError, match=message):
        validate(plan_of(*paths, orders=orders), SEATS, 2, 2)


@given(swarms(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_random_routing_is_valid_balanced_and_never_waits_in_a_circle(swarm, step):
    seats, num_stages, count = swarm
    view = View(seats=seats, num_stages=num_stages, num_microbatches=count, step=step, seed=3)
    plan, blocks = planners["shuffled"](view), planners["straight"](view)
    validate_view(plan, view)
    stuck, _ = play(plan, num_stages)
    assert not stuck
    assert Counter(h.peer for p in plan.paths for h in p.hops) == Counter(h.peer for p in blocks.paths for h in p.hops)
    assert planners["shuffled"](view) == plan


def test_random_routing_draws_other_ways_in_every_step():
    seats = [Seat(f"{stage}-{index}", stage, 1.0) for stage in range(3) for index in range(4)]
    views = [View(seats=seats, num_stages=3, num_microbatches=8, step=step) for step in range(6)]
    ways = {tuple(tuple(hop.peer for hop in path.hops) for path in planners["shuffled"](view).paths) for view in views}
    assert len(ways) == 6
