"""Planners and repair policies of rings: valid whoever is there, whatever the links, whoever is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.plan import planners
from talkoot.plan.repair import Progress, Wound, repairs
from talkoot.plan.senders import answer_s
from talkoot.plan.steps import Hop, Path, Route, Seat, StepPlan, View, pace, validate
from talkoot.world.links import Link, Network


@st.composite
def views(draw, least: int = 1) -> View:
    """Rings of 1 to 5 stages, unlike peers and links; every stage has ``least`` peers or more."""
    stages = draw(st.integers(1, 5))
    seats: list[Seat] = []
    for stage in range(stages):
        for index in range(draw(st.integers(least, least + 2))):
            speed = draw(st.sampled_from([1.0, 0.5, 0.1]))
            seats.append(Seat(f"id-{stage}-{index}", stage, speed, f"{stage}-{index}", draw(st.integers(0, 3))))
    names = [seat.name for seat in seats]
    pairs = draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=6))
    links = {f"{a}->{b}": Link(latency_s=draw(st.floats(0, 2))) for a, b in pairs}
    return View(
        seats=seats,
        num_stages=stages,
        num_microbatches=draw(st.integers(1, 9)),
        ring=True,
        network=Network(links=links),
        hop_bytes=1_000_000,
        homes={seat.name: seat.stage for seat in seats},
    )


@settings(max_examples=80, deadline=None)
@given(views(), st.sampled_from(["straight", "weighted", "greedy"]))
def test_every_plan_of_a_ring_is_valid_and_gives_each_microbatch_all_stages(view, name):
    plan = planners[name](view)
    validate(plan, view)
    assert all(len(path.hops) == view.num_stages for path in plan.paths)
    assert planners[name](view) == plan


@settings(max_examples=80, deadline=None)
@given(views(), st.sampled_from(["straight", "weighted", "greedy"]))
def test_no_origin_has_more_microbatches_under_way_than_it_has_slots(view, name):
    plan = planners[name](view)
    slots = {seat.peer: seat.slots for seat in view.seats}
    for origin, limit in slots.items():
        mine = [path for path in plan.paths if path.hops[0].peer == origin]
        if limit:
            assert sum(path.after is None for path in mine) <= limit
            waited_for = Counter(path.after for path in mine if path.after is not None)
            assert all(count == 1 for count in waited_for.values()), "each return lets one leave"


def test_a_greedy_sender_ignores_load_and_a_weighted_one_shares_by_speed():
    seats = [Seat("o", 0, 1.0, "o"), Seat("fast", 1, 1.0, "fast"), Seat("slow", 1, 0.5, "slow")]
    view = View(seats=seats, num_stages=2, num_microbatches=9, ring=True, stage_s=[1.0, 1.0])
    chosen = {
        name: Counter(path.hops[1].peer for path in planners[name](view).paths) for name in ("greedy", "weighted")
    }
    assert chosen == {"greedy": {"fast": 9}, "weighted": {"fast": 6, "slow": 3}}
    assert answer_s(view, seats[0], seats[2]) == pytest.approx(6.0, rel=1e-2)


def test_microbatches_wait_for_the_one_a_slot_before_them():
    assert pace({0: "a", 1: "a", 2: "b", 3: "a", 4: "a", 5: "b"}, {"a": 2}) == {3: 0, 4: 1}


ROUTES = (Route(("0-0", "1-0", "2-0"), 2), Route(("0-1", "2-1"), 1))
SEATS = [Seat(f"id-{s}-{i}", s, 1.0, f"{s}-{i}") for s in range(3) for i in range(2)]


def view_of(seats: list[Seat]) -> View:
    homes = {seat.name: seat.stage for seat in SEATS}
    return View(seats=seats, num_stages=3, num_microbatches=3, ring=True, routes=ROUTES, homes=homes)


def test_routes_are_followed_and_a_lane_carries_one_microbatch_at_a_time():
    plan = planners["routes"](view_of(SEATS))
    validate(plan, view_of(SEATS))
    assert [([hop.peer for hop in path.hops], path.after) for path in plan.paths] == [
        (["id-0-0", "id-1-0", "id-2-0"], None),
        (["id-0-1", "id-2-1"], None),
        (["id-0-0", "id-1-0", "id-2-0"], 0),
    ]


@pytest.mark.parametrize("missing", ["0-0", "1-0", "2-1"])
def test_the_other_peer_of_the_stage_stands_in_for_a_missing_one(missing):
    view = view_of([seat for seat in SEATS if seat.name != missing])
    plan = planners["routes"](view)
    validate(plan, view)
    assert f"id-{missing}" not in {hop.peer for path in plan.paths for hop in path.hops}


def test_routes_for_another_number_of_microbatches_are_refused():
    with pytest.raises(ValueError, match="do not carry 4"):
        planners["routes"](View(seats=SEATS, num_stages=3, num_microbatches=4, ring=True, routes=ROUTES))


@st.composite
def wounds(draw) -> Wound:
    """A plan of which some peers are lost at some moment, with everybody's progress as of then."""
    view = draw(views(least=2))
    plan = planners[draw(st.sampled_from(["straight", "weighted"]))](view)
    by_stage = {stage: [seat.peer for seat in view.seats if seat.stage == stage] for stage in range(view.num_stages)}
    lost = {draw(st.sampled_from(peers)) for peers in by_stage.values() if draw(st.booleans())}
    done: dict[str, set[tuple[str, int]]] = {seat.peer: set() for seat in view.seats}
    for path in plan.paths:
        course = [("forward", hop.peer) for hop in path.hops] + [("loss", path.hops[0].peer)]
        course += [("backward", hop.peer) for hop in reversed(path.hops)]
        for phase, peer in course[: draw(st.integers(0, len(course)))]:
            done[peer].add((phase, path.microbatch))
    left = [seat for seat in view.seats if seat.peer not in lost]
    return Wound(
        plan=plan,
        lost=frozenset(lost),
        view=View(
            seats=left,
            num_stages=view.num_stages,
            num_microbatches=view.num_microbatches,
            ring=True,
            network=view.network,
            hop_bytes=view.hop_bytes,
        ),
        progress={seat.peer: Progress(frozenset(done[seat.peer])) for seat in left},
    )


@settings(max_examples=150, deadline=None)
@given(wounds(), st.sampled_from(["repair", "skip", "redo"]))
def test_a_mended_plan_is_valid_and_only_hurt_paths_change(wound, policy):
    mending = repairs[policy](wound)
    validate(mending.plan, wound.view)
    before = {path.microbatch: path for path in wound.plan.paths}
    holes = {(m, hop.stage) for m, path in before.items() for hop in path.hops if hop.peer in wound.lost}
    assert set(mending.repaired) | set(mending.skipped) == holes
    assert not set(mending.repaired) & set(mending.skipped)
    for path in mending.plan.paths:
        kept = {hop for hop in before[path.microbatch].hops if hop.peer not in wound.lost}
        assert kept <= set(path.hops)
        assert path.after == before[path.microbatch].after
    if policy == "repair":
        assert mending.repeated <= len(holes), "one forward of one stage per hole"
    if policy != "redo":
        assert mending.restarted == ()


@settings(max_examples=100, deadline=None)
@given(wounds())
def test_skipping_in_a_crash_keeps_the_stages_visits_even_and_never_undoes_what_was_handed_on(wound):
    mending = repairs["skip"](wound)
    visits = [len(mending.plan.visitors(stage)) for stage in range(1, wound.view.num_stages)]
    assert not visits or max(visits) - min(visits) <= 1
    after = {path.microbatch: [hop.stage for hop in path.hops] for path in wound.plan.paths}
    for m, stage in mending.skipped:
        follower = (after[m].index(stage) + 1) % len(after[m])
        peer = next(p for p in wound.plan.paths if p.microbatch == m).hops[follower].peer
        phase = "forward" if follower else "loss"
        assert peer in wound.lost or (phase, m) not in wound.progress[peer].done


def test_a_lost_origin_hands_all_that_waits_for_one_another_to_one_heir():
    hops = lambda origin: (Hop(0, origin), Hop(1, "r"))  # noqa: E731
    paths = (Path(0, hops("a")), Path(1, hops("a"), 0), Path(2, hops("a"), 1), Path(3, hops("b")))
    seats = [Seat("b", 0, 1.0, "b"), Seat("c", 0, 1.0, "c"), Seat("r", 1, 1.0, "r")]
    view = View(seats=seats, num_stages=2, num_microbatches=4, ring=True)
    progress = {peer: Progress(frozenset()) for peer in ("b", "c", "r")}
    mending = repairs["repair"](
        Wound(plan=StepPlan(paths, ring=True), lost=frozenset("a"), view=view, progress=progress)
    )
    validate(mending.plan, view)
    assert len({path.hops[0].peer for path in mending.plan.paths[:3]}) == 1


def test_the_policy_restart_gives_the_step_up():
    view = View(seats=[], num_stages=1, num_microbatches=1, ring=True)
    assert repairs["restart"](Wound(plan=StepPlan(()), lost=frozenset(), view=view, progress={})) is None
