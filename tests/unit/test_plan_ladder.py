"""What each loss would cost: an oracle that tries every assignment of rungs, and the properties that must hold."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.ids import PeerId
from talkoot.plan.ladder import Case, Price, Steady, judge, keepers, losses, price, steady_cost
from talkoot.train.recovery.ladder import Holding, Loss, Unrecoverable, climb
from talkoot.world.links import Link, Network

RUNGS = ("replica", "shadow", "journal", "replay", "checkpoint", "blend")


@st.composite
def cases(draw) -> Case:
    count = draw(st.integers(1, 8))
    holders = tuple(tuple(f"{s}-{i}" for i in range(draw(st.integers(1, 2)))) for s in range(count))
    names = ["lead", *(name for peers in holders for name in peers)]
    pairs = draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=8))
    speeds = st.sampled_from([1e6, 3e6, 1e7])
    ring = draw(st.booleans())
    blocks = tuple(draw(st.integers(0 if ring and s == 0 else 1, 3)) for s in range(count))
    return Case(
        holders=holders,
        values=tuple(1000 + 500 * b for b in blocks),
        blocks=blocks,
        ends=(0,) if ring else (0, count - 1),
        ring=ring,
        network=Network(
            default=Link(latency_s=0.1), links={f"{a}->{b}": Link(bytes_per_s=draw(speeds)) for a, b in pairs}
        ),
        ladder=tuple(draw(st.permutations(RUNGS)))[: draw(st.integers(1, 6))],
        copies=draw(st.integers(1, 3)),
        guarded=tuple(draw(st.sets(st.integers(0, count - 1), max_size=3))),
        moments=draw(st.sampled_from(["reset", "neighbours"])),
        iteration_s=90.0,
        stage_s=tuple(float(10 + s) for s in range(count)),
        sent_bytes=5e5,
        checkpoint_every=draw(st.sampled_from([10, 100])),
        detection_s=1.0,
        start_s=5.0,
    )


def able(case: Case, rung: str, stage: int, lost: frozenset[str]) -> bool:
    """Whether a rung can serve, written by the words of the specification rather than by the code's."""
    size = len(case.holders)
    dead = {s for s in range(size) if set(case.holders[s]) <= lost}
    near = {(stage + d) % size for d in (-1, 1)} if case.ring else {stage - 1, stage + 1} & set(range(size))
    near -= {stage}
    if rung == "replica":
        return stage not in dead
    if rung in ("shadow", "journal"):
        return any(name not in lost for name in keepers(case).get(stage, ()))
    if rung == "replay":
        return lost == {name for s in dead for name in case.holders[s]}
    if rung == "blend":
        with_blocks = {s for s in near if case.blocks[s] > 0}
        return stage not in case.ends and bool(with_blocks) and not with_blocks & dead
    return rung == "checkpoint"


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_the_answer_is_that_of_an_oracle_which_tries_every_assignment_of_rungs(case, data):
    names = [name for peers in case.holders for name in peers]
    lost = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=4)))
    struck = [s for s, peers in enumerate(case.holders) if set(peers) & lost]
    held = [s for s in struck if set(case.holders[s]) - lost and case.ladder[0] != "checkpoint"]
    hurt = [s for s in struck if s not in held]  # the others are held by who is left
    ways = [
        way
        for way in product(range(len(case.ladder)), repeat=len(hurt))
        if all(able(case, case.ladder[place], stage, lost) for place, stage in zip(way, hurt, strict=True))
    ]
    found = judge(case, lost)
    if not ways:
        assert not found.rungs
        assert not found.exact
        assert math.isinf(found.seconds)
        stuck = [s for s in hurt if not any(able(case, rung, s, lost) for rung in case.ladder)]
        assert all(f"stage {s}:" in found.why for s in stuck)
        return
    best = min(ways)  # the earliest rung for every stage: no stage's choice restricts another's
    chosen = [case.ladder[place] for place in best]
    if "replay" in chosen and "checkpoint" not in chosen:  # it serves only where all that were hit are empty
        chosen = ["replay"] * len(hurt)
    assert [found.rungs[s] for s in hurt] == chosen
    assert all(found.rungs[s] == "replica" for s in held)
    assert found.exact == ("blend" not in found.rungs.values())
    assert found.stages == tuple(s for s in struck if set(case.holders[s]) <= lost)
    prices = {s: price(case, found.rungs[s], s, lost, keepers(case)) for s in struck}
    assert all(isinstance(one, Price) for one in prices.values())
    if len(struck) == 1 and found.stages:
        (one,) = prices.values()
        assert isinstance(one, Price)
        assert found.seconds == pytest.approx(1 + 5 + one.transfer_s + one.again_s + 45)


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_the_answer_is_that_of_the_running_lead(case, data):
    names = [name for peers in case.holders for name in peers]
    lost = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=4)))
    kept = keepers(case)

    def left(peers) -> tuple[PeerId, ...]:
        return tuple(PeerId(name) for name in peers if name not in lost)

    stages = tuple(
        Holding(survivors=left(peers), keepers=left(kept.get(s, ())), blocks=case.blocks[s], ends=s in case.ends)
        for s, peers in enumerate(case.holders)
    )
    hurt = tuple(s for s, peers in enumerate(case.holders) if set(peers) & lost)
    logged = "" if all(set(case.holders[s]) <= lost for s in hurt) else "somebody who had sent to it is gone"
    found = judge(case, lost)
    loss = Loss(stages=stages, hurt=hurt, step=7, checkpoint=5, logged=logged, ring=case.ring)
    try:
        sources, stuck = climb(case.ladder, loss), []
    except Unrecoverable as refusal:
        sources, stuck = {}, list(refusal.reasons)
    assert all(f"stage {stage}:" in found.why for stage in stuck)
    assert math.isinf(found.seconds) == bool(stuck)
    assert found.rungs == {stage: source.rung for stage, source in sources.items()}
    assert found.exact == (not stuck and all(source.exact for source in sources.values()))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_keeper_is_of_another_stage_and_no_neighbour_while_there_is_another_choice(case):
    case = msgspec.structs.replace(case, ladder=("shadow",), guarded=(), copies=1)
    count = case.num_stages
    stage_of = {name: stage for stage, names in enumerate(case.holders) for name in names}
    for stage, names in keepers(case).items():
        assert len(names) == min(1, count - 1)
        distances = {(stage_of[name] - stage) % count for name in names}
        assert 0 not in distances
        assert count < 4 or distances.isdisjoint({1, count - 1})


def example(**changes) -> Case:
    """The published medium model's ring, everything on links of 10 MB/s."""
    seven = tuple((name,) for name in "abcdefg")
    usual = Case(
        holders=seven,
        values=(103_000_000, *[67_000_000] * 6),
        blocks=(0, 4, 4, 4, 4, 4, 4),
        network=Network(default=Link(latency_s=0.0, bytes_per_s=1e7)),
        ladder=("shadow",),
        stream_bytes=2,
        iteration_s=90.0,
        stage_s=(5.0,) * 7,
        sent_bytes=2.7e8,
        checkpoint_every=10,
        start_s=30.0,
    )
    return msgspec.structs.replace(usual, **changes)


def seconds(case: Case, *stages: int) -> float:
    return judge(case, [case.holders[stage][0] for stage in stages]).seconds


def test_each_rung_costs_what_can_be_computed_by_hand():
    state = 12 * 67e6 / 1e7
    assert seconds(example(), 3) == pytest.approx(30 + state + 45)
    assert seconds(example(ladder=("journal",)), 3) == pytest.approx(30 + state + 25 * 2 * 67e6 / 1e7 + 45)
    assert seconds(example(ladder=("replay",)), 3) == pytest.approx(30 + 5 * 27 + 5 * 5 + 45)
    assert seconds(example(ladder=("checkpoint",)), 3) == pytest.approx(30 + state + 5 * 90 + 45)
    assert seconds(example(ladder=("blend",)), 3) == pytest.approx(30 + 8 * 67e6 / 1e7 + 5 * 90 + 45)
    assert seconds(example(ladder=("blend",), moments="reset", jump_iterations=0), 3) == pytest.approx(30 + 26.8 + 45)


def test_losses_side_by_side_share_their_wait_but_not_what_approximations_lose():
    assert seconds(example(), 2, 3) == seconds(example(), 3)
    blend = example(ladder=("blend",))
    assert seconds(blend, 2, 5) == pytest.approx(seconds(blend, 5) + 5 * 90)


def test_two_adjacent_stages_are_refused_by_the_approximate_rung_and_borne_by_the_exact_one():
    refused = judge(example(ladder=("blend",)), ["c", "d"])
    assert refused.rungs == {}
    assert "neighbours [3] are lost with it" in refused.why
    kept = judge(example(), ["c", "d"])
    assert kept.rungs == {2: "shadow", 3: "shadow"}
    assert kept.exact


def test_embedding_and_head_are_never_blended_but_can_be_guarded():
    ladder = ("shadow", "blend")
    assert "embedding" in judge(example(ladder=("blend",)), ["a"]).why
    guarded = example(ladder=ladder, guarded=(0,))
    assert judge(guarded, ["a"]).rungs == {0: "shadow"}
    assert judge(guarded, ["b"]).rungs == {1: "blend"}


def test_one_peer_of_a_stage_with_two_costs_no_waiting():
    case = example(holders=(("a",), ("b", "b2"), *[(name,) for name in "cdefg"]), ladder=("replica", "shadow"))
    assert judge(case, ["b2"]).seconds == 2.5
    assert judge(case, ["b", "b2"]).rungs == {1: "shadow"}


def test_single_losses_and_adjacent_pairs_are_listed_once_each():
    words = [text for text, _ in losses(example())]
    assert words[:7] == [f"stage {stage}" for stage in range(7)]
    assert sorted(words[7:14]) == sorted([f"stages {s} and {s + 1}" for s in range(6)] + ["stages 6 and 0"])
    assert [text.partition(" and ")[0] for text in words[14:]] == [f"stage {s}" for s in range(7)]
    assert all(text.endswith("its keeper") for text in words[14:])
    line = example(ring=False, ends=(0, 6))
    assert [text for text, _ in losses(line)][7:13] == [f"stages {s} and {s + 1}" for s in range(6)]
    assert [t for t, _ in losses(example(holders=(("a",), ("b",))))][2:] == ["stages 0 and 1"]


def test_a_stream_costs_what_the_backwards_of_earlier_stages_do_not_hide():
    case = example(stage_s=(0.0,) * 7, sent_bytes=0.0)
    shadow = steady_cost(case, "shadow")
    assert shadow.bytes == 2 * 103e6
    assert shadow.link_s == shadow.exposed_s == pytest.approx(20.6)
    later = steady_cost(msgspec.structs.replace(case, guarded=(3,), stage_s=(6.0,) * 7), "shadow")
    assert (later.link_s, later.exposed_s) == pytest.approx((13.4, 13.4 - 3 * 4))
    assert shadow.kept_bytes == 12 * 103e6
    assert steady_cost(case, "replay").bytes == 12 * 103e6 / 10
    assert steady_cost(case, "blend") == Steady(bytes=0, link_s=0, exposed_s=0, kept_bytes=0)


def test_a_rung_that_does_not_exist_is_a_programming_error():
    with pytest.raises(ValueError, match="no rung"):
        price(example(), "hope", 1, ["b"], {})
