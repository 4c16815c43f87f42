"""Tokenizers of experts: the same, or told apart in words."""

from __future__ import annotations

import pytest

from talkoot.blend.vocabulary import difference, same_tokenizer
from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer


def saved(tmp_path, **tokenizers: Tokenizer):
    for name, tokenizer in tokenizers.items():
        tokenizer.save(tmp_path / name)
    return {name: tmp_path / name for name in tokenizers}


def test_equal_tokenizers_are_one(tmp_path):
    folders = saved(tmp_path, a=Tokenizer.bytes(), b=Tokenizer.bytes())
    assert same_tokenizer(folders).digest() == Tokenizer.bytes().digest()


def test_unlike_tokenizers_are_refused_with_the_tokens_that_differ(tmp_path):
    with pytest.raises(TalkootError, match="tokenizers differ") as caught:
        same_tokenizer(saved(tmp_path, a=Tokenizer.characters("abxyz"), b=Tokenizer.characters("abz")))
    assert caught.value.where == "a and b"
    assert "2 of 7 tokens are only in the first: 'x', 'y'" in caught.value.why
    assert "1 tokens have other ids: 'z' (6 and 4)" in caught.value.why
    assert "second" not in caught.value.why


def test_long_lists_are_cut():
    told = difference(Tokenizer.bytes(), Tokenizer.train(["the sea the sea and the ship"] * 9, 270))
    assert "tokens are only in the second" in told
    assert told.endswith("...")


def test_equal_tokens_with_other_rules_are_told_apart_too():
    tokenizer = Tokenizer.bytes()
    other = Tokenizer(tokenizer.content, {**tokenizer.settings, "eos_token": None})
    assert "begin and end tokens" in difference(tokenizer, other)
