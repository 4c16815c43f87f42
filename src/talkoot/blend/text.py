"""A domain's text: sampled, split by document, packed once below the blend's folder, and read back by document.

``tokens/NAME/{train,validation,test}`` hold the sides. Statistics are counted on the first, calibration looks at the
second, and the third is for those who measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

import numpy as np

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest
from talkoot.data import TokenFile, read_documents
from talkoot.data.pack import Tokenizer as Packing
from talkoot.data.pack import pack
from talkoot.data.split import Split, split_documents
from talkoot.model.tokenizer import Tokenizer

TOKENS = "tokens"
PARTS = ("train", "validation", "test")
PIECES = 200  # of a domain, so that its small sides get some


def split_source(source: str, column: str = "text", *, megabytes: float = 0.0, pieces: int = 0, seed: int = 0) -> Split:
    """A source's documents on three sides.

    Args:
        source, column: see ``talkoot.data``.
        megabytes: at most so much of it, see :func:`sample`; 0 = all.
        pieces: cut each document into so many stretches first; 0 = as many as make 200 of all.
        seed: of the split.

    Raises:
        TalkootError: the source cannot be read, or a side got nothing.
    """
    found = sample(read_documents(source, column), megabytes)
    pieces = pieces or math.ceil(PIECES / max(1, len(found)))
    split = split_documents(found, seed=seed, pieces=pieces)
    for part in PARTS:
        if not getattr(split, part):
            raise TalkootError(
                "the domain is too small",
                where=source,
                why=f"none of its documents fell to the side {part!r} of the split",
                next="give it more text, or, in a recipe, cut it finer: pieces = 400 in its [[domains]]",
            )
    return split


def sample(texts: Iterable[str], megabytes: float) -> list[str]:
    """Documents of so many megabytes together (0 = all), chosen and ordered by their content, not by their place."""
    found = list(texts)
    if not megabytes:
        return found
    ranked = sorted(found, key=lambda text: digest(text.encode(), "sample"))
    sizes = accumulate(len(text.encode()) for text in ranked)
    # The one that would exceed is left out, unless it is the first.
    pairs = enumerate(zip(ranked, sizes, strict=True))
    return [text for place, (text, size) in pairs if not place or size <= megabytes * 1e6]


def packed(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, source: str) -> TokenFile:
    """Texts as tokens; what lies in the folder already is taken as it is."""
    if (folder / "tokens.json").is_file():
        return TokenFile.open(folder, tokenizer=cast(Packing, tokenizer))
    # Two peers at once write the same bytes, each whole before it shows.
    return pack(texts, cast(Packing, tokenizer), folder, source)


def pack_split(folder: Path, name: str, split: Split, tokenizer: Tokenizer, source: str) -> None:
    """All three sides of a domain below a blend's folder."""
    for part in PARTS:
        packed(folder / TOKENS / name / part, getattr(split, part), tokenizer, f"{source}, {part}")


def has_part(folder: Path, name: str, part: str) -> bool:
    """Whether a side of a domain's text is packed in a blend's folder."""
    return (folder / TOKENS / name / part / "tokens.json").is_file()


def documents_of(folder: Path, name: str, part: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each packed document, without its end token.

    Raises:
        TalkootError: the text is not packed here, or by another tokenizer.
    """
    tokens = TokenFile.open(folder / TOKENS / name / part, tokenizer=cast(Packing, tokenizer)).tokens
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True) if b > a]


def spread_windows(documents: Sequence[Sequence[int]], length: int, most_tokens: int) -> list[Sequence[int]]:
    """Stretches of at most ``length`` tokens from all over the documents, together about ``most_tokens``."""
    cuts = [document[at : at + length] for document in documents for at in range(0, len(document), length)]
    step = max(1, math.ceil(len(cuts) * length / max(1, most_tokens)))
    return cuts[::step]
