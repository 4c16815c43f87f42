"""Playback: physically possible, in the stated order, and true to what was published."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings

from random_routes import cases
from talkoot.plan.playback import Iteration, Player, Span, makespan, play, rtt
from talkoot.plan.problem import Lane, Problem, Routes


def small(nodes: int, *, busy_s: float = 0.0, slots: int = 3) -> Problem:
    """All hops 1 s, all forwards 1 s, backwards 1.5 s, loss 0.25 s."""
    hops = tuple(tuple(float(a != b) for b in range(nodes)) for a in range(nodes))
    busy = tuple(tuple(busy_s * (a != b) for b in range(nodes)) for a in range(nodes))
    return Problem(
        names=tuple("abcdefgh"[:nodes]),
        hop_s=hops,
        busy_s=busy,
        share_s=hops,
        layer_s=(1.0,) * nodes,
        stage_layers=(1,) * 3,
        slots=(slots,) * nodes,
    )


def starts(iteration: Iteration, node: int) -> list[tuple[str, int, float]]:
    return [(span.phase, span.microbatch, span.start_s) for span in iteration.spans if span.node == node]


def by_microbatch(iteration: Iteration) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in iteration.spans:
        found.setdefault(span.microbatch, []).append(span)
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_lone_microbatch_takes_its_round_trip_to_the_last_bit(case) -> None:
    problem, routes, _ = case
    for lane in routes.lanes[:3]:
        alone = Routes(groups=routes.groups, lanes=(Lane(lane.origin, lane.relays, 1),))
        expected = rtt(problem, routes.groups, lane.origin, lane.relays)
        assert makespan(problem, alone) == expected
        stage_of, path = routes.stage_of(), (lane.origin, *lane.relays)
        hops = sum(problem.hop_s[a][b] + problem.hop_s[b][a] for a, b in pairwise((*path, lane.origin)))
        work = sum(problem.forward_s(node, stage_of[node]) for node in path)
        assert expected == pytest.approx(hops + 2.5 * work + problem.loss_s(lane.origin), rel=1e-12)
        assert makespan(problem, alone, contention=True) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_node_does_one_thing_at_a_time_and_never_holds_more_than_its_slots(case) -> None:
    problem, routes, _ = case
    for contention in (False, True):
        iteration = play(problem, routes, contention=contention)
        for node in range(len(problem.names)):
            own = [span for span in iteration.spans if span.node == node]
            assert all(a.end_s <= b.start_s for a, b in pairwise(own))
            moments = [(span.start_s, 1) for span in own if span.phase == "forward"]
            moments += [(span.end_s, -1) for span in own if span.phase == "backward"]
            held = 0
            for _, change in sorted(moments):
                held += change
                assert 0 <= held <= problem.slots[node]
            assert held == 0


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_microbatch_goes_there_and_back_and_no_faster_than_its_links(case) -> None:
    problem, routes, _ = case
    for contention in (False, True):
        iteration = play(problem, routes, contention=contention)
        trips = by_microbatch(iteration)
        assert sorted(trips) == list(range(routes.num_microbatches))
        for number, index, _ in routes.turns():
            lane, spans = routes.lanes[index], trips[number]
            out = (lane.origin, *lane.relays)
            assert [span.node for span in spans] == [*out, lane.origin, *reversed(out)]
            phases = Counter(span.phase for span in spans)
            assert phases == {"forward": len(out), "loss": 1, "backward": len(out)}
            for a, b in pairwise(spans):
                assert b.start_s >= a.end_s + problem.hop_s[a.node][b.node] - 1e-9


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_lane_launches_the_next_microbatch_when_the_one_before_is_back(case) -> None:
    problem, routes, _ = case
    iteration = play(problem, routes)
    trips = by_microbatch(iteration)
    before: dict[int, float] = {}
    for number, index, _ in routes.turns():
        first, last = trips[number][0], trips[number][-1]
        assert first.start_s >= before.get(index, 0.0)
        before[index] = last.end_s
    assert iteration.seconds == max(before.values(), default=0.0)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_playing_again_or_without_a_record_gives_the_same(case) -> None:
    problem, routes, _ = case
    player = Player(problem, routes.groups)
    for contention in (False, True):
        iteration = player.play(routes.lanes, contention=contention)
        assert iteration == play(problem, routes, contention=contention)
        assert iteration.seconds == player.makespan(routes.lanes, contention=contention)


def test_an_origins_lanes_start_a_forward_apart() -> None:
    problem = small(3)
    lanes = (Lane(0, (1,), 1), Lane(0, (1, 2), 1), Lane(0, (2,), 1))  # not the longest first
    iteration = play(problem, Routes(groups=((0,), (1,), (2,)), lanes=lanes))
    assert starts(iteration, 0)[:3] == [("forward", 0, 0.0), ("forward", 1, 1.0), ("forward", 2, 2.0)]


def test_a_backward_goes_before_a_forward_that_came_first() -> None:
    # Microbatch 0 comes to node 2 by way of the slow node 3, for its forward, while it does the backward of 1; the
    # backward of 2 comes later, and is done first.
    problem = msgspec.structs.replace(small(5), layer_s=(0.4, 0.4, 1.0, 3.0, 0.3))
    routes = Routes(groups=((0, 1, 4), (2,), (3,)), lanes=(Lane(4, (3, 2), 1), Lane(0, (2,), 1), Lane(1, (2,), 1)))
    iteration = play(problem, routes)
    own = starts(iteration, 2)
    assert [(phase, number) for phase, number, _ in own] == [
        ("forward", 1),
        ("forward", 2),
        ("backward", 1),
        ("backward", 2),
        ("forward", 0),
        ("backward", 0),
    ]


def test_the_longest_way_ahead_goes_first_and_then_the_schedule() -> None:
    # All three forwards reach node 3 at 2 s; microbatch 1 has one relay more ahead of it.
    problem = small(5)
    relays = ((3,), (3, 4), (3,))
    lanes = tuple(Lane(origin, path, 1) for origin, path in enumerate(relays))
    iteration = play(problem, Routes(groups=((0, 1, 2), (3,), (4,)), lanes=lanes))
    assert starts(iteration, 3)[:3] == [("forward", 1, 2.0), ("forward", 0, 3.0), ("forward", 2, 4.0)]


def test_network_cards_send_and_receive_one_transfer_at_a_time() -> None:
    # Both origins finish their forward at 1 s and send to node 2, whose card is busy 0.5 s with each.
    problem = small(4, busy_s=0.5)
    both = (Lane(0, (2,), 1), Lane(1, (2,), 1))
    groups = ((0, 1), (2,), (3,))
    arrivals = [start for _, _, start in starts(play(problem, Routes(groups=groups, lanes=both), contention=True), 2)]
    assert arrivals[:2] == [2.0, 3.0]  # the second arrives at 2.5 and waits for the node
    quick = msgspec.structs.replace(problem, layer_s=(1.0, 1.0, 0.0, 1.0))
    arrivals = [start for _, _, start in starts(play(quick, Routes(groups=groups, lanes=both), contention=True), 2)]
    assert arrivals[:2] == [2.0, 2.5]
    arrivals = [start for _, _, start in starts(play(quick, Routes(groups=groups, lanes=both)), 2)]
    assert arrivals[:2] == [2.0, 2.0]
    # One origin, forwards of 0.1 s: its card still sends the first when the second is done.
    single = msgspec.structs.replace(problem, layer_s=(0.1, 1.0, 0.0, 0.0))
    lanes = (Lane(0, (2,), 1), Lane(0, (3,), 1))
    iteration = play(single, Routes(groups=((0, 1), (2,), (3,)), lanes=lanes), contention=True)
    assert starts(iteration, 2)[0][2] == pytest.approx(1.1)
    assert starts(iteration, 3)[0][2] == pytest.approx(1.6)


def test_busy_shares_are_work_over_time() -> None:
    iteration = play(small(3), Routes(groups=((0,), (1,), (2,)), lanes=(Lane(0, (1,), 2),)))
    assert iteration.seconds == 2 * (2.5 + 0.25 + 2.5 + 4)
    assert iteration.busy_share() == {0: pytest.approx(5.5 / 18.5), 1: pytest.approx(5 / 18.5)}


def test_a_lane_without_microbatches_takes_neither_time_nor_slots() -> None:
    problem = small(3, slots=1)
    lanes = (Lane(0, (1,), 0), Lane(0, (1,), 1), Lane(0, (2,), 0))
    alone = makespan(problem, Routes(groups=((0,), (1,), (2,)), lanes=(Lane(0, (1,), 1),)))
    assert makespan(problem, Routes(groups=((0,), (1,), (2,)), lanes=lanes)) == alone
    assert play(problem, Routes(groups=((0,), (1,), (2,)), lanes=())) == Iteration(0.0, ())


def test_more_lanes_than_slots_are_refused_by_name() -> None:
    routes = Routes(groups=((0,), (1,), (2,)), lanes=(Lane(0, (1,), 1), Lane(0, (2,), 1)))
    with pytest.raises(ValueError, match="a is on more lanes than its 1 slots"):
        makespan(small(3, slots=1), routes)


def test_a_node_without_a_stage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="visits d, which holds no stage"):
        makespan(small(4), Routes(groups=((0,), (1,), (2,)), lanes=(Lane(0, (3,), 1),)))
