"""Fitting on one machine: it learns, resumes to the bit, and moves only what it should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.model.fit import FitSettings, Fitter, fit, stage_fitter
from talkoot.model.stage import Stage

torch.set_num_threads(1)
HOW = FitSettings(learning_rate=3e-3, horizon=20, warmup=2, weight_decay=0.1)


def model(tied=False):
    config = ModelConfig.from_depth(2, 17, tied=tied)
    return Stage(config, 0, config.layer_count, seed=3)


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(0, 17, (4, 1), generator=generator) + torch.arange(9)) % 17 for _ in range(count)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.tensors().values(), other.tensors().values(), strict=True))


def test_the_loss_falls():
    stage = model()
    losses = fit(stage, batches(20), stage_fitter(stage, HOW))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("trained", ["all", "mlp"])
def test_training_in_two_parts_gives_the_bits_of_training_in_one(trained):
    whole, parts = model(), model()
    expected = fit(whole, batches(8), stage_fitter(whole, HOW, trained))
    first = stage_fitter(parts, HOW, trained)
    losses = fit(parts, batches(8)[:3], first)
    second = stage_fitter(parts, HOW, trained)
    second.load_state(first.state())
    losses += fit(parts, batches(8)[3:], second)
    assert losses == expected
    assert same(whole, parts)


def test_mlp_training_leaves_every_other_weight_alone():
    stage, before = model(), {name: value.detach().clone() for name, value in model().tensors().items()}
    fit(stage, batches(3), stage_fitter(stage, HOW, "mlp"))
    moved = {name for name, value in stage.tensors().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".mlp." in name}


def test_a_tied_head_stays_equal_to_its_embedding_and_both_gradients_count():
    stage, loose = model(tied=True), model(tied=True)
    fit(stage, batches(3), stage_fitter(stage, HOW))
    tensors = stage.tensors()
    assert torch.equal(tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    fit(loose, batches(3), Fitter(loose.tensors(), HOW))
    assert not torch.equal(tensors["lm_head.weight"], loose.tensors()["lm_head.weight"])


def test_a_state_of_other_parameters_is_refused_and_changes_nothing():
    stage = model()
    all_weights, mlp = stage_fitter(stage, HOW), stage_fitter(stage, HOW, "mlp")
    fit(stage, batches(2), all_weights)
    with pytest.raises(TalkootError, match="does not fit"):
        mlp.load_state(all_weights.state())
    assert mlp.steps == 0
    with pytest.raises(TalkootError, match="does not fit"):
        all_weights.load_state({})


def test_a_loss_that_is_not_finite_moves_nothing():
    stage, twin = model(), model()
    fitter = stage_fitter(stage, HOW)
    with pytest.raises(TalkootError, match="diverged"):
        fitter.step(stage(batches(1)[0]).sum() * float("nan"))
    assert same(stage, twin)
    assert fitter.steps == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.floats(0, 1), st.sampled_from(["cosine", "linear"]), st.floats(0, 1))
def test_the_rate_rises_to_its_peak_falls_to_its_end_and_stays(horizon, share, schedule, final):
    how = FitSettings(learning_rate=2.0, horizon=horizon, warmup=int(share * horizon), schedule=schedule, final=final)
    rates = [how.rate(step) for step in range(horizon + 3)]
    peak = max(0, how.warmup - 1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert max(rates) == pytest.approx(2.0)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rates[peak:], rates[peak + 1 :], strict=False))
    assert rates[-3:] == pytest.approx([2.0 * final] * 3)


def test_a_shorter_run_is_the_beginning_of_its_schedule_not_a_shorter_schedule():
    how = FitSettings(learning_rate=1.0, horizon=100)
    assert how.rate(50) == pytest.approx(0.55)


@pytest.mark.parametrize("wrong", [{"horizon": 0}, {"horizon": 5, "warmup": 6}, {"horizon": 5, "final": 1.5}])
def test_a_schedule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError):
        FitSettings(**{"learning_rate": 1e-3, **wrong})
