"""Every kind of source yields its documents, and every bad input says what, where, why and what next."""

from __future__ import annotations

import gzip
import importlib.resources
import json
import sys
import types
from pathlib import Path

import pytest

from talkoot.core.errors import TalkootError
from talkoot.data import readers, source
from talkoot.data.source import read_documents


def write(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def failure(name: str, column: str = "text") -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        list(read_documents(name, column))
    error = caught.value
    assert all((error.what, error.where, error.why, error.next))
    return error


# --- the bundled text


def test_bundled_plays():
    plays = list(read_documents("bundled:shakespeare"))
    assert [play.splitlines()[0] for play in plays] == [
        "HAMLET, PRINCE OF DENMARK",
        "THE TRAGEDY OF KING LEAR",
        "MACBETH",
        "A MIDSUMMER NIGHT'S DREAM",
        "OTHELLO, THE MOOR OF VENICE",
        "ROMEO AND JULIET",
        "THE TEMPEST",
        "TWELFTH NIGHT; OR, WHAT YOU WILL",
    ]


def test_bundled_text_is_clean_and_as_described():
    folder = importlib.resources.files("talkoot.data") / "text"
    data = (folder / "shakespeare.txt").read_bytes()
    text = data.decode("ascii")
    assert 900_000 < len(data) < 1_200_000
    assert "\r" not in text
    assert "\n\n\n\n" not in text
    for word in ("gutenberg", "etext", "copyright", "http", "www.", "@"):
        assert word not in text.lower()
    note = (folder / "LICENSE.md").read_text("utf-8")
    assert source.hashlib.blake2b(data, digest_size=32).hexdigest() in note
    assert f"{len(data):,} bytes" in note
    assert "public domain worldwide" in note


def test_unknown_bundled_text():
    assert "'shakespeare'" in failure("bundled:shakespear").why


# --- text


def test_text_file_drops_the_mark_and_normalises_line_ends(tmp_path):
    name = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree \xc3\xa4\n")
    assert list(read_documents(name)) == ["one\ntwo\nthree ä\n"]


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 10)
    text = "ab\ncdef\n" * 9 + "x" * 25 + "\nend"
    documents = list(read_documents(write(tmp_path / "a.log", text)))
    assert "".join(documents) == text
    assert max(map(len, documents)) <= 10
    assert documents[0] == "ab\ncdef\n"


def test_gzipped_text(tmp_path):
    assert list(read_documents(write(tmp_path / "a.txt.gz", gzip.compress(b"hello")))) == ["hello"]


def test_folder_is_read_in_path_order_without_hidden_or_foreign_files(tmp_path):
    write(tmp_path / "b" / "1.md", "second")
    write(tmp_path / "a.txt", "first")
    write(tmp_path / "c.jsonl", '{"text": "third"}\n')
    write(tmp_path / ".git" / "x.txt", "hidden")
    write(tmp_path / "z.png", b"\x89PNG")
    assert list(read_documents(str(tmp_path))) == ["first", "second", "third"]


def test_glob(tmp_path):
    for name in ("2.log", "1.log", "3.txt"):
        write(tmp_path / name, name)
    assert list(read_documents(str(tmp_path / "*.log"))) == ["1.log", "2.log"]
    assert "matches no file" in failure(str(tmp_path / "*.xyz")).why


def test_folder_without_text(tmp_path):
    write(tmp_path / "a.png", b"\x89PNG")
    error = failure(str(tmp_path))
    assert str(tmp_path) in error.where
    assert ".jsonl" in error.why


def test_missing_file_names_the_nearest_sibling(tmp_path):
    write(tmp_path / "corpus.txt", "x")
    with pytest.raises(TalkootError) as caught:  # at once, not at the first document
        read_documents(str(tmp_path / "corpsu.txt"))
    assert "corpsu.txt" in caught.value.where
    assert caught.value.why == "did you mean 'corpus.txt'?"
    assert "path" in caught.value.next


def test_missing_file_in_other_folders(tmp_path):
    assert failure(str(tmp_path / "a.txt")).why == "the folder is empty"
    assert "does not exist" in failure(str(tmp_path / "no" / "a.txt")).why
    for number in range(100):
        write(tmp_path / f"{number:05}", "x")
    assert "none of the 100 names" in failure(str(tmp_path / "quite-unlike.txt")).why


@pytest.mark.parametrize("name", ["", "  ", "To be, or not to be " * 40])
def test_names_that_are_no_names(name):
    assert "bundled:shakespeare" in failure(name).next


def test_empty_file(tmp_path):
    name = write(tmp_path / "a.txt", b"")
    error = failure(name)
    assert (error.where, error.why) == (name, "the file is empty (0 bytes)")


@pytest.mark.parametrize(
    ("data", "offset"),
    [(b"caf\xe9 au lait", 3), (b"x" * 70_000 + b"\xff", 70_000), (b"y" * 65_535 + b"\xc3\xa4\x80", 65_537)],
)
def test_undecodable_bytes(tmp_path, data, offset):
    error = failure(write(tmp_path / "a.txt", data))
    assert error.where == f"{tmp_path / 'a.txt'}, byte {offset}"
    assert f"0x{data[offset]:02x}" in error.why
    assert "iconv" in error.next


def test_truncated_character_and_gzip(tmp_path):
    assert failure(write(tmp_path / "a.txt", b"ab\xc3")).where.endswith("byte 2")
    zipped = failure(write(tmp_path / "b.txt.gz", gzip.compress(b"ab\xff")))
    assert zipped.where.endswith("byte 2 of the unpacked data")
    for data in (gzip.compress(b"hello" * 50)[:-9], b"not gzip at all"):
        error = failure(write(tmp_path / "c.txt.gz", data))
        assert "gzip" in error.what
        assert error.where == str(tmp_path / "c.txt.gz")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bundle:shakespeare", "'bundled'"),
        ("dataset:x", "'datasets'"),
        ("https://example.org/a.txt", "bundled"),
    ],
)
def test_unknown_scheme(name, hint):
    error = failure(name)
    assert error.where == name
    assert hint in error.why
    assert "datasets:NAME" in error.next


# --- JSON lines


def test_jsonl_plain_and_gzipped(tmp_path):
    lines = '{"text": "one"}\n\n{"text": null}\n{"text": ""}\n{"text": "two\\u00e4", "n": 1}'
    assert list(read_documents(write(tmp_path / "a.jsonl", lines))) == ["one", "twoä"]
    assert list(read_documents(write(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode())))) == [
        "one",
        "twoä",
    ]


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ('{"text": "x"', "not valid JSON", "delimiter"),
        ("[" * 200_000, "not valid JSON", "recursion"),
        ("[1]", "not an object", "list"),
        ('{"content": "x", "id": 1}', "no column 'text'", "columns found: content, id"),
        ("{}", "no column 'text'", "no columns"),
        ('{"text": 5}', "not text", "int"),
        ('{"text": "\\ud800"}', "not valid Unicode", "surrogate"),
    ],
)
def test_bad_json_lines_give_file_and_line(tmp_path, line, what, why):
    name = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    error = failure(name)
    assert what in error.what
    assert error.where == f"{name}, line 3"
    assert why in error.why


def test_misspelt_column_is_guessed(tmp_path):
    error = failure(write(tmp_path / "a.jsonl", '{"content": "x"}'), column="contents")
    assert "did you mean 'content'?" in error.why


def test_endless_line(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 20)
    error = failure(write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 100})))
    assert "longer than 20" in error.why


def test_only_empty_rows(tmp_path):
    assert "no documents" in failure(write(tmp_path / "a.jsonl", '{"text": ""}\n')).why


# --- Parquet


def parquet(path: Path, **columns) -> str:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns), path)
    return str(path)


def test_parquet(tmp_path):
    name = parquet(tmp_path / "a.parquet", text=["one", None, "", "two"], n=[1, 2, 3, 4])
    assert list(read_documents(name)) == ["one", "two"]
    error = failure(name, column="body")
    assert (error.where, "columns found: text, n" in error.why) == (name, True)
    assert failure(name, column="n").where == f"{name}, row 1"


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    error = failure(write(tmp_path / "a.parquet", b"PAR1 no"))
    assert "Parquet" in error.what
    assert error.where.endswith("a.parquet")


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("datasets", "datasets:tiny")])
def test_missing_extra_is_named(tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        name = write(tmp_path / name, b"PAR1")
    error = failure(name)
    assert package in error.what
    assert error.where == name
    assert error.next == "pip install 'talkoot[data]'"


# --- the datasets package (a stand-in: the real one would reach for the network)


class Table(list):
    column_names = ("body", "label")
    _fingerprint = "f1"


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(name, split):
        if name != "tiny":
            raise FileNotFoundError(f"Dataset {name!r} doesn't exist")
        return Table({"body": f"{split} {n}", "label": n} for n in range(2))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.usefixtures("hub")
def test_datasets():
    assert list(read_documents("datasets:tiny", "body")) == ["train 0", "train 1"]
    assert list(read_documents("datasets:tiny:test", "body")) == ["test 0", "test 1"]
    assert read_documents("datasets:tiny", "body").digest()
    assert "columns found: body, label" in failure("datasets:tiny").why
    assert failure("datasets:tiny", "label").where == "datasets:tiny, row 1"
    assert "doesn't exist" in failure("datasets:other").why
    assert "no name" in failure("datasets:").why


def test_dataset_without_fingerprint_has_no_digest(hub, monkeypatch):
    monkeypatch.setattr(Table, "_fingerprint", "")
    assert read_documents("datasets:tiny", "body").digest() == ""


# --- tokens and digests


def test_tokens_are_not_documents(tmp_path):
    assert "TokenFile" in failure(write(tmp_path / "a.bin", b"\1\0")).next


def test_digest_follows_content_and_column_not_place(tmp_path):
    def digest(name, column="text"):
        return read_documents(name, column).digest()

    one = write(tmp_path / "a.txt", "same")
    assert digest(one) == digest(write(tmp_path / "b" / "c.txt", "same"))
    assert digest(one) != digest(write(tmp_path / "d.txt", "other"))
    assert digest(one) != digest(one, "body")
    assert digest("bundled:shakespeare") == digest("bundled:shakespeare")
