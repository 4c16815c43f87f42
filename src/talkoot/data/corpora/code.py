"""Corpora of source code: as it is, a file a document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from talkoot.data.corpora.corpus import Corpus, corpora
from talkoot.data.corpora.files import files, read

# Tests are left out because they are mostly data, site-packages because they differ from machine to machine.
_NOT_PYTHON = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_NOT_GO = ("cmd", "vendor", "testdata")


def _code(root: Path, suffixes: tuple[str, ...], without: tuple[str, ...] = (), tests: str = "\0") -> Iterator[str]:
    return (read(path) for path in files(root, *suffixes, without=without) if not path.name.endswith(tests))


corpora.register("python")(
    Corpus(
        what="Python code: the standard library of the running interpreter",
        licence="PSF-2.0",
        kind="stdlib",
        package="python",
        wanted=("*.py",),
        documents=partial(_code, suffixes=(".py",), without=_NOT_PYTHON),
    )
)

corpora.register("hol-light")(
    Corpus(
        what="formal mathematics: proofs in HOL Light",
        licence="BSD-2-Clause (a few files LGPL or GPL)",
        kind="debian",
        package="hol-light",
        wanted=("usr/share/hol-light/*.ml", "usr/share/hol-light/*.hl"),
        documents=partial(_code, suffixes=(".ml", ".hl")),
    )
)

corpora.register("go")(
    Corpus(
        what="Go code: the standard library",
        licence="BSD-3-Clause",
        kind="debian",
        package="golang-src",
        wanted=("usr/share/go-*/src/*.go",),
        documents=partial(_code, suffixes=(".go",), without=_NOT_GO, tests="_test.go"),
    )
)

corpora.register("elisp")(
    Corpus(
        what="Emacs Lisp code: the editor's library",
        licence="GPL-3.0-or-later",
        kind="debian",
        package="emacs-el",
        wanted=("usr/share/emacs/*/lisp/*.el.gz",),
        documents=partial(_code, suffixes=(".el.gz",)),
    )
)

corpora.register("c-headers")(
    Corpus(
        what="C headers: what Linux offers to programs",
        licence="GPL-2.0 WITH Linux-syscall-note",
        kind="debian",
        package="linux-libc-dev",
        wanted=("usr/include/*.h",),
        documents=partial(_code, suffixes=(".h",)),
    )
)
