"""Which layers run when stages are skipped, swapped or dead."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.model.depth import held_out_loss, layer_order, remaining_layers, ring_cut
from talkoot.model.stage import Stage


def config(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=31, width=16, layers=layers, heads=2, kv_heads=2, head_dim=8, hidden=24, max_positions=16
    )


def test_a_rings_first_stage_holds_both_ends():
    cut = ring_cut((2, 1, 3))
    assert cut == [(-1, 3), (3, 4), (4, 7)]
    assert [config(6).held(*part) for part in cut] == [[7, 0, 1, 2], [3], [4, 5, 6]]


def test_a_path_runs_the_layers_of_its_stages_in_the_order_of_visiting():
    assert layer_order(config(6), ring_cut((2, 1, 3)), (0, 2, 1)) == (0, 1, 2, 4, 5, 6, 3, 7)
    assert layer_order(config(6), ring_cut((2, 1, 3)), (0,)) == (0, 1, 2, 7)
    assert layer_order(config(6), [(0, 2), (2, 4), (4, 6), (6, 8)], (0, 2, 3)) == (0, 1, 4, 5, 6, 7)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.data())
def test_what_remains_is_every_layer_but_those_of_dead_stages(blocks, data):
    shape, cut = config(sum(blocks)), ring_cut(blocks)
    dead = data.draw(st.sets(st.sampled_from(range(1, len(blocks)))))
    gone = {index for stage in dead for index in range(*cut[stage])}
    assert remaining_layers(shape, cut, dead) == tuple(i for i in range(shape.layer_count) if i not in gone)


@pytest.mark.parametrize("dead", [(0,), (0, 1), (3,), (-1,)])
def test_the_ends_cannot_be_dead_and_neither_can_stages_that_do_not_exist(dead):
    with pytest.raises(TalkootError, match="cannot run through these stages") as caught:
        remaining_layers(config(3), ring_cut((1, 1, 1)), dead)
    assert "stages" in caught.value.why
    with pytest.raises(TalkootError, match="cannot run") as caught:
        remaining_layers(config(3), [(0, 2), (2, 4), (4, 5)], (2,))
    assert "[0, 2]" in caught.value.why


@pytest.mark.parametrize("path", [(), (1, 2), (0, 1, 1), (0, 3)])
def test_a_path_without_the_ends_or_with_a_stage_twice_is_refused(path):
    with pytest.raises(TalkootError, match="cannot run"):
        layer_order(config(3), ring_cut((1, 1, 1)), path)


def test_the_held_out_loss_is_the_mean_over_batches_of_the_layers_that_remain():
    stage = Stage(config(3), 0, 5, seed=1)
    ran: list[int] = []
    for index, layer in zip(stage.held, stage.layers, strict=True):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    batches = [torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    with torch.no_grad():
        logits = [stage.run_layers(rows[:, :-1], (0, 1, 3, 4)) for rows in batches]
    each = [
        float(F.cross_entropy(one.reshape(-1, 31), rows[:, 1:].reshape(-1)))
        for one, rows in zip(logits, batches, strict=True)
    ]
    ran.clear()
    assert held_out_loss(stage, batches, (0, 1, 3, 4)) == math.fsum(each) / 3
    assert ran == [0, 1, 3, 4] * 3
    ran.clear()
    assert held_out_loss(stage, batches) != held_out_loss(stage, batches, (0, 1, 3, 4))
    assert ran[:15] == [0, 1, 2, 3, 4] * 3
    with pytest.raises(ValueError, match="no held-out batch"):
        held_out_loss(stage, [])
