"""What the owner of a text tells others about it: counts and second moments, signed, and where they come from.

**What they leak.** A histogram is the exact number of times that each token, and each pair's bucket, occurs. A Gram
matrix of embeddings is linear in such a histogram and gives it back where the table is wide; one of hidden states
gives their mean and second moments. So statistics are not private, only smaller than the text: word order beyond pairs
stays at home. :meth:`Statistics.blurred` adds noise; it is no guarantee of differential privacy by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from talkoot.blend.statistics import file
from talkoot.blend.statistics.gram import Gram
from talkoot.blend.statistics.histogram import Histogram
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, PeerId, short
from talkoot.core.keys import Key


class Source(msgspec.Struct, frozen=True, order=True):
    """Somebody's text.

    Attributes:
        contributor: who counted.
        dataset: digest of the documents, in any order.
    """

    contributor: PeerId
    dataset: Digest


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where statistics come from.

    Attributes:
        features: digest of all that turns text into what is counted: tokenizer, embeddings or trunk, sizes. Statistics
            of unlike features do not add up.
        domain: the kind of text, in its owner's words; an expert's name.
        sources: whose texts they are, sorted.
        code: version of talkoot that counted.
    """

    features: str
    domain: str
    sources: tuple[Source, ...]
    code: str


@dataclass(frozen=True)
class Statistics:
    """Of one domain.

    Attributes:
        provenance: where they come from.
        grams: by layer, or by the name of a feature.
        histogram: of the tokens, where features depend on those alone.
        documents, tokens: how many there were.
    """

    provenance: Provenance
    grams: dict[str, Gram] = field(default_factory=dict)
    histogram: Histogram | None = None
    documents: int = 0
    tokens: int = 0

    def check(self) -> None:
        """Whether these can be statistics of a text at all.

        Raises:
            ValueError: a part cannot be what it says; the message names it.
        """
        if self.documents < 1 or self.tokens < 1:
            raise ValueError("they are of no documents or no tokens")
        if not self.provenance.sources or list(self.provenance.sources) != sorted(set(self.provenance.sources)):
            raise ValueError("their sources are missing, out of order or named twice")
        if not self.grams and self.histogram is None:
            raise ValueError("they hold neither a histogram nor a Gram matrix")
        for name, gram in self.grams.items():
            try:
                gram.check()
            except ValueError as problem:
                raise ValueError(f"Gram matrix {name!r}: {problem}") from None
        if self.histogram is not None:
            self.histogram.check()
            if self.histogram.tokens != self.tokens:
                raise ValueError(f"the histogram counts {self.histogram.tokens} tokens, the header {self.tokens}")

    def write(self, path: Path, key: Key) -> None:
        """Write as a file signed by ``key``; see :func:`talkoot.blend.statistics.file.write`."""
        file.write(self, path, key)

    @classmethod
    def read(cls, path: Path, *, features: str = "") -> Statistics:
        """Read a file and check all of it; see :func:`talkoot.blend.statistics.file.read`."""
        return file.read(path, features=features)

    def blurred(self, scale: float, seed: int) -> Statistics:
        """With Gaussian noise, for owners who want to tell less.

        Args:
            scale: standard deviation in tokens (of counts) or rows (of Gram matrices).
            seed: keep it secret, and use it once: who knows it takes the noise off again.
        """
        chance = torch.Generator().manual_seed(seed)
        histogram = self.histogram.blurred(scale, chance) if self.histogram else None
        return replace(
            self,
            grams={name: self.grams[name].blurred(scale, chance) for name in sorted(self.grams)},
            histogram=histogram,
            tokens=histogram.tokens if histogram else self.tokens,
        )


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
