"""Text of an HTML page: what a reader sees, without navigation; paragraphs become one line, ``<pre>`` is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.parser import HTMLParser

_SILENT = frozenset({"head", "script", "style", "template", "noscript"})
_INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img", "ins", "kbd"}
    | {"mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr"}
)
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "wbr"}
)
_NEVER_CLOSED = frozenset({"p", "li", "dt", "dd", "tr", "td", "th", "option"})  # HTML lets authors leave the end out


class _Reader(HTMLParser):
    def __init__(self, without: Iterable[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.without = frozenset(without)
        self.parts: list[str] = []
        self.mute: list[str] = []  # open elements from the one that is left out on
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = next((value or "" for name, value in attrs if name == "class"), "").split()
        if self.mute or ((tag in _SILENT or not self.without.isdisjoint(classes)) and tag not in _VOID):
            if tag not in _VOID and tag not in _NEVER_CLOSED:
                self.mute.append(tag)
            return
        if tag == "pre":
            self.preformatted += 1
        if tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")
        elif tag not in _INLINE:
            self.parts.append("\n\n" if tag != "tr" else "\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.mute:
            if tag in self.mute:  # an end that was forgotten within must not keep the rest of the page silent
                while self.mute.pop() != tag:
                    pass
            return
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if tag not in _INLINE and tag not in ("td", "th", "tr"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self.mute:
            return
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1][-1:].isspace():
                data = data.lstrip()
        if data:
            self.parts.append(data)


def text_of_html(page: str, without: Iterable[str] = ()) -> str:
    """The page's text.

    Args:
        page: HTML, however untidy.
        without: classes of elements to leave out with all that is in them, such as a navigation bar's.
    """
    reader = _Reader(without)
    reader.feed(page)
    reader.close()
    text = re.sub(r"[ \t]+\n", "\n", "".join(reader.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip()
