"""Training with swapped ends: gradients are those of both orders, slots bring no standstill, crashes leave no trace."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from test_train_kit import Fault, Run, replace, simulate, text_folder, tiny

from talkoot.model.stage import Stage
from talkoot.train import records
from talkoot.train.oracle import step_gradients
from talkoot.train.prepare import model_config, open_windows, prepare_tokenizer
from talkoot.train.recipe import Model, Recipe


def ring(groups: tuple[int, ...] = (1,) * 5, slots: int = 0, **train) -> Recipe:
    recipe = tiny(planner="swapped", microbatches=4, steps=2, evaluate_every=1, **train)
    recipe = msgspec.structs.replace(recipe, model=Model(depth=4, context=16, device="cpu"))
    return replace(recipe, "swarm", layout="ring", groups=groups, cut=(0, 1, 1, 1, 1), slots=slots)


@cache
def undisturbed() -> Run:
    return simulate(ring(), held_out=2)


def test_a_step_has_the_gradient_of_a_single_process_in_both_orders():
    recipe = ring(clip=0.0)
    (first, _) = undisturbed().facts("train.commit", records.Committed)
    config = model_config(recipe, prepare_tokenizer(recipe, text_folder()))
    whole = Stage(config, 0, config.layer_count, seed=recipe.seed)
    rows = [torch.from_numpy(open_windows(recipe, str(text_folder() / "tokens")).train(0, m, 4)) for m in range(4)]
    orders = [[0, 2, 1, 4, 3, 5] if m % 2 else [0, 1, 2, 3, 4, 5] for m in range(4)]
    gradients, losses = step_gradients(whole, rows, orders)
    assert first.losses == losses
    squares = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients.values())
    assert first.gradient_norm == pytest.approx(squares**0.5, rel=1e-12)


def test_evaluations_go_in_order():
    plain = simulate(replace(ring(learning_rate=1e-30), "train", planner="straight"), held_out=2)
    swapped = simulate(ring(learning_rate=1e-30), held_out=2)
    assert swapped.result.held_out == plain.result.held_out
    assert swapped.losses != plain.losses


def test_one_slot_per_peer_brings_no_standstill():
    assert simulate(ring(slots=1), held_out=2).result.state_hash == undisturbed().result.state_hash


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_crash_in_a_swapped_pair_leaves_no_trace(phase):
    recipe = ring(groups=(1, 2, 2, 1, 1))
    victim = list(recipe.swarm.peers)[1]
    run = simulate(msgspec.structs.replace(recipe, faults=(Fault(peer=victim, step=1, phase=phase),)), held_out=2)
    assert run.facts("peer.lost", records.Gone)
    assert run.losses == undisturbed().losses
    assert run.result.state_hash == undisturbed().result.state_hash
