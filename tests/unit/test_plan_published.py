"""The published 20-node case: its costs to the last digit, its iteration times within a few per cent."""

from __future__ import annotations

import pytest

from talkoot.plan import published
from talkoot.plan.bounds import lower_bound
from talkoot.plan.playback import makespan, play, rtt
from talkoot.plan.problem import Rules, violations

# Seconds between some pairs of nodes, as in the published file: all kinds of links, and the one with the unit error.
DELAYS = {
    (0, 1): 1.9615622573571703,
    (0, 12): 0.3666251005828381,
    (2, 10): 0.5221639796857014,
    (3, 9): 2.879421966068447,
    (5, 7): 0.6260474232226765,
    (6, 10): 132.3144123449581,
    (8, 1): 3.074605201141865,
    (11, 6): 3.760072409605369,
    (13, 19): 1.0437167045316549,
    (18, 10): 132.3144123449581,
    (16, 9): 0.7765216355596161,
}


def test_costs_are_those_of_the_published_file() -> None:
    problem = published.published_problem()
    for (a, b), seconds in DELAYS.items():
        assert problem.hop_s[a][b] == pytest.approx(seconds, abs=1e-9)
        assert problem.hop_s[b][a] == pytest.approx(seconds, abs=1e-9)
    assert problem.forward_s(0, 0) == pytest.approx(0.44)
    assert problem.backward_s(5, 3) == pytest.approx(0.66)
    assert problem.loss_s(11) == pytest.approx(0.11)
    assert problem.slots == (published.SLOTS,) * 20
    repaired = published.published_problem(unit_error=False)
    assert repaired.hop_s[6][10] == pytest.approx(0.4836668, abs=1e-6)
    assert repaired.hop_s[0][1] == problem.hop_s[0][1]


@pytest.mark.parametrize(
    ("row", "routes", "visits"),
    [
        ("full pipeline", published.full_routes(), 6),
        ("colliding", published.colliding_routes(), 4),
        ("avoiding", published.avoiding_routes(), 4),
    ],
)
def test_playback_agrees_with_the_published_simulator(row: str, routes, visits: int) -> None:
    problem = published.published_problem()
    assert violations(problem, routes, Rules(visits=visits)) == []
    assert makespan(problem, routes) == pytest.approx(published.REPORTED_S[row], rel=0.03)


def test_the_gains_are_the_published_ones() -> None:
    problem = published.published_problem()
    full = makespan(problem, published.full_routes(30))
    colliding = makespan(problem, published.colliding_routes())
    avoiding = makespan(problem, published.avoiding_routes())
    assert 1 - avoiding / full >= 0.55
    assert 1 - avoiding / colliding >= 0.04
    assert published.full_routes(30).num_microbatches == avoiding_count() == 30


def avoiding_count() -> int:
    return published.avoiding_routes().num_microbatches


def test_the_bounds_are_those_of_the_australian_origin() -> None:
    problem = published.published_problem()

    def seconds(rules: Rules, **options) -> float:
        return lower_bound(problem, published.GROUPS, rules, 30, **options).seconds

    third_start = 2 * problem.forward_s(11, 0)
    # The shortest round trips from Australia: in stage order, with a swap, and through all stages; two waves of each.
    assert seconds(Rules(visits=4, max_swap=0)) - third_start == pytest.approx(32.12, abs=0.005)
    assert seconds(published.RULES) - third_start == pytest.approx(30.28, abs=0.005)
    assert seconds(Rules(visits=6)) - third_start == pytest.approx(43.19, abs=0.005)
    committed = published.avoiding_routes().lanes[-1]
    assert 2 * rtt(problem, published.GROUPS, 11, committed.relays) == pytest.approx(30.28, abs=0.005)
    assert 19 < seconds(published.RULES, quotas="free") < 25
    # The published paths are some per cent above what equal quotas permit.
    assert 1.0 < makespan(problem, published.avoiding_routes()) / seconds(published.RULES) < 1.06


def test_relays_of_the_published_paths_are_mostly_idle() -> None:
    iteration = play(published.published_problem(), published.avoiding_routes())
    shares = iteration.busy_share()
    relays = [share for node, share in shares.items() if node not in published.GROUPS[0]]
    assert max(relays) < 0.25
