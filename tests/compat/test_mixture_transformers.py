"""Stock transformers loads an exported mixture in a fresh process, without custom code, and says what ours says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mixture_toys import NAMES, expert, model, text
from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.counting import count
from talkoot.blend.mixture.fitting import fit_gates
from talkoot.blend.mixture.store import load_mixture, save_mixture
from talkoot.model.generate import generate

pytest.importorskip("transformers")
torch.set_num_threads(1)

ELSEWHERE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder, out = sys.argv[1:]
ids = torch.tensor(json.load(open(f"{folder}.json")))
model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
model.eval()
with torch.no_grad():
    torch.save(model(ids).logits, f"{out}.pt")
    text = model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), max_new_tokens=64, min_new_tokens=64,
                          do_sample=False, pad_token_id=0)
json.dump({"text": text[0, ids.shape[1]:].tolist(), "kind": type(model).__name__,
           "odd": [sorted(map(str, report[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")]},
          open(f"{out}.json", "w"))
model.save_pretrained(f"{out}-again")
"""


def fitted(family, top_k, **shape):
    """Of unequal widths, so that padding is in it."""
    dense = {name: expert(n, hidden=(48, 32, 40)[n], family=family, **shape) for n, name in enumerate(NAMES)}
    made = assemble(dense, model(family=family, **shape), top_k=top_k, temperature=0.1).mixture
    parts = {
        name: count(
            made.forced(name), text(n), domain=name, gate="token", tokenizer="t", contributor="a" * 64, window=16
        )
        for n, name in enumerate(NAMES)
    }
    fit_gates(made, parts)
    return made


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "kind", "top_k", "shape"),
    [
        ("llama", "MixtralForCausalLM", 1, {}),
        ("mistral", "MixtralForCausalLM", 2, {"sliding_window": 8, "tied": True}),
        ("qwen2", "Qwen2MoeForCausalLM", 1, {"tied": True}),
        ("qwen2", "Qwen2MoeForCausalLM", 2, {"sliding_window": 8, "full_layers": (1,)}),
        ("qwen3", "Qwen3MoeForCausalLM", 1, {"head_dim": 16}),
        ("qwen3", "Qwen3MoeForCausalLM", 2, {"sliding_window": 8}),
    ],
)
def test_transformers_loads_a_mixture_and_agrees(tmp_path, family, kind, top_k, shape):
    made = fitted(family, top_k, **shape)
    folder, out = tmp_path / "m", tmp_path / "out"
    save_mixture(folder, made)
    ids = torch.tensor([text(0, 1, 24, seed=9)[0], text(2, 1, 24, seed=9)[0]])
    (tmp_path / "m.json").write_text(json.dumps(ids.tolist()))
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(folder), str(out)], check=True, timeout=120)
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["kind"] == kind
    assert said["odd"] == [[], [], []]
    theirs = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (theirs - made(ids)).abs().max() <= 1e-4
    ours = generate(made, ids[:1], 64, eos_id=())[0]
    assert said["text"] == [one.token for one in ours]
    with made.watched() as seen:
        made(ids)
    assert len(torch.cat([one.chosen.flatten() for one in seen]).unique()) > 1  # there was something to get wrong
    back = load_mixture(tmp_path / "out-again")  # what transformers itself has saved
    assert (back(ids) - theirs).abs().max() <= 1e-4
