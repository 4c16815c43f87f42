"""Where newcomers go, and who takes over: against brute force, on the figures that the decision sees."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.plan.joining import Candidate, Swarm, after, choose_stage, choose_stages, next_hop, typical_hop_s

Placed = list[tuple[Candidate, int]]


def draw(seed: int, stages: int, peers: int, newcomers: int) -> tuple[Swarm, list[Candidate]]:
    """A swarm of ``stages`` times ``peers`` relays of 1 to 3 places, and newcomers of the same kind."""
    chance = random.Random(seed)
    capacity = tuple(sum(chance.randint(1, 3) for _ in range(peers)) for _ in range(stages))
    swarm = Swarm(
        wanted=4 * peers, capacity=capacity, lane_s=stages * chance.uniform(0.5, 1.5), share_s=chance.uniform(1, 5)
    )
    candidates = [
        Candidate(
            name=f"n{k}",
            slots=chance.randint(1, 3),
            hop_s=tuple(chance.uniform(0.2, 3.0) for _ in range(stages)),
            share_s=chance.uniform(1, 6),
        )
        for k in range(newcomers)
    ]
    return swarm, candidates


def cost(swarm: Swarm, candidates: list[Candidate], chosen: dict[str, int]) -> float:
    """Estimated seconds per microbatch with newcomers where they are said to go."""
    return after(swarm, [(c, chosen[c.name]) for c in candidates if c.name in chosen]).microbatch_s


def brute_force(swarm: Swarm, candidates: list[Candidate]) -> float:
    """The best estimate over every assignment."""
    best = swarm.microbatch_s
    for stages in product(range(len(swarm.capacity) + 1), repeat=len(candidates)):
        placed: Placed = [(c, stage) for c, stage in zip(candidates, stages, strict=True) if stage]
        best = min(best, after(swarm, placed).microbatch_s)
    return best


def one_at_a_time(swarm: Swarm, candidates: list[Candidate]) -> dict[str, int]:
    """Greedy admission: the best single candidate, again and again, while it helps."""
    chosen: dict[str, int] = {}
    while len(chosen) < len(candidates):
        left = [candidate.name for candidate in candidates if candidate.name not in chosen]
        options = [chosen | {name: stage + 1} for name in left for stage in range(len(swarm.capacity))]
        better = min(options, key=lambda option: cost(swarm, candidates, option))
        if cost(swarm, candidates, better) >= cost(swarm, candidates, chosen):
            break
        chosen = better
    return chosen


@pytest.mark.parametrize(("stages", "peers", "newcomers"), [(4, 8, 5), (8, 4, 4), (4, 4, 3), (2, 3, 5)])
def test_joint_placement_is_as_good_as_brute_force(stages, peers, newcomers):
    for seed in range(3):
        swarm, candidates = draw(seed, stages, peers, newcomers)
        found = cost(swarm, candidates, choose_stages(swarm, candidates))
        assert found == pytest.approx(brute_force(swarm, candidates))


def test_stages_equally_short_need_newcomers_together():
    swarm = Swarm(wanted=20, capacity=(4,) * 5, lane_s=6.0, share_s=1.0)
    candidates = [Candidate(name=f"n{k}", slots=4, hop_s=(1.0,) * 5) for k in range(5)]
    chosen = choose_stages(swarm, candidates)
    assert sorted(chosen.values()) == [1, 2, 3, 4, 5]
    greedy = cost(swarm, candidates, one_at_a_time(swarm, candidates))
    assert greedy / cost(swarm, candidates, chosen) > 1.7


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 7))
def test_admitting_is_never_in_vain_nor_worse_than_one_at_a_time(seed, stages, peers, newcomers):
    swarm, candidates = draw(seed, stages, peers, newcomers)
    chosen = choose_stages(swarm, candidates)
    found = cost(swarm, candidates, chosen)
    assert found <= swarm.microbatch_s
    assert found <= cost(swarm, candidates, one_at_a_time(swarm, candidates)) + 1e-9
    for name in chosen:
        assert cost(swarm, candidates, {other: chosen[other] for other in chosen if other != name}) > found - 1e-12


def test_many_newcomers_are_placed_in_turns():
    swarm, candidates = draw(1, 4, 6, 25)
    assert cost(swarm, candidates, choose_stages(swarm, candidates)) < swarm.microbatch_s


def test_a_single_newcomer_goes_to_the_bottleneck_or_stays_idle():
    swarm = Swarm(wanted=10, capacity=(6, 3, 6), lane_s=4.0)
    helpful = Candidate(name="n", slots=2, hop_s=(1.0, 1.0, 1.0))
    assert choose_stage(swarm, helpful) == 2
    slow = Candidate(name="n", slots=2, hop_s=(1.0, 9.0, 1.0))
    assert choose_stage(swarm, slow) is None
    assert choose_stage(Swarm(wanted=3, capacity=(6, 3, 6), lane_s=4.0), helpful) is None


def test_an_empty_stage_is_filled():
    swarm = Swarm(wanted=4, capacity=(4, 0, 4), lane_s=4.0)
    assert choose_stage(swarm, Candidate(name="n", slots=2, hop_s=(1.0,) * 3)) == 2


def test_hops_must_cover_every_stage():
    with pytest.raises(ValueError, match="2 hops for 3 stages"):
        choose_stages(Swarm(wanted=4, capacity=(4, 3, 4), lane_s=4.0), [Candidate(name="n", slots=2, hop_s=(1.0,) * 2)])


def test_the_typical_hop_is_to_the_nearer_half():
    assert typical_hop_s([1.0, 3.0, 9.0], [2.0]) == pytest.approx((2.0 + 2.0) / 2)


def star(**detours: float) -> dict[str, dict[str, float]]:
    """Costs with which going from p over a peer to f takes the given seconds."""
    return {"p": {q: d / 2 for q, d in detours.items()}, **{q: {"f": d / 2} for q, d in detours.items()}}


def test_the_nearest_peer_with_a_free_slot_takes_over():
    costs, slots = star(a=1.0, b=2.0, c=3.0), {"a": 2, "b": 2, "c": 2}
    work_s = dict.fromkeys("abc", 0.1)
    assert next_hop(costs, "p", "f", load={}, slots=slots, work_s=work_s) == "a"
    assert next_hop(costs, "p", "f", load={"a": 2}, slots=slots, work_s=work_s) == "b"
    assert next_hop(costs, "p", "f", load={"a": 2}, slots=slots, work_s=work_s, exclude={"b"}) == "c"
    assert next_hop(costs, "p", "f", load={"a": 1}, slots=slots, work_s=dict.fromkeys("abc", 2.0)) == "b"


def test_without_a_free_slot_the_least_loaded_peer_takes_over():
    costs, slots = star(a=1.0, b=2.0), {"a": 2, "b": 2}
    work_s = dict.fromkeys("ab", 0.1)
    assert next_hop(costs, "p", "f", load={"a": 3, "b": 2}, slots=slots, work_s=work_s) == "b"
    assert next_hop(costs, "p", "f", load={"a": 2, "b": 2}, slots=slots, work_s=work_s) == "a"


def test_peers_out_of_reach_are_passed_over():
    costs = star(a=1.0, b=2.0)
    del costs["a"]["f"]
    slots, work_s = {"a": 2, "b": 2}, dict.fromkeys("ab", 0.1)
    assert next_hop(costs, "p", "f", load={}, slots=slots, work_s=work_s) == "b"
    with pytest.raises(ValueError, match="nobody is left"):
        next_hop(costs, "p", "f", load={}, slots=slots, work_s=work_s, exclude="b")
