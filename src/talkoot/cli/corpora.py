"""``talkoot corpora``: which text domains there are, and fetching them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from talkoot.cli.output import print_json, print_table, say
from talkoot.data.corpora import Manifest, cached, corpora, fetch


def run(names: Sequence[str], *, get: bool, as_json: bool) -> None:
    """List the named corpora (all, without a name); with ``get``, fetch those that are not here yet.

    Raises:
        TalkootError: an unknown name; what :func:`talkoot.data.corpora.fetch.fetch` raises.
    """
    chosen = list(dict.fromkeys(names)) or list(corpora)
    for name in chosen:
        corpora[name]  # a misspelt name is refused before anything is fetched
    quiet = as_json or not get
    found = {name: fetch(name, (lambda _: None) if quiet else say) if get else cached(name) for name in chosen}
    if as_json:
        print_json({name: _plain(name, manifest) for name, manifest in found.items()})
    else:
        rows = [_row(name, manifest) for name, manifest in found.items()]
        print_table(rows, ("corpus", "what", "licence", "MB", "documents", "from"))


def _plain(name: str, manifest: Manifest | None) -> dict[str, Any]:
    corpus = corpora[name]
    facts = {"what": corpus.what, "licence": corpus.licence, "kind": corpus.kind, "package": corpus.package}
    return {**facts, "cached": manifest is not None, "manifest": manifest and msgspec.to_builtins(manifest)}


def _row(name: str, manifest: Manifest | None) -> tuple[str, ...]:
    corpus = corpora[name]
    size, count, origin = "-", "not fetched", f"{corpus.kind}: {corpus.package}"
    if manifest is not None:
        size, count = f"{manifest.text_bytes / 1e6:.1f}", f"{manifest.documents:,}"
        origin = f"{corpus.kind}: {manifest.parcels[-1].package} {manifest.parcels[-1].version}"
    return name, corpus.what, corpus.licence, size, count, origin
