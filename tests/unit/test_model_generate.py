"""Generation: the cache changes the cost, never the text."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from talkoot.core.errors import TalkootError
from talkoot.model.config import FAMILIES, ModelConfig
from talkoot.model.depth import remaining_layers, ring_cut
from talkoot.model.generate import generate, stream
from talkoot.model.stage import Stage


def model(family: str = "llama", **changes) -> Stage:
    sizes = {
        "vocab_size": 61,
        "width": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "hidden": 48,
    }
    config = ModelConfig(**{**sizes, "family": family, "max_positions": 64, **changes})
    stage = Stage(config, 0, config.layer_count, seed=9)
    with torch.no_grad():  # a larger head makes an untrained model opinionated, so that ties cannot hide errors
        stage.tensors()["lm_head.weight"].mul_(20)
    return stage


def without(stage: Stage, *blocks: int) -> Stage:
    """A model from which these blocks were physically removed."""
    kept = [index for index in range(1, stage.config.layers + 1) if index not in blocks]
    config = msgspec.structs.replace(stage.config, layers=len(kept))
    smaller = Stage(config, 0, config.layer_count)
    old = {f"model.layers.{index - 1}.": f"model.layers.{place}." for place, index in enumerate(kept)}
    tensors = {name: tensor for name, tensor in stage.tensors().items() if ".layers." not in name}
    for before, after in old.items():
        tensors |= {n.replace(before, after): t for n, t in stage.tensors().items() if n.startswith(before)}
    smaller.load(tensors)
    return smaller


def executed(stage: Stage) -> list[int]:
    """A list to which every layer of the stage adds its index when it runs."""
    ran: list[int] = []
    for index, layer in zip(stage.held, stage.layers, strict=True):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    return ran


PROMPTS = torch.tensor([[3, 7, 9], [60, 0, 1]])


def ids(rows: list) -> list[list[int]]:
    return [[one.token for one in row] for row in rows]


@torch.no_grad()
def greedy_reference(stage: Stage, prompts: torch.Tensor, count: int) -> list[list[int]]:
    for _ in range(count):
        prompts = torch.cat((prompts, stage(prompts)[:, -1:].argmax(-1)), 1)
    return prompts[:, -count:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_cache_equals_without(family: str) -> None:
    stage = model(family, **({} if family == "llama" else {"sliding_window": 4}))
    rows = generate(stage, PROMPTS, 40)
    assert ids(rows) == greedy_reference(stage, PROMPTS, 40)
    with torch.no_grad():
        first = stage(PROMPTS)[:, -1].log_softmax(-1)
    for row, logprobs in zip(rows, first, strict=True):
        assert math.isclose(row[0].logprob, logprobs[row[0].token], abs_tol=1e-5)


def test_a_row_depends_on_its_seed_not_on_its_company() -> None:
    stage = model()
    both = ids(generate(stage, PROMPTS, 12, temperature=1.0, seed=[4, 5]))
    alone = ids(generate(stage, PROMPTS[1:], 12, temperature=1.0, seed=[5]))
    assert both[1] == alone[0]
    assert both == ids(generate(stage, PROMPTS, 12, temperature=1.0, seed=[4, 5]))
    same = PROMPTS[:1].expand(2, -1)
    first, second = ids(generate(stage, same, 12, temperature=2.0, seed=1))
    assert first != second, "rows of one prompt must differ: rollouts compare them"


def test_rows_end_at_their_end_token_or_stop_sequence() -> None:
    stage = model()
    free = ids(generate(stage, PROMPTS, 20))
    ended = ids(generate(stage, PROMPTS, 20, eos_id=free[0][4]))
    cut = free[0].index(free[0][4]) + 1
    assert ended[0] == free[0][:cut]
    stop = free[1][2:4]
    stopped = ids(generate(stage, PROMPTS, 20, stop=[stop]))
    assert stopped[1][-2:] == stop
    assert len(stopped[1]) <= 4
    steps = list(stream(stage, PROMPTS, 20, eos_id=free[0][4]))
    assert steps[cut][0] is None or len(steps) == cut
    owner = model(eos_ids=(free[0][4],))
    assert ids(generate(owner, PROMPTS, 20))[0] == free[0][:cut]
    assert ids(generate(owner, PROMPTS, 20, eos_id=()))[0] == free[0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 62},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": [1, 2, 3]},
        {"tokens": torch.tensor([[61]])},
        {"tokens": torch.tensor([[-1]])},
        {"tokens": torch.zeros(1, 0, dtype=torch.int64)},
    ],
)
def test_bad_requests_are_explained(options: dict) -> None:
    with pytest.raises(TalkootError, match="generation cannot use"):
        generate(model(), **{"tokens": PROMPTS, "max_new_tokens": 4, **options})


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dead", [(1,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_with_dead_stages_is_that_of_the_model_without_their_layers(family, dead, temperature) -> None:
    stage = model(family, layers=5, **({} if family == "llama" else {"sliding_window": 4}))
    cut = ring_cut((1, 1, 2, 1))
    layers = remaining_layers(stage.config, cut, dead)
    smaller = without(stage, *(index for one in dead for index in range(*cut[one])))
    partly = generate(stage, PROMPTS, 20, temperature=temperature, layers=layers)
    assert partly == generate(smaller, PROMPTS, 20, temperature=temperature)
    assert ids(partly) != ids(generate(stage, PROMPTS, 20, temperature=temperature))


def test_each_token_runs_the_layers_that_were_asked_for_and_no_other() -> None:
    stage = model(layers=4)
    ran = executed(stage)
    for layers in (0, 1, 3, 2, 5), (0, 2, 5), (0, 5), (0, 1, 2, 3, 4, 5):
        ran.clear()
        generate(stage, PROMPTS, 3, layers=layers)
        assert ran == list(layers) * 3
    ran.clear()
    generate(stage, PROMPTS, 3)
    assert ran == [0, 1, 2, 3, 4, 5] * 3


@torch.no_grad()
def test_swapped_layers_with_cache_equal_those_without() -> None:
    stage, layers, prompts = model(layers=4), (0, 1, 3, 2, 5), PROMPTS
    for _ in range(20):
        prompts = torch.cat((prompts, stage.run_layers(prompts, layers)[:, -1:].argmax(-1)), 1)
    assert ids(generate(stage, PROMPTS, 20, layers=layers)) == prompts[:, -20:].tolist()


@pytest.mark.parametrize("layers", [(), (0,), (1, 2, 4), (0, 1, 2), (0, 0, 4), (0, 4, 4), (0, 7, 4), (4, 1, 0)])
def test_an_order_that_is_no_whole_way_through_the_model_is_refused(layers) -> None:
    with pytest.raises(TalkootError, match="generation cannot use this layers"):
        generate(model(), PROMPTS, 4, layers=layers)


def test_a_partial_stage_cannot_generate() -> None:
    with pytest.raises(TalkootError, match="stage"):
        generate(Stage(model().config, 0, 3, seed=1), PROMPTS, 4)
