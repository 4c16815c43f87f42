"""One optimizer step: what moves, what is refused, what a resume restores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from talkoot.core.errors import TalkootError
from talkoot.tune.objective.optimiser import PolicyOptimizer
from talkoot.tune.objective.settings import Optimizer


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (4,), (2, 2))]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def values(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in params]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_first_step_moves_each_weight_by_the_rate_against_its_gradient():
    params = parameters()
    before = values(params)
    give_gradients(params, 1)
    signs = [parameter.grad.sign() for parameter in params]
    facts = PolicyOptimizer(params, Optimizer(learning_rate=0.01)).step()
    assert facts.applied
    for parameter, old, sign in zip(params, before, signs, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.01 * sign, atol=1e-6, rtol=0)


def test_the_norm_is_global_and_reported_before_clipping():
    params = parameters()
    give_gradients(params, 1, scale=10)
    expected = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in params))
    settings = Optimizer(clip=0.5, beta1=0.0, beta2=0.0, epsilon=1e6, learning_rate=1e6)
    before = values(params)
    facts = PolicyOptimizer(params, settings).step()
    assert facts.grad_norm == pytest.approx(expected, rel=1e-6)
    # With such an epsilon a step is the gradient itself (in units of rate / epsilon = 1).
    moved = math.sqrt(sum(float((p.detach() - b).square().sum()) for p, b in zip(params, before, strict=True)))
    assert moved == pytest.approx(0.5, rel=1e-3)


def test_no_clip_leaves_the_gradient_alone():
    params = parameters()
    give_gradients(params, 1, scale=10)
    expected = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in params))
    before = values(params)
    PolicyOptimizer(params, Optimizer(clip=0, beta1=0.0, beta2=0.0, epsilon=1e6, learning_rate=1e6)).step()
    moved = math.sqrt(sum(float((p.detach() - b).square().sum()) for p, b in zip(params, before, strict=True)))
    assert moved == pytest.approx(expected, rel=1e-3)


def test_decay_shrinks_matrices_only():
    params = parameters()
    before = values(params)
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    PolicyOptimizer(params, Optimizer(learning_rate=0.1, weight_decay=0.5)).step()
    for parameter, old in zip(params, before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (0.95 if old.ndim == 2 else 1.0))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_leaves_no_trace(poison):
    params, twins = parameters(), parameters()
    mine, theirs = PolicyOptimizer(params, Optimizer()), PolicyOptimizer(twins, Optimizer())
    before = values(params)
    give_gradients(params, 1)
    params[1].grad[2] = poison
    facts = mine.step()
    assert (facts.applied, facts.reason, facts.grad_norm) == (False, "non-finite gradient", None)
    assert same(values(params), before)
    assert (mine.steps, mine.skipped) == (0, 1)
    for group, optimizer in ((params, mine), (twins, theirs)):
        give_gradients(group, 2)
        optimizer.step()
    assert same(values(params), values(twins))


def test_a_step_without_gradients_says_so():
    facts = PolicyOptimizer(parameters(), Optimizer()).step()
    assert (facts.applied, facts.reason) == (False, "no gradient")


def test_the_rate_climbs_over_the_warmup_and_stays():
    params = parameters()
    optimizer = PolicyOptimizer(params, Optimizer(learning_rate=0.4, warmup=4))
    rates = []
    for step in range(6):
        give_gradients(params, step)
        rates.append(optimizer.step().learning_rate)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_resume_gives_the_same_bits():
    settings = Optimizer(learning_rate=0.01, warmup=5, weight_decay=0.1)
    params = parameters()
    optimizer = PolicyOptimizer(params, settings)
    for step in range(3):
        give_gradients(params, step)
        params[2].grad = None  # a parameter that took no part has no moments
        optimizer.step()
    copies = [nn.Parameter(value) for value in values(params)]
    resumed = PolicyOptimizer(copies, settings)
    resumed.load_state(optimizer.state())
    for step in range(3, 6):
        for group, each in ((params, optimizer), (copies, resumed)):
            give_gradients(group, step)
            each.step()
    assert same(values(params), values(copies))
    assert resumed.steps == optimizer.steps == 6
    left, right = optimizer.state(), resumed.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_saved_state_is_a_copy():
    params = parameters()
    optimizer = PolicyOptimizer(params, Optimizer())
    give_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state()
    first = saved["exp_avg/0"].clone()
    give_gradients(params, 1)
    optimizer.step()
    assert torch.equal(saved["exp_avg/0"], first)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("exp_avg/1"),
        lambda state: state.pop("steps"),
        lambda state: state.update({"exp_avg/0": torch.zeros(2)}),
        lambda state: state.update({"exp_avg/7": torch.zeros(2)}),
    ],
)
def test_a_state_of_another_policy_is_refused_and_changes_nothing(change):
    params = parameters()
    optimizer = PolicyOptimizer(params, Optimizer())
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.state()
    change(state)
    with pytest.raises(TalkootError, match="does not fit"):
        optimizer.load_state(state)
    assert optimizer.steps == 1
    assert "exp_avg/1" in optimizer.state()


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.0), ("learning_rate", math.nan), ("warmup", -1), ("beta1", 1.0), ("clip", -1.0)],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(TalkootError) as caught:
        Optimizer(**{name: value})
    assert f"optimizer.{name}" in caught.value.where


def test_a_policy_without_parameters_is_refused():
    with pytest.raises(ValueError, match="trainable"):
        PolicyOptimizer([], Optimizer())
