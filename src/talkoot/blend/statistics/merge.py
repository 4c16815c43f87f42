"""Several owners' statistics of one domain, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from talkoot.blend.statistics.objects import Statistics
from talkoot.blend.statistics.provenance import Source
from talkoot.core.errors import TalkootError
from talkoot.core.ids import short


def merge(parts: Sequence[Statistics]) -> Statistics:
    """One domain's statistics from several owners.

    Integers add up exactly in any order. Gram matrices of other numbers are added in the order of their sources, so
    the same parts give the same bits in whatever order they came.

    Raises:
        TalkootError: no parts, unlike features, domains or contents, or a text that would count twice.
    """
    if not parts:
        raise _unlike("there is nothing to merge", "no statistics were given", "count some first")
    parts = sorted(parts, key=lambda part: part.provenance.sources)
    first = parts[0]
    _refuse_twice([source for part in parts for source in part.provenance.sources])
    for other in parts[1:]:
        for what in ("features", "domain"):
            ours, theirs = getattr(first.provenance, what), getattr(other.provenance, what)
            if ours != theirs:
                why = f"{what} {ours!r} and {theirs!r}"
                raise _unlike(f"statistics of unlike {what} do not add up", why, "count them anew with the same")
        if _form(first) != _form(other):
            raise _unlike("statistics of unlike contents do not add up", f"{_form(first)} and {_form(other)}", "")
    total = first
    for part in parts[1:]:
        total = replace(
            total,
            grams={name: gram + part.grams[name] for name, gram in total.grams.items()},
            histogram=total.histogram + part.histogram if total.histogram and part.histogram else None,
            documents=total.documents + part.documents,
            tokens=total.tokens + part.tokens,
        )
    sources = tuple(sorted(source for part in parts for source in part.provenance.sources))
    return replace(total, provenance=msgspec.structs.replace(first.provenance, sources=sources))


def _form(statistics: Statistics) -> str:
    histogram = statistics.histogram
    counted = f"histogram of {histogram.vocabulary} + {histogram.buckets}; " if histogram else ""
    return counted + ", ".join(f"{name}: width {gram.width}" for name, gram in sorted(statistics.grams.items()))


def _refuse_twice(sources: Sequence[Source]) -> None:
    seen: dict[str, str] = {}
    for source in sources:
        if source.dataset in seen:
            by = {seen[source.dataset], source.contributor}
            raise _unlike(
                "the same text would count twice",
                f"data set {short(source.dataset)} was counted by {' and by '.join(sorted(map(short, by)))}",
                "leave one of them out",
            )
        seen[source.dataset] = source.contributor


def _unlike(what: str, why: str, next: str) -> TalkootError:
    return TalkootError(what, where="statistics", why=why, next=next or "count them anew with the same talkoot")
