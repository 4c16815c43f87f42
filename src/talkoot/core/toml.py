"""Plain data as TOML, for files that we write and users read, change and hand back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

Table: TypeAlias = Mapping[str, Any]


def to_toml(tree: Table) -> str:
    """``tree`` as TOML, from which ``tomllib`` reads an equal one, apart from values that are None, which it lacks.

    A table whose values are tables gets a section, and each of its values a line; all others stand on one line, but
    lists of lists or tables, which get a line per item.

    Args:
        tree: tables, lists, text, finite numbers and booleans.
    """
    return "\n".join(_section(tree, ())) + "\n"


def _section(table: Table, path: tuple[str, ...]) -> Iterator[str]:
    """Values before tables: a table's header takes all that follows."""
    sections: dict[str, Table] = {}
    for key, value in table.items():
        inner = _table(value)
        if inner is not None and (not path or any(map(_is_table, inner.values()))):
            sections[key] = inner
        elif value is not None:
            yield f"{_key(key)} = {_lines(value)}"
    for key, value in sections.items():
        yield f"\n[{'.'.join(map(_key, (*path, key)))}]"
        yield from _section(value, (*path, key))


def _lines(value: Any) -> str:
    items = _items(value)
    if any(_is_table(item) or _items(item) for item in items):
        return "\n".join(("[", *(f"  {_inline(item)}," for item in items), "]"))
    return _inline(value)


def _inline(value: Any) -> str:
    if (table := _table(value)) is not None:
        inside = ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in table.items() if item is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, _items(value)))}]"
    # JSON's text and finite numbers are TOML's, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def _table(value: Any) -> Table | None:
    return cast("Table", value) if isinstance(value, Mapping) else None


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _items(value: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("-", "").replace("_", "").isalnum() else _inline(key)
