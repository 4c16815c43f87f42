"""Whether models read the same tokens; where not, which tokens differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer

_SHOWN = 5


def same_tokenizer(folders: Mapping[str, Path]) -> Tokenizer:
    """The one tokenizer of several models.

    Args:
        folders: of the models, by name.

    Raises:
        TalkootError: a folder has none, or two differ; which tokens differ, and how many.
    """
    found = {name: Tokenizer.load(folder) for name, folder in folders.items()}
    if not found:
        raise TalkootError("there is no expert", where="the blend", why="none was given", next="add one")
    first, *others = found
    for other in others:
        if found[other].digest() != found[first].digest():
            raise TalkootError(
                "the experts' tokenizers differ",
                where=f"{first} and {other}",
                why=difference(found[first], found[other]),
                next="route by prompt (each expert is then served on its own), or train the experts from one seed",
            )
    return found[first]


def difference(one: Tokenizer, other: Tokenizer) -> str:
    """How two tokenizers differ, in words: tokens that only one has, tokens of unlike ids, or else the rules."""
    ours, theirs = _tokens(one), _tokens(other)
    parts: list[str] = []
    for which, these, those in (("first", ours, theirs), ("second", theirs, ours)):
        only = sorted(these.keys() - those.keys(), key=lambda token: these[token])
        if only:
            parts.append(f"{len(only):,} of {len(these):,} tokens are only in the {which}: {_some(only)}")
    moved = sorted(
        (token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]), key=lambda t: ours[t]
    )
    if moved:
        shown = ", ".join(f"{token!r} ({ours[token]} and {theirs[token]})" for token in moved[:_SHOWN])
        parts.append(f"{len(moved):,} tokens have other ids: {shown}" + (", ..." if len(moved) > _SHOWN else ""))
    return "; ".join(parts) or "the tokens are the same; merges, normalisation, or begin and end tokens differ"


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    content: dict[str, Any] = json.loads(tokenizer.content)
    listed = content["model"].get("vocab", {})
    vocabulary = dict(listed) if isinstance(listed, dict) else {entry[0]: i for i, entry in enumerate(listed)}
    return vocabulary | {added["content"]: added["id"] for added in content.get("added_tokens", ())}


def _some(tokens: list[str]) -> str:
    return ", ".join(map(repr, tokens[:_SHOWN])) + (", ..." if len(tokens) > _SHOWN else "")
