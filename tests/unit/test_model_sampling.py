"""Draws follow the distribution that was asked for, and every log-probability says of which."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.model.sampling import draw, uniforms

CHANCES = torch.tensor([0.5, 0.3, 0.15, 0.05])
ROWS = 4000


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected", "kept"),
    [
        (0, 1.0, [0.5, 0.3, 0.15, 0.05], None),
        (4, 1.0, [0.5, 0.3, 0.15, 0.05], None),
        (2, 1.0, [0.625, 0.375, 0, 0], 0.8),
        (0, 0.75, [0.625, 0.375, 0, 0], 0.8),
        (0, 0.1, [1.0, 0, 0, 0], 0.5),
        (9, 0.94, [10 / 19, 6 / 19, 3 / 19, 0], 0.95),
        (2, 0.6, [1.0, 0, 0, 0], 0.5),
    ],
)
def test_sampling_follows_the_filtered_distribution(top_k, top_p, expected, kept) -> None:
    drawn = draw(CHANCES.log().expand(ROWS, -1), uniforms(range(ROWS), 1)[:, 0], 1.0, top_k, top_p)
    counts = drawn.ids.bincount(minlength=4) / ROWS
    assert torch.allclose(counts, torch.tensor(expected), atol=0.035)
    assert torch.allclose(drawn.logp, CHANCES.log()[drawn.ids], atol=1e-6), "of the whole vocabulary"
    assert (drawn.kept is None) == (kept is None)
    if kept is not None:
        assert torch.allclose(drawn.kept, torch.tensor(math.log(kept)), atol=1e-6)


def test_temperature_flattens_and_zero_takes_the_likeliest() -> None:
    logits = CHANCES.log().expand(ROWS, -1) + 7
    cold = draw(logits, uniforms(range(ROWS), 1)[:, 0], 0.25)
    wanted = CHANCES**4 / (CHANCES**4).sum()
    assert torch.allclose(cold.ids.bincount(minlength=4) / ROWS, wanted, atol=0.035)
    assert torch.allclose(cold.logp, wanted.log()[cold.ids], atol=1e-5)
    greedy = draw(logits, uniforms(range(ROWS), 1)[:, 0], 0.0, top_k=1)
    assert greedy.ids.tolist() == [0] * ROWS
    assert greedy.kept is None
    assert torch.allclose(greedy.logp, torch.tensor(math.log(0.5)))


def test_a_large_vocabulary_is_drawn_from_like_a_small_one() -> None:
    size = 5003
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, -4:] = 6.0
    logits[0, 100:4000] = -200  # whole blocks without mass
    for number in range(60):
        uniform = uniforms([number, number + 100, number + 200], 1)[:, 0]
        reach = logits.log_softmax(-1).exp().double().cumsum(-1)
        plain = (reach <= uniform[:, None] * reach[:, -1:]).sum(-1)
        assert (draw(logits, uniform).ids - plain).abs().max() <= 1
    edges = torch.tensor([0.0, 1 - 2**-48, 0.5], dtype=torch.float64)
    drawn = draw(logits, edges)
    assert drawn.ids[:2].tolist() == [0, size - 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), zeros=st.sets(st.integers(0, 6), max_size=6))
def test_a_token_without_probability_is_never_drawn(seed: int, zeros: set[int]) -> None:
    logits = torch.zeros(1, 7)
    logits[0, list(zeros)] = -1e4
    for uniform in (*uniforms([seed], 6)[0], *torch.tensor([0.0, 1 - 2**-48], dtype=torch.float64)):
        assert int(draw(logits, uniform[None]).ids) not in zeros


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    many = uniforms([5, 2**64 - 1, 7], 9)
    assert torch.equal(uniforms([7], 4)[0], many[2, :4])
    assert torch.equal(uniforms([-1], 9)[0], many[1])
    assert len(set(many.flatten().tolist())) == 27
    # SplitMix64's published first outputs from state 0.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniforms([0], 3)[0].tolist() == [(word >> 16) * 2.0**-48 for word in words]


def test_uniforms_are_uniform_along_seeds_and_along_positions() -> None:
    for values in (uniforms(range(20000), 1)[:, 0], uniforms([1], 20000)[0]):
        share = torch.histc(values.float(), 20, 0, 1) / len(values)
        assert torch.allclose(share, torch.full((20,), 0.05), atol=0.006)
