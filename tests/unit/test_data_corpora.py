"""Corpora are fetched once, whole or not at all; what a package holds is bounded and cannot leave its folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from corpora_toys import deb, tar, wheel, zipped
from talkoot.core.errors import Exit, TalkootError
from talkoot.data import corpora
from talkoot.data.corpora import debian, store, unpack
from talkoot.data.source import read_documents

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="a deb is unpacked by dpkg-deb")
FORTUNE = {f"usr/share/man/de/man1/{name}.1.gz": zipped(f".SH {name}\nText.\n") for name in ("b", "a")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TALKOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Path:
    """A folder of debs, and an ``apt-get`` that downloads from it and keeps count."""
    folder, programs = tmp_path / "mirror", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    script = f"""#!/bin/sh
for name; do :; done
echo "$name" >> {folder}/asked
test -f {folder}/down && echo "E: Failed to fetch $name  Temporary failure resolving" >&2 && exit 100
cp {folder}/"$name"_*.deb . 2>/dev/null && exit 0
echo "W: noise" >&2; echo "E: Unable to locate package $name" >&2; exit 100
"""
    (programs / "apt-get").write_text(script)
    (programs / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return folder


def failure(work) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        work()
    assert all((caught.value.what, caught.value.where, caught.value.why, caught.value.next))
    return caught.value


# --- fetched from Debian


@needs_dpkg
def test_a_corpus_is_fetched_once_and_then_read_from_the_cache(mirror, cache):
    archive = deb(mirror / "manpages-de_1_all.deb", {**FORTUNE, "usr/share/man/fr/man1/c.1.gz": zipped(".SH c\n")})
    said: list[str] = []
    manifest = corpora.fetch("manpages-de", said.append)
    assert list(read_documents("corpus:manpages-de")) == ["a\n\nText.", "b\n\nText."]
    assert corpora.fetch("manpages-de") == corpora.cached("manpages-de") == manifest
    assert (mirror / "asked").read_text() == "manpages-de\n"
    assert len(said) == 2
    [parcel] = manifest.parcels
    assert (parcel.package, parcel.version) == ("manpages-de", "1:2.0-1")
    assert parcel.sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (manifest.documents, manifest.text_bytes) == (2, 16)
    assert sorted(path.name for path in cache.iterdir()) == ["manpages-de"]
    assert sorted(path.name for path in (cache / "manpages-de").iterdir()) == [store.DOCUMENTS, store.MANIFEST]


@needs_dpkg
def test_the_digest_is_the_contents_and_follows_into_the_source(mirror, cache):
    deb(mirror / "manpages-de_1_all.deb", FORTUNE)
    first, of_source = corpora.fetch("manpages-de"), read_documents("corpus:manpages-de").digest()
    shutil.rmtree(cache)
    deb(mirror / "manpages-de_1_all.deb", FORTUNE, version="3")
    assert corpora.fetch("manpages-de").digest == first.digest
    assert read_documents("corpus:manpages-de").digest() == of_source
    shutil.rmtree(cache)
    deb(mirror / "manpages-de_1_all.deb", {**FORTUNE, "usr/share/man/de/man1/c.1.gz": zipped(".SH c\n")})
    assert corpora.fetch("manpages-de").digest != first.digest
    assert read_documents("corpus:manpages-de").digest() != of_source


@needs_dpkg
def test_a_package_without_text_stands_for_the_one_it_depends_on(mirror):
    deb(mirror / "golang-src_2_all.deb", {"usr/share/doc/golang-src/copyright": b"x"}, depends="golang-1.19-src (>= 1)")
    deb(mirror / "golang-1.19-src_1_all.deb", {"usr/share/go-1.19/src/fmt/print.go": b"package fmt\n"})
    manifest = corpora.fetch("go")
    assert [parcel.package for parcel in manifest.parcels] == ["golang-src", "golang-1.19-src"]
    assert list(read_documents("corpus:go")) == ["package fmt\n"]


@needs_dpkg
@pytest.mark.parametrize("depends", ["", "a, b", "a | b"])
def test_a_package_that_has_lost_its_text_is_refused(mirror, cache, depends):
    deb(mirror / "manpages-de_1_all.deb", {"usr/share/doc/x": b"x"}, depends=depends)
    assert "usr/share/man/de" in failure(lambda: corpora.fetch("manpages-de")).why
    assert not list(cache.iterdir())


@needs_dpkg
def test_no_chain_of_packages_is_followed_for_ever(mirror):
    deb(mirror / "golang-src_2_all.deb", {}, depends="golang-src")
    problem = failure(lambda: debian.get("golang-src", ("*.go",), mirror))
    assert "no file in it matches *.go" in problem.why
    assert (mirror / "asked").read_text() == "golang-src\n" * 2


@needs_dpkg
@pytest.mark.parametrize("depends", ["-oDir=x", "../../up"])
def test_a_dependency_that_is_no_name_is_not_asked_for(mirror, depends):
    deb(mirror / "golang-src_2_all.deb", {}, depends=depends)
    failure(lambda: debian.get("golang-src", ("*.go",), mirror))
    assert (mirror / "asked").read_text() == "golang-src\n"


def test_without_apt_it_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no apt" in failure(lambda: corpora.fetch("kjv")).what


def test_a_package_that_the_lists_lack_and_a_network_that_is_down_are_told_apart(mirror, cache):
    unknown = failure(lambda: corpora.fetch("kjv"))
    assert unknown.why == "Unable to locate package bible-kjv-text"
    assert "apt-get update" in unknown.next
    (mirror / "down").touch()
    down = failure(lambda: list(read_documents("corpus:kjv")))
    assert "Temporary failure resolving" in down.why
    assert down.code is Exit.UNREACHABLE
    assert not list(cache.iterdir())


@needs_dpkg
def test_a_truncated_package_leaves_nothing(mirror, cache):
    archive = deb(mirror / "manpages-de_1_all.deb", {**FORTUNE, "usr/share/man/de/x.gz": os.urandom(300_000)})
    archive.write_bytes(archive.read_bytes()[:150_000])
    failure(lambda: corpora.fetch("manpages-de"))
    assert not list(cache.iterdir())


@needs_dpkg
def test_a_package_with_a_wrong_checksum_leaves_nothing(mirror, cache):
    # With much behind the archive's end, all files are there before the checksum comes.
    archive = deb(mirror / "manpages-de_1_all.deb", FORTUNE, padding=1 << 20)
    data = bytearray(archive.read_bytes())
    data[-8] ^= 1  # within gzip's checksum, whether or not a line end pads the content
    archive.write_bytes(data)
    assert "dpkg-deb" in failure(lambda: corpora.fetch("manpages-de")).why
    assert not list(cache.iterdir())


@needs_dpkg
def test_a_broken_file_within_a_package_leaves_nothing(mirror, cache):
    deb(mirror / "manpages-de_1_all.deb", {"usr/share/man/de/a.gz": zipped("text" * 99)[:-9]})
    problem = failure(lambda: corpora.fetch("manpages-de"))
    assert problem.where == "manpages-de"
    assert "a.gz is not whole" in problem.why
    assert not list(cache.iterdir())


# --- unpacking


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out.txt", "a\\..\\out.txt"])
def test_no_file_is_written_outside_the_folder(tmp_path, name):
    (tmp_path / "a.tar.gz").write_bytes(tar({"ok.txt": b"ok", name: b"evil"}))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "evil")
    for packed in ("a.tar.gz", "a.zip"):
        root = tmp_path / packed.replace(".", "-")
        assert "outside" in failure(lambda: unpack.unpack(tmp_path / packed, root, ("*",))).why  # noqa: B023
    assert not list(tmp_path.rglob("out.txt"))


def test_links_are_not_made_and_unwanted_files_not_written(tmp_path):
    (tmp_path / "a.tar.xz").write_bytes(tar({"a/link.txt": None, "a/b.txt": b"b", "a/c.bin": b"c"}, "w:xz"))
    assert unpack.unpack(tmp_path / "a.tar.xz", tmp_path / "out", ("a/*.txt",)) == 1
    assert [path.name for path in (tmp_path / "out").rglob("*") if not path.is_dir()] == ["b.txt"]


def test_too_much_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(tar({f"{number}.txt": bytes(100) for number in range(4)}))
    for limit, value in (("MOST_BYTES", 399), ("MOST_FILES", 3), ("LARGEST_FILE", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(unpack, limit, value)
            assert "more than" in failure(lambda: unpack.unpack(tmp_path / "a.tar.gz", tmp_path / "o", ("*",))).why
    assert unpack.unpack(tmp_path / "a.tar.gz", tmp_path / "out", ("*",)) == 4


def test_a_zip_that_lies_about_its_sizes_is_refused(tmp_path):
    archive = wheel(tmp_path / "a-1-py3-none-any.whl", {"a.txt": b"x" * 1000})
    data = archive.read_bytes()
    archive.write_bytes(data.replace((1000).to_bytes(4, "little") * 2, (1000).to_bytes(4, "little") + bytes(4)))
    failure(lambda: unpack.unpack(archive, tmp_path / "out", ("a.txt",)))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.whl", "a.zip"])
def test_an_archive_that_is_none_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    assert failure(lambda: unpack.unpack(tmp_path / name, tmp_path / "out", ("*",))).where == name


# --- the store


def kept(*texts: str) -> store.Manifest:
    parcels = (corpora.Parcel(package="p", version="1"),)
    return store.keep("kjv", lambda corpus, scratch: (iter(texts), parcels))


def test_duplicates_and_empty_documents_are_dropped_and_the_order_stays():
    manifest = kept("b", "", " \n", "a", "b", "ä\n")
    assert list(read_documents("corpus:kjv")) == ["b", "a", "ä\n"]
    assert (manifest.documents, manifest.text_bytes) == (3, 5)


def test_what_fails_half_way_leaves_nothing_that_looks_whole(cache):
    def break_down():
        yield "text"
        raise TalkootError("broken", where="here", why="so", next="that")

    failure(lambda: store.keep("kjv", lambda corpus, scratch: (break_down(), ())))
    assert corpora.cached("kjv") is None
    assert not list(cache.iterdir())


def test_a_corpus_without_documents_is_refused(cache):
    assert failure(lambda: kept("", " ")).what == "the corpus is empty"
    assert not list(cache.iterdir())


def test_where_another_process_was_faster_its_result_counts():
    def slower(corpus, scratch):
        theirs.append(kept("theirs"))
        return iter(["ours"]), theirs[0].parcels

    theirs: list[store.Manifest] = []
    assert store.keep("kjv", slower) == theirs[0]
    assert list(read_documents("corpus:kjv")) == ["theirs"]


def test_a_document_that_nobody_can_have_written_is_refused(cache, mirror, monkeypatch):
    monkeypatch.setattr(store.readers, "LONGEST_LINE", 30)
    deb(mirror / "manpages-de_1_all.deb", {**FORTUNE, "usr/share/man/de/c.gz": zipped(".SH c\n" + "long " * 9)})
    assert "47 bytes" in failure(lambda: corpora.fetch("manpages-de")).why
    assert not list(cache.iterdir())


def test_what_a_killed_fetch_left_is_removed_once_it_is_old(cache):
    for name in (".kjv.old", ".kjv.new", ".go.old"):
        (cache / name).mkdir(parents=True)
    for name in (".kjv.old", ".go.old"):
        os.utime(cache / name, (0, 0))
    kept("a")
    assert sorted(path.name for path in cache.iterdir()) == [".go.old", ".kjv.new", "kjv"]


def test_a_full_disk_is_said_so(cache, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    assert failure(lambda: kept("a")).why == "No space left on device"
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_made_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TALKOOT_CACHE", str(tmp_path / "file"))
    assert "TALKOOT_CACHE" in failure(lambda: kept("a")).next


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "no documents", "other version"])
def test_a_damaged_cache_is_noticed(cache, damage):
    kept("a", "b")
    place = cache / "kjv"
    if damage == "truncated":
        (place / store.DOCUMENTS).write_bytes((place / store.DOCUMENTS).read_bytes()[:-1])
    elif damage == "no manifest":
        (place / store.MANIFEST).write_text("{}")
    elif damage == "no documents":
        (place / store.DOCUMENTS).unlink()
    else:
        text = (place / store.MANIFEST).read_text()
        (place / store.MANIFEST).write_text(text.replace('"version": 1,', '"version": 2,', 1))
    problem = failure(lambda: list(read_documents("corpus:kjv")))
    assert problem.what == "a fetched corpus is damaged"
    assert str(place) in problem.next


def test_the_cache_lies_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("TALKOOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpora.folder("kjv") == tmp_path / "talkoot" / "corpora" / "kjv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpora.folder("kjv") == tmp_path / ".cache" / "talkoot" / "corpora" / "kjv"


def test_the_stored_bytes_are_a_function_of_the_documents(cache):
    kept("a", "b")
    first = (cache / "kjv" / store.DOCUMENTS).read_bytes()
    shutil.rmtree(cache)
    kept("a", "b", "a")
    assert (cache / "kjv" / store.DOCUMENTS).read_bytes() == first
    assert first[4:8] == bytes(4)  # no time in the header
    assert [json.loads(line) for line in gzip.decompress(first).splitlines()] == [{"text": "a"}, {"text": "b"}]


# --- the interpreter's library, and names


def test_the_interpreters_own_library_is_a_corpus():
    manifest = corpora.fetch("python")
    assert manifest.documents > 300
    assert manifest.text_bytes > 5e6
    documents = list(read_documents("corpus:python"))
    assert any("def dataclass(" in text for text in documents)
    assert not any("unittest.main()" in text and "class Test_TestCase" in text for text in documents)


@pytest.mark.parametrize("name", ["kjw", "", "../kjv", "datasets"])
def test_an_unknown_corpus_is_refused_at_once(name):
    problem = failure(lambda: read_documents(f"corpus:{name}"))
    assert "talkoot corpora" in problem.next
    if name == "kjw":
        assert "'kjv'" in problem.why


def test_every_corpus_is_described():
    assert len(list(corpora.corpora)) == 15
    for name in corpora.corpora:
        corpus = corpora.corpora[name]
        assert corpus.what and corpus.licence and corpus.package and corpus.wanted  # noqa: PT018
