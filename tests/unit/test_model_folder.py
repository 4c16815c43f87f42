"""Model folders from strangers: every defect is named before a tensor is read, nothing outside is touched."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from talkoot.core.errors import TalkootError
from talkoot.model import huggingface
from talkoot.model.config import FAMILIES, LinearScaling, Llama3Scaling, ModelConfig
from talkoot.model.huggingface import load_config, load_model, load_stage, preflight, save_folder
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

SIZES = {"vocab_size": 61, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 48}


def export(folder: Path, max_shard_bytes: int = 1 << 30, **changes) -> ModelConfig:
    config = ModelConfig(**{**SIZES, **changes})
    save_folder(folder, config, Stage(config, 0, 5, seed=2).tensors(), max_shard_bytes=max_shard_bytes)
    return config


@pytest.fixture
def single(tmp_path: Path) -> Path:
    export(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    export(tmp_path / "m", max_shard_bytes=20_000)
    return tmp_path / "m"


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        *({"family": family, "tied": tied} for family in FAMILIES for tied in (False, True)),
        {"family": "mistral", "sliding_window": 5, "eos_ids": (1, 2), "bos_id": 0, "pad_id": -1},
        {"family": "qwen2", "sliding_window": 5, "full_layers": (1, 2)},
        {"family": "qwen3", "sliding_window": 5, "full_layers": (2,), "dtype": "bfloat16"},
        {"rope_scaling": LinearScaling(factor=2.0), "rope_theta": 5e5, "dtype": "float16"},
        {"rope_scaling": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64)},
    ],
)
def test_config_and_tensors_come_back(tmp_path: Path, changes: dict) -> None:
    config = export(tmp_path / "m", 20_000, **changes)
    assert load_config(tmp_path / "m") == config
    source = Stage(config, 0, 5, seed=2).tensors()
    dtype = getattr(torch, config.dtype)
    for name, value in load_model(tmp_path / "m").tensors().items():
        assert torch.equal(value, source[name].to(dtype).float()), name


def test_a_stage_reads_only_its_own_tensors(sharded: Path) -> None:
    places = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {place for name, place in places.items() if name.startswith("model.layers.1.")}
    opened: list[str] = []
    honest = huggingface._open

    def spy(path: Path) -> object:
        opened.append(path.name)
        return honest(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "_open", spy)
        stage = load_stage(sharded, 2, 3)
    assert set(opened) == needed < set(places.values())
    full = load_model(sharded).tensors()
    assert all(torch.equal(value, full[name]) for name, value in stage.tensors().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(model_type="lama"), "did you mean 'llama'"),
        (lambda c: c.update(model_type="smollm3"), "NoPE"),
        (lambda c: c.pop("model_type"), "model_type"),
        (lambda c: c.update(architectures=["LlamaForSequenceClassification"]), "not LlamaForCausalLM"),
        (lambda c: c.update(hidden_size="32"), "hidden_size"),
        (lambda c: c.update(num_attention_heads=0), "heads"),
        (lambda c: c.update(num_hidden_layers=10**12), "layers"),
        (lambda c: c.update(num_hidden_layers=4), "says 4 blocks, the checkpoint holds 3"),
        (lambda c: c.update(intermediate_size=50), "wrong shape"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c.update(attention_bias=True), "attention_bias"),
        (lambda c: c.update(quantization_config={"bits": 4}), "quantization_config"),
        (lambda c: c.update(rope_scaling={"type": "yarn", "factor": 2.0}), "'yarn'"),
        (lambda c: c.update(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "llama3 needs"),
        (lambda c: c.update(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial"),
        (lambda c: c.update(partial_rotary_factor=0.5), "all pairs must turn"),
        (lambda c: c.update(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "turn differently"),
        (lambda c: c.update(layer_types=["full_attention"] * 9), "layer_types"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 3), "layer_types"),
    ],
)
def test_unusable_configs_are_named(single: Path, change: Callable, message: str) -> None:
    edit_json(single / "config.json", change)
    with pytest.raises(TalkootError, match=message):
        preflight(single)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing model\.norm\.weight"),
        (lambda t: t.update(surprise=torch.ones(2)), "unknown to family 'llama': surprise"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "wrong shape"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "I8"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), "checkpoint holds 4"),
    ],
)
def test_unusable_weights_are_named_before_reading(
    single: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, message: str
) -> None:
    edit_weights(single, change)
    monkeypatch.setattr(huggingface, "_open", lambda path: pytest.fail("a tensor was about to be read"))
    with pytest.raises(TalkootError, match=message):
        load_model(single)


def test_stored_rotary_frequencies_of_old_checkpoints_are_tolerated(single: Path) -> None:
    edit_weights(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load_model(single)


def test_a_tied_checkpoint_may_carry_its_head_and_the_embedding_rules(tmp_path: Path) -> None:
    export(tmp_path / "m", tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    edit_weights(tmp_path / "m", lambda t: t.update({"lm_head.weight": torch.ones(61, 32)}))
    tensors = load_model(tmp_path / "m").tensors()
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "corrupt"),
        (b"\x00" * 8, "corrupt"),
        (struct.pack("<Q", 1 << 62) + b"{}", "corrupt"),
        (struct.pack("<Q", 2) + b"[]", "corrupt"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "corrupt"),
        (struct.pack("<Q", 2) + b"{}" + b"tail", "truncated or padded"),
    ],
)
def test_broken_weight_files_are_named(single: Path, data: bytes, message: str) -> None:
    (single / "model.safetensors").write_bytes(data)
    with pytest.raises(TalkootError, match=message):
        preflight(single)


@pytest.mark.parametrize("offsets", [[4, 8], [0, 8], [0, 2], [-4, 0]])
def test_lying_extents_are_named(single: Path, offsets: list[int]) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(TalkootError, match="extent"):
        preflight(single)


def test_truncated_weights_are_named(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TalkootError, match="truncated"):
        preflight(single)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "..\\x.safetensors", "x.bin"])
def test_an_index_cannot_point_outside(sharded: Path, name: str) -> None:
    edit_json(sharded / "model.safetensors.index.json", lambda c: c["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(TalkootError, match="outside its folder"):
        preflight(sharded)


def test_an_index_that_disagrees_with_its_shards_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    original = index.read_text()
    edit_json(index, lambda c: c["weight_map"].pop("lm_head.weight"))
    with pytest.raises(TalkootError, match=r"disagree about lm_head\.weight"):
        preflight(sharded)
    for corrupt in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(corrupt)
        with pytest.raises(TalkootError, match="corrupt"):
            preflight(sharded)
    index.write_text(original)
    next(sharded.glob("model-00001*")).unlink()
    with pytest.raises(TalkootError, match="cannot be read"):
        preflight(sharded)


def test_pickles_are_refused_unopened_and_large_json_unread(tmp_path: Path, single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(TalkootError, match="no weights"):
        preflight(single)
    (single / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(TalkootError, match="run any code"):
        preflight(single)
    (single / "config.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(TalkootError, match="too large"):
        load_config(single)
    with pytest.raises(TalkootError, match="cannot be read"):
        load_config(tmp_path / "absent")


def test_export_is_whole_or_absent_and_overwrites_only_exports(tmp_path: Path) -> None:
    config = ModelConfig(**SIZES)
    tensors = dict(Stage(config, 0, 5, seed=2).tensors())
    target = tmp_path / "m"
    with pytest.raises(TalkootError, match="lacks tensors"):
        save_folder(target, config, {n: t for n, t in tensors.items() if n != "model.norm.weight"})

    def fail(*args: object, **options: object) -> None:
        raise OSError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            save_folder(target, config, tensors)
    assert list(tmp_path.iterdir()) == []
    save_folder(target, config, tensors, Tokenizer.bytes())
    save_folder(target, config, Stage(config, 0, 5, seed=3).tensors(), max_shard_bytes=20_000)
    assert not (target / "tokenizer.json").exists(), "an old export must leave nothing behind"
    assert torch.equal(
        load_model(target).tensors()["lm_head.weight"],
        Stage(config, 4, 5, seed=3).tensors()["lm_head.weight"],
    )
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(TalkootError, match="overwrite"):
        save_folder(tmp_path / "precious", config, tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "precious"]
