"""The formulas of training under losses, against a replay by chance and figures derived by hand."""

from __future__ import annotations

import random

import pytest

from talkoot.plan.churn_costs import (
    PUBLISHED,
    bound_hours,
    expected_hours,
    kept_share,
    rollback_iterations,
    swap_fit,
    young_daly,
)


@pytest.mark.parametrize(("period", "rate"), [(10, 0.01), (100, 0.0054), (50, 0.05)])
def test_rolling_back_leaves_the_share_that_a_replay_by_chance_finds(period, rate):
    chance = random.Random(5)
    done, kept, since = 200_000, 0, 0
    for now in range(done):
        since = 0 if chance.random() < rate else since + 1
        if (now + 1) % period == 0:
            kept, since = kept + since, 0
    assert kept / done == pytest.approx(kept_share(period, rate), rel=0.04)


def test_the_tuned_period_beats_its_half_and_its_double():
    cost, rate = 0.5, 0.01

    def share(period: float) -> float:
        return kept_share(period, rate) / (1 + cost / period)

    best = young_daly(cost, rate)
    assert best == pytest.approx(10)
    assert share(best) > max(share(best / 2), share(best * 2))


def test_the_published_medium_model_is_read_as_in_the_lab_book():
    five, ten, sixteen = PUBLISHED
    assert expected_hours(10_000, 91.32) == pytest.approx(253.7, abs=0.1)
    assert [round(bound_hours(five, overhead=share)) for share in (0.0, 0.15)] == [255, 293]
    assert [round(bound_hours(sixteen, overhead=share)) for share in (0.0, 0.15)] == [259, 297]
    assert [round(rollback_iterations(case, 100), -2) for case in PUBLISHED] == [12_900, 17_200, 26_400]
    assert round(rollback_iterations(five, 10), -2) == 10_300
    iterations, lost = swap_fit(five, ten)
    assert (round(iterations, -2), round(lost)) == (13_600, 5)
    assert five.redundant * 3600 / 151.04 == pytest.approx(10_000, rel=1e-3)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="never ends"):
        expected_hours(10, 1.0, 0.1, lost_iterations=10)
    with pytest.raises(ValueError, match="without failures"):
        young_daly(1.0, 0.0)
