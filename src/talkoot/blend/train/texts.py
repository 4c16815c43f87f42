"""A run's text as tokens: split by document, packed once below the run's folder, the same for every peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import cast

from talkoot.blend.recipe import BlendRecipe, Domain
from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest
from talkoot.data import TokenFile, read_documents
from talkoot.data.pack import Tokenizer as Packing
from talkoot.data.pack import pack
from talkoot.data.split import split_documents
from talkoot.model.tokenizer import Tokenizer

TOKENIZER, TOKENS = "tokenizer", "tokens"
GENERAL = "general"
PIECES = 200  # of a domain, so that its small sides get some


def prepare_tokenizer(recipe: BlendRecipe, folder: Path) -> Tokenizer:
    """The recipe's tokenizer, trained or loaded once and kept in the run's folder. It is trained on general text: a
    domain's owner need not show theirs.

    Raises:
        TalkootError: it has no token that ends a document.
    """
    kept = folder / TOKENIZER
    if (kept / "tokenizer.json").is_file():
        return Tokenizer.load(kept)
    spec = recipe.model.tokenizer
    kind, _, size = spec.partition(":")
    if recipe.model.load:
        tokenizer = Tokenizer.load(recipe.model.load)  # a loaded model understands only its own tokens
    elif spec == "bytes":
        tokenizer = Tokenizer.bytes()
    elif kind == "bpe" and size.isdigit():
        tokenizer = Tokenizer.train(_general(recipe), int(size))
    else:
        tokenizer = Tokenizer.load(spec)
    if tokenizer.eos_id is None:
        raise TalkootError(
            "the tokenizer has no end-of-text token",
            where=recipe.model.load or spec,
            why="documents are joined with one, and its tokenizer_config.json names none",
            next="set eos_token in the tokenizer's tokenizer_config.json",
        )
    tokenizer.save(kept)
    return tokenizer


def _general(recipe: BlendRecipe) -> Iterator[str]:
    for source in recipe.general.sources:
        yield from sample(read_documents(source, recipe.general.column), recipe.general.megabytes)


def sample(texts: Iterable[str], megabytes: float) -> list[str]:
    """Documents of so many megabytes together (0 = all), chosen and ordered by their content, not by their place."""
    found = list(texts)
    if not megabytes:
        return found
    ranked = sorted(found, key=lambda text: digest(text.encode(), "sample"))
    sizes = accumulate(len(text.encode()) for text in ranked)
    # The one that would exceed is left out, unless it is the first.
    return [
        text
        for place, (text, size) in enumerate(zip(ranked, sizes, strict=True))
        if not place or size <= megabytes * 1e6
    ]


def documents(recipe: BlendRecipe, name: str, part: str) -> list[str]:
    """The texts of one side of a domain's split.

    Raises:
        TalkootError: there are too few documents for three sides.
    """
    domain = recipe.domain(name)
    found = sample(read_documents(domain.source, domain.column), domain.megabytes)
    pieces = domain.pieces or math.ceil(PIECES / max(1, len(found)))
    split = split_documents(found, seed=recipe.seed, pieces=pieces)
    side: list[str] = getattr(split, part)
    if not side:
        raise TalkootError(
            f"domain {name!r} is too small",
            where=domain.source,
            why=f"none of its documents fell to the side {part!r} of the split",
            next="give it more text, or cut it finer with domains.pieces",
        )
    return side


def general_tokens(recipe: BlendRecipe, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """What the general model learns."""

    def texts() -> Iterator[str]:
        yield from _general(recipe)
        for domain in recipe.domains if recipe.general.domains else ():
            yield from documents(recipe, domain.name, "train")

    return _packed(texts(), tokenizer, folder / TOKENS / GENERAL, "general text")


def domain_tokens(recipe: BlendRecipe, name: str, part: str, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """One side of a domain's text."""
    target = folder / TOKENS / name / part
    if (target / "tokens.json").is_file():
        return TokenFile.open(target, tokenizer=cast(Packing, tokenizer))
    return _packed(iter(documents(recipe, name, part)), tokenizer, target, f"{recipe.domain(name).source}, {part}")


def _packed(texts: Iterator[str], tokenizer: Tokenizer, folder: Path, what: str) -> TokenFile:
    if (folder / "tokens.json").is_file():
        return TokenFile.open(folder, tokenizer=cast(Packing, tokenizer))
    # Two peers at once write the same bytes, each whole before it shows.
    return pack(texts, cast(Packing, tokenizer), folder, what)


def check_readable(domain: Domain) -> None:
    """Refuse a domain whose source does not exist, before anything is trained."""
    read_documents(domain.source, domain.column)


__all__ = ["check_readable", "documents", "domain_tokens", "general_tokens", "prepare_tokenizer"]
