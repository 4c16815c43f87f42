"""Divergences between a student and its teacher: gradients known in closed form, buckets, extremes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.tune.distil.divergence import advantages, divergences, policy_gradient, student_of, teacher_of

ROWS, VOCABULARY = 5, 7


def logits(seed: int, rows: int = ROWS, vocabulary: int = VOCABULARY, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def tokens(seed: int, rows: int = ROWS, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))


def loss(name: str, ours: Tensor, theirs: Tensor, ids: Tensor, top_k: int = 0, beta: float = 0.3) -> Tensor:
    teacher = teacher_of(theirs, ids, top_k)
    return divergences[name](student_of(ours, ids, teacher), teacher, beta)


def gradient(name: str, ours: Tensor, theirs: Tensor, ids: Tensor, top_k: int = 0) -> Tensor:
    leaf = ours.clone().requires_grad_()
    loss(name, leaf, theirs, ids, top_k).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_forward_gradient_is_the_difference_of_the_probabilities():
    ours, theirs = logits(0), logits(1)
    expected = ours.softmax(-1) - theirs.softmax(-1)
    torch.testing.assert_close(gradient("forward", ours, theirs, tokens(2)), expected, rtol=0, atol=1e-12)


def test_the_reverse_gradient_weighs_each_log_ratio_against_their_mean():
    ours, theirs = logits(3), logits(4)
    p_s, ratio = ours.softmax(-1), ours.log_softmax(-1) - theirs.log_softmax(-1)
    kl = (p_s * ratio).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient("reverse", ours, theirs, tokens(5)), p_s * (ratio - kl), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("top_k", [0, 3])
def test_gradients_agree_with_finite_differences(name: str, top_k: int):
    theirs, ids = logits(6), tokens(7)
    assert torch.autograd.gradcheck(lambda x: loss(name, x, theirs, ids, top_k), logits(8).requires_grad_())


def test_the_policy_gradient_form_is_the_reverse_gradient_in_expectation():
    ours, theirs = logits(9), logits(10)
    p_s, mean = ours.softmax(-1), torch.zeros_like(ours)
    for token in range(VOCABULARY):
        ids = torch.full((ROWS,), token)
        mean += p_s[:, token, None] * gradient("pg", ours, theirs, ids)
    torch.testing.assert_close(mean, gradient("reverse", ours, theirs, tokens(11)), rtol=0, atol=1e-12)


def test_the_policy_gradient_is_minus_advantage_times_the_score():
    ours, theirs, ids = logits(12), logits(13), tokens(14)
    rows = torch.arange(ROWS)
    advantage = theirs.log_softmax(-1)[rows, ids] - ours.log_softmax(-1)[rows, ids]
    score = torch.nn.functional.one_hot(ids, VOCABULARY) - ours.softmax(-1)
    torch.testing.assert_close(gradient("pg", ours, theirs, ids), -advantage[:, None] * score, rtol=0, atol=1e-12)


def test_advantages_are_exact_whatever_the_number_of_buckets_and_carry_no_gradient():
    ours, theirs, ids = logits(15).requires_grad_(), logits(16), tokens(17)
    few, all_of_them = teacher_of(theirs, ids, 2), teacher_of(theirs, ids, 0)
    first = advantages(student_of(ours, ids, few), few)
    assert torch.equal(first, advantages(student_of(ours, ids, all_of_them), all_of_them))
    assert not first.requires_grad


@pytest.mark.parametrize("name", list(divergences))
def test_as_many_buckets_as_tokens_is_exact(name: str):
    ours, theirs, ids = logits(18), logits(19), tokens(20)
    for top_k in (VOCABULARY, VOCABULARY + 5):
        assert torch.equal(loss(name, ours, theirs, ids, top_k), loss(name, ours, theirs, ids, 0))


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd"])
def test_buckets_never_see_more_difference_than_there_is_and_more_of_them_see_more(name: str):
    ours, theirs, ids = logits(21), logits(22), tokens(23)
    seen = [loss(name, ours, theirs, ids, top_k) for top_k in (1, 2, 4, VOCABULARY - 1, VOCABULARY)]
    for fewer, more in pairwise(seen):
        assert bool((fewer <= more + 1e-12).all())
    assert bool((seen[0] < seen[-1] - 1e-3).any())


def test_buckets_are_the_teachers_likeliest_tokens_and_the_rest():
    theirs, ids = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float64), torch.tensor([0])
    teacher = teacher_of(theirs, ids, 2)
    assert teacher.top is not None
    assert teacher.top.tolist() == [[1, 3]]
    p = theirs.softmax(-1)[0]
    expected = torch.stack([p[1], p[3], p[0] + p[2]])
    torch.testing.assert_close(teacher.logp.exp()[0], expected)
    student = student_of(torch.zeros(1, 4, dtype=torch.float64), ids, teacher)
    torch.testing.assert_close(student.logp.exp()[0], torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64))


@given(
    seed=st.integers(0, 2**31), scale=st.floats(0.1, 60), beta=st.floats(0.01, 0.99), top_k=st.sampled_from([0, 1, 3])
)
@settings(max_examples=40, deadline=None)
def test_divergences_are_never_negative_never_infinite_and_nought_between_equals(
    seed: int, scale: float, beta: float, top_k: int
):
    ours, theirs, ids = logits(seed, scale=scale).float(), logits(seed + 1, scale=scale).float(), tokens(seed)
    for name in ("forward", "reverse", "jsd"):
        value = loss(name, ours, theirs, ids, top_k, beta)
        assert bool((value >= -1e-4).all())
        assert bool(value.isfinite().all())
        assert float(loss(name, ours, ours, ids, top_k, beta).abs().max()) < 1e-4
        assert bool(gradient(name, ours, theirs, ids, top_k).isfinite().all())


def test_a_token_that_the_teacher_excludes_costs_much_but_not_infinitely_much():
    theirs = torch.tensor([[0.0, -math.inf, 0.0]])
    for name in divergences:
        value = loss(name, torch.zeros(1, 3), theirs, torch.tensor([1]))
        assert bool(value.isfinite().all())
        assert bool(gradient(name, torch.zeros(1, 3), theirs, torch.tensor([1])).isfinite().all())
    assert float(loss("reverse", torch.zeros(1, 3), theirs, torch.tensor([1]))) > 30


def test_jsd_is_bounded_by_the_entropy_of_its_coin():
    ours, theirs = torch.tensor([[50.0, 0, 0]]), torch.tensor([[0.0, 50, 0]])
    value = float(loss("jsd", ours, theirs, torch.tensor([0]), beta=0.5))
    assert value == pytest.approx(math.log(2), abs=1e-4)


def test_temperature_divides_the_logits_of_both():
    ours, theirs, ids = logits(24), logits(25), tokens(26)
    hot = teacher_of(theirs, ids, 3, temperature=2.0)
    cold = teacher_of(theirs / 2, ids, 3)
    torch.testing.assert_close(hot.logp, cold.logp)
    torch.testing.assert_close(student_of(ours, ids, hot, 2.0).logp, student_of(ours / 2, ids, cold).logp)


def test_half_precision_logits_are_compared_in_single():
    ours, theirs, ids = logits(27).bfloat16(), logits(28).bfloat16(), tokens(29)
    assert torch.equal(loss("reverse", ours, theirs, ids), loss("reverse", ours.float(), theirs.float(), ids))


def test_a_policy_gradient_takes_any_advantage():
    ours, ids = logits(30), tokens(31)
    teacher = teacher_of(logits(32), ids, 0)
    student = student_of(ours, ids, teacher)
    assert torch.equal(policy_gradient(student, torch.zeros(ROWS)), torch.zeros(ROWS, dtype=torch.float64))
    assert torch.equal(policy_gradient(student, torch.ones(ROWS)), -student.token_logp)


def test_a_misspelt_divergence_is_told_the_nearest_name():
    with pytest.raises(TalkootError, match="forwards") as caught:
        divergences["forwards"]
    assert "forward" in str(caught.value.why)
