"""Each correction against numbers computed by hand: two completions, of three and of two tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.tune.corrections import Correction, Evidence, corrections
from talkoot.tune.corrections.rule import divergences

LOG2 = math.log(2)
ROWS = torch.tensor([0, 0, 0, 1, 1])


def evidence(*log_ratio: float, adv: tuple[float, float] = (1.0, -1.0), unlike: tuple[bool, bool] = (False, False)):
    ratios = torch.tensor(log_ratio, dtype=torch.float64)
    hidden = torch.tensor(unlike)
    total = torch.zeros(2, dtype=torch.float64).index_add(0, ROWS, ratios)
    return Evidence(
        log_ratio=ratios.masked_fill(hidden[ROWS], 0.0),
        total=total,
        unlike=hidden,
        lengths=torch.tensor([3, 2]),
        rows=ROWS,
        advantages=torch.tensor(adv, dtype=torch.float64),
    )


FAR = evidence(LOG2, 2 * LOG2, -LOG2, -4.0, -2.0)  # the second completion is 6 nats away, and negative


def test_every_correction_is_filed():
    assert set(corrections) == {"none", "vis", "tis", "mis", "filter", "ftis", "fvis", "opsm"}


@pytest.mark.parametrize(
    ("rule", "weight", "second", "clip_to"),
    [
        ("none", [1, 1, 1, 1, 1], -1, "learner"),
        ("vis", [1, 1, 1, 1, 1], -1, "generator"),
        ("tis", [2, 2, 0.5, math.exp(-4), math.exp(-2)], -1, "learner"),
        ("mis", [2, 0, 0.5, math.exp(-4), math.exp(-2)], -1, "learner"),
        ("filter", [1, 1, 1, 1, 1], 0, "learner"),
        ("ftis", [2, 2, 0.5, math.exp(-4), math.exp(-2)], 0, "learner"),
        ("fvis", [1, 1, 1, 1, 1], 0, "generator"),
        ("opsm", [1, 1, 1, 1, 1], 0, "learner"),
    ],
)
def test_each_rule_gives_the_weights_and_advantages_of_its_definition(rule, weight, second, clip_to):
    found = corrections[rule](Correction(rule=rule, cap=2.0 + 1e-12, gamma=5.0), FAR)
    torch.testing.assert_close(found.weight, torch.tensor(weight, dtype=torch.float64))
    assert found.advantages.tolist() == [1, second]
    assert found.clip_to == clip_to
    assert found.dropped.tolist() == [False, second == 0]


@pytest.mark.parametrize("rule", ["tis", "ftis"])
def test_a_weight_per_completion_is_the_product_truncated(rule):
    found = corrections[rule](Correction(rule=rule, is_level="sequence", cap=3.0), FAR)
    torch.testing.assert_close(found.weight, torch.tensor([3, 3, 3, *[math.exp(-6)] * 2], dtype=torch.float64))


def test_a_masked_weight_per_completion_is_all_or_nothing():
    found = corrections["mis"](Correction(rule="mis", is_level="sequence", cap=3.0), FAR)
    torch.testing.assert_close(found.weight, torch.tensor([0, 0, 0, *[math.exp(-6)] * 2], dtype=torch.float64))


@pytest.mark.parametrize(("gamma", "dropped"), [(6.1, False), (5.9, True), (0.0, True)])
def test_the_filter_drops_negatives_at_gamma_and_keeps_positives_at_any_distance(gamma, dropped):
    knobs = Correction(rule="filter", gamma=gamma)
    assert corrections["filter"](knobs, FAR).dropped.tolist() == [False, dropped]
    good = evidence(-50, -50, -50, -50, -50, adv=(1.0, 0.5))
    assert corrections["filter"](knobs, good).dropped.tolist() == [False, False]


def test_gamma_means_per_token_under_a_mean():
    assert corrections["filter"](Correction(gamma=2.9, kl_reduce="mean"), FAR).dropped.tolist() == [False, True]
    assert corrections["filter"](Correction(gamma=3.1, kl_reduce="mean"), FAR).dropped.tolist() == [False, False]


def test_both_divergences_equal_their_formulas():
    both = divergences(FAR, "sum")
    torch.testing.assert_close(both["naive"], torch.tensor([-2 * LOG2, 6.0], dtype=torch.float64))

    def term(x: float) -> float:
        return math.exp(x) * x - math.exp(x) + 1

    expected = [term(LOG2) + term(2 * LOG2) + term(-LOG2), term(-4) + term(-2)]
    torch.testing.assert_close(both["nonnegative"], torch.tensor(expected, dtype=torch.float64))
    mean = divergences(FAR, "mean")
    torch.testing.assert_close(mean["naive"], torch.tensor([-2 * LOG2 / 3, 3.0], dtype=torch.float64))


def test_the_nonnegative_estimate_filters_by_itself():
    value = float(divergences(FAR, "sum")["nonnegative"][1])
    for gamma, dropped in ((value - 0.01, True), (value + 0.01, False)):
        knobs = Correction(kl_estimator="nonnegative", gamma=gamma)
        assert corrections["filter"](knobs, FAR).dropped.tolist() == [False, dropped]


def test_sequence_masking_looks_at_the_sign_and_the_filter_does_not():
    likelier = evidence(0, 0, 0, 4.0, 2.0)
    assert not corrections["opsm"](Correction(rule="opsm"), likelier).dropped.any()
    assert corrections["filter"](Correction(gamma=5.0), likelier).dropped.tolist() == [False, True]


@pytest.mark.parametrize("rule", ["vis", "fvis", "tis", "mis", "ftis"])
def test_ratios_per_token_of_unlike_tokenizers_are_refused_by_name(rule):
    with pytest.raises(TalkootError, match="another tokenizer") as caught:
        corrections[rule](Correction(rule=rule), evidence(0, 0, 0, -4, -2, unlike=(False, True)))
    assert "sequence" in caught.value.next


@pytest.mark.parametrize("rule", ["tis", "mis", "ftis", "filter", "opsm", "none"])
def test_whole_texts_of_unlike_tokenizers_are_weighed_by_their_totals(rule):
    seen = evidence(0, 0, 0, -4, -2, unlike=(False, True))
    found = corrections[rule](Correction(rule=rule, is_level="sequence", gamma=5.0), seen)
    weighed = rule in ("tis", "mis", "ftis")
    assert found.weight[3:].tolist() == pytest.approx([math.exp(-6) if weighed else 1.0] * 2)
    assert bool(found.dropped[1]) == (rule in ("ftis", "filter", "opsm"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-200, 200), min_size=5, max_size=5), st.sampled_from(sorted(corrections)))
def test_weights_are_finite_and_never_above_the_cap_and_positives_stay(values, rule):
    seen = evidence(*values)
    for level in ("token", "sequence"):
        found = corrections[rule](Correction(rule=rule, is_level=level), seen)
        assert found.weight.isfinite().all()
        assert (found.weight >= 0).all()
        assert (found.weight <= 2.0).all()
        assert found.advantages[0] == 1
    both = divergences(seen, "sum")
    assert all(value.isfinite().all() for value in both.values())
    assert (both["nonnegative"] >= -1e-9).all()


@pytest.mark.parametrize(("name", "value"), [("cap", 0.0), ("gamma", math.nan), ("delta", -1.0)])
def test_impossible_knobs_are_refused_by_name(name, value):
    with pytest.raises(TalkootError) as caught:
        Correction(**{name: value})
    assert f"correction.{name}" in caught.value.where
