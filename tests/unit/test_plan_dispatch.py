"""Counts of negotiated lanes: hand-made iterations, slots that make others wait, and a search that never harms."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.ids import PeerId
from talkoot.plan.dispatch import Queues, lane_counts, launch_order
from talkoot.plan.steps import Seat, View
from talkoot.world.links import Link, Network

ORIGIN = Seat(PeerId("o"), 0, 1.0, "o")


def view_of(seats: list[Seat], microbatches: int, hop_s: float = 0.0, loss_s: float = 0.0) -> View:
    return View(
        seats=seats,
        num_stages=1 + max(seat.stage for seat in seats),
        num_microbatches=microbatches,
        ring=True,
        network=Network(default=Link(latency_s=hop_s, bytes_per_s=1e18)),
        stage_s=[0.0] + [1.0] * max(seat.stage for seat in seats),
        loss_s=loss_s,
    )


def seat(name: str, stage: int = 1, speed: float = 1.0, slots: int = 0) -> Seat:
    return Seat(PeerId(name), stage, speed, name, slots)


def test_one_microbatch_takes_its_work_and_its_ways():
    lane = [ORIGIN, seat("a", 1), seat("b", 2, 0.5)]
    queues = Queues(view_of(lane, 1, hop_s=0.25, loss_s=0.125), [lane])
    assert queues.seconds([1]) == pytest.approx(3 * 1 + 3 * 2 + 6 * 0.25 + 0.125)
    assert queues.seconds([0]) == 0.0


@pytest.mark.parametrize(("slots", "seconds"), [(1, 12), (2, 9)])
def test_a_full_peer_makes_the_next_microbatch_wait_until_a_gradient_is_back(slots, seconds):
    """One slot: 1 there, twice (forward 1, ways 2, backward 2), 1 home. Two: backwards from 4 to 8."""
    lane = [ORIGIN, seat("a", slots=slots)]
    assert Queues(view_of(lane, 2, hop_s=1.0), [lane]).seconds([2]) == pytest.approx(seconds)


def test_the_counts_follow_what_peers_can_do_not_what_a_lane_alone_costs():
    fast, slow = seat("fast"), seat("slow", speed=0.5)
    view = view_of([ORIGIN, fast, slow], 9)
    assert lane_counts(view, [[ORIGIN, fast], [ORIGIN, slow]]) == [6, 3]
    shared = view_of([ORIGIN, fast, seat("other")], 8)
    both = [[ORIGIN, fast], [ORIGIN, fast], [ORIGIN, seat("other")]]
    first, second, third = lane_counts(shared, both)
    assert (first + second, third) == (4, 4), "two lanes through one peer are no faster than one"


def test_microbatches_leave_turn_by_turn():
    assert launch_order([2, 0, 3]) == [0, 2, 0, 2, 2]
    assert launch_order([]) == []


def test_without_a_lane_there_are_no_counts():
    with pytest.raises(ValueError, match="no lanes"):
        lane_counts(view_of([ORIGIN, seat("a")], 1), [])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counts_are_complete_and_no_move_of_one_microbatch_helps(data):
    stages = data.draw(st.integers(1, 3))
    pool = {
        stage: [
            seat(f"{stage}-{k}", stage, data.draw(st.sampled_from([1.0, 0.5, 0.2])), data.draw(st.integers(0, 2)))
            for k in range(data.draw(st.integers(1, 3)))
        ]
        for stage in range(1, stages + 1)
    }
    lanes = [
        [ORIGIN, *(data.draw(st.sampled_from(pool[stage])) for stage in pool)]
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    microbatches = data.draw(st.integers(1, 10))
    view = view_of([ORIGIN, *(one for group in pool.values() for one in group)], microbatches, hop_s=0.3)
    counts = lane_counts(view, lanes)
    assert sum(counts) == microbatches
    assert min(counts) >= 0
    assert counts == lane_counts(view, lanes)
    busiest = max(
        sum(3 * view.forward_s(one) * count for lane, count in zip(lanes, counts, strict=True) if one in lane)
        for group in pool.values()
        for one in group
    )
    seconds = Queues(view, lanes).seconds(counts)
    assert seconds >= busiest - 1e-9, "nobody works faster than it can"
    for giver, taker in permutations(range(len(lanes)), 2):
        if counts[giver]:
            moved = [count - (lane == giver) + (lane == taker) for lane, count in enumerate(counts)]
            assert Queues(view, lanes).seconds(moved) >= seconds - 1e-9, "no single move helps"
