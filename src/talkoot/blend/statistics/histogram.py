"""Counts of tokens and of pairs of neighbours: integers, so that sums are exact in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_VOCABULARY, MAX_BUCKETS = 1 << 21, 1 << 22
MAX_TOKENS = 1 << 53  # beyond, doubles could not hold the counts


class Histogram:
    """How often each token occurs, and each pair of neighbours, hashed into a fixed number of buckets.

    Args:
        vocabulary: number of token ids.
        buckets: for pairs; 0 = pairs are not counted.
        unigrams, bigrams: the counts so far, int64 of shapes (vocabulary,) and (buckets,).

    Raises:
        ValueError: sizes that cannot be.
    """

    def __init__(
        self, vocabulary: int, buckets: int = 0, unigrams: Tensor | None = None, bigrams: Tensor | None = None
    ) -> None:
        if not (1 <= vocabulary <= MAX_VOCABULARY and 0 <= buckets <= MAX_BUCKETS):
            raise ValueError(f"no histogram has {vocabulary} tokens and {buckets} buckets")
        self.vocabulary, self.buckets = vocabulary, buckets
        self.unigrams = torch.zeros(vocabulary, dtype=torch.int64) if unigrams is None else unigrams
        self.bigrams = torch.zeros(buckets, dtype=torch.int64) if bigrams is None else bigrams
        for counts, size in ((self.unigrams, vocabulary), (self.bigrams, buckets)):
            if counts.dtype != torch.int64 or tuple(counts.shape) != (size,):
                raise ValueError(f"expected ({size},) int64, got {tuple(counts.shape)} {counts.dtype}")

    def add(self, ids: Sequence[int] | Tensor) -> None:
        """Count one document's token ids.

        Raises:
            ValueError: an id outside the vocabulary; nothing was counted then.
        """
        tokens = as_ids(ids, self.vocabulary)
        self.unigrams += torch.bincount(tokens, minlength=self.vocabulary)
        if self.buckets:
            # Not bincount: that would make and add all buckets anew for each document, of which many are short.
            self.bigrams.scatter_add_(0, pair_buckets(tokens, self.buckets), torch.ones_like(tokens[1:]))

    @property
    def tokens(self) -> int:
        """How many were counted."""
        return int(self.unigrams.sum())

    def __add__(self, other: Histogram) -> Histogram:
        if (self.vocabulary, self.buckets) != (other.vocabulary, other.buckets):
            raise ValueError("histograms of unlike vocabularies or numbers of buckets do not add up")
        return Histogram(self.vocabulary, self.buckets, self.unigrams + other.unigrams, self.bigrams + other.bigrams)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram)
            and torch.equal(self.unigrams, other.unigrams)
            and torch.equal(self.bigrams, other.bigrams)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def filled(self) -> int:
        """How many buckets are not empty."""
        return int((self.bigrams > 0).sum())

    def packed(self) -> dict[str, Tensor]:
        """As it is stored: the counts of tokens, the buckets that are not empty (int32, rising), and their counts."""
        full = self.bigrams.nonzero()[:, 0]
        return {"unigrams": self.unigrams, "full": full.to(torch.int32), "bigrams": self.bigrams[full]}

    @classmethod
    def unpacked(cls, vocabulary: int, buckets: int, parts: Mapping[str, Tensor]) -> Histogram:
        """From what :meth:`packed` gave.

        Raises:
            ValueError: a bucket is out of range, out of order or named twice.
        """
        histogram, full = cls(vocabulary, buckets, parts["unigrams"]), parts["full"].long()
        if len(full) and not (int(full[0]) >= 0 and int(full[-1]) < buckets and bool((full.diff() > 0).all())):
            raise ValueError("its buckets are out of range or out of order")
        histogram.bigrams[full] = parts["bigrams"]
        return histogram

    def check(self) -> None:
        """Whether these can be counts.

        Raises:
            ValueError: negative or absurdly large, or more pairs than tokens allow.
        """
        for counts in (self.unigrams, self.bigrams):
            if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) < MAX_TOKENS // len(counts):
                raise ValueError("it holds negative or absurdly large counts")
        if int(self.bigrams.sum()) > self.tokens:
            raise ValueError("it counts more pairs of neighbours than tokens")

    def blurred(self, scale: float, chance: torch.Generator) -> Histogram:
        """With rounded Gaussian noise of standard deviation ``scale`` on each count, and nothing below zero."""
        unigrams, bigrams = (
            (counts + (torch.randn(len(counts), generator=chance, dtype=torch.float64) * scale).round().long()).clamp(
                min=0
            )
            for counts in (self.unigrams, self.bigrams)
        )
        excess = int(bigrams.sum()) - int(unigrams.sum())
        if excess > 0:  # thin pairs drown in noise that only adds: scale them back to what tokens allow
            bigrams = (bigrams.double() * (float(unigrams.sum()) / float(bigrams.sum()))).floor().long()
        return Histogram(self.vocabulary, self.buckets, unigrams, bigrams)


def as_ids(ids: Sequence[int] | Tensor, vocabulary: int) -> Tensor:
    """Token ids as int64, (n,).

    Raises:
        ValueError: an id outside the vocabulary.
    """
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ValueError(f"a token id is not below {vocabulary}, the size of the vocabulary")
    return tokens


def pair_buckets(tokens: Tensor, buckets: int) -> Tensor:
    """The bucket of each pair of neighbours, (n - 1,); multiplicative hashing (Knuth 1973), the same everywhere."""
    return hashed(tokens[:-1], tokens[1:], buckets)


def hashed(first: Tensor, second: Tensor, buckets: int) -> Tensor:
    """The bucket of each pair of a token and the one after it, of any shape."""
    mixed = first * 0x9E3779B1 + second
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D  # int64 wraps around
    return ((mixed >> 32) & 0x7FFFFFFF) % buckets
