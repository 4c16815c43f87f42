"""A real model: SmolLM2-135M-Instruct answers the same here as in transformers, and leaves as it came."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smollm2 import INSTALL, smollm2_folder

from talkoot.model.generate import generate
from talkoot.model.huggingface import load_model, save_folder
from talkoot.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(1)
    found = smollm2_folder()
    if found is None:
        pytest.skip(f"SmolLM2 is not installed: {INSTALL}")
    return found


def test_smollm2_agrees_and_returns_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    ours, tokenizer = load_model(folder), Tokenizer.load(folder)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, special=True)
    assert ids == words(text, add_special_tokens=False)["input_ids"]
    prompt = torch.tensor([ids])
    with torch.no_grad():
        assert (ours(prompt) - theirs(prompt).logits).abs().max() <= 1e-4
    theirs.generation_config.eos_token_id = None  # 32 tokens from both, past the end of the answer
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(ids) :]
    found = [one.token for one in generate(ours, prompt, 32, eos_id=())[0]]
    assert found == expected.tolist()
    assert "Paris" in tokenizer.decode(found)

    save_folder(tmp_path / "out", ours.config, ours.tensors(), tokenizer)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert back(text, add_special_tokens=False)["input_ids"] == ids
    assert back.chat_template == words.chat_template
