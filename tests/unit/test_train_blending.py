"""Blending a lost stage from its neighbours: what must hold whatever the weights are."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.model.config import ModelConfig
from talkoot.train.recovery.blending import Blended, Neighbour, blend
from talkoot.train.sections import Recovery

CONFIG = msgspec.structs.replace(
    ModelConfig.from_depth(6, 16), width=8, heads=2, kv_heads=1, head_dim=4, hidden=12, layers=9
)
LOST = (4, 7)
SPANS = [(1, 4), (7, 10)]
norms = st.floats(0, 1e150, allow_nan=False)
positive = st.floats(1e-150, 1e150)
quick = settings(max_examples=25, deadline=None)


def state_of(first: int, last: int, seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        f"{part}/{name}": torch.randn(shape, generator=chance).abs_() ** (2 if part == "second" else 1)
        for part, layer in product(("weight", "first", "second"), CONFIG.held(first, last))
        for name, shape in CONFIG.layer_shapes(layer).items()
    }


def beside(span: tuple[int, int], omega: float, seed: int) -> Neighbour:
    return Neighbour(first=span[0], last=span[1], omega=omega, state=state_of(*span, seed))


def block(blended: Blended, layer: int, part: str = "weight") -> list[torch.Tensor]:
    return [blended.state[f"{part}/{name}"] for name in CONFIG.layer_shapes(layer)]


def its(neighbour: Neighbour, layer: int, part: str = "weight") -> list[torch.Tensor]:
    return [neighbour.state[f"{part}/{name}"] for name in CONFIG.layer_shapes(layer)]


def run(*neighbours: Neighbour, lost: tuple[int, int] = LOST, kept=None, **rule) -> Blended:
    return blend(CONFIG, lost, neighbours, Recovery(**rule), step=7, seed=3, kept=kept)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(ours, theirs, strict=True))


@quick
@given(norms, norms, st.sampled_from([0, 1, 2]), st.sampled_from(["norm", "uniform", "copy"]), st.integers(0, 99))
def test_every_weight_lies_between_the_neighbours_and_all_is_finite(one, other, power, merge, seed):
    a, b = beside(SPANS[0], one, seed), beside(SPANS[1], other, seed + 1)
    blended = run(a, b, omega_power=power, merge=merge)
    assert math.isclose(sum(blended.shares), 1)
    for place, part in product(range(3), ("weight", "second")):
        blocks = block(blended, 4 + place, part), its(a, 1 + place, part), its(b, 7 + place, part)
        for got, x, y in zip(*blocks, strict=True):
            assert torch.isfinite(got).all()
            assert (got >= torch.minimum(x, y)).all()
            assert (got <= torch.maximum(x, y)).all()


@quick
@given(norms, norms, st.sampled_from([0, 1, 2]), st.integers(0, 99))
def test_it_does_not_matter_which_neighbour_is_named_first(one, other, power, seed):
    a, b = beside(SPANS[0], one, seed), beside(SPANS[1], other, seed + 1)
    there, back = run(a, b, omega_power=power), run(b, a, omega_power=power)
    assert same(list(there.state.values()), list(back.state.values()))
    assert there.shares == back.shares[::-1]


@quick
@given(norms, norms, st.sampled_from([0, 1, 2]), st.integers(0, 99))
def test_equal_neighbours_reproduce_themselves_bit_for_bit(one, other, power, seed):
    a = beside(SPANS[0], one, seed)
    moved = {
        f"{part}/{there}": a.state[f"{part}/{here}"]
        for part, place in product(("weight", "first", "second"), range(3))
        for here, there in zip(CONFIG.layer_shapes(1 + place), CONFIG.layer_shapes(7 + place), strict=True)
    }
    b = Neighbour(first=7, last=10, omega=other, state=moved)
    blended = run(a, b, omega_power=power)
    for place, part in product(range(3), ("weight", "second")):
        assert same(block(blended, 4 + place, part), its(a, 1 + place, part))


@quick
@given(positive, st.sampled_from([1, 2]))
def test_a_neighbour_without_gradient_has_no_say(omega, power):
    a, b = beside(SPANS[0], 0.0, 1), beside(SPANS[1], omega, 2)
    blended = run(a, b, omega_power=power)
    assert blended.shares == (0, 1)
    assert all(same(block(blended, 4 + place), its(b, 7 + place)) for place in range(3))


@quick
@given(norms)
def test_equal_norms_give_the_uniform_mean(omega):
    a, b = beside(SPANS[0], omega, 1), beside(SPANS[1], omega, 2)
    uniform = run(a, b, merge="uniform")
    assert same(list(run(a, b).state.values()), list(uniform.state.values()))
    assert uniform.shares == (0.5, 0.5)


def test_the_larger_norm_weighs_more_and_its_power_decides_how_much():
    a, b = beside(SPANS[0], 1.0, 1), beside(SPANS[1], 3.0, 2)
    for power, shares in enumerate(((0.5, 0.5), (0.25, 0.75), (0.1, 0.9))):
        assert run(a, b, omega_power=power).shares == pytest.approx(shares)
    got, x, y = (tensors[0] for tensors in (block(run(a, b), 5), its(a, 2), its(b, 8)))
    torch.testing.assert_close(got, 0.25 * x + 0.75 * y)


def test_one_neighbour_is_copied_and_a_copy_is_of_the_one_before():
    a, b = beside(SPANS[0], 1.0, 1), beside(SPANS[1], 5.0, 2)
    for blended in (run(a), run(a, b, merge="copy")):
        assert blended.shares[0] == 1
        assert all(same(block(blended, 4 + place), its(a, 1 + place)) for place in range(3))
    got = block(run(a), 4)[0]
    assert got.data_ptr() != its(a, 1)[0].data_ptr()


def test_a_rings_first_stage_without_blocks_has_no_say_and_one_with_blocks_gives_only_these():
    empty, after = beside((-1, 1), 1e300, 1), beside((3, 5), 1.0, 2)
    blended = run(empty, after, lost=(1, 3), omega_power=2)
    assert blended.shares == (0, 1)
    assert same(block(blended, 1), its(after, 3))
    assert same(block(run(beside((-1, 3), 9.0, 1), lost=(3, 5)), 3), its(beside((-1, 3), 9.0, 1), 1))


@pytest.mark.parametrize(("depth", "sources"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (5, [1, 2, 2, 3, 3])])
def test_blocks_of_unequal_stages_are_matched_by_their_relative_depth(depth, sources):
    a = beside((1, 4), 1.0, 1)
    blended = run(a, lost=(4, 4 + depth))
    for place, source in enumerate(sources):
        assert same(block(blended, 4 + place), its(a, source))


def test_moments_are_reset_or_the_neighbours_or_the_kept_ones():
    a, b = beside(SPANS[0], 1.0, 1), beside(SPANS[1], 1.0, 2)
    reset, beside_them = run(a, b, moments="reset"), run(a, b, moments="neighbours")
    assert (reset.step, beside_them.step) == (0, 7)
    assert not any(tensor.any() for name, tensor in reset.state.items() if not name.startswith("weight/"))
    assert not any(tensor.any() for tensor in block(beside_them, 4, "first"))
    mean = (its(a, 1, "second")[0] + its(b, 7, "second")[0]) / 2
    torch.testing.assert_close(block(beside_them, 4, "second")[0], mean)
    kept = state_of(*LOST, 9)
    exact = run(a, b, moments="exact", kept=kept)
    assert exact.step == 7
    assert all(torch.equal(exact.state[name], kept[name]) for name in kept if not name.startswith("weight/"))
    with pytest.raises(ValueError, match="nobody kept"):
        run(a, b, moments="exact")


def test_random_weights_are_fresh_and_the_same_for_the_same_loss():
    a, b = beside(SPANS[0], 1.0, 1), beside(SPANS[1], 1.0, 2)
    once, again = run(a, b, merge="random"), run(a, b, merge="random")
    later = blend(CONFIG, LOST, [a, b], Recovery(merge="random"), step=8, seed=3)
    matrix = next(name for name in once.state if name.endswith("q_proj.weight"))
    assert torch.equal(once.state[matrix], again.state[matrix])
    assert not torch.equal(once.state[matrix], later.state[matrix])


def test_the_state_is_complete_and_of_the_lost_layers():
    blended = run(beside(SPANS[0], 1.0, 1), beside(SPANS[1], 1.0, 2))
    assert {name: tensor.shape for name, tensor in blended.state.items()} == {
        name: tensor.shape for name, tensor in state_of(*LOST, 0).items()
    }


def test_what_cannot_be_blended_is_refused():
    a = beside(SPANS[0], 1.0, 1)
    for lost in ((-1, 2), (0, 2), (9, 11), (4, 4)):
        with pytest.raises(ValueError, match="decoder blocks"):
            run(a, lost=lost)
    with pytest.raises(ValueError, match="no neighbour"):
        run(beside((-1, 1), 1.0, 1))
    for omega in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="norms"):
            run(beside(SPANS[0], omega, 1))
