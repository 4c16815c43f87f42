"""Desks: whatever the order of messages, and whoever is lost in mid-step, all work is done and none is wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.plan import planners
from talkoot.plan.repair import Progress, Wound, repairs
from talkoot.plan.steps import Seat, StepPlan, View, Work
from talkoot.train.desk import Desk, Parcel
from talkoot.train.mend import items_of
from talkoot.train.messages import Item


class Office:
    """All desks of a step, and the messages between them in random order, some of them twice."""

    def __init__(self, view: View, plan: StepPlan, chance: random.Random) -> None:
        self.view, self.plan, self.chance = view, plan, chance
        self.desks = {
            seat.peer: Desk(
                seat.peer,
                items_of(plan.paths, seat.peer, plan.ring),
                plan.orders.get(seat.peer, ()),
                ring=plan.ring,
                slots=seat.slots,
            )
            for seat in view.seats
        }
        self.way: list[tuple[str, Parcel]] = []
        self.most: dict[str, int] = dict.fromkeys(self.desks, 0)
        self.news: dict[str, tuple[Item, ...]] = {}

    def send(self, sender: str, parcel: Parcel | None) -> None:
        if parcel is not None:
            self.way += [(sender, parcel)] * self.chance.choice([1, 1, 1, 2])

    def advance(self) -> bool:
        """One random thing: a message arrives, or a desk works; False when nothing can happen any more."""
        if self.news and self.chance.random() < 0.2:  # everybody hears of the new paths at another time
            name = self.chance.choice(sorted(self.news))
            for parcel in self.desks[name].amend(self.news.pop(name)):
                self.send(name, parcel)
        ready = [peer for peer, desk in self.desks.items() if desk.next() is not None]
        if not ready and not self.way:
            return bool(self.news)
        if self.way and (not ready or self.chance.random() < 0.5):
            sender, parcel = self.way.pop(self.chance.randrange(len(self.way)))
            if parcel.to in self.desks:
                self.desks[parcel.to].arrive(sender, parcel.phase, parcel.microbatch, parcel.frames, parcel.round)
            return True
        peer = self.chance.choice(ready)
        desk = self.desks[peer]
        work = desk.next()
        assert work is not None
        if work.phase == "forward":
            route = [] if not desk.inputs(work) else list(desk.inputs(work)[0].decode().split(">"))
            output = [">".join([*route, str(self.stage(peer))]).encode()]
        else:
            output = [b"gradient"]
        self.send(peer, desk.finish(work, output))
        held = sum(("forward", m) in desk.done and ("backward", m) not in desk.done for m in desk.items)
        self.most[peer] = max(self.most[peer], held)
        return True

    def stage(self, peer: str) -> int:
        return next(seat.stage for seat in self.view.seats if seat.peer == peer)

    def lose(self, peer: str, policy: str) -> None:
        """A crash, the stocktaking, the decision and the new paths."""
        del self.desks[peer]
        left = [seat for seat in self.view.seats if seat.peer != peer]
        view = View(seats=left, num_stages=self.view.num_stages, num_microbatches=len(self.plan.paths), ring=True)
        progress = {}
        for name, desk in self.desks.items():
            done, arrived = desk.take_stock([peer])
            progress[name] = Progress(frozenset(done), frozenset(arrived))
        mending = repairs[policy](Wound(plan=self.plan, lost=frozenset([peer]), view=view, progress=progress))
        assert mending is not None
        self.view, self.plan = view, mending.plan
        self.news = {
            name: items_of(mending.plan.paths, name, True, dict.fromkeys(mending.restarted, 1)) for name in self.desks
        }

    def done(self) -> bool:
        return all(desk.finished for desk in self.desks.values())


@st.composite
def rings(draw) -> tuple[View, StepPlan]:
    """Two of everything, so that anybody can be lost; full paths."""
    stages, slots = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    seats = [Seat(f"{s}-{i}", s, 1.0, f"{s}-{i}", slots) for s in range(stages) for i in range(2)]
    view = View(seats=seats, num_stages=stages, num_microbatches=draw(st.integers(1, 8)), ring=True)
    return view, planners[draw(st.sampled_from(["straight", "weighted"]))](view)


@settings(max_examples=100, deadline=None)
@given(rings(), st.integers(0, 10**6))
def test_whatever_the_order_of_messages_a_ring_completes_and_keeps_to_its_slots(ring, seed):
    view, plan = ring
    office = Office(view, plan, random.Random(seed))
    while office.advance():
        pass
    assert office.done()
    for seat in view.seats:
        assert office.desks[seat.peer].counts["forward"] == len(plan.share_of(seat.peer))
        assert not seat.slots or office.most[seat.peer] <= seat.slots


@settings(max_examples=150, deadline=None)
@given(rings(), st.sampled_from(["repair", "skip", "redo"]), st.integers(0, 200), st.integers(0, 10**6))
def test_whoever_is_lost_at_whatever_moment_the_step_completes_along_the_mended_paths(ring, policy, moment, seed):
    view, plan = ring
    chance = random.Random(seed)
    office = Office(view, plan, chance)
    for _ in range(moment):
        office.advance()
    victim = chance.choice(view.seats).peer
    office.lose(victim, policy)
    while office.advance():
        pass
    assert office.done()
    for path in office.plan.paths:
        stages = [hop.stage for hop in path.hops]
        last = office.desks[path.hops[-1].peer]
        came = last._sent["forward", path.microbatch][0].decode()  # what really ran, stage by stage
        assert came == ">".join(map(str, stages)), "no skipped stage is computed, no kept one left out"


def test_backward_comes_before_forward_and_the_longest_way_to_go_first():
    view = View(seats=[Seat("o", 0, slots=9), Seat("r", 1), Seat("s", 2)], num_stages=3, num_microbatches=2, ring=True)
    plan = planners["straight"](view)
    desk = Desk("r", items_of(plan.paths, "r", True), ring=True)
    desk.arrive("o", "forward", 0, [b""])
    desk.finish(Work("forward", 0), [b""])
    desk.arrive("o", "forward", 1, [b""])
    assert desk.next() == Work("forward", 1)
    desk.arrive("s", "backward", 0, [b""])
    assert desk.next() == Work("backward", 0)


def test_only_the_neighbour_on_the_path_is_heard():
    view = View(seats=[Seat("o", 0), Seat("r", 1)], num_stages=2, num_microbatches=1, ring=True)
    desk = Desk("r", items_of(planners["straight"](view).paths, "r", True), ring=True)
    desk.arrive("stranger", "forward", 0, [b"poison"])
    assert desk.next() is None
    desk.arrive("o", "forward", 0, [b"true"])
    desk.arrive("o", "forward", 0, [b"again"])
    assert desk.inputs(Work("forward", 0)) == [b"true"]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_line_follows_its_order(phase):
    view = View(seats=[Seat("a", 0), Seat("b", 1)], num_stages=2, num_microbatches=2)
    plan = planners["straight"](view)
    desk = Desk("b", items_of(plan.paths, "b", False), plan.orders["b"])
    desk.arrive("a", "forward", 1, [b""])
    assert desk.next() is None, "microbatch 0 comes first"
    desk.arrive("a", "forward", 0, [b""])
    desk.finish(Work("forward", 0), [b""])
    assert desk.next() == Work("backward", 0), "the end of a line needs no gradient from anybody"
