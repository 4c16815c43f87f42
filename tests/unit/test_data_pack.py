"""Packing: the bytes are right, whole or absent; reuse is exact; bad files and tokenizers are told apart."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.data import TokenFile, Windows, load_tokens, pack, read_documents


class Letters:
    """One id per byte, plus an end-of-text id; counts how much it was asked to encode."""

    def __init__(self, vocab_size: int = 257, eos_id: int = 256, name: str = "letters") -> None:
        self.vocab_size, self.eos_id, self.name, self.calls = vocab_size, eos_id, name, 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        return list(text.encode())

    def digest(self) -> str:
        return self.name


class Batched(Letters):
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def failure(call, *args, **options) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        call(*args, **options)
    error = caught.value
    assert all((error.what, error.where, error.why, error.next))
    return error


@settings(max_examples=30, deadline=None)
@given(documents=st.lists(st.text(max_size=20), min_size=1), batched=st.booleans())
def test_tokens_are_the_documents_joined_with_eos(tmp_path_factory, documents, batched):
    expected = [token for text in documents if text for token in [*text.encode(), 256]]
    folder, tokenizer = tmp_path_factory.mktemp("pack"), (Batched if batched else Letters)()
    if not expected:
        assert "no text" in failure(pack, documents, tokenizer, folder, "drawn").what
        assert os.listdir(folder) == []
        return
    file = pack(iter(documents), tokenizer, folder, "drawn")
    assert file.tokens.tolist() == expected
    assert file.count == len(expected)


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_files_on_disk(tmp_path, vocab, dtype):
    folder = tmp_path / "made" / "on demand"
    pack(["ab", "c"], Letters(vocab, vocab - 1), folder, "two")
    data = (folder / "tokens.bin").read_bytes()
    assert sorted(os.listdir(folder)) == ["tokens.bin", "tokens.json"]
    assert np.frombuffer(data, {"uint16": "<u2", "uint32": "<u4"}[dtype]).tolist() == [
        97,
        98,
        vocab - 1,
        99,
        vocab - 1,
    ]
    assert json.loads((folder / "tokens.json").read_text()) == {
        "count": 5,
        "dtype": dtype,
        "digest": hashlib.blake2b(data, digest_size=32).hexdigest(),
        "tokenizer": "letters",
        "source": "two",
        "source_digest": "",
        "version": 1,
    }
    assert TokenFile.open(folder, tokenizer=Letters(), verify=True).dtype == dtype


def test_same_text_and_tokenizer_are_reused_and_anything_else_is_packed_again(tmp_path):
    text, folder = tmp_path / "a.txt", tmp_path / "tokens"
    text.write_text("hello")

    def encodings(name: str) -> int:
        tokenizer = Letters(name=name)
        pack(read_documents(str(text)), tokenizer, folder, str(text))
        return tokenizer.calls

    assert [encodings("a"), encodings("a"), encodings("b"), encodings("b")] == [1, 0, 1, 0]
    text.write_text("other")
    assert [encodings("b"), encodings("b")] == [1, 0]
    (folder / "tokens.bin").write_bytes(b"\1")
    assert [encodings("b"), encodings("b")] == [1, 0]


def test_a_source_partly_read_is_not_mistaken_for_the_whole(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    documents = read_documents(str(tmp_path / "a.jsonl"))
    next(documents)
    assert pack(documents, Letters(), tmp_path / "t", "rest").source_digest == ""


def test_load_tokens_from_text_and_from_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    packed = load_tokens(str(tmp_path / "a.txt"), Letters(), tmp_path / "cache")
    (tmp_path / "own.bin").write_bytes(packed.tokens.tobytes())
    (tmp_path / "own.json").write_text('{"dtype": "uint16", "tokenizer": "letters"}')
    for source in (tmp_path / "own.bin", tmp_path / "cache"):
        assert load_tokens(str(source), Letters(), tmp_path / "unused").tokens.tolist() == packed.tokens.tolist()
    assert not (tmp_path / "unused").exists()
    assert "no digest" in failure(TokenFile.open, tmp_path / "own.bin", verify=True).why


def test_bundled_text_to_batches(tmp_path):
    file = load_tokens("bundled:shakespeare", Batched(), tmp_path)
    assert file.count > 1_000_000
    batch = Windows(file.tokens, length=64, batch=2, seed=0).train(0, 0, 1)
    assert batch.max() <= 256
    assert Letters().encode("HAMLET") == file.tokens[:6].tolist()


def test_memory_stays_bounded(tmp_path):
    documents = ("x" * 200_000 for _ in range(100))  # 20 MB of text, 40 MB of tokens
    tracemalloc.start()
    try:
        pack(documents, Letters(), tmp_path, "stream")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "tokens.bin").stat().st_size == 40_000_200
    assert peak < 60_000_000  # lists of a batch's ids dominate: about 1.2 M of them, at 8 bytes and more


def broken(documents):
    yield from documents
    raise RuntimeError("the source breaks off")


def test_interrupted_packing_leaves_the_old_tokens_and_no_scraps(tmp_path):
    pack(["old"], Letters(), tmp_path, "old")
    with pytest.raises(RuntimeError):
        pack(broken(["x" * 2_000_000]), Letters(), tmp_path, "new")
    assert sorted(os.listdir(tmp_path)) == ["tokens.bin", "tokens.json"]
    assert TokenFile.open(tmp_path, verify=True).source == "old"


def test_a_crash_between_the_two_files_never_pairs_new_tokens_with_an_old_record(tmp_path, monkeypatch):
    pack(["old"], Letters(), tmp_path, "old")
    replace = os.replace

    def crash(old, new):
        if str(new).endswith(".json"):
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        pack(["new"], Letters(), tmp_path, "new")  # as many tokens: their number alone would not tell
    assert os.listdir(tmp_path) == ["tokens.bin"]
    assert failure(TokenFile.open, tmp_path).where == str(tmp_path / "tokens.json")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(tmp_path, monkeypatch, code):
    pack(["old"], Letters(), tmp_path, "old")

    def full(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    error = failure(pack, ["new"], Letters(), tmp_path, "new")
    assert error.what == "the disk is full"
    assert error.where == str(tmp_path)
    assert "free some space" in error.next
    assert sorted(os.listdir(tmp_path)) == ["tokens.bin", "tokens.json"]
    assert TokenFile.open(tmp_path, verify=True).source == "old"


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    error = failure(pack, ["x"], Letters(), tmp_path / "file", "x")
    assert error.what == "the tokens cannot be written"
    assert error.where == str(tmp_path / "file")


@pytest.mark.parametrize("eos", [-1, 257, 70_000])
def test_ids_outside_the_vocabulary(tmp_path, eos):
    error = failure(pack, ["x"], Letters(eos_id=eos), tmp_path, "x.txt")
    assert "outside its vocabulary" in error.what
    assert error.where == "x.txt"
    assert str(eos) in error.why
    assert os.listdir(tmp_path) == []


def test_another_tokenizers_tokens(tmp_path):
    pack(["x"], Letters(), tmp_path, "x")
    error = failure(TokenFile.open, tmp_path, tokenizer=Letters(name="words"))
    assert "another tokenizer" in error.what
    assert error.where == str(tmp_path / "tokens.bin")
    assert "letters" in error.why
    assert "words" in error.why


def test_changed_bytes_are_found_by_verify_only(tmp_path):
    pack(["hello"], Letters(), tmp_path, "x")
    data = bytearray((tmp_path / "tokens.bin").read_bytes())
    data[4] ^= 1
    (tmp_path / "tokens.bin").write_bytes(data)
    assert TokenFile.open(tmp_path).count == 6
    assert "BLAKE2b-256" in failure(TokenFile.open, tmp_path, verify=True).why


@pytest.mark.parametrize("size", [0, 5, 10, 14])
def test_wrong_length(tmp_path, size):
    pack(["hello"], Letters(), tmp_path, "x")
    os.truncate(tmp_path / "tokens.bin", size)
    error = failure(TokenFile.open, tmp_path)
    assert error.where == str(tmp_path / "tokens.bin")
    assert ("no tokens" if size == 0 else f"{size} bytes found, and 6 tokens of uint16 take 12") in error.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "uint8"}, "did you mean 'uint"),
        ({"dtype": None}, "'dtype' must be a string"),
        ({"tokenizer": ""}, "'tokenizer' must be a string"),
        ({"digest": 5}, "'digest' must be a string"),
        ({"count": -1}, "'count' must be a whole number"),
        ({"count": True}, "'count' must be a whole number"),
        ({"version": 2}, "format version 2"),
    ],
)
def test_bad_sidecar(tmp_path, change, why):
    pack(["hello"], Letters(), tmp_path, "x")
    sidecar = tmp_path / "tokens.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    error = failure(TokenFile.open, tmp_path)
    assert error.where == str(sidecar)
    assert why in error.why


@pytest.mark.parametrize(("text", "why"), [("{", "not valid JSON"), ("[]", "an object is needed"), ("\xff", "JSON")])
def test_unreadable_sidecar(tmp_path, text, why):
    pack(["hello"], Letters(), tmp_path, "x")
    (tmp_path / "tokens.json").write_bytes(text.encode("latin-1"))
    assert why.replace("an object", "a JSON object") in failure(TokenFile.open, tmp_path).why


def test_missing_files(tmp_path):
    error = failure(TokenFile.open, tmp_path)
    assert error.where == str(tmp_path / "tokens.json")
    assert "pack the text" in error.next
    pack(["hello"], Letters(), tmp_path, "x")
    (tmp_path / "tokens.bin").unlink()
    assert failure(TokenFile.open, tmp_path).where == str(tmp_path / "tokens.bin")
