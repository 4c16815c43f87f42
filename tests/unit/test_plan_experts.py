"""Experts at equal compute: allocations, lanes, difficulty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.plan.experts import (
    CLASSES,
    TOLERANCE,
    Budget,
    Curve,
    allocate,
    allocations,
    classify,
    deviation,
    fit_curve,
    lanes,
)

FLOPS = {"small": 80.0, "medium": 100.0, "large": 125.0}


def budget(steps: int = 200, **changes: object) -> Budget:
    domains = {"kjv": "easy", "postgres": "easy", "anarchism": "medium", "python": "hard", "hol": "hard"}
    return Budget(**{"domains": domains, "step_flops": FLOPS, "steps": steps, **changes})  # type: ignore[arg-type]


curves = st.builds(Curve, st.floats(2, 9), st.floats(0.01, 1))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(CLASSES), min_size=1, max_size=9),
    st.integers(100, 2000),
    st.floats(0, 0.9),
    st.tuples(st.floats(0.3, 1), st.floats(1, 4)),
    st.data(),
)
def test_every_allocation_costs_what_the_homogeneous_one_does(classes, steps, shift, ends, data):
    domains = {f"d{number}": one for number, one in enumerate(classes)}
    asked = Budget(
        domains=domains,
        step_flops={"small": ends[0], "medium": 1.0, "large": ends[1]},
        steps=steps,
        shift=shift,
        curves={name: data.draw(curves) for name in domains},
    )
    for name in allocations:
        plan = allocate(name, asked)
        assert {one.domain for one in plan} == set(domains)
        assert all(one.steps >= 1 and one.flops == one.steps * asked.step_flops[one.size] for one in plan)
        assert deviation(plan, asked) <= TOLERANCE


def test_harder_domains_get_more():
    steps = {one.domain: one.steps for one in allocate("steps", budget())}
    assert steps == {"kjv": 150, "postgres": 150, "anarchism": 200, "python": 250, "hol": 250}
    sizes = {one.domain: (one.size, one.steps) for one in allocate("sizes", budget())}
    assert sizes["kjv"][0] == "small"
    assert sizes["python"][0] == "large"
    # 2 x 80 + 100 + 2 x 125 = 510 operations per step of all, where five medium ones take 500.
    assert {count for _, count in sizes.values()} <= {196, 197}


def test_marginal_gain_per_operation_is_the_same_everywhere():
    known = {name: Curve(6.0, slope) for name, slope in zip(budget().domains, (0.1, 0.2, 0.4, 0.8, 0.5), strict=True)}
    plan = allocate("marginal", budget(1000, curves=known))
    gains = [known[one.domain].slope / (1 + one.steps) for one in plan]
    assert max(gains) / min(gains) == pytest.approx(1, abs=0.01)
    even = sum(curve.at(1000) for curve in known.values())
    assert sum(known[one.domain].at(one.steps) for one in plan) < even


def test_steps_that_are_too_few_are_refused():
    with pytest.raises(TalkootError, match="cost the same"):
        allocate("sizes", budget(2, domains={"a": "easy", "b": "hard"}, step_flops={**FLOPS, "large": 333.0}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"domains": {}}, "no domain"),
        ({"domains": {"a": "harsh"}}, "harsh"),
        ({"shift": 1.0}, "shift"),
        ({"step_flops": {"medium": 1.0}}, "cost of a step"),
        ({"step_flops": {**FLOPS, "small": math.inf}}, "finite"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(changes, why):
    with pytest.raises(TalkootError) as caught:
        allocate("homogeneous", budget(**changes))
    assert why in caught.value.why


def test_a_misspelt_allocation_names_the_nearest():
    with pytest.raises(TalkootError, match="unknown allocation"):
        allocate("step", budget())


def test_marginal_without_curves_says_whose_are_missing():
    with pytest.raises(TalkootError) as caught:
        allocate("marginal", budget())
    assert "kjv" in caught.value.why


def test_lanes_continue_the_class_before():
    assert lanes(budget().domains) == {"postgres": "kjv", "hol": "python"}


@settings(max_examples=50, deadline=None)
@given(curves)
def test_a_curve_is_found_again(curve):
    found = fit_curve([(steps, curve.at(steps)) for steps in (0, 3, 10, 40)])
    assert found.start == pytest.approx(curve.start, abs=1e-9)
    assert found.slope == pytest.approx(curve.slope, abs=1e-9)


def test_difficulty_is_what_is_left_after_learning_not_what_is_new():
    known = {"new": Curve(9.0, 1.5), "plain": Curve(5.0, 0.3), "deep": Curve(6.0, 0.2)}
    assert classify(known, 200) == {"new": "easy", "plain": "medium", "deep": "hard"}


def test_a_curve_of_one_point_is_no_curve():
    with pytest.raises(ValueError, match="two numbers"):
        fit_curve([(0, 5.0), (0, 5.1)])
