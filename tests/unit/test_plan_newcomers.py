"""Newcomers go where they help; measured speeds that stay off lead to a new plan."""

from __future__ import annotations

from talkoot.plan.drift import STEPS, Drift
from talkoot.plan.newcomers import stages_for
from talkoot.plan.steps import Seat, View

RING = [Seat(f"id-{s}-{i}", s, 1.0, f"{s}-{i}", 2) for s, n in enumerate((2, 1, 2)) for i in range(n)]


def view(seats: list[Seat] = RING, **more) -> View:
    return View(seats=seats, num_stages=3, num_microbatches=6, ring=True, **more)


def newcomer(name: str, speed: float = 1.0, slots: int = 2) -> Seat:
    return Seat(f"id-{name}", -1, speed, name, slots)


def test_a_newcomer_goes_to_the_stage_that_limits_how_many_are_under_way():
    assert stages_for([newcomer("late")], view()) == {"late": 1}


def test_a_newcomer_that_lets_nobody_more_be_under_way_waits():
    even = [Seat(f"id-{s}-{i}", s, 1.0, f"{s}-{i}", 2) for s in range(3) for i in range(2)]
    assert stages_for([newcomer("late")], view(even)) == {}


def test_without_slots_the_stage_with_most_work_per_peer_gets_the_newcomers():
    seats = [Seat(f"id-{s}", s, 1.0, str(s)) for s in range(3)]
    chosen = stages_for([newcomer("a", slots=0), newcomer("b", slots=0)], view(seats, stage_s=[1.0, 5.0, 2.0]))
    assert chosen == {"a": 1, "b": 1}, "five are still more than two after the first has come"
    assert stages_for([newcomer("a", slots=0)], view(seats[:2], stage_s=[1.0, 5.0, 2.0])) == {"a": 2}, "an empty one"


def test_a_speed_that_is_off_once_is_no_news_and_one_that_stays_off_is():
    drift = Drift(0.2)
    for _ in range(STEPS - 1):
        drift.note("slow", 1.0, 1.0, 2.0)
        drift.note("right", 1.0, 1.0, 1.05)
        assert drift.news() == {}
    drift.note("slow", 1.0, 1.0, 2.0)
    news = drift.news()
    assert round(news["slow"], 6) == 0.5
    assert abs(news["right"] - 1) < 0.1
    assert drift.news() == {}, "said once"


def test_a_speed_within_the_tolerance_never_is_news_and_no_tolerance_means_never():
    patient, never = Drift(0.5), Drift(0.0)
    for _ in range(10):
        patient.note("a", 1.0, 1.0, 1.4)
        never.note("a", 1.0, 1.0, 9.0)
        assert patient.news() == never.news() == {}


def test_work_that_took_no_time_says_nothing():
    drift = Drift(0.1)
    for _ in range(10):
        drift.note("a", 1.0, 0.0, 0.0)
    assert drift.news() == {}
