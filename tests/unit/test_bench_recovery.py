"""The recovery bench's arithmetic: traces by the clock, seconds on paper, curves, rows; a rehearsal with a death."""

from __future__ import annotations

import math
import random

import pytest

from talkoot.bench.peer_lost_stages import Trained
from talkoot.bench.peer_recovery_arms import Bench, Measured, asked, losses_per_iteration, medium_case
from talkoot.bench.peer_recovery_times import (
    APART_S,
    ITERATION_S,
    START_S,
    Death,
    History,
    calibrated,
    deaths,
    history,
    mean_iteration_s,
    on_paper,
    tuned_period,
)
from talkoot.bench.recovery import BLEND, SWAPPED, _bars, _rows, curves, probed
from talkoot.plan.churn_costs import kept_share


def test_stages_die_at_their_hourly_rate_in_order_and_neighbours_apart():
    found = [deaths(seed, 0.16, 48) for seed in range(30)]
    total = sum(len(kept) + spared for kept, spared in found)
    assert total / (30 * 6 * 48) == pytest.approx(-math.log(0.84), rel=0.06)
    for kept, _ in found:
        assert [one.seconds for one in kept] == sorted(one.seconds for one in kept)
        assert {one.stage for one in kept} <= set(range(1, 7))
        for one in kept:
            near = [other for other in kept if abs(other.stage - one.stage) == 1]
            assert all(abs(other.seconds - one.seconds) > APART_S for other in near)
    assert deaths(3, 0.16, 48) == found[3]


def test_seconds_on_paper_lose_the_iteration_under_way_and_the_pause():
    def pause(stage: int) -> float:
        return float(stage)

    assert on_paper(10, [], pause, 2.0) == 20
    assert on_paper(10, [Death(5.0, 3)], pause, 2.0) == 5 + 3 + (10 - 2) * 2
    assert on_paper(10, [Death(5.0, 3), Death(6.0, 4)], pause, 2.0) == 8 + 4 + 16
    assert on_paper(10, [Death(21.0, 3)], pause, 2.0) == 20


def test_seconds_on_paper_throw_back_to_the_newest_usable_snapshot():
    def none(stage: int) -> float:
        return 0.0

    assert on_paper(10, [], none, 2.0, period=5, save_s=1.0) == 22
    assert on_paper(10, [Death(17.0, 1)], none, 2.0, period=5, save_s=1.0) == 17 + 11
    assert on_paper(10, [Death(10.5, 1)], none, 2.0, period=5, save_s=1.0) == 10.5 + 22
    assert on_paper(10, [Death(11.0, 1)], none, 2.0, period=5, lag_s=0.0) == 11 + 10
    assert on_paper(10, [Death(11.0, 1)], none, 2.0, period=5, lag_s=3.0) == 11 + 20


def test_many_losses_leave_the_share_that_the_formula_says():
    chance, rate, period = random.Random(2), 0.01, 10
    now, struck = 0.0, []
    while now < 200_000:
        now += chance.expovariate(rate)
        struck.append(Death(now, 1))
    taken = on_paper(100_000, struck, lambda stage: 0.0, 1.0, period=period)
    by_progress = rate * period / math.expm1(rate * period)
    assert 100_000 / taken == pytest.approx(by_progress, rel=0.02)
    assert by_progress < kept_share(period, rate)


def test_a_period_is_chosen_from_a_grid_around_the_guess():
    assert tuned_period(lambda period: abs(period - 14), 10) == 15
    assert tuned_period(lambda period: period, 1) == 1


def test_a_history_knows_seconds_between_commits_and_losses_before_a_step():
    found = History(commits=(10.0, 20.0, 40.0), lost={1: (2, 4), 3: (5,)})
    assert [found.seconds_at(steps) for steps in (0, 1, 2.5, 3)] == [0, 10, 30, 40]
    assert found.seconds_at(3.1) == found.seconds_at(math.inf) == math.inf
    assert (found.losses_before(1), found.losses_before(2), found.losses_before(3.5)) == (0, 2, 3)


def test_steps_to_a_target_are_read_off_the_smoothed_curve():
    curve = tuple((10 * n, loss) for n, loss in enumerate((3.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0), 1))
    assert Trained(curve=curve).smooth[0] == (20, 3.0)
    assert Trained(curve=curve).steps_to(2.0) == pytest.approx(40)
    assert Trained(curve=curve).steps_to(0.5) == math.inf


def test_a_death_in_a_rehearsal_costs_its_iteration_the_start_and_the_transfer():
    assert mean_iteration_s(calibrated(6, ladder=("blend",))) == pytest.approx(ITERATION_S, abs=0.01)
    plain = history(calibrated(6, ladder=("blend",)), ())
    struck = history(calibrated(6, ladder=("blend",)), [Death(2.5 * ITERATION_S, 3)])
    assert plain.lost == {}
    ((step, stages),) = struck.lost.items()
    assert stages == (3,)
    assert step in (1, 2)
    late = struck.commits[-1] - plain.commits[-1]
    moved = asked(medium_case("blend"), "blend", 3).transfer_s
    assert START_S + moved <= late <= START_S + moved + ITERATION_S + 5


def test_losses_per_iteration_are_those_of_six_relays():
    assert losses_per_iteration(0.05, 3600.0) == pytest.approx(-6 * math.log(0.95))


def run(arm: str, rate: float, seconds: float, jumps: tuple[tuple[int, float], ...] = (), lost: int = 1) -> Measured:
    curve = ((0.0, 3.0), (1.0, 2.0))
    numbers = {"steps": 100.0, "usual": 90.0, "undisturbed_s": 9000.0, "lost": lost}
    return Measured(arm=arm, rate=rate, seed=0, seconds=seconds, jumps=jumps, curve=curve, **numbers)


def test_rows_name_rate_hours_and_the_published_figure_and_who_never_arrived():
    rows = list(_rows([run(BLEND, 0.16, 18_000.0), run(BLEND, 0.16, math.inf), run("x", 0.05, 9000.0)]))
    assert [row.name for row in rows] == ["x, 5%/h", f"{BLEND}, 16%/h"]
    assert rows[1].values == (2.0,)
    assert "1 of 2 never arrived; published 563.0 h = 2.22" in rows[1].note
    assert run("x", 0.05, 9000.0).lost_per_loss == 10
    assert math.isnan(run("x", 0.05, 9000.0, lost=0).lost_per_loss)


def test_bars_fail_where_an_equality_fails_or_a_copy_does_as_well_as_a_blend():
    shadow = run("shadow", 0.16, 9500.0)

    def holds(blend: float, copy: float, swapped: float, checks: dict[str, bool]) -> list[bool]:
        bench = Bench.__new__(Bench)  # nothing is trained
        edge = 0.5
        bench.plain = {0: Trained(curve=(), probes={"norm": (edge, blend, edge), "copy": (edge, copy, edge)})}
        bench.swapped = {0: Trained(curve=(), probes={"norm": (swapped, blend, swapped)})}
        bars = list(_bars(bench, checks, [shadow], quick=False))
        return [bars[0].holds, bars[3].holds, bars[4].holds]

    assert holds(0.01, 0.02, 0.1, {"a": True}) == [True, True, True]
    assert holds(0.02, 0.02, 0.4, {"a": True, "b": False}) == [False, False, False]


def test_inner_stages_and_edges_are_told_apart():
    runs = [Trained(curve=(), probes={"copy": (1.0, 2.0, 3.0, 4.0)})]
    assert probed(runs, "copy", edge=False) == [2.0, 3.0]
    assert probed(runs, "copy", edge=True) == [1.0, 4.0]


def test_the_plot_has_a_line_per_run():
    plot = curves([run(BLEND, 0.16, 1.0), run(SWAPPED, 0.16, 1.0), run(SWAPPED, 0.16, 2.0)], 2.0)
    assert plot.count("<polyline") == 3
    assert plot.startswith("<svg")
