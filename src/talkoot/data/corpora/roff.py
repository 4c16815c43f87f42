r"""Text of a manual page in troff's languages ``man`` and ``mdoc``: words and headings, without requests and escapes.

Not a formatter: fonts, sizes, indents and tables' lines are dropped, filled text keeps the author's line ends.
"""

from __future__ import annotations

import re

_NAMED = """
    aq ' | dq " | lq \u201c | rq \u201d | oq \u2018 | cq \u2019 | Bq \u201e | Fo « | Fc » | bu • | em — | en \u2013
    hy - | mi \u2212 | ha ^ | ti ~ | ga ` | rs \\ | sl / | ul _ | at @ | sh # | Do $ | Eu € | la < | ra > | lB [ | rB ]
    lC { | rC } | -> → | <- ← | <= ≤ | >= ≥ | != ≠ | +- ± | mu \u00d7 | de ° | co © | rg ® | tm ™ | sc § | ps ¶ | 12 ½
    14 ¼ | 34 ¾ | ss ß | :a ä | :o ö | :u ü | :A Ä | :O Ö | :U Ü | 'e é | `e è | 'a á"""
_GLYPHS = {pair.split()[0]: pair.split()[1] for pair in _NAMED.replace("\n", "|").split("|")[1:]}
_CHARACTERS = {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", "_": "_", ".": "."}
_ESCAPE = re.compile(
    r"""\\(?:
      \[(?P<long>[^\]\n]*)\] | \((?P<two>..)
    | [*nfFgkmMVY](?:\[[^\]\n]*\]|\(..|.)             # strings, registers, fonts, colours
    | s[-+]?(?:\[[^\]\n]*\]|\(..|'[^'\n]*'|[0-3]?\d)  # sizes
    | [bhvwxlLDoXZNARS](?P<quote>[^\w\s\\]).*?(?P=quote) # motions, drawings, widths
    | ["\#].*                                          # a comment
    | (?P<one>.) | $ )""",
    re.VERBOSE,
)
_REQUEST = re.compile(r"^[.']\s*([^\s\\]*)\s*(.*)")
_HEADING = {"SH", "SS", "Sh", "Ss"}
_WORDS = {
    "B",
    "I",
    "R",
    "SM",
    "SB",
    "IP",
    "TP",
    "UR",
    "MT",
    "OP",
    "SY",
    "URL",
    "MTO",
}  # `man` macros whose arguments are words
_JOINED = {"BR", "RB", "BI", "IB", "IR", "RI"}  # the same, set without spaces between
_PARAGRAPH = {"PP", "P", "LP", "TP", "IP", "HP", "TQ", "br", "sp", "Pp", "It", "RS", "RE", "nf", "fi", "EX", "EE", "SY"}
_SKIPPED = {"TH", "Dd", "Dt", "Os", "Bl", "El", "Bd", "Ed"}
_MDOC = re.compile(r"[A-Z][a-z]$")  # Nm, Fl, Ar, ...: macros of `mdoc`, of which Fl means a dash
_PUNCTUATION = set(".,:;()[]?!")


def text_of_roff(page: str) -> str:
    """The page's text; empty for a page that only includes another one."""
    lines: list[str] = []
    pending = iter(page.split("\n"))
    for line in pending:
        if line[:1] not in (".", "'"):
            lines.append(_plain(line))
            continue
        name, rest = _REQUEST.findall(line)[0]
        skipped = _skipped_to(name, rest)
        if skipped is not None:
            for inner in pending:
                if skipped.search(inner):
                    break
        elif name not in _SKIPPED:
            lines += _request(name, _arguments(rest))
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _skipped_to(name: str, rest: str) -> re.Pattern[str] | None:
    """How the last line looks of what a request begins that is not for readers; None for other requests."""
    words = _uncommented(rest).split()
    if name in ("de", "de1", "am", "ig"):  # a macro, or text to ignore
        end = words[-1] if len(words) > (name != "ig") else "."
        return re.compile(rf"^[.']\s*{re.escape(end)}\s*$")
    if name == "TS":  # a table's layout
        return re.compile(r"\.\s*$|^\.TE")
    if name in ("if", "ie", "el", "while") and "\\{" in rest and "\\}" not in rest:
        return re.compile(r"\\}")
    return None


def _request(name: str, words: list[str]) -> list[str]:
    before = [""] if name in _PARAGRAPH else []
    if name in _HEADING:
        return ["", " ".join(words), ""]
    if name == "IP":
        words = words[:1]  # the second is an indent
    elif name == "TP" or name in ("RS", "RE", "sp", "HP", "br"):
        words = []
    if name in _JOINED:
        return ["".join(words)]
    if name in _WORDS:
        return [*before, " ".join(words)] if words else before
    if _MDOC.match(name) and words:
        return [*before, _mdoc(name, words)]
    return before


def _mdoc(name: str, words: list[str]) -> str:
    said, dash = "", name == "Fl"
    for word in words:
        if _MDOC.match(word):
            dash = word == "Fl"
            continue
        tight = not said or word in _PUNCTUATION
        said += ("" if tight else " ") + ("-" if dash and word not in _PUNCTUATION else "") + word
        dash = False
    return said


def _arguments(rest: str) -> list[str]:
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\.|[^\s"\\])(?:\\.|[^\s\\])*)', _uncommented(rest))
    return [_plain(quoted.replace('""', '"') if quoted or not bare else bare) for quoted, bare in found]


def _uncommented(rest: str) -> str:
    return re.split(r'(?<!\\)\\["#]', rest, maxsplit=1)[0].strip()


def _plain(line: str) -> str:
    return _ESCAPE.sub(_glyph, line)


def _glyph(found: re.Match[str]) -> str:
    name = found["long"] or found["two"]
    if name:
        if re.fullmatch(r"u[0-9A-F]{4,5}", name):
            return chr(int(name[1:], 16))
        return _GLYPHS.get(name, "")
    return _CHARACTERS.get(found["one"] or "", "")
