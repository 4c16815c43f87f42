"""How often snapshots are taken."""

from __future__ import annotations

import math

import pytest

from talkoot.train.period import Period


def test_without_a_failure_rate_they_come_every_so_many_steps():
    period = Period(3, 0.0, 4)
    assert [step for step in range(1, 10) if period.due(step, None)] == [3, 6, 9]
    assert not any(Period(0, 0.0, 4).due(step, None) for step in range(1, 10))


def test_with_one_the_period_is_that_of_young_and_daly_for_what_was_measured():
    period = Period(0, 0.05, 6)
    period.step_took(91.3)
    period.snapshot_took(45.65)
    failures_per_step = 0.05 * 6 / 3600 * 91.3
    assert period.steps == round(math.sqrt(2 * 0.5 / failures_per_step)) == 11
    assert [step for step in (10, 11, 30, 31, 32) if period.due(step, 20 if step > 20 else None)] == [11, 31, 32]


def test_a_snapshot_that_costs_nothing_is_taken_after_every_step_and_the_first_one_at_once():
    period = Period(100, 10.0, 2)
    assert period.due(1, None)
    period.step_took(3600.0)
    assert period.steps == 1


@pytest.mark.parametrize("worse", [2, 5])
def test_more_failures_or_cheaper_snapshots_mean_more_of_them(worse):
    def steps(rate: float, cost: float) -> int:
        period = Period(0, rate, 4)
        period.step_took(10.0)
        period.snapshot_took(cost)
        return period.steps

    assert steps(0.1 * worse, 60.0) < steps(0.1, 60.0)
    assert steps(0.1, 60.0 / worse) < steps(0.1, 60.0)
