"""HTML and SVG from Python. What is not marked as markup is escaped: strangers write logs."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is already safe HTML."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Text as it must appear inside an element or a quoted attribute."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def join(parts: Iterable[object]) -> Markup:
    """Several pieces in a row; None is left out."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def tag(name: str, *children: object, **attributes: Any) -> Markup:
    """An element. ``cls`` is ``class``, ``_`` in names is ``-``; None and False omit an attribute."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = {"cls": "class", "for_": "for", "viewbox": "viewBox", "preserve": "preserveAspectRatio"}.get(key, key)
        text = "" if value is True else f'="{escape(number(value))}"'
        written.append(f" {key.replace('_', '-')}{text}")
    return Markup(f"<{name}{''.join(written)}>{join(children)}</{name}>")


def number(value: object) -> object:
    """Coordinates without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def data_block(identifier: str, data: Any) -> Markup:
    """JSON inside a page that can neither end its element early nor start another one."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{identifier}">{text}</script>')
