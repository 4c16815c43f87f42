"""Text survives the trip to tokens and back, and nobody's text becomes a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import BEGIN, END, Tokenizer

TEXTS = [
    "the cat sat on the mat, the dog sat on the log",
    "Näin tehdään talkoot! 大家一起来 🚜",
    "x = f(1) # ok\n\t",
] * 9

BYTES = Tokenizer.bytes()
TRAINED = Tokenizer.train(TEXTS, 330)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])
@given(text=st.text())
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(2 <= one < tokenizer.vocab_size for one in ids)


def test_bytes_are_bytes() -> None:
    assert BYTES.vocab_size == 258
    assert BYTES.encode("ä\x00~") == [byte + 2 for byte in "ä\x00~".encode()]
    assert (BYTES.bos_id, BYTES.eos_id) == (0, 1)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])
def test_markers_in_a_text_are_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    text = f"a{END}b"
    plain = tokenizer.encode(text)
    assert tokenizer.eos_id not in plain
    assert tokenizer.decode(plain) == text
    marked = tokenizer.encode(text, special=True)
    assert marked.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(marked) == "ab"
    assert tokenizer.decode(marked, special=True) == text


def test_training_learns_merges_and_repeats_itself() -> None:
    again = Tokenizer.train(iter(TEXTS), 330)
    assert again.digest() == TRAINED.digest()
    assert TRAINED.vocab_size <= 330
    assert len(TRAINED.encode(TEXTS[0])) < len(BYTES.encode(TEXTS[0])) / 2
    assert Tokenizer.train(TEXTS, 300).digest() != TRAINED.digest()
    hostile = Tokenizer.train([f"{BEGIN}{END}" * 50] * 20, 400)
    assert hostile.eos_id not in hostile.encode(END), "a corpus of markers must not teach the marker as a word"
    with pytest.raises(TalkootError, match="too small"):
        Tokenizer.train(TEXTS, 257)


def test_batches_equal_single_texts() -> None:
    assert TRAINED.encode_batch(TEXTS[:3]) == [TRAINED.encode(one) for one in TEXTS[:3]]


def test_saving_keeps_everything(tmp_path: Path) -> None:
    source = Tokenizer(TRAINED._plain.to_str(), {**TRAINED.settings, "custom": [1]}, "{{ messages }}")
    source.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        back = Tokenizer.load(path)
        assert back.digest() == source.digest() == TRAINED.digest()
        assert (back.settings, back.template) == (source.settings, source.template)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_bad_files_and_texts_are_explained(tmp_path: Path) -> None:
    with pytest.raises(TalkootError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TalkootError, match="cannot be read"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    for content in (b"", b"{}", b"[]", b"\xff", b'{"model": 1}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TalkootError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    BYTES.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(TalkootError, match="eos_token is unknown"):
        Tokenizer.load(tmp_path)
    with pytest.raises(TalkootError, match="cannot be encoded"):
        BYTES.encode("\ud800")
