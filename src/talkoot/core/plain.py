"""Typed values from the text files that users write: TOML or JSON in, structs out, and errors that name the key."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from talkoot.core.errors import TalkootError, nearest

T = TypeVar("T")

CORRECT = "correct this value and run the same command again"


def read_plain(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file, or of a JSON one where the name ends in ``.json``.

    Args:
        what: first sentence of an error, such as "the recipe cannot be used".

    Raises:
        TalkootError: unreadable, broken, or not a table at its top.
    """
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except OSError as problem:
        raise _bad(what, str(path), problem.strerror or str(problem), "name a file that exists") from problem
    except (ValueError, RecursionError) as problem:  # broken, no text, or a number of thousands of digits
        raise _bad(what, str(path), f"it is not {form}: {problem}", "correct the line it names") from problem
    if not isinstance(tree, dict):
        raise _bad(what, str(path), "its top level is no table of keys and values", "begin the file with {")
    return cast("dict[str, Any]", tree)


def read_overridden(
    path: Path | None, overrides: Iterable[str], what: str, default: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A file's content (without one, ``default``), changed by ``section.key=value`` overrides.

    Values are in TOML syntax; bare words are text.

    Raises:
        TalkootError: as :func:`read_plain`, or an override is not of that form.
    """
    tree = deepcopy(dict(default)) if path is None else read_plain(path, what)
    for override in overrides:
        _override(tree, override, what)
    return tree


def _override(tree: dict[str, Any], text: str, what: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise _bad(what, f"--set {text}", "it is not of the form section.key=value", "write --set train.steps=500")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except ValueError:  # no TOML, or a number of thousands of digits
        parsed = value
    *sections, leaf = key.strip().split(".")
    for section in sections:
        inner: object = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise _bad(what, f"--set {text}", f"{section!r} is a value, not a section", CORRECT)
        tree = cast("dict[str, Any]", inner)
    tree[leaf] = parsed


def build(tree: dict[str, Any], kind: type[T], *, what: str, where: str) -> T:
    """``tree`` as a struct of type ``kind``.

    Raises:
        TalkootError: an unknown key (with the nearest name that exists), a value of a wrong type, an integer of more
            than 64 bits, or what the struct's own checks refuse.
    """
    _refuse_huge(tree, "", what, where)
    _refuse_unknown(tree, kind, "", what, where)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as problem:
        if isinstance(problem.__cause__, TalkootError):
            raise problem.__cause__ from None
        text, _, key = str(problem).partition(" - at `$.")
        raise _bad(what, f"{where}, key {key.rstrip('`') or '(top level)'}", text, CORRECT) from problem


def _refuse_huge(tree: Any, key: str, what: str, where: str) -> None:
    """Nothing could send or store an integer of more than 64 bits."""
    if isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        raise _bad(what, f"{where}, key {key}", f"it is {tree}, it must be an integer of 64 bits", CORRECT)
    if isinstance(tree, dict):
        for name, value in cast("dict[str, Any]", tree).items():
            _refuse_huge(value, f"{key}.{name}" if key else name, what, where)
    elif isinstance(tree, list):
        for index, value in enumerate(cast("list[Any]", tree)):
            _refuse_huge(value, f"{key}[{index}]", what, where)


def _refuse_unknown(tree: Any, kind: Any, prefix: str, what: str, where: str) -> None:
    inner = get_args(kind)  # tuple[Fault, ...], Mapping[str, Link]
    if isinstance(tree, list) and get_origin(kind) is tuple and inner:
        for index, value in enumerate(cast("list[Any]", tree)):
            _refuse_unknown(value, inner[0], f"{prefix.rstrip('.')}[{index}].", what, where)
    if isinstance(tree, str) and get_origin(kind) is Literal and tree not in inner:
        why = f"there is no {tree!r}; {nearest(tree, inner)}"
        raise _bad(what, f"{where}, key {prefix.rstrip('.')}", why, CORRECT)
    if not isinstance(tree, dict):
        return
    table = cast("dict[str, Any]", tree)
    if len(inner) == 2:
        for key, value in table.items():
            _refuse_unknown(value, inner[1], f"{prefix}{key}.", what, where)
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            why = f"there is no such key; {nearest(key, fields)}"
            raise _bad(what, f"{where}, key {prefix}{key}", why, "correct the key's name")
        _refuse_unknown(value, fields[key], f"{prefix}{key}.", what, where)


def _bad(what: str, where: str, why: str, next: str) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=next)
