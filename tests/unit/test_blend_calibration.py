"""Calibration: probabilities that hold, risks that are kept, prompts that are drawn fairly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.blend.router.calibration import (
    MISSED,
    NEVER,
    Calibration,
    Point,
    Wanted,
    calibrate,
    confidence_for,
    draw_prompts,
    familiarity_for,
    fit_temperature,
)
from talkoot.core.errors import TalkootError

torch.set_num_threads(1)


def honest(seed: int, n: int = 4000, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose softmax is the truth."""
    torch.manual_seed(seed)
    logits = torch.randn(n, classes, dtype=torch.float64) * 2
    return logits, torch.multinomial(logits.softmax(1), 1)[:, 0]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 100), st.floats(0.01, 100))
def test_the_temperature_undoes_any_scale(seed, scale):
    logits, labels = honest(seed)
    assert fit_temperature(logits * scale, labels) == pytest.approx(scale, rel=0.15)


def test_prompts_without_an_error_leave_the_temperature_finite():
    labels = torch.arange(3).repeat(20)
    scores = torch.nn.functional.one_hot(labels, 3).double()
    temperature = fit_temperature(scores, labels)
    assert 0.01 < temperature < 1
    assert float((scores / temperature).softmax(1).max()) < 0.999


def test_scores_that_say_nothing_become_even_chances():
    torch.manual_seed(0)
    scores = torch.randn(500, 3, dtype=torch.float64)
    labels = torch.randint(3, (500,))
    assert float((scores / fit_temperature(scores, labels)).softmax(1).max()) < 0.5


@settings(max_examples=9, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.01, 0.05, 0.2]))
def test_the_confidence_threshold_keeps_the_risk(seed, risk):
    logits, labels = honest(seed, n=500)
    threshold = confidence_for(logits, labels, risk)
    chances, chosen = logits.softmax(1).max(1)
    wrong = (chances >= threshold) & (chosen != labels)
    assert (int(wrong.sum()) + 1) / (len(labels) + 1) <= risk + 1e-12
    looser = math.nextafter(float(chances[(chosen != labels) & (chances < threshold)].max()), 0)
    wrong = (chances >= looser) & (chosen != labels)
    assert (int(wrong.sum()) + 1) / (len(labels) + 1) > risk


def test_the_risk_holds_for_the_next_prompt_on_average():
    all_logits, all_labels = honest(0, n=61 * 400)
    wrong = 0
    for logits, labels in zip(all_logits.split(61), all_labels.split(61), strict=True):
        threshold = confidence_for(logits[:-1], labels[:-1], 0.1)
        chance, chosen = logits[-1].softmax(0).max(0)
        wrong += bool(chance >= threshold and chosen != labels[-1])
    assert 0.05 < wrong / 400 < 0.13


def test_a_risk_that_few_prompts_cannot_show_routes_nothing_and_no_error_routes_all():
    logits, labels = honest(0, n=20)
    assert confidence_for(logits, labels, 0.01) == NEVER
    assert confidence_for(logits, logits.argmax(1), 0.1) == 0.0


def test_the_familiarity_threshold_refuses_its_share():
    values = torch.randperm(1000).double()
    assert int((values < familiarity_for(values, 0.05)).sum()) == 49
    assert familiarity_for(values[:10], 0.05) == MISSED


def test_points_are_interpolated_in_the_logarithm_of_the_length():
    calibration = Calibration(
        points=(
            Point(length=10, temperature=1.0, confidence=0.2, familiarity=-6.0),
            Point(length=1000, temperature=100.0, confidence=0.4, familiarity=-4.0),
        )
    )
    middle = calibration.at(100)
    assert (middle.temperature, middle.confidence, middle.familiarity) == pytest.approx((10.0, 0.3, -5.0))
    assert calibration.at(1) == calibration.at(10) == calibration.points[0]
    assert calibration.at(10**6) == calibration.at(1000) == calibration.points[1]


def test_prompts_are_pieces_of_documents_each_drawn_alike():
    short, long = list(range(100, 150)), list(range(1000, 11_000))
    prompts = draw_prompts([short, long], 50, 400, 0)
    assert all(prompt.diff().eq(1).all() and len(prompt) == 50 for prompt in prompts)
    assert 150 < sum(int(prompt[0]) == 100 for prompt in prompts) < 250
    assert len({int(prompt[0]) for prompt in prompts}) > 150
    assert all(torch.equal(a, b) for a, b in zip(prompts, draw_prompts([short, long], 50, 400, 0), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(prompts, draw_prompts([short, long], 50, 400, 1), strict=True))


def test_short_documents_are_joined_into_prompts():
    prompts = draw_prompts([[1, 2], [3, 4], [5, 6], [7, 8]], 4, 50, 0)
    assert {tuple(prompt.tolist()) for prompt in prompts} == {(1, 2, 3, 4), (5, 6, 7, 8)}
    assert draw_prompts([[1, 2]], 4, 50, 0) == []
    assert draw_prompts([], 4, 50, 0) == []


def echo(tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Sure of domain 0 for small tokens, of domain 1 for large ones."""
    value = float(tokens.double().mean())
    return torch.tensor([50 - value, value - 50], dtype=torch.float64), -abs(value - 50)


def test_lengths_that_a_domain_has_no_text_for_are_left_out():
    held_out = {"a": [[10, 20] * 20], "b": [[80, 90] * 5]}
    fitted = calibrate(echo, ("a", "b"), held_out, Wanted(lengths=(8, 20), prompts=100, risk=0.05, refused=0.05))
    assert [point.length for point in fitted.points] == [8]
    with pytest.raises(TalkootError, match="cannot be calibrated") as caught:
        calibrate(echo, ("a", "b", "c"), held_out, Wanted(lengths=(8,)))
    assert caught.value.where == "c"
