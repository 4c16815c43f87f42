"""The pipelines bench: like is compared with like, every route is valid, bars say no when they should."""

from __future__ import annotations

import json

import pytest

from talkoot.bench import pipelines
from talkoot.bench.pipelines import BLIND, EQUAL, FREE, FULL, NAIVE, THEIR_BLIND, THEIR_FULL, THEIRS, Effort, Random
from talkoot.plan import published
from talkoot.plan.networks import named_network
from talkoot.plan.playback import makespan
from talkoot.plan.problem import Rules, violations
from talkoot.train.planned import usual_problem

QUICK = Effort(played=150, seeds=1, draws=2, networks=1)
PROBLEM = usual_problem(named_network("gcp12", 20), 6)


@pytest.fixture(scope="module")
def routes():
    return pipelines.contenders(PROBLEM, QUICK)


def test_the_usual_costs_are_the_published_ones_but_for_the_slip_of_a_unit():
    repaired = published.published_problem(unit_error=False)
    assert repaired.hop_s == PROBLEM.hop_s
    for node in range(20):
        assert PROBLEM.forward_s(node, 0) == pytest.approx(repaired.forward_s(node, 0))
        assert PROBLEM.backward_s(node, 3) == pytest.approx(repaired.backward_s(node, 3))
        assert PROBLEM.loss_s(node) == pytest.approx(repaired.loss_s(node))


def test_every_contender_does_the_same_work_and_breaks_no_rule(routes):
    for name, found in routes.items():
        rules = Rules(visits=6) if "full" in name else published.RULES
        for one in found:
            assert violations(PROBLEM, one, rules) == [], name
            assert one.num_microbatches == (27 if name == THEIR_FULL else 30)
            assert one.groups == published.GROUPS or "DT-FM" in name


def test_every_idea_saves_time(routes):
    seconds = {name: min(makespan(PROBLEM, one) for one in found) for name, found in routes.items()}
    assert seconds[EQUAL] <= seconds[BLIND] < seconds[NAIVE] < seconds[FULL]
    assert seconds[FREE] < seconds[NAIVE]
    assert seconds[FULL] < makespan(PROBLEM, published.full_routes(30)), "our baseline is at least as good as theirs"


def values(**changes: float) -> dict[str, list[float]]:
    found = {THEIR_FULL: 80.0, FULL: 80.0, NAIVE: 50.0, THEIR_BLIND: 35.0, BLIND: 34.0, THEIRS: 33.0, EQUAL: 33.0}
    return {name: [value] for name, value in (found | {FREE: 26.0} | changes).items()}


CUTS = {4: 0.60, 8: 0.58, 16: 0.55}
GOOD = [Random(0.1, True, 5.0, 6.0)] * 9 + [Random(0.2, True, 5.0, 6.0)]


@pytest.mark.parametrize(
    ("seconds", "cuts", "found", "fails"),
    [
        (values(), CUTS, GOOD, set()),
        (values(**{THEIRS: 31.0}), CUTS, GOOD, {0}),
        (values(**{NAIVE: 40.0}), CUTS, GOOD, {1}),
        (values(**{THEIR_BLIND: 34.5, THEIRS: 33.3}), CUTS, GOOD, {2}),
        (values(**{FULL: 70.0}), CUTS, GOOD, {3}),
        (values(), {4: 0.58, 8: 0.58, 16: 0.55}, GOOD, {4}),
        (values(**{FREE: 27.0}), CUTS, GOOD, {5}),
        (values(), CUTS, [*GOOD[:7], *[GOOD[-1]] * 3], {6}),
        (values(), CUTS, [*GOOD[:-1], Random(0.1, False, 5.0, 6.0)], {7}),
        (values(), CUTS, [*GOOD[:-1], Random(0.1, True, 61.0, 70.0)], {8}),
    ],
)
def test_each_bar_falls_for_its_own_reason(seconds, cuts, found, fails):
    bars = pipelines.bars(seconds, cuts, found)
    assert {place for place, bar in enumerate(bars) if not bar.holds} == fails
    assert len(pipelines.notes(seconds, cuts, found)) == 6


def test_one_of_twenty_may_be_slower_than_the_95th_percentile():
    assert pipelines.percentile_95([1.0] * 19 + [9.0]) == 1.0
    assert pipelines.percentile_95([1.0] * 18 + [9.0] * 2) == 9.0
    assert pipelines.percentile_95([3.0]) == 3.0


def test_a_random_network_is_planned_and_measured():
    found = pipelines.plan_random(1, QUICK)
    assert found.valid
    assert 0 <= found.gap < 1
    assert found.cpu_s > 0
    assert found.wall_s > 0


def test_pages_and_traces_show_every_piece_of_work(routes):
    files = pipelines.drawings(PROBLEM, {"ours": routes[EQUAL][0], "full": routes[FULL][0]})
    assert set(files) == {f"pipelines-{name}.{kind}" for name in ("ours", "full") for kind in ("html", "trace.json")}
    trace = json.loads(files["pipelines-ours.trace.json"])
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 30 * 9
    assert "Full pipeline: 20 nodes in 12 places" in files["pipelines-full.html"]
