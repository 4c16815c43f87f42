"""Pure decisions: the learning rate, the recovery ladder, and who holds what."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.train.recipe import Swarm, Train
from talkoot.train.roster import Roster
from talkoot.train.schedule import learning_rate, schedules


def rates(train: Train) -> list[float]:
    return [learning_rate(train, step) for step in range(train.steps)]


def test_the_cosine_has_its_hand_computed_values():
    train = Train(steps=8, warmup=4, learning_rate=1.0, final_rate=0.2, schedule="cosine")
    half = math.sqrt(0.5)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half]
    assert rates(train) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(train, 8) == pytest.approx(0.2)
    assert learning_rate(train, 99) == pytest.approx(0.2)


def test_constant_then_decay_has_its_hand_computed_values():
    train = Train(steps=10, warmup=0, learning_rate=2.0, final_rate=0.5, decay=0.4, schedule="constant-decay")
    assert rates(train) == pytest.approx([2.0] * 7 + [1.75, 1.5, 1.25], rel=1e-12)
    assert learning_rate(train, 10) == pytest.approx(1.0)


@given(
    st.sampled_from(list(schedules)),
    st.integers(1, 200),
    st.integers(0, 250),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_every_schedule_warms_up_linearly_then_never_rises_and_ends_at_its_final_rate(
    name, steps, warmup, decay, final_rate
):
    train = Train(steps=steps, warmup=warmup, learning_rate=3e-3, schedule=name, decay=decay, final_rate=final_rate)
    found = rates(train)
    for step, rate in enumerate(found[:warmup]):
        assert rate == 3e-3 * (step + 1) / warmup
    after = found[warmup:]
    assert all(a >= b - 1e-15 for a, b in pairwise(after))
    assert all(3e-3 * final_rate - 1e-12 <= rate <= 3e-3 for rate in after)
    if after and (name == "cosine" or decay > 1e-6):
        assert learning_rate(train, max(steps, warmup + 1)) == pytest.approx(3e-3 * final_rate)


def test_an_unknown_schedule_is_refused_with_the_nearest_name():
    with pytest.raises(TalkootError) as caught:
        learning_rate(Train(schedule="cosin", warmup=0), 0)
    assert "'cosine'" in caught.value.why


def full(stages: int = 2, replicas: int = 2) -> tuple[Roster, dict[str, PeerId]]:
    """A roster with all names present and seated; identities sort in another order than names."""
    roster = Roster(Swarm(stages=stages, replicas=replicas, speeds=(1.0, 0.5)))
    peers = {name: PeerId(f"id-{99 - index}") for index, name in enumerate(roster.home)}
    for index, (name, peer) in enumerate(peers.items()):
        roster.launched[name] = f"launch:{index}"
        roster.admit(peer, name, f"at-{name}")
    for peer, stage in roster.unseated():
        roster.members[peer].stage = stage
    return roster, peers


def test_names_serve_their_stages_in_order():
    roster, peers = full()
    assert roster.home == {"alder": 0, "birch": 0, "cedar": 1, "dogwood": 1}
    assert roster.holders(0) == (peers["alder"], peers["birch"])
    assert roster.holders(1) == (peers["cedar"], peers["dogwood"])
    assert roster.unseated() == []
    assert [(seat.peer, seat.stage, seat.speed) for seat in roster.seats()] == [
        (peers["alder"], 0, 1.0),
        (peers["birch"], 0, 0.5),
        (peers["cedar"], 1, 1.0),
        (peers["dogwood"], 1, 1.0),
    ]
    assert roster.describe([peers["dogwood"], peers["alder"], "stranger"]) == "alder, dogwood, stranger"


def test_only_a_peer_that_was_launched_is_admitted_and_only_once():
    roster, _ = full()
    with pytest.raises(ValueError, match="nobody waits for 'zelkova'"):
        roster.admit(PeerId("x"), "zelkova", "")
    with pytest.raises(ValueError, match="nobody waits for 'alder'"):
        roster.admit(PeerId("x"), "alder", "")
    assert PeerId("x") not in roster.members


def test_a_loss_is_understood_by_identity_and_by_ticket_and_known_once():
    roster, peers = full()
    assert roster.find(peers["cedar"]) == roster.find("launch:2") == peers["cedar"]
    del roster.members[peers["cedar"]]
    assert roster.find(peers["cedar"]) is roster.find("launch:2") is None


def test_a_launch_that_ends_before_its_hello_is_named_once():
    roster, _ = full()
    roster.launched["elm"] = "launch:9"
    assert roster.stillborn("launch:8") is None
    assert roster.stillborn("launch:9") == "elm"
    assert roster.stillborn("launch:9") is None


def test_what_is_missing_are_names_under_way_for_empty_stages_and_stages_without_any_name():
    roster, peers = full()
    assert roster.missing() == (set(), [])
    del roster.members[peers["cedar"]]
    assert roster.missing() == (set(), []), "the other replica still holds the stage"
    del roster.members[peers["dogwood"]]
    assert roster.missing() == (set(), [1])
    roster.launched["dogwood"] = "launch:7"
    assert roster.missing() == ({"dogwood"}, [])
    roster.vacate()
    assert roster.seated() == []
    assert roster.missing() == ({"dogwood"}, [])
    assert len(roster.unseated()) == 2


@given(st.integers(2, 4), st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_with_tied_embeddings_everybody_at_an_end_hears_from_exactly_the_one_that_sends_to_it(
    stages, firsts, lasts, chance
):
    roster = Roster(Swarm(stages=stages, replicas=5))
    for name, stage in roster.home.items():
        keep = {0: firsts, stages - 1: lasts}.get(stage, 1)
        roster.launched[name] = f"launch:{name}"
        if len(roster.holders(stage)) < keep:
            peer = PeerId(f"{chance.random()}-{name}")
            roster.admit(peer, name, "")
            roster.members[peer].stage = stage
    heard: dict[str, list[str]] = {}
    for peer, stage in roster.seated():
        to, _ = roster.tie(peer, stage)
        for other in to:
            heard.setdefault(other, []).append(peer)
    for peer, stage in roster.seated():
        _, source = roster.tie(peer, stage)
        at_an_end = stage in (0, stages - 1)
        assert heard.get(peer, []) == ([source] if at_an_end else [])


def test_a_single_stage_has_no_partners():
    roster, peers = full(1, 2)
    assert roster.tie(peers["alder"], 0) == ((), None)
