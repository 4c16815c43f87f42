"""What the owner of a text tells others about it: counts and second moments, signed, and where they come from.

**What they leak.** A histogram is the exact number of times that each token, and each pair's bucket, occurs. A Gram
matrix of embeddings is linear in such a histogram and gives it back where the table is wide; one of hidden states
gives their mean and second moments. So statistics are not private, only smaller than the text: word order beyond pairs
stays at home. :meth:`Statistics.blurred` adds noise; it is no guarantee of differential privacy by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from talkoot.blend.statistics.gram import Gram
from talkoot.blend.statistics.histogram import Histogram
from talkoot.blend.statistics.provenance import Outline, Provenance
from talkoot.core.ids import Digest, digest, digest_of_digests
from talkoot.core.keys import Key
from talkoot.model.folder import write_file


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

    def outline(self) -> Outline:
        """All but the numbers."""
        histogram = self.histogram
        return Outline(
            provenance=self.provenance,
            documents=self.documents,
            tokens=self.tokens,
            grams={name: gram.width for name, gram in sorted(self.grams.items())},
            histogram=(histogram.vocabulary, histogram.buckets, histogram.filled) if histogram else None,
            content=_content(self.numbers()),
        )

    def numbers(self) -> dict[str, Tensor]:
        """The numbers by name, as they are stored."""
        tensors = {f"gram.{name}": gram.packed() for name, gram in self.grams.items()}
        if self.histogram is not None:
            tensors |= {f"histogram.{name}": part for name, part in self.histogram.packed().items()}
        return tensors

    @classmethod
    def rebuilt(cls, outline: Outline, tensors: Mapping[str, Tensor]) -> Statistics:
        """Statistics from both, checked.

        Raises:
            ValueError: the numbers are others than the outline's, or no text has them.
        """
        if _content(tensors) != outline.content:
            raise ValueError("the numbers were changed")
        histogram = None
        if outline.histogram:
            vocabulary, buckets, _ = outline.histogram
            parts = {name: tensors[f"histogram.{name}"] for name in ("unigrams", "full", "bigrams")}
            histogram = Histogram.unpacked(vocabulary, buckets, parts)
        statistics = cls(
            provenance=outline.provenance,
            grams={name: Gram.unpacked(width, tensors[f"gram.{name}"]) for name, width in outline.grams.items()},
            histogram=histogram,
            documents=outline.documents,
            tokens=outline.tokens,
        )
        statistics.check()
        return statistics

    def signed(self, key: Key) -> bytes:
        """A file's content, signed by ``key``; see :func:`talkoot.blend.statistics.file.signed`."""
        from talkoot.blend.statistics import file  # the file knows what it holds

        return file.signed(self, key)

    def write(self, path: Path, key: Key) -> None:
        """Write what :meth:`signed` gives."""
        content = self.signed(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)

    @classmethod
    def read(cls, path: Path, *, features: str = "") -> Statistics:
        """Read a file and check all of it; see :func:`talkoot.blend.statistics.file.read`."""
        from talkoot.blend.statistics import file

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


def _content(tensors: Mapping[str, Tensor]) -> Digest:
    return digest_of_digests((name, digest(part.numpy().tobytes())) for name, part in tensors.items())
