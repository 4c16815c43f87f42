"""Cutting layers into stages: exact, contiguous, and refused where it cannot be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.plan.cut import cut_layers

costs = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def every_cut(count: int, stages: int) -> list[list[tuple[int, int]]]:
    inner = combinations(range(1, count), stages - 1)
    return [list(zip((0, *cuts), (*cuts, count), strict=True)) for cuts in inner]


def worst(costs: list[int], ranges: list[tuple[int, int]]) -> int:
    return max(sum(costs[first:last]) for first, last in ranges)


@settings(max_examples=150, deadline=None)
@given(costs, st.data())
def test_no_cut_has_a_cheaper_worst_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = cut_layers(costs, stages)
    every = every_cut(len(costs), stages)
    assert found in every, "contiguous, complete, each range with at least one layer"
    assert worst(costs, found) == min(worst(costs, ranges) for ranges in every)


def test_ties_go_to_the_earliest_cut():
    assert cut_layers([1, 1, 1], 2) == [(0, 1), (1, 3)]
    assert cut_layers([0, 0, 0, 0], 3) == [(0, 1), (1, 2), (2, 4)]


def test_a_heavy_head_gets_a_stage_of_its_own():
    assert cut_layers([1, 4, 4, 4, 12], 2) == [(0, 4), (4, 5)]


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_an_impossible_number_of_stages_is_refused_with_the_number_that_is_possible(stages):
    with pytest.raises(TalkootError) as caught:
        cut_layers([1.0, 2.0, 3.0], stages)
    assert caught.value.where == "swarm.stages"
    assert "at most 3" in caught.value.next
