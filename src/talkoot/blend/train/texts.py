"""A run's text as tokens: split by document, packed once below the run's folder, the same for every peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from talkoot.blend.folder import TOKENIZER
from talkoot.blend.recipe import BlendRecipe, Domain
from talkoot.blend.text import TOKENS, has_part, packed, sample, split_source
from talkoot.core.errors import TalkootError
from talkoot.data import TokenFile, read_documents
from talkoot.model.tokenizer import Tokenizer

GENERAL = "general"


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


def documents(recipe: BlendRecipe, name: str, part: str) -> list[str]:
    """The texts of one side of a domain's split."""
    domain = recipe.domain(name)
    split = split_source(
        domain.source, domain.column, megabytes=domain.megabytes, pieces=domain.pieces, seed=recipe.seed
    )
    return getattr(split, part)


def general_tokens(recipe: BlendRecipe, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """What the general model learns."""

    def texts() -> Iterator[str]:
        yield from _general(recipe)
        for domain in recipe.domains if recipe.general.domains else ():
            yield from documents(recipe, domain.name, "train")

    return packed(folder / TOKENS / GENERAL, texts(), tokenizer, "general text")


def domain_tokens(recipe: BlendRecipe, name: str, part: str, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """One side of a domain's text."""
    target = folder / TOKENS / name / part
    if has_part(folder, name, part):
        return packed(target, (), tokenizer, name)
    return packed(target, documents(recipe, name, part), tokenizer, f"{recipe.domain(name).source}, {part}")


def check_readable(domain: Domain) -> None:
    """Refuse a domain without text before anything is trained; a corpus is fetched now, not by all peers at once."""
    next(read_documents(domain.source, domain.column))
