"""The planner that swaps the stages at both ends: every odd microbatch, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.plan import planners
from talkoot.plan.steps import Seat, View, validate
from talkoot.train.methods import check_methods
from talkoot.train.recipe import Recipe, Swarm, Train


@st.composite
def views(draw) -> View:
    stages = draw(st.integers(5, 8))
    speeds = st.sampled_from([1.0, 0.5])
    seats = [
        Seat(f"id-{s}-{i}", s, draw(speeds), f"{s}-{i}", draw(st.integers(0, 2)))
        for s in range(stages)
        for i in range(draw(st.integers(1, 3)))
    ]
    return View(seats=seats, num_stages=stages, num_microbatches=draw(st.integers(1, 9)), ring=True)


@settings(max_examples=60, deadline=None)
@given(views())
def test_odd_microbatches_swap_both_ends_over_the_peers_that_straight_gives_them(view):
    plan, plain = planners["swapped"](view), planners["straight"](view)
    validate(plan, view)
    for path, straight in zip(plan.paths, plain.paths, strict=True):
        stages = [hop.stage for hop in path.hops]
        usual = list(range(view.num_stages))
        if path.microbatch % 2:
            last = view.num_stages - 1
            assert stages == [0, 2, 1, *usual[3:-2], last, last - 1]
        else:
            assert stages == usual
        assert set(path.hops) == set(straight.hops)
        assert path.after == straight.after


def test_seven_stages_are_visited_in_the_published_order():
    seats = [Seat(f"id-{stage}", stage) for stage in range(7)]
    plan = planners["swapped"](View(seats=seats, num_stages=7, num_microbatches=2, ring=True))
    assert [[hop.stage for hop in path.hops] for path in plan.paths] == [[0, 1, 2, 3, 4, 5, 6], [0, 2, 1, 3, 4, 6, 5]]


def test_a_line_and_a_ring_too_short_for_two_pairs_are_refused():
    seats = [Seat(f"id-{stage}", stage) for stage in range(5)]
    view = View(seats=seats, num_stages=5, num_microbatches=2)
    short = msgspec.structs.replace(view, seats=seats[:4], num_stages=4, ring=True)
    for bad in (view, short):
        with pytest.raises(ValueError, match="four relay stages"):
            planners["swapped"](bad)
    recipe = Recipe(train=Train(planner="swapped"), swarm=Swarm(layout="ring", stages=4))
    with pytest.raises(TalkootError, match="needs more stages"):
        check_methods(recipe)
    check_methods(msgspec.structs.replace(recipe, swarm=Swarm(layout="ring", stages=5)))
