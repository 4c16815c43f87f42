"""Ridge regression from sums: the same as from rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.blend.solve import cross_validated, ridge
from talkoot.blend.statistics import Gram
from talkoot.core.errors import TalkootError

torch.set_num_threads(1)


def data(seed: int = 0, rows: int = 400, width: int = 5, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(rows, width, dtype=torch.float64) @ torch.randn(width, width, dtype=torch.float64)
    x = x + torch.randn(width, dtype=torch.float64)
    return x, (x @ torch.randn(width, classes, dtype=torch.float64) + torch.randn(rows, classes)).argmax(1)


def grams(x: torch.Tensor, labels: torch.Tensor) -> dict[str, Gram]:
    found = {}
    for label in sorted(set(labels.tolist())):
        found[f"c{label}"] = Gram(x.shape[1])
        found[f"c{label}"].add(x[labels == label])
    return found


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels).double()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.floats(1e-4, 10))
def test_sums_give_the_penalised_least_squares_of_the_rows(seed, intercept, strength):
    x, labels = data(seed)
    fit = ridge(grams(x, labels), strength=strength, intercept=intercept)
    weights = fit.weights.clone().requires_grad_()
    unit = x.square().sum() / x.numel()
    scores = x @ weights[:-1] + weights[-1] if intercept else x @ weights
    penalised = weights[:-1] if intercept else weights
    loss = (scores - one_hot(labels)).square().sum() / len(x) + strength * unit * penalised.square().sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    assert float(gradient.abs().max()) < 1e-9
    assert torch.allclose(fit.scores(x), scores)


def test_the_published_form_regularises_the_sums_as_they_are():
    x, labels = data()
    extended = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    left = extended.T @ extended + 0.5 * torch.eye(6)
    expected = torch.linalg.solve(left, extended.T @ one_hot(labels))
    assert torch.allclose(ridge(grams(x, labels), strength=0.5, paper=True).weights, expected, atol=1e-10)


def test_scale_and_number_of_rows_do_not_change_what_a_strength_means():
    x, labels = data()
    small = ridge(grams(x, labels), strength=0.3)
    again = ridge(grams(torch.cat([x, x]) * 7, torch.cat([labels, labels])), strength=0.3)
    assert torch.allclose(small.weights[:-1], again.weights[:-1] * 7)
    assert torch.allclose(small.weights[-1], again.weights[-1])


def test_balanced_classes_count_alike_however_many_rows_they_have():
    x, labels = data()
    often = torch.cat([x, *[x[labels == 0]] * 4]), torch.cat([labels, *[labels[labels == 0]] * 4])
    first, second = (ridge(grams(*pair), balanced=True).weights for pair in ((x, labels), often))
    assert torch.allclose(first, second, atol=1e-9)
    assert not torch.allclose(ridge(grams(x, labels)).weights, ridge(grams(*often)).weights, atol=1e-3)


def test_columns_are_in_the_order_of_the_mapping():
    x, labels = data()
    forward = grams(x, labels)
    backward = dict(reversed(forward.items()))
    fit = ridge(backward)
    assert fit.names == ("c2", "c1", "c0")
    assert torch.allclose(fit.weights.flip(1), ridge(forward).weights, atol=1e-10)


@pytest.mark.parametrize("peers", [1, 3, 7])
def test_shuffled_peers_sums_give_the_same_gate(peers):
    x, labels = data(rows=100_000, width=12)
    whole = ridge(grams(x, labels))
    order = torch.randperm(len(x))
    total: dict[str, Gram] = {}
    for part in order.chunk(peers):
        mine = grams(x[part], labels[part])
        total = {name: total[name] + gram if total else gram for name, gram in mine.items()}
    summed = ridge(total)
    assert float((summed.weights - whole.weights).abs().max()) < 1e-10
    assert torch.equal(summed.scores(x).argmax(1), whole.scores(x).argmax(1))


def test_the_condition_number_is_that_of_the_solved_matrix():
    x, labels = data()
    extended = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    matrix = extended.T @ extended + 0.5 * torch.eye(6)
    fit = ridge(grams(x, labels), strength=0.5, paper=True)
    assert fit.condition == pytest.approx(float(torch.linalg.cond(matrix)), rel=0.02)


def test_features_that_say_the_same_twice_are_solved_with_a_larger_ridge():
    x, labels = data()
    twice = grams(torch.cat([x, x], dim=1), labels)
    fit = ridge(twice, strength=0.0)
    assert fit.strength > 0
    assert bool(torch.isfinite(fit.weights).all())
    accuracy = (fit.scores(torch.cat([x, x], dim=1)).argmax(1) == labels).double().mean()
    alone = (ridge(grams(x, labels), strength=0.0).scores(x).argmax(1) == labels).double().mean()
    assert float(accuracy) >= float(alone) - 0.01


def test_what_no_ridge_mends_is_solved_in_the_space_that_is_there():
    x, labels = data()
    found = grams(x, labels)
    found["c0"]._sum[0, 0] -= 1e7  # as no sum of squares has it: one direction is hugely negative
    fit = ridge(found)
    assert bool(torch.isfinite(fit.weights).all())
    assert fit.strength >= 1e3


def test_cross_validation_from_sums_is_that_from_rows():
    x, labels = data(rows=60)
    best, errors = cross_validated(grams(x, labels), strengths=(1e-3, 0.1, 1.0))
    centred = x - x.mean(0)
    targets = one_hot(labels) - one_hot(labels).mean(0)
    unit = float(x.square().mean())
    for strength, error in errors.items():
        hat = centred @ torch.linalg.solve(
            centred.T @ centred / 60 + strength * unit * torch.eye(5, dtype=torch.float64), centred.T / 60
        )
        residual = (targets - hat @ targets).square().sum() / 60
        assert error == pytest.approx(float(residual / (1 - (hat.trace() + 1) / 60) ** 2))
    assert errors[best] == min(errors.values())


def test_cross_validation_asks_for_a_large_ridge_where_there_is_nothing_to_learn():
    torch.manual_seed(0)
    x, labels = torch.randn(60, 30), torch.randint(2, (60,))
    assert cross_validated(grams(x, labels))[0] >= 10
    x[:, 0] += labels * 10
    assert cross_validated(grams(x, labels))[0] < 10


def test_one_domain_an_empty_one_and_unlike_ones_are_refused():
    x, labels = data()
    found = grams(x, labels)
    with pytest.raises(TalkootError, match="single domain"):
        ridge({"c0": found["c0"]})
    with pytest.raises(TalkootError, match="empty"):
        ridge(found | {"c3": Gram(5)})
    with pytest.raises(TalkootError, match="unlike"):
        ridge(found | {"c3": Gram(4)})
    found["c1"]._sum[1, 2] = float("nan")
    with pytest.raises(TalkootError, match="not finite"):
        ridge(found)
