"""Mixtures on disk: every format comes back, unequal widths are padded, and what cannot be said is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mixture_toys import NAMES, expert, experts, model, text
from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.fitting import randomise_gates
from talkoot.blend.mixture.formats import formats
from talkoot.blend.mixture.store import load_mixture, mixture_preflight, save_mixture, standard_format
from talkoot.core.errors import TalkootError
from talkoot.model.huggingface import load_model
from talkoot.model.tokenizer import Tokenizer

torch.set_num_threads(1)
FAMILY = {"mixtral": "llama", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "custom": "llama"}


def mixture(family="llama", widths=(48, 48, 48), **choices):
    dense = {name: expert(n, hidden=widths[n], family=family) for n, name in enumerate(NAMES)}
    made = assemble(dense, model(family=family), **choices).mixture
    randomise_gates(made, 5)
    with torch.no_grad():
        for value in made.gate_tensors().values():
            value.copy_((60 * value).abs())  # counts, where a gate has those
    return made


def tokens():
    return torch.tensor(text(1, 2, 30, seed=9))


@torch.no_grad()
@pytest.mark.parametrize("format", list(formats))
@pytest.mark.parametrize("top_k", [1, 2])
def test_every_format_comes_back_to_the_bit(tmp_path, format, top_k):
    made = mixture(FAMILY[format], top_k=top_k)
    tokenizer = Tokenizer.characters("abc")
    assert save_mixture(tmp_path / "m", made, tokenizer, format) == format
    back = load_mixture(tmp_path / "m")
    assert back.config.experts == NAMES
    assert torch.equal(back(tokens()), made(tokens()))
    assert Tokenizer.load(tmp_path / "m").digest() == tokenizer.digest()


@torch.no_grad()
@pytest.mark.parametrize("gate", ["mean", "naive-bayes", "bigram", "prompt", "token"])
def test_our_own_format_keeps_what_no_other_can(tmp_path, gate):
    made = mixture(gate=gate, widths=(48, 16, 32), top_k=2, temperature=0.5, bias=True, renormalised=False)
    assert save_mixture(tmp_path / "m", made) == "custom"
    back = load_mixture(tmp_path / "m")
    assert back.config == made.config
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), made.parameters(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("format", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_unequal_widths_and_temperature_leave_in_a_standard_format_with_the_same_function(tmp_path, format):
    made = mixture(FAMILY[format], widths=(48, 16, 32), top_k=2, temperature=0.25)
    save_mixture(tmp_path / "m", made, format=format)
    back = load_mixture(tmp_path / "m")
    assert back.config.widths == (48, 48, 48)
    torch.testing.assert_close(back(tokens()), made(tokens()), atol=1e-5, rtol=0)


def test_weights_that_do_not_add_up_to_one_fit_qwen_and_not_mixtral(tmp_path):
    save_mixture(tmp_path / "q", mixture("qwen3", top_k=2, renormalised=False), format="qwen3_moe")
    assert load_mixture(tmp_path / "q").config.renormalised is False
    with pytest.raises(TalkootError, match="cannot hold"):
        save_mixture(tmp_path / "m", mixture(top_k=2, renormalised=False), format="mixtral")


@pytest.mark.parametrize(
    ("format", "family", "choices"),
    [
        ("mixtral", "llama", {"gate": "mean"}),
        ("mixtral", "mistral", {"gate": "naive-bayes"}),
        ("mixtral", "llama", {"gate": "prompt"}),
        ("mixtral", "llama", {"bias": True}),
        ("qwen2_moe", "llama", {}),
        ("mixtral", "qwen3", {}),
    ],
)
def test_what_a_format_cannot_say_is_refused_and_nothing_is_written(tmp_path, format, family, choices):
    made = mixture(family, **choices)
    with pytest.raises(TalkootError, match="cannot hold") as refused:
        save_mixture(tmp_path / "m", made, format=format)
    assert standard_format(made.config) in refused.value.next
    assert not list(tmp_path.iterdir())


def test_gates_that_were_never_set_are_not_saved(tmp_path):
    with pytest.raises(TalkootError, match="gates cannot be saved"):
        save_mixture(tmp_path / "m", assemble(experts(), model()).mixture)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_mixture_in_shards_comes_back_and_replaces_an_earlier_export(tmp_path):
    save_mixture(tmp_path / "m", mixture("qwen2"))
    made = mixture()
    save_mixture(tmp_path / "m", made, max_shard_bytes=20_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert torch.equal(load_mixture(tmp_path / "m")(tokens()), made(tokens()))


@torch.no_grad()
def test_a_tied_head_is_stored_once_and_comes_back(tmp_path):
    dense = experts(tied=True)
    made = assemble(dense, model(tied=True)).mixture
    randomise_gates(made, 1)
    save_mixture(tmp_path / "m", made)
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(load_mixture(tmp_path / "m")(tokens()), made(tokens()))


def test_a_mixture_is_no_dense_model_and_a_dense_model_no_mixture(tmp_path):
    for format, family in FAMILY.items():
        save_mixture(tmp_path / format, mixture(family), format=format)
        with pytest.raises(TalkootError, match="not supported") as refused:
            load_model(tmp_path / format)
        assert "load_mixture" in refused.value.next
    from talkoot.model.huggingface import save_folder

    save_folder(tmp_path / "dense", model().config, dict(model().tensors()))
    with pytest.raises(TalkootError, match="no mixture") as refused:
        load_mixture(tmp_path / "dense")
    assert "load_model" in refused.value.next


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("qwen2_moe", {"shared_expert_intermediate_size": 16}),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("mixtral", {"num_local_experts": 4}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("mixtral", {"num_local_experts": 1}),
        ("custom", {"mixture": {"experts": ["a", "b"]}}),
    ],
)
def test_a_config_of_another_kind_of_mixture_is_refused_before_any_tensor_is_read(tmp_path, format, changes):
    save_mixture(tmp_path / "m", mixture(FAMILY[format]), format=format)
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TalkootError):
        mixture_preflight(tmp_path / "m")


def test_a_missing_expert_is_named(tmp_path):
    save_mixture(tmp_path / "m", mixture())
    file = tmp_path / "m" / "model.safetensors"
    held = load_file(file)
    del held["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(held, file)
    with pytest.raises(TalkootError, match="lacks tensors") as refused:
        load_mixture(tmp_path / "m")
    assert "experts.2.up_proj" in refused.value.why
