"""Where statistics come from, and what they hold, without their numbers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from talkoot.blend.statistics.gram import MAX_WIDTH
from talkoot.blend.statistics.histogram import MAX_BUCKETS, MAX_VOCABULARY
from talkoot.core.ids import Digest, PeerId, digest

MAX_GRAMS = 1024


class Source(msgspec.Struct, frozen=True, order=True):
    """Somebody's text.

    Attributes:
        contributor: who counted.
        dataset: digest of the documents, in any order.
    """

    contributor: PeerId
    dataset: Digest


def dataset_digest(documents: Iterable[str]) -> Digest:
    """Of a text, from the digests of its documents' token ids (int64), in any order."""
    return digest("".join(sorted(documents)).encode(), "documents")


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


class Outline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics without their numbers.

    Attributes:
        provenance, documents, tokens: as in `Statistics`.
        grams: width of each Gram matrix by name.
        histogram: vocabulary, buckets, and how many of those are not empty; None without one.
        content: digest of all numbers.
    """

    provenance: Provenance
    documents: int
    tokens: int
    grams: dict[str, int]
    histogram: tuple[int, int, int] | None
    content: Digest

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type, as safetensors writes it, and shape of each tensor by name.

        Raises:
            ValueError: sizes that no statistics have.
        """
        vocabulary, buckets, filled = self.histogram or (1, 0, 0)
        widths = self.grams.values()
        if len(widths) > MAX_GRAMS or not all(1 <= width <= MAX_WIDTH for width in widths):
            raise ValueError("the sizes of its Gram matrices cannot be")
        if not (1 <= vocabulary <= MAX_VOCABULARY and 0 <= filled <= buckets <= MAX_BUCKETS):
            raise ValueError("the sizes of its histogram cannot be")
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            f"gram.{name}": ("F64", ((w + 1) * (w + 2) // 2,)) for name, w in self.grams.items()
        }
        if self.histogram:
            found |= {
                "histogram.unigrams": ("I64", (vocabulary,)),
                "histogram.full": ("I32", (filled,)),
                "histogram.bigrams": ("I64", (filled,)),
            }
        return found
