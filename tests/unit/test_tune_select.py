"""Which groups a round learns from."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.select import informative, refill, select


def groups(peer: str, count: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> list[ScoredGroup]:
    return [
        ScoredGroup((number,), tuple(Sample((1,), r, "stop", (-1.0,), -1.0) for r in rewards), peer, peer == "alder")
        for number in range(count)
    ]


def test_flat_external_groups_are_discarded_first_and_own_ones_are_not():
    external = groups("birch", 3, (1.0, 1.0)) + groups("cedar", 2)
    found = select(groups("alder", 4, (1.0, 1.0)), external, 4, 2, "s")
    assert (found.own, found.external, found.discarded, found.missing) == (4, 2, 3, 0)
    assert all(group.peer == "cedar" for group in found.groups[4:])
    assert all(group.own for group in found.groups[:4])


def test_the_draw_is_seeded_and_does_not_depend_on_arrival():
    own, external = groups("alder", 8), groups("birch", 9) + groups("cedar", 9)
    found = select(own, external, 4, 4, "run/3")
    mixed_own, mixed = own[:], external[:]
    random.Random(1).shuffle(mixed_own)
    random.Random(2).shuffle(mixed)
    assert select(mixed_own, mixed, 4, 4, "run/3") == found
    assert select(own, external, 4, 4, "run/4") != found


def test_every_informative_external_group_is_equally_likely():
    external = groups("birch", 2) + groups("cedar", 8)
    counts = Counter(select([], external, 0, 1, f"{i}").groups[0].peer for i in range(2000))
    assert 0.16 < counts["birch"] / 2000 < 0.24


def test_what_one_side_lacks_the_other_makes_up_for():
    alone = select(groups("alder", 8), [], 4, 4, "s")
    assert (alone.own, alone.external, alone.missing) == (8, 0, 0)
    idle = select(groups("alder", 1), groups("birch", 9), 4, 4, "s")
    assert (idle.own, idle.external, idle.missing) == (1, 7, 0)
    short = select(groups("alder", 1), groups("birch", 2), 4, 4, "s")
    assert (short.own, short.external, short.missing) == (1, 2, 5)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="cannot be drawn"):
        select([], [], -1, 2, "s")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_no_group_is_taken_twice_and_the_counts_add_up(num_own, num_external, have, others, flat):
    external = groups("birch", others) + groups("cedar", flat, (0.0, 0.0))
    found = select(groups("alder", have), external, num_own, num_external, "s")
    assert len(found.groups) == found.own + found.external == num_own + num_external - found.missing
    assert len({(group.peer, group.prompt) for group in found.groups}) == len(found.groups)
    assert found.missing == max(0, num_own + num_external - have - others)
    assert found.own >= min(num_own, have)
    assert found.external >= min(num_external, others)


def test_dynamic_sampling_refills_by_the_share_that_was_useful_up_to_the_cap():
    made = groups("alder", 3) + groups("alder", 5, (1.0, 1.0))
    first = refill(made, wanted=6, cap=40)
    assert (len(first.groups), first.dropped) == (3, 5)
    assert first.generate == 8  # 3 missing at (3 + 1) / (8 + 2), rounded up
    assert refill(made, wanted=6, cap=11).generate == 3
    assert refill(made, wanted=6, cap=8).generate == 0
    done = refill(made, wanted=2, cap=40)
    assert (len(done.groups), done.generate) == (2, 0)
    assert refill([], wanted=4, cap=40).generate == 8


def test_informative_means_unequal_rewards():
    assert informative(groups("alder", 1)[0])
    assert not informative(groups("alder", 1, (0.5, 0.5))[0])
    assert not informative(groups("alder", 1, (0.5,))[0])
