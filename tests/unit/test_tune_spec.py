"""Descriptions of models, and what is refused before anything is opened."""

from __future__ import annotations

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.policies.open import open_policy, policy_backends
from talkoot.tune.policies.spec import ModelSpec


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"lora_rank": 4}, "model.lora_rank"),
        ({"checkpointing": True}, "model.checkpointing"),
        ({"backend": "huggingface"}, "model.load"),
        ({"heads": 5}, "model.heads"),
        ({"layers": 0}, "model.layers"),
        ({"batch_rows": -1}, "model.batch_rows"),
        ({"lora_alpha": float("nan")}, "model.lora_alpha"),
    ],
)
def test_a_contradiction_is_refused_under_its_key(changes, where):
    with pytest.raises(TalkootError) as caught:
        open_policy(ModelSpec(**changes), "01")
    assert caught.value.where == where


def test_an_unknown_back_end_gets_the_nearest_name():
    with pytest.raises(TalkootError) as caught:
        open_policy(ModelSpec(backend="hugingface"))
    assert "huggingface" in caught.value.why
    assert list(policy_backends) == ["huggingface", "native", "vllm"]


def test_a_new_model_speaks_the_tasks_characters():
    policy = open_policy(ModelSpec(width=16, heads=2, layers=1), "01+=")
    assert policy.coder.decode(policy.coder.encode("1+0=")) == "1+0="
    assert policy.weights_hash() == open_policy(ModelSpec(width=16, heads=2, layers=1), "01+=").weights_hash()
    assert policy.weights_hash() != open_policy(ModelSpec(width=16, heads=2, layers=1, seed=1), "01+=").weights_hash()


def test_a_task_without_an_alphabet_needs_another_tokenizer():
    with pytest.raises(TalkootError) as caught:
        open_policy(ModelSpec())
    assert caught.value.where == "model.tokenizer"
    assert open_policy(ModelSpec(tokenizer="bytes", width=16, heads=2)).coder.vocab_size == 258


def test_alpha_follows_the_rank_unless_it_is_given():
    assert ModelSpec(lora_rank=8).alpha == 16
    assert ModelSpec(lora_rank=8, lora_alpha=5).alpha == 5
