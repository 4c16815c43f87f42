"""Documents into training, validation and test text, so that no document's side depends on the others.

A document's side is a hash of its content held against the two shares: the same on every machine, in any order and
company, and exact duplicates cannot end up on two sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Split(NamedTuple):
    """Three lists of documents, each in the order in which they came."""

    train: list[str]
    validation: list[str]
    test: list[str]


def split_documents(
    documents: Iterable[str], *, seed: int = 0, validation: float = 0.05, test: float = 0.05, pieces: int = 1
) -> Split:
    """Share documents out; of exact duplicates the first is kept.

    Args:
        documents: any strings.
        seed: another one gives another, independent split.
        validation, test: expected shares of the documents (not of the bytes).
        pieces: first cut every document into so many contiguous spans of about equal length, at line ends where there
            are some: for corpora of few long documents. A document with fewer characters gives fewer.

    Raises:
        ValueError: a share is negative, both leave nothing to train on, or ``pieces`` is below 1.
    """
    if min(validation, test) < 0 or not validation + test < 1 or pieces < 1:
        raise ValueError(f"shares of {validation} and {test} in {pieces} pieces cannot be had")
    sides = Split([], [], [])
    seen = set[bytes]()
    for document in documents:
        for piece in spans(document, pieces):
            mark = _mark(piece, "same")
            if mark in seen:
                continue
            seen.add(mark)
            place = int.from_bytes(_mark(piece, f"side {seed}")[:8], "big") / 2**64
            side = sides.test if place < test else sides.validation if place < test + validation else sides.train
            side.append(piece)
    return sides


def spans(text: str, count: int) -> Iterator[str]:
    """Contiguous spans that together are ``text``: at most ``count``, none empty (but for an empty text).

    Each ends at the last line end before its share is used up, and in mid-line only where its share holds none.
    """
    start = 0
    for number in range(1, count):
        target = len(text) * number // count
        cut = text.rfind("\n", start, target) + 1 or target
        if cut > start:
            yield text[start:cut]
            start = cut
    if start < len(text) or not text:
        yield text[start:]


def _mark(text: str, purpose: str) -> bytes:
    return hashlib.blake2b(f"{purpose}\n{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
