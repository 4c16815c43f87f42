"""Every switch of the objective against numbers computed by hand, on two completions of three and of two tokens."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.tune.objective.advantage import ALONE, CUT_OFF, EQUAL, advantages
from talkoot.tune.objective.algorithms import algorithms
from talkoot.tune.objective.kl import divergence
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.objective.surrogate import surrogates
from talkoot.tune.objective.switches import Objective, make_objective
from talkoot.tune.objective.weights import token_weights

LENGTHS, ALL = torch.tensor([3, 2]), torch.tensor([True, True])


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rewarded(*rewards: float, lengths: tuple[int, ...] = (), finish: tuple[str, ...] = ()) -> ScoredGroup:
    lengths, finish = lengths or (2,) * len(rewards), finish or ("stop",) * len(rewards)
    samples = [
        Sample((1,) * length, reward, end, (-1.0,) * length, -1.0 * length)
        for reward, length, end in zip(rewards, lengths, finish, strict=True)
    ]
    return ScoredGroup((0,), tuple(samples), "alder", True)


@pytest.mark.parametrize(
    ("agg", "expected"),
    [
        ("seq_mean", (1 / 6, 1 / 4)),
        ("token_mean", (1 / 5, 1 / 5)),
        ("const", (1 / 20, 1 / 20)),
        ("seq_sum", (1 / 2, 1 / 2)),
    ],
)
def test_each_aggregation_weighs_tokens_as_defined(agg, expected):
    objective = Objective(loss_agg=agg, max_length=10)
    torch.testing.assert_close(token_weights(objective, LENGTHS, ALL), tensor(*expected))


@pytest.mark.parametrize(
    ("agg", "expected"), [("seq_mean", 1 / 3), ("token_mean", 1 / 3), ("const", 1 / 10), ("seq_sum", 1.0)]
)
def test_a_masked_completion_is_in_no_denominator(agg, expected):
    objective = Objective(loss_agg=agg, max_length=10)
    weights = token_weights(objective, LENGTHS, torch.tensor([True, False]))
    torch.testing.assert_close(weights, tensor(expected, 0.0))


def test_nothing_counted_weighs_nothing():
    for agg in ("seq_mean", "token_mean", "const", "seq_sum"):
        assert token_weights(Objective(loss_agg=agg), LENGTHS, ~ALL).tolist() == [0, 0]


def test_advantages_divide_by_the_population_deviation_of_the_group():
    found = advantages(Objective(), [rewarded(1, 0, 0, 0)])
    deviation = math.sqrt(3) / 4 + 1e-4  # of mean 1/4: sqrt(1/4 * 3/4)
    torch.testing.assert_close(found.values, tensor(0.75, -0.25, -0.25, -0.25) / deviation)
    assert found.skipped == {}


def test_advantages_divide_by_the_deviation_of_the_batch():
    found = advantages(Objective(adv_scale="batch_std"), [rewarded(1, 0), rewarded(1, 1)])
    deviation = math.sqrt(3) / 4 + 1e-4
    torch.testing.assert_close(found.values, tensor(0.5, -0.5, 0, 0) / deviation)
    assert found.skipped == {EQUAL: 1}


def test_advantages_without_a_scale_or_with_the_others_as_baseline():
    plain = advantages(Objective(adv_scale="none"), [rewarded(1, 0, 0.5)])
    torch.testing.assert_close(plain.values, tensor(0.5, -0.5, 0))
    others = advantages(Objective(adv_scale="none", baseline="leave_one_out"), [rewarded(1, 0, 0.5)])
    torch.testing.assert_close(others.values, tensor(0.75, -0.75, 0))
    alone = advantages(Objective(adv_scale="none", baseline="none"), [rewarded(1, 1), rewarded(0.5)])
    torch.testing.assert_close(alone.values, tensor(1, 1, 0.5))


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_what_cannot_be_compared_is_zero_and_named_never_nan(scale, baseline):
    objective = Objective(adv_scale=scale, baseline=baseline)
    found = advantages(objective, [rewarded(0.7), rewarded(0.1, 0.1, 0.1), rewarded(1, 0)])
    assert found.values[:4].tolist() == [0, 0, 0, 0]
    assert found.values.isfinite().all()
    assert found.skipped == {ALONE: 1, EQUAL: 1}
    assert found.counted.all()


def test_dynamic_sampling_takes_flat_groups_out_of_the_batch():
    found = advantages(Objective(dynamic_sampling=True), [rewarded(1, 1), rewarded(1, 0)])
    assert found.counted.tolist() == [False, False, True, True]


def test_cut_off_completions_are_masked_but_compared():
    group = rewarded(1, 0, 0, finish=("stop", "stop", "length"))
    found = advantages(Objective(overlong="mask", adv_scale="none"), [group])
    assert found.counted.tolist() == [True, True, False]
    torch.testing.assert_close(found.values, tensor(2 / 3, -1 / 3, -1 / 3))
    assert found.skipped == {CUT_OFF: 1}


def test_the_soft_penalty_is_zero_then_linear_then_minus_one():
    group = rewarded(1, 1, 1, 1, lengths=(6, 7, 10, 12))
    objective = Objective(overlong="soft", max_length=10, overlong_buffer=4, adv_scale="none", baseline="none")
    torch.testing.assert_close(advantages(objective, [group]).values, tensor(1, 0.75, 0, 0))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="not finite"):
        advantages(Objective(), [rewarded(1, reward)])


def test_an_empty_group_is_refused_and_an_empty_batch_is_empty():
    with pytest.raises(ValueError, match="no completion"):
        advantages(Objective(), [ScoredGroup((0,), (), "alder", True)])
    assert advantages(Objective(), []).values.tolist() == []


def test_the_clip_keeps_the_worse_of_both_on_either_side():
    ratio, adv = tensor(0.5, 1.1, 1.5, 0.5, 1.1, 1.5), tensor(2, 2, 2, -2, -2, -2)
    value = surrogates["clip"](Objective(clip_low=0.2, clip_high=0.3), ratio.log(), ratio.log(), adv)
    torch.testing.assert_close(value, tensor(1.0, 2.2, 2.6, -1.6, -2.2, -3.0))


def test_the_dual_clip_bounds_far_negatives_only():
    ratio, adv = tensor(5, 5, 2), tensor(1, -1, -1)
    value = surrogates["clip"](Objective(dual_clip=3.0), ratio.log(), ratio.log(), adv)
    torch.testing.assert_close(value, tensor(1.2, -3.0, -2.0))


def test_clipped_weights_carry_no_gradient_but_log_probabilities_do():
    logp = tensor(-1.0, -2.0, -0.5).requires_grad_()
    old = tensor(-1.0, -3.0, -0.1)
    objective = Objective(clip_low=1.0, clip_high=0.5)
    surrogates["clipped_weight"](objective, logp - old, logp, tensor(1, 2, -1)).sum().backward()
    torch.testing.assert_close(logp.grad, tensor(1.0, 2 * 1.5, -math.exp(-0.4)))


@pytest.mark.parametrize(
    ("name", "value"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)]
)
def test_divergence_estimates_equal_their_formulas(name, value):
    logp, reference = tensor(math.log(0.5)), tensor(math.log(0.25))
    torch.testing.assert_close(divergence(name, logp, reference), tensor(value))
    assert divergence(name, logp, logp).tolist() == [0]


def test_a_vast_divergence_stays_finite():
    assert divergence("k3", tensor(-1e6), tensor(0.0)).isfinite().all()
    far = tensor(1e6, -1e6)
    assert surrogates["clip"](Objective(), far, far, tensor(-1, -1)).isfinite().all()


PRESETS = {
    "grpo": ("clip", "seq_mean", "group_mean", "group_std", 0.2, 0.2, "token"),
    "dr_grpo": ("clip", "const", "group_mean", "none", 0.2, 0.2, "token"),
    "dapo": ("clip", "token_mean", "group_mean", "group_std", 0.2, 0.28, "token"),
    "bnpo": ("clip", "token_mean", "group_mean", "group_std", 0.2, 0.2, "token"),
    "gspo": ("clip", "seq_mean", "group_mean", "group_std", 3e-4, 4e-4, "sequence"),
    "cispo": ("clipped_weight", "token_mean", "group_mean", "group_std", 1.0, 0.28, "token"),
    "rloo": ("log_probability", "seq_sum", "leave_one_out", "none", 0.2, 0.2, "token"),
    "reinforce": ("log_probability", "seq_sum", "group_mean", "none", 0.2, 0.2, "token"),
}


def test_each_algorithm_is_the_preset_of_its_paper():
    assert set(algorithms) == set(PRESETS)
    for name, expected in PRESETS.items():
        o = make_objective({"algorithm": name}, 40)
        found = (o.surrogate, o.loss_agg, o.baseline, o.adv_scale, o.clip_low, o.clip_high, o.ratio_level)
        assert found == expected, name
        assert (o.algorithm, o.max_length, o.overlong_buffer) == (name, 40, 8)
    assert make_objective({"algorithm": "dapo"}, 40).dynamic_sampling
    assert make_objective({"algorithm": "dapo"}, 40).overlong == "soft"


def test_a_recipe_overrides_single_switches():
    made = make_objective({"algorithm": "dapo", "clip_high": 0.3, "overlong": "none", "max_length": 100}, 40)
    assert (made.clip_high, made.overlong, made.max_length, made.overlong_buffer) == (0.3, "none", 100, 20)
    assert made.loss_agg == "token_mean"
    assert make_objective({}, 40).algorithm == "grpo"


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"algorithm": "grop"}, "grpo"),
        ({"algorithm": 3}, "str"),
        ({"clip_hihg": 0.2}, "clip_high"),
        ({"loss_agg": "seqmean"}, "seq_mean"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"kl_beta": -1.0}, "kl_beta"),
        ({"overlong": "soft", "overlong_buffer": 40}, "overlong_buffer"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": "x"}, "max_length"),
        ({"surrogate": "clop"}, "clip"),
    ],
)
def test_bad_settings_are_refused_by_name(tree, word):
    with pytest.raises(TalkootError) as caught:
        make_objective(tree, 40)
    assert word in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(["group_std", "batch_std", "none"]),
    st.sampled_from(["group_mean", "leave_one_out", "none"]),
)
def test_advantages_are_finite_whatever_the_rewards(rewards, scale, baseline):
    groups = [rewarded(*values) for values in rewards]
    found = advantages(Objective(adv_scale=scale, baseline=baseline), groups)
    assert found.values.isfinite().all()
    for values, part in zip(rewards, found.values.split([len(v) for v in rewards]), strict=True):
        if baseline != "none":
            assert abs(float(part.sum())) < 1e-6 * max(1.0, float(part.abs().max()))
        if len(set(values)) == 1 and baseline != "none":
            assert not part.any()


def test_settings_registries_and_selection_need_no_torch():
    script = (
        "import sys, talkoot.tune.corrections, talkoot.tune.select\n"
        "from talkoot.tune.objective.switches import make_objective\n"
        "make_objective({'algorithm': 'cispo'}, 8)\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
