"""The single process that trains along layer orders: whose mean a gradient is, and that nothing else runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from talkoot.data import Windows
from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage
from talkoot.train.oracle import OrderTraining, batched_gradients, step_gradients
from talkoot.train.recipe import Model, Recipe, Train
from talkoot.train.schedule import learning_rate
from talkoot.train.tensors import TensorStage

FULL = (0, 1, 2, 3, 4, 5)
ORDERS = [(0, 1, 2, 3, 5), (0, 1, 4, 3, 5), (0, 1, 2, 5), FULL, (0, 1, 3, 4, 5)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(tied: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=31, width=32, layers=4, heads=2, kv_heads=2, head_dim=16, hidden=40, max_positions=16, tied=tied
    )


def model(tied: bool = False) -> Stage:
    return Stage(config(tied), 0, 6, seed=2)


def microbatches(count: int = len(ORDERS)) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(31, (2, 13), generator=chance) for _ in range(count)]


def executed(stage: Stage) -> list[int]:
    ran: list[int] = []
    for index, layer in enumerate(stage.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    return ran


def mean_over_visitors(stage: Stage, rows, orders, layer: int, name: str) -> torch.Tensor:
    """The definition, spelt out: one backward pass for each microbatch that ran the layer."""
    visitors = [(one, order) for one, order in zip(rows, orders, strict=True) if layer in order]
    parts = []
    for one, order in visitors:
        logits = stage.run_layers(one[:, :-1], order)
        loss = F.cross_entropy(logits.reshape(-1, 31), one[:, 1:].reshape(-1))
        parts.append(torch.autograd.grad(loss, stage.tensors()[name])[0].double())
    return torch.stack(parts).mean(0)


@pytest.mark.parametrize("gradients", [step_gradients, batched_gradients])
def test_a_layers_gradient_is_the_mean_over_the_microbatches_that_ran_it(gradients):
    stage, rows = model(), microbatches()
    found, losses = gradients(stage, rows, ORDERS)
    assert set(found) == set(stage.tensors())
    for layer in range(6):
        for name in stage.config.layer_shapes(layer):
            expected = mean_over_visitors(stage, rows, ORDERS, layer, name)
            assert torch.allclose(found[name].double(), expected, rtol=1e-4, atol=1e-7), name
    with torch.no_grad():
        logits = stage.run_layers(rows[1][:, :-1], ORDERS[1])
    assert math.isclose(losses[1], F.cross_entropy(logits.flatten(0, 1), rows[1][:, 1:].flatten()), abs_tol=1e-5)


def test_the_named_layers_run_in_the_named_order_and_no_other_does():
    stage, rows = model(), microbatches()
    ran = executed(stage)
    step_gradients(stage, rows, ORDERS)
    assert ran == [layer for order in ORDERS for layer in order]
    ran.clear()
    batched_gradients(stage, rows, [(0, 1, 2, 5), (0, 1, 2, 5), (0, 1, 3, 5), (0, 2, 1, 5), (0, 5)])
    assert ran == [0, 1, 2, 1, 3, 5], "equal layers share a batch; a swap costs one more"


def test_a_layer_that_nobody_ran_has_no_gradient_and_stays_as_it_is():
    stage, rows = model(), microbatches(3)
    training = OrderTraining(stage, Train(steps=4, learning_rate=0.01))
    training.step(0, rows, [FULL] * 3)
    before = {name: tensor.clone() for name, tensor in stage.tensors().items()}
    gradients, _ = step_gradients(stage, rows, [(0, 1, 3, 4, 5)] * 3)
    skipped = set(stage.config.layer_shapes(2))
    assert set(stage.tensors()) - set(gradients) == skipped
    training.step(1, rows, [(0, 1, 3, 4, 5)] * 3)
    for name, tensor in stage.tensors().items():
        assert torch.equal(tensor, before[name]) is (name in skipped), name


def test_a_tied_pair_gets_the_sum_of_both_gradients_and_stays_tied():
    stage, rows = model(tied=True), microbatches()
    untied = Stage(config(), 0, 6)
    untied.load(stage.tensors())
    expected, _ = step_gradients(untied, rows, ORDERS)
    for gradients in (step_gradients, batched_gradients):
        found, _ = gradients(stage, rows, ORDERS)
        both = expected["model.embed_tokens.weight"] + expected["lm_head.weight"]
        assert torch.allclose(found["model.embed_tokens.weight"], both, atol=1e-7)
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    OrderTraining(stage, Train(steps=2)).step(0, rows, ORDERS)
    assert torch.equal(stage.tensors()["lm_head.weight"], stage.tensors()["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_without_skipping_the_bits_are_those_of_the_training_runtime(tied):
    clip = 1.0 if tied else 0.8  # amid the norms, so that it is at work in some steps and not in others
    train = Train(steps=6, microbatches=5, microbatch_size=2, learning_rate=0.01, warmup=2, clip=clip)
    recipe = Recipe(model=Model(context=12, device="cpu"), train=train)
    text = np.random.default_rng(0).integers(31, size=2000).astype(np.uint16)
    windows = Windows(text, length=12, batch=2, seed=0)
    runtime, training = TensorStage(config(tied), 0, 6, recipe, windows), OrderTraining(model(tied), train)
    training.stage.load(runtime.stage.tensors())
    scales = []
    for step in range(6):
        runtime.begin(step, 5, False)
        for microbatch in (3, 1, 0, 4, 2):
            runtime.forward(microbatch, [])
            runtime.backward(microbatch, [])
        losses, squares = runtime.finish()
        norm = math.sqrt(math.fsum(squares))
        scales.append(clip / norm if norm > clip else 1.0)
        rows = [torch.from_numpy(windows.train(step, microbatch, 5)) for microbatch in range(5)]
        assert training.step(step, rows, [FULL] * 5) == tuple(losses[microbatch] for microbatch in range(5))
        runtime.apply(learning_rate(train, step), scales[-1])
        for name, tensor in runtime.stage.tensors().items():
            assert torch.equal(tensor, training.stage.tensors()[name]), (step, name)
    assert min(scales) < 1.0 == max(scales)


def test_skipping_does_not_shrink_a_stages_gradient():
    stage = model()
    rows = [microbatches(1)[0]] * 6
    halves = step_gradients(stage, rows, [(0, 1, 2, 5)] * 3 + [(0, 1, 3, 5)] * 3)[0]
    alone = step_gradients(stage, rows[:1], [(0, 1, 2, 5)])[0]
    for name in stage.config.layer_shapes(2):
        assert torch.allclose(halves[name], alone[name], rtol=1e-5, atol=1e-8), name
