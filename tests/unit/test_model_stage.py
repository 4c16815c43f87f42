"""Cutting, skipping and initialising: however a model is held, its bits are the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from talkoot.core.errors import TalkootError
from talkoot.model.config import FAMILIES, ModelConfig, tied_names
from talkoot.model.decoder import Cache, Positions, rotary_frequencies
from talkoot.model.initial import initial_tensor
from talkoot.model.stage import Stage


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(family: str = "llama", tied: bool = False, layers: int = 3) -> ModelConfig:
    window = {"mistral": {"sliding_window": 5}, "qwen3": {"sliding_window": 5, "full_layers": (2,)}}
    return ModelConfig(
        family=family,
        vocab_size=61,
        width=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=48,
        tied=tied,
        max_positions=64,
        **window.get(family, {}),
    )


def whole(config: ModelConfig, **options) -> Stage:
    return Stage(config, 0, config.layer_count, **options)


def tokens(config: ModelConfig, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))


def loss_of(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def pipeline_step(stages: list[Stage], x: torch.Tensor) -> torch.Tensor:
    """Forward and backward as separate peers do it: activations and their gradients cross by value."""
    inputs, outputs = [x], []
    for stage in stages:
        outputs.append(stage(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    loss_of(outputs[-1], x).backward()
    for before, output in zip(reversed(inputs[1:-1]), reversed(outputs[:-1]), strict=True):
        output.backward(before.grad)
    return outputs[-1]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_has_the_whole_ones_bits(family: str, tied: bool, autocast: torch.dtype | None) -> None:
    config = small(family, tied)
    x = tokens(config)
    model = whole(config, seed=3, autocast=autocast)
    logits = model(x)
    loss_of(logits, x).backward()
    expected = {name: p.grad for name, p in model.tensors().items()}
    for cuts in ((0, 5), (0, 2, 5), (0, 1, 3, 5), (0, 1, 2, 4, 5)):
        stages = [Stage(config, a, b, seed=3, autocast=autocast) for a, b in pairwise(cuts)]
        assert torch.equal(pipeline_step(stages, x), logits)
        found = {name: p.grad for stage in stages for name, p in stage.tensors().items()}
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), cuts


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_named_shaped_and_ordered_as_the_config_says(family: str) -> None:
    config = small(family, layers=11)
    shapes = {name: s for index in range(config.layer_count) for name, s in config.layer_shapes(index).items()}
    found = {name: tuple(p.shape) for name, p in whole(config).tensors().items()}
    assert list(found.items()) == list(shapes.items())
    assert sum(p.numel() for p in whole(config).parameters()) == sum(config.layer_parameters())


def test_initial_values_follow_from_seed_and_name_alone() -> None:
    config = small(tied=True)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a = whole(config, seed=1).tensors()
    assert torch.equal(torch.get_rng_state(), state), "building a stage must not draw from the global generator"
    b = Stage(config, 2, 3, seed=1).tensors()
    assert all(torch.equal(a[name], b[name]) for name in b)
    for owner, copy in tied_names(config):
        assert torch.equal(a[owner], a[copy])
        assert a[owner] is not a[copy]
    other = whole(config, seed=2).tensors()
    assert not torch.equal(a["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(a["model.layers.0.mlp.up_proj.weight"], a["model.layers.1.mlp.up_proj.weight"])


def test_initial_matrices_are_a_unit_bell_of_the_stated_scale() -> None:
    config = ModelConfig.from_depth(8, 4096)
    plain = initial_tensor(config, "model.embed_tokens.weight", (4096, 512), 7) / 0.02
    assert abs(plain.mean()) < 3e-3
    assert abs(plain.std() - 1) < 3e-3
    assert plain.abs().max() <= 12**0.5
    assert abs((plain.abs() < 1).float().mean() - 0.68) < 0.02
    residual = initial_tensor(config, "model.layers.0.mlp.down_proj.weight", (512, 1024), 7)
    assert abs(residual.std() * 4 / 0.02 - 1) < 1e-2


def test_initial_bits_do_not_depend_on_the_processor() -> None:
    code = (
        "import hashlib; from talkoot.model.config import ModelConfig;"
        "from talkoot.model.initial import initial_tensor;"
        "t = initial_tensor(ModelConfig.from_depth(2, 300), 'model.embed_tokens.weight', (300, 64), 4);"
        "print(hashlib.sha256(t.numpy().tobytes()).hexdigest())"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    here = initial_tensor(ModelConfig.from_depth(2, 300), "model.embed_tokens.weight", (300, 64), 4)
    assert done.stdout.strip() == hashlib.sha256(here.numpy().tobytes()).hexdigest()


def test_layers_run_in_any_order_on_a_whole_model() -> None:
    config = small()
    model, x = whole(config, seed=3), tokens(config)
    assert torch.equal(model.run_layers(x, range(5)), model(x))
    swapped = model.run_layers(x, [0, 2, 1, 3, 4])
    skipped = model.run_layers(x, [0, 1, 3, 4])
    assert not torch.equal(swapped, model(x))
    by_hand = model.layers
    places = Positions.after(0, 12, rotary_frequencies(config))
    hidden = by_hand[0](x)
    for index in (1, 3):
        hidden = by_hand[index](hidden, places, None, 0)
    assert torch.equal(skipped, by_hand[4](hidden))


@pytest.mark.parametrize("order", [[], [1, 0], [0, 4, 1], [0, 7], [0, 0, 1], [0, 4, 4]])
def test_impossible_orders_are_refused(order: list[int]) -> None:
    config = small()
    with pytest.raises(TalkootError, match="order"):
        whole(config, seed=1).run_layers(tokens(config), order)


def test_unloaded_values_cannot_go_unnoticed_and_loading_checks_first() -> None:
    config = small(tied=True)
    model, x = whole(config), tokens(config)
    assert model(x).isnan().all()
    source = {n: p.detach() for n, p in whole(config, seed=3).tensors().items()}
    with pytest.raises(TalkootError, match=r"model\.norm\.weight"):
        model.load({**source, "model.norm.weight": torch.ones(3)})
    assert model(x).isnan().all(), "a refused load must change nothing"
    del source["lm_head.weight"]
    model.load(source)
    assert torch.equal(model(x), whole(config, seed=3)(x))


def test_wrong_input_is_explained() -> None:
    config = small()
    model, x = whole(config, seed=1), tokens(config)
    for bad in (x.float(), x[0], x[:, :0], tokens(config, 1, 65)):
        with pytest.raises(TalkootError, match="cannot run"):
            model(bad)
    with pytest.raises(TalkootError, match="cannot run"):
        Stage(config, 1, 2, seed=1)(torch.zeros(1, 3, 31))
    with pytest.raises(TalkootError, match=r"torch\.no_grad"):
        model(x, Cache())
    for first, last in ((2, 2), (-2, 3), (-1, 5), (0, 6)):
        with pytest.raises(TalkootError, match="non-empty range"):
            Stage(config, first, last)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cached_stages_agree_with_one_pass(family: str) -> None:
    config = small(family)
    model, x = whole(config, seed=3), tokens(config, length=40)
    stages = [Stage(config, 0, 2, seed=3), Stage(config, 2, 5, seed=3)]
    caches = [Cache(), Cache()]
    parts = []
    for piece in x.split([7, 1, 1, 20, 1, 10], dim=1):
        for stage, cache in zip(stages, caches, strict=True):
            piece = stage(piece, cache)
        parts.append(piece)
    assert torch.allclose(torch.cat(parts, 1), model(x), atol=1e-5)


def test_bfloat16_weights_and_autocast_stay_close_and_return_float32() -> None:
    config = small("qwen3")
    x = tokens(config)
    exact = whole(config, seed=3)(x)
    for options in ({"dtype": torch.bfloat16}, {"autocast": torch.bfloat16}):
        rough = whole(config, seed=3, **options)(x)
        assert rough.dtype == torch.float32
        assert (rough - exact).abs().max() < 0.05 * exact.abs().max()


def test_compiled_stage_traces_without_a_break() -> None:
    config = small("mistral")
    model, x = whole(config, seed=3), tokens(config)
    expected = model(x)
    model.compile(backend="eager", fullgraph=True)
    assert torch.allclose(model(x), expected, atol=1e-6)
