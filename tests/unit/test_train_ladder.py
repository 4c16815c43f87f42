"""The recovery ladder and the book of keepers, against brute force: pure, every small failure set."""

from __future__ import annotations

import random
from itertools import combinations, permutations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.keepers import choose_keepers, head_start_s
from talkoot.plan.steps import Seat, View
from talkoot.train.keepers import Keepers
from talkoot.train.recovery import Holding, Loss, Source, Unrecoverable, climb
from talkoot.train.sections import Recovery
from talkoot.world.links import Link, Network


def swarm(stages: int, replicas: int = 1) -> View:
    seats = [Seat(PeerId(f"{s}.{r}"), s, 1.0, f"{s}.{r}", 0) for s in range(stages) for r in range(replicas)]
    return View(seats=seats, num_stages=stages, num_microbatches=2)


def sizes(view: View) -> list[float]:
    return [1e8] * view.num_stages


def book(view: View, **recovery) -> Keepers:
    """Everybody who should keep something does, as of step 5."""
    keepers = Keepers(Recovery(ladder=("shadow",), **recovery))
    for stage, peer in keepers.wanted(view, 1, sizes(view)):
        keepers.add(stage, peer, 1)
        keepers.note(stage, peer, 5, 1)
    return keepers


def loss_of(view: View, keepers: Keepers, dead: set[str], *, ring: bool = False, logged: str = "no") -> Loss:
    last = view.num_stages - 1
    for peer in dead:
        keepers.forget(PeerId(peer))
    stages = tuple(
        Holding(
            survivors=tuple(seat.peer for seat in view.holders(stage) if seat.peer not in dead),
            keepers=tuple(keepers.able(stage, 5)),
            ends=stage == 0 if ring else stage in (0, last),
            blocks=0 if ring and stage == 0 else 1,
            gradient_norm=1.0 + stage,
        )
        for stage in range(view.num_stages)
    )
    hurt = {seat.stage for seat in view.seats if seat.peer in dead}
    return Loss(stages=stages, hurt=tuple(sorted(hurt)), step=5, logged=logged, ring=ring)


def expected(names, view, stage, dead, *, ring, logged, kept_by) -> tuple[str, bool] | None:
    """What must serve a hurt stage, worked out from who is dead alone (one peer per stage)."""
    count = view.num_stages
    for name in names:
        if name == "shadow" and set(kept_by) - dead:
            return "shadow", True
        if name == "replay" and not logged:
            return "replay", True
        if name == "blend" and not (stage == 0 if ring else stage in (0, count - 1)):
            beside = {(stage - 1) % count, (stage + 1) % count} - ({0} if ring else set())
            if beside and not any(f"{s}.0" in dead for s in beside):
                return "blend", False
        if name == "checkpoint":
            return "checkpoint", True
    return None


LADDERS = [("shadow", "blend"), ("replay", "blend"), ("blend",), ("replica", "shadow", "replay", "checkpoint"), ()]


@pytest.mark.parametrize("names", LADDERS, ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("stages", range(2, 9))
def test_the_climb_agrees_with_brute_force_for_every_failure_set(names, ring, stages):
    everybody = [f"{stage}.0" for stage in range(stages)]
    sets = [set(dead) for size in (1, 2, 3, stages) for dead in combinations(everybody, min(size, stages))]
    for dead, copies, logged in product(sets, (1, 2), ("", "no")):
        view = swarm(stages)
        keepers = book(view, copies=copies)
        kept = {stage: keepers.of(stage) for stage in range(stages)}
        loss = loss_of(view, keepers, dead, ring=ring, logged=logged)
        lost = sorted(int(peer.split(".")[0]) for peer in dead)
        assert loss.empty_stages == lost
        answers = {s: expected(names, view, s, dead, ring=ring, logged=logged, kept_by=kept[s]) for s in lost}
        if ("replay", True) in answers.values() and ("checkpoint", True) not in answers.values():
            answers = {s: answer if answer is None else ("replay", True) for s, answer in answers.items()}
        hopeless = {stage for stage, answer in answers.items() if answer is None}
        if hopeless:
            with pytest.raises(Unrecoverable, match="cannot recover") as caught:
                climb(names, loss)
            assert set(caught.value.reasons) == hopeless
            assert caught.value.code == Exit.UNREACHABLE
            assert all(set(said) == set(names) and all(said.values()) for said in caught.value.reasons.values())
        else:
            found = climb(names, loss)
            assert {stage: (source.rung, source.exact) for stage, source in found.items()} == answers


@pytest.mark.parametrize("stages", range(4, 13))
def test_one_keeper_is_enough_for_any_two_adjacent_losses(stages):
    for first in range(stages - 1):
        view = swarm(stages)
        loss = loss_of(view, book(view), {f"{first}.0", f"{first + 1}.0"})
        assert all(source.exact for source in climb(("shadow",), loss).values())


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_that_many_keepers_survive_that_many_losses_whoever_they_are(copies):
    stages = 7
    for dead in combinations([f"{stage}.0" for stage in range(stages)], copies):
        view = swarm(stages)
        loss = loss_of(view, book(view, copies=copies), set(dead))
        assert set(climb(("shadow",), loss)) == set(loss.empty_stages)


def test_a_survivor_makes_everything_else_unnecessary():
    view = swarm(3, 2)
    loss = loss_of(view, book(view), {"1.0"})
    assert climb(("replica", "shadow"), loss) == {1: Source(rung="replica", how="copy", step=5)}


def test_before_the_first_snapshot_everybody_goes_back_to_the_start():
    view = swarm(2)
    loss = loss_of(view, book(view), {"1.0"})
    assert climb(("checkpoint",), loss)[1].step == 0


def test_the_longest_wait_for_a_gradient_is_as_short_as_can_be():
    """Against all assignments, on random links."""
    for seed in range(20):
        chance, count = random.Random(seed), 6
        names = [f"{stage}.0" for stage in range(count)]
        links = {
            f"{a}->{b}": Link(latency_s=0.01, bytes_per_s=chance.uniform(1e6, 1e8))
            for a in names
            for b in names
            if a != b
        }
        view = msgspec.structs.replace(swarm(count), network=Network(links=links), hop_bytes=10**8)
        found = choose_keepers(view, dict.fromkeys(range(count), 1), [], sizes(view))
        seats = {seat.peer: seat for seat in view.seats}
        holder = {stage: view.holders(stage)[0] for stage in range(count)}

        def slowest(pairs, seats=seats, holder=holder, view=view) -> float:
            waits = {(s, p): view.hop_s(holder[s], seats[p]) - head_start_s(view, s) for s, p in pairs}
            return max(0.0, *waits.values())

        best = min(
            slowest(list(enumerate(map(PeerId, order))))
            for order in permutations(names)
            if all((int(peer[0]) - stage) % count not in (0, 1, count - 1) for stage, peer in enumerate(order))
        )
        assert slowest(found) == best


@given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_keepers_are_peers_of_other_stages_each_of_another_one_and_share_the_work(stages, replicas, copies, seed):
    view = swarm(stages, replicas)
    keepers = book(view, copies=copies)
    stage_of = {seat.peer: seat.stage for seat in view.seats}
    load = dict.fromkeys(stage_of, 0)
    for stage in range(stages):
        found = keepers.of(stage)
        assert len({stage_of[peer] for peer in found}) == len(found) == min(copies, stages - 1)
        assert stage not in {stage_of[peer] for peer in found}
        for peer in found:
            load[peer] += 1
    assert max(load.values()) <= copies
    assert keepers.wanted(view, 2, sizes(view)) == []


def test_a_keeper_counts_only_with_every_gradient_up_to_the_last_commit():
    view = swarm(4)
    keepers = book(view)
    (keeper,) = keepers.of(0)
    assert keepers.able(0, 5) == [keeper]
    assert keepers.able(0, 6) == []
    streams = keepers.streams(0)
    keepers.committed(0, streams, 5)
    assert keepers.able(0, 6) == [keeper]
    keepers.drop(0)
    assert keepers.able(0, 6) == []
    (again,) = [peer for stage, peer in keepers.wanted(view, 2, sizes(view)) if stage == 0]
    keepers.add(0, again, 2)
    keepers.committed(0, keepers.streams(0), 6)
    assert keepers.able(0, 7) == [], "whose state has not arrived is not waited for, so its step proves nothing"
    keepers.note(0, again, 7, 1)
    assert keepers.able(0, 7) == [], "what it says about an older generation's state counts for nothing"
    keepers.note(0, again, 7, 2)
    assert keepers.able(0, 7) == [again]


def test_an_unknown_rung_is_refused_with_the_nearest_name():
    with pytest.raises(TalkootError) as caught:
        climb(("replcia",), loss_of(swarm(2), book(swarm(2)), {"1.0"}))
    assert "'replica'" in caught.value.why
