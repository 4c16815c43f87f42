"""The shape of a model: counting, naming, deriving, refusing; without torch."""

from __future__ import annotations

import subprocess
import sys
from math import prod

import msgspec
import pytest

from talkoot.core.errors import TalkootError
from talkoot.model.config import FAMILIES, LinearScaling, Llama3Scaling, ModelConfig, tied_names

BASE = {"vocab_size": 64, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_agree_with_shapes(family: str, tied: bool) -> None:
    config = ModelConfig(**BASE, family=family, tied=tied)
    per_layer = [sum(map(prod, config.layer_shapes(i).values())) for i in range(config.layer_count)]
    assert config.layer_parameters() == per_layer
    assert config.num_parameters() == sum(per_layer) - (64 * 32 if tied else 0)
    assert tied_names(config) == ((("model.embed_tokens.weight", "lm_head.weight"),) if tied else ())


@pytest.mark.parametrize("layers", [1, 2, 4, 7, 8, 9, 12, 30, 64])
def test_one_dial_derives_a_consistent_model_and_explains_it(layers: int) -> None:
    config = ModelConfig.from_depth(layers, 1024)
    rows = config.derivation()
    assert {name: getattr(config, name) for name, *_ in rows[:-1]} == {name: value for name, value, _ in rows[:-1]}
    assert rows[-1][:2] == ("parameters", config.num_parameters())
    assert all(reason and not reason.startswith("given") for *_, reason in rows)
    assert config.heads * config.head_dim == config.width


def test_a_size_given_by_hand_is_not_passed_off_as_derived() -> None:
    assert {n: r for n, _, r in ModelConfig(**BASE).derivation()}["hidden"].startswith("given")


def test_attention_cost_is_the_mean_over_positions_that_are_seen() -> None:
    config = ModelConfig(**BASE, family="qwen3", sliding_window=5, full_layers=(2,))
    flops = config.layer_flops(12)
    matrices = 2 * sum(prod(s) for s in config.layer_shapes(1).values() if len(s) == 2)
    for index, window in ((1, 5), (2, 12)):
        seen = sum(min(t, window) for t in range(1, 13)) / 12
        assert flops[index] == matrices + round(4 * 4 * 8 * seen)
    assert flops[0] == 0
    assert config.flops_per_token(12) == sum(flops)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"width": 33}, "width"),
        ({"layers": 0}, "layers"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"family": "lama"}, "family"),
        ({"dtype": "int8"}, "dtype"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"family": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"family": "mistral", "sliding_window": 4, "full_layers": (1,)}, "full_layers"),
        ({"family": "qwen2", "sliding_window": 4, "full_layers": (9,)}, "full_layers"),
        ({"family": "qwen2", "full_layers": (1,)}, "full_layers"),
        ({"rope_scaling": LinearScaling(factor=0.0)}, "factor"),
        (
            {
                "rope_scaling": Llama3Scaling(
                    factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_positions=8
                )
            },
            "rope_scaling",
        ),
        ({"eos_ids": (-7,)}, "eos_ids"),
    ],
)
def test_contradictions_are_refused_by_name(change: dict, field: str) -> None:
    with pytest.raises(TalkootError) as caught:
        ModelConfig(**{**BASE, **change})
    assert field in caught.value.where


def test_config_survives_the_wire_and_unknown_fields_do_not() -> None:
    config = ModelConfig(**BASE, rope_scaling=LinearScaling(factor=2.0), eos_ids=(1, 2))
    data = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(data, type=ModelConfig) == config
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(config), "surprise": 1}, ModelConfig)


def test_no_torch_for_shapes_tokens_and_folder_reading() -> None:
    code = (
        "import sys, talkoot.model.config, talkoot.model.tokenizer, talkoot.model.hf_config;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
