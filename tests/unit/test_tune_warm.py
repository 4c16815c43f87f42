"""Warm starts: deterministic, on completions alone, and with named errors."""

from __future__ import annotations

import pytest
import torch

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer
from talkoot.tune.policies.open import open_policy
from talkoot.tune.policies.spec import ModelSpec
from talkoot.tune.warm import warm_start

TEXTS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def policy():
    return open_policy(ModelSpec(width=32, layers=1, heads=2, context=32, seed=1), "0123456789+=")


def start(texts=TEXTS, steps=20, which=None):
    return warm_start(which or policy(), texts, steps, 16, 3e-3, 4)


def test_the_loss_falls_and_the_same_start_gives_the_same_weights():
    torch.set_num_threads(1)
    one, other = policy(), policy()
    losses = start(which=one)
    assert losses[-1] < 0.8 * losses[0]
    assert start(which=other) == losses
    assert one.weights_hash() == other.weights_hash()


@pytest.mark.parametrize(
    "texts", [[], [("1", "2" * 40)]], ids=["no demonstration", "one that is too long for the model"]
)
def test_what_cannot_be_learned_is_refused(texts):
    with pytest.raises(TalkootError, match="warmed up"):
        start(texts)


def test_a_tokenizer_of_characters_has_one_token_for_each():
    tokenizer = Tokenizer.characters("cba+a")
    assert tokenizer.vocab_size == 6
    assert [tokenizer.decode([one]) for one in tokenizer.encode("+abc")] == ["+", "a", "b", "c"]
    assert tokenizer.digest() == Tokenizer.characters("abc+").digest()
    assert tokenizer.digest() != Tokenizer.characters("abd+").digest()
    with pytest.raises(TalkootError):
        tokenizer.encode("x")
    with pytest.raises(TalkootError):
        Tokenizer.characters("")


def test_a_tokenizer_of_characters_is_stored_and_read_again(tmp_path):
    tokenizer = Tokenizer.characters("0123+=\u00e9")
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).digest() == tokenizer.digest()
    assert Tokenizer.load(tmp_path).encode("12+\u00e9") == tokenizer.encode("12+\u00e9")
