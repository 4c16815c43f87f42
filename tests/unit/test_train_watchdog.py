"""When nothing moves: who is asked, who is given up, and when everything is done again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.train.watchdog import Pulse, Watchdog

FLOOR = 10.0
NOTHING = ((), (), False)


def awake() -> Watchdog:
    dog = Watchdog(FLOOR)
    dog.committed()
    dog.wait("prepared", 1, 0.0)
    return dog


def look(dog: Watchdog, now: float, *owing: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    verdict = dog.look(now, owing)
    assert bool(verdict.why) == (bool(verdict.lost) or verdict.again)
    return verdict.probe, verdict.lost, verdict.again


def test_it_sleeps_until_a_step_was_committed_and_while_nobody_waits():
    dog = Watchdog(FLOOR)
    dog.wait("prepared", 0, 0.0)
    assert dog.due == math.inf
    assert look(dog, 1000.0, "a") == NOTHING
    dog.committed()
    assert dog.due == FLOOR
    dog.rest()
    assert dog.due == math.inf


def test_whoever_gives_no_sign_of_life_is_lost():
    dog = awake()
    assert look(dog, 9.9, "a", "b") == NOTHING
    assert look(dog, 10.0, "a", "b") == (("a", "b"), (), False)
    assert dog.due == 20.0
    assert not dog.hear("a", Pulse(3, True), 10.1)
    assert look(dog, 10.1, "a", "b") == NOTHING
    assert look(dog, 20.0, "a", "b") == ((), ("b",), False)


def test_whoever_has_work_and_does_none_over_two_questions_is_lost():
    dog = awake()
    look(dog, 10.0, "a", "b")
    for peer, waits in (("a", False), ("b", True)):
        dog.hear(peer, Pulse(3, waits), 10.1)
    assert look(dog, 10.1, "a", "b") == NOTHING
    assert look(dog, 20.1, "a", "b") == (("a", "b"), (), False)
    for peer, waits in (("a", False), ("b", True)):
        dog.hear(peer, Pulse(3, waits), 20.2)
    assert look(dog, 20.2, "a", "b") == ((), ("a",), False)


def test_work_done_between_two_questions_is_progress():
    dog = awake()
    dog.hear("a", Pulse(3, False), 1.0)
    look(dog, 10.0, "a")
    assert dog.hear("a", Pulse(4, False), 10.1)
    assert dog.due == 20.1
    assert look(dog, 10.1, "a") == NOTHING
    assert look(dog, 20.1, "a") == (("a",), (), False)


def test_when_all_wait_everything_is_done_again_and_next_time_it_takes_twice_as_long():
    dog = awake()
    look(dog, 10.0, "a", "b")
    for peer in ("a", "b"):
        dog.hear(peer, Pulse(3, True), 10.1)
    assert look(dog, 10.1, "a", "b") == ((), (), True)
    dog.rest()
    dog.wait("prepared", 2, 11.0)
    assert dog.due == 11.0 + 2 * FLOOR
    dog.committed()
    dog.wait("prepared", 3, 40.0)
    assert dog.due == 40.0 + FLOOR


def test_something_large_on_its_way_is_given_time_unless_something_was_refused():
    for refused, expected in ((0, NOTHING), (1, ((), (), True))):
        dog = awake()
        dog.wait("ready", 1, 0.0, slow_s=75.0)
        look(dog, 10.0, "a")
        dog.hear("a", Pulse(3, True, refused), 10.1)
        assert look(dog, 10.1, "a") == expected
    dog = awake()
    dog.wait("ready", 1, 0.0, slow_s=75.0)
    for at in range(1, 8):
        assert look(dog, at * 10.5, "a") == (("a",), (), False)
        dog.hear("a", Pulse(3, True), at * 10.5)
        assert look(dog, at * 10.5, "a") == NOTHING
    look(dog, 84.0, "a")
    dog.hear("a", Pulse(3, True), 84.0)
    assert look(dog, 84.0, "a") == ((), (), True)


def test_who_loads_something_large_may_be_deaf_for_a_while():
    dog = awake()
    dog.wait("ready", 1, 0.0, slow_s=25.0)
    assert look(dog, 10.0, "a") == (("a",), (), False)
    assert look(dog, 20.0, "a") == (("a",), (), False)
    assert look(dog, 30.0, "a") == ((), ("a",), False)


def test_what_was_refused_long_ago_is_no_news():
    dog = awake()
    dog.wait("ready", 1, 0.0, slow_s=75.0)
    dog.hear("a", Pulse(2, True, 5), 1.0)
    look(dog, 20.0, "a")
    dog.hear("a", Pulse(2, True, 5), 20.1)
    assert look(dog, 20.1, "a") == NOTHING


def test_the_limit_follows_the_longest_pause_that_is_usual_for_a_kind_of_wait():
    dog, now = awake(), 0.0
    for step in range(30):
        dog.wait("prepared", ("step", step), now)
        now += 20.0  # computing
        for _ in range(8):  # then all answers at once
            dog.moved(now)
            now += 0.001
    dog.wait("prepared", "next", now)
    assert dog.limit_s == pytest.approx(60.0, rel=0.02)
    dog.wait("saved", "next", now)
    assert dog.limit_s == FLOOR


def test_a_wait_that_was_broken_off_teaches_nothing():
    dog = awake()
    dog.moved(1.0)
    dog.moved(500.0)
    dog.rest()
    dog.wait("prepared", 2, 500.0)
    assert dog.limit_s == FLOOR


@given(st.lists(st.floats(0.0, 9.9), min_size=1, max_size=60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_whoever_moves_often_enough_is_never_asked(pauses, peers):
    dog, now, names = awake(), 0.0, [f"p{n}" for n in range(peers)]
    for count, pause in enumerate(pauses, 1):
        assert dog.due > now + pause
        now += pause
        assert look(dog, now, *names) == NOTHING
        assert dog.hear(names[0], Pulse(count, False), now) == (count > 1)
        dog.moved(now)
