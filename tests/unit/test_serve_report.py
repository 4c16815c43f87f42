"""The report: one file, safe to open whatever the log says."""

from __future__ import annotations

import base64
import hashlib
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fixture_run import Story, crew, eventful

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.log import Log
from talkoot.serve.markup import data_block, escape, tag
from talkoot.serve.report import report_page, write_report
from talkoot.serve.view import View
from talkoot.serve.words import clock, count, duration, size

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Collects elements and attributes as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_report_is_written_and_complete_in_itself(tmp_path: Path):
    eventful(tmp_path).log.close()
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    for tag_name, attributes in Reader(text).tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag_name, name, value)
    assert len(text) < 600_000
    assert "neighbours" in text
    assert "simulated" in text
    assert 'class="smooth"' in text


def test_another_place_for_the_report(tmp_path: Path):
    eventful(tmp_path / "run", steps=12).log.close()
    out = tmp_path / "elsewhere" / "page.html"
    assert write_report(tmp_path / "run", out) == out
    assert out.exists()


def test_only_scripts_and_styles_named_by_the_policy_are_in_it(tmp_path: Path):
    eventful(tmp_path, steps=12).log.close()
    text = write_report(tmp_path).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    blocks = re.findall(r"<(script|style)( type=\"module\")?>(.*?)</\1>", text, re.S)
    assert len(blocks) == 4
    for _, _, content in blocks:
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy
    assert not any("style" in attributes for _, attributes in Reader(text).tags)


def test_hostile_text_stays_text():
    story = Story(Log(None), steps=5)
    recipe = {"name": HOSTILE, HOSTILE: HOSTILE, "train": {"steps": 5}, "model": {"load": HOSTILE}}
    story.begin(recipe=recipe)
    crew(story)
    story.join(HOSTILE[:30], 0, source=HOSTILE)
    story.commit()
    story.lose(HOSTILE[:30], HOSTILE)
    story.roll_back(0, HOSTILE)
    story.commit()
    text = report_page(View().advance_all(story.log.entries()).snapshot())
    plain = report_page(View().snapshot())
    tags = [name for name, _ in Reader(text).tags]
    assert tags.count("script") == [name for name, _ in Reader(plain).tags].count("script") == 3
    assert "img" not in tags
    assert not any(key.startswith("on") for _, attributes in Reader(text).tags for key in attributes)
    assert "&lt;/script&gt;&lt;script&gt;" in text
    story.log.close()


def test_an_empty_run_has_a_report_that_says_so():
    text = report_page(View().snapshot())
    assert "No step has been committed yet" in text
    assert "Nobody has joined yet" in text


def test_a_log_that_was_changed_gets_no_report(tmp_path: Path):
    eventful(tmp_path, steps=12).log.close()
    with sqlite3.connect(tmp_path / "log.sqlite") as database:
        database.execute("UPDATE receipts SET signature = zeroblob(64) WHERE position = 20")
    database.close()
    with pytest.raises(TalkootError, match="does not verify") as caught:
        write_report(tmp_path)
    assert caught.value.code == Exit.FAILED_CHECK
    assert not (tmp_path / "report.html").exists()


def test_no_run_no_report(tmp_path: Path):
    with pytest.raises(TalkootError, match="no run log"):
        write_report(tmp_path)


def test_markup_escapes_everything_that_is_not_markup():
    assert tag("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert escape("&'") == "&amp;&#x27;"
    assert "<" not in data_block("d", {"a": "</script><!--"})[len('<script type="application/json" id="d">') : -9]


def test_words_for_numbers():
    assert [duration(x) for x in (0.004, 4.2, 200, 18_600, 273_600, None)] == [
        "4 ms",
        "4.2 s",
        "3 min 20 s",
        "5 h 10 min",
        "3 d 4 h",
        "\N{EN DASH}",
    ]
    assert [clock(x) for x in (4.25, 59, 200, 3909)] == ["4.2 s", "59 s", "3:20", "1:05:09"]
    assert [count(x) for x in (0, 1234, 5_600_000, float("nan"))] == ["0", "1,234", "5.6 M", "\N{EN DASH}"]
    assert [size(x) for x in (12, 3_400_000)] == ["12 B", "3.4 MB"]
