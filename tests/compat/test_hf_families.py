"""transformers and talkoot agree: same logits, same greedy tokens, same bits there and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'talkoot[hf]'")

from safetensors.torch import load_file  # noqa: E402

from talkoot.model.config import ModelConfig  # noqa: E402
from talkoot.model.generate import generate  # noqa: E402
from talkoot.model.huggingface import load_config, load_model, save_folder  # noqa: E402
from talkoot.model.stage import Stage  # noqa: E402
from talkoot.model.tokenizer import Tokenizer  # noqa: E402

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDE = {"use_sliding_window": True, "sliding_window": 6, "head_dim": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama3-scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 6}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {**SLIDE, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-window": (
        "Qwen3",
        {**SLIDE, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
TOKENS = torch.randint(67, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def theirs(case: str, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    name, changes = CASES[case]
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**SIZES, tie_word_embeddings=tied, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # as initialised, norms and biases would hide a mix-up of their tensors
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.to(dtype).eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("shard", [None, "10KB"], ids=["whole", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path: Path, case: str, tied: bool, shard: str | None) -> None:
    model = theirs(case, tied)
    model.save_pretrained(tmp_path / "in", **({"max_shard_size": shard} if shard else {}))
    assert (tmp_path / "in" / "model.safetensors.index.json").exists() == bool(shard)
    ours = load_model(tmp_path / "in")
    with torch.no_grad():
        logits = ours(TOKENS)
    assert (logits - logits_of(model)).abs().max() <= 1e-4
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(TOKENS[:, :9], attention_mask=torch.ones_like(TOKENS[:, :9]), **options)[:, 9:]
    assert [[one.token for one in row] for row in generate(ours, TOKENS[:, :9], 24)] == expected.tolist()

    save_folder(tmp_path / "out", ours.config, ours.tensors(), max_shard_bytes=10_000 if shard else 1 << 30)
    assert load_config(tmp_path / "out") == ours.config
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is type(model)
    assert torch.equal(logits_of(back), logits_of(model))
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_its_bits_through_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs("qwen3", True, dtype).save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in")
    save_folder(tmp_path / "out", ours.config, ours.tensors())
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == dtype for n in before)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_version_4_spelling_reads_the_same(tmp_path: Path) -> None:
    """A config.json as transformers 4 wrote it: rope_theta and rope_scaling side by side."""
    import json

    model = theirs("llama3-scaling", False)
    model.save_pretrained(tmp_path)
    modern = load_config(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    rope = content.pop("rope_parameters")
    content |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "torch_dtype": content.pop("dtype"),
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load_config(tmp_path) == modern


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_an_exported_model_and_tokenizer_load_by_their_auto_classes(tmp_path: Path, kind: str) -> None:
    corpus = ["low lower lowest newer newest wider", "Grüße, 世界! 🚀"] * 5
    tokenizer = Tokenizer.bytes() if kind == "bytes" else Tokenizer.train(corpus, 300)
    config = ModelConfig.from_depth(
        2, tokenizer.vocab_size, bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,), tied=True
    )
    save_folder(tmp_path / "m", config, Stage(config, 0, 4, seed=1).tensors(), tokenizer)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in (*corpus, "x <|end|> y", " two  spaces\n"):
        assert other(text)["input_ids"] == tokenizer.encode(text, special=True)
        assert other.decode(tokenizer.encode(text)) == text
    assert (other.bos_token_id, other.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.generation_config.eos_token_id == tokenizer.eos_id
