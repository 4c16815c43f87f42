r"""Text of a manual page in troff's languages ``man`` and ``mdoc``: words and headings, without requests and escapes.

Not a formatter: fonts, sizes, indents and tables' lines are dropped, filled text keeps the author's line ends.
"""

from __future__ import annotations

import re

_GLYPHS = {
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "bu": "•", "co": "©", "rg": "®", "tm": "™",
    "em": "—", "en": "–", "hy": "-", "mi": "−", "ha": "^", "ti": "~", "ga": "`", "rs": "\\", "sl": "/", "ba": "|",
    "ul": "_", "at": "@", "sh": "#", "Do": "$", "Eu": "€", "la": "<", "ra": ">", "lB": "[", "rB": "]", "lC": "{",
    "rC": "}", "lh": "☜", "->": "→", "<-": "←", "<=": "≤", ">=": "≥", "!=": "≠", "+-": "±", "mu": "×", "de": "°",
    "ss": "ß", ":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "'e": "é", "`e": "è", "'a": "á",
    "Fo": "«", "Fc": "»", "Bq": "„", "12": "½", "14": "¼", "34": "¾", "ci": "○", "sc": "§", "ps": "¶",
}  # fmt: skip
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
_HEADING = {"SH", "SS", "Sh", "Ss"}
_WORDS = {"B", "I", "R", "SM", "SB", "IP", "TP", "UR", "MT", "OP", "SY"}  # `man` macros whose arguments are words
_JOINED = {"BR", "RB", "BI", "IB", "IR", "RI"}  # the same, set without spaces between
_PARAGRAPH = {"PP", "P", "LP", "TP", "IP", "HP", "TQ", "br", "sp", "Pp", "It", "RS", "RE", "nf", "fi", "EX", "EE", "SY"}
_SKIPPED = {"TH", "Dd", "Dt", "Os", "Bl", "El", "Bd", "Ed"}
_MDOC = re.compile(r"[A-Z][a-z]$")  # Nm, Fl, Ar, ...: macros of `mdoc`, of which Fl means a dash
_PUNCTUATION = set(".,:;()[]?!")


def text_of_roff(page: str) -> str:
    """The page's text; empty for a page that only includes another one."""
    lines: list[str] = []
    pending = iter(page.replace("\\\n", "").split("\n"))
    for line in pending:
        if line[:1] not in (".", "'"):
            lines.append(_plain(line))
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("de", "de1", "ig", "am"):  # a definition, or text to ignore: up to its end
            end = "." + (rest.split()[-1] if len(rest.split()) > (name != "ig") else ".")
            for inner in pending:
                if inner.rstrip() == end:
                    break
        elif name == "TS":  # a table begins with its layout, up to a line that ends with a full stop
            for inner in pending:
                if inner.rstrip().endswith(".") or inner.startswith(".TE"):
                    break
        elif name not in _SKIPPED:
            lines += _request(name, _arguments(rest))
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


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
    cut = re.split(r'(?<!\\)\\["#]', rest, maxsplit=1)[0].strip()
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\.|[^\s"\\])(?:\\.|[^\s\\])*)', cut)
    return [_plain(quoted.replace('""', '"') if quoted or not bare else bare) for quoted, bare in found]


def _plain(line: str) -> str:
    return _ESCAPE.sub(_glyph, line)


def _glyph(found: re.Match[str]) -> str:
    name = found["long"] or found["two"]
    if name:
        if re.fullmatch(r"u[0-9A-F]{4,5}", name):
            return chr(int(name[1:], 16))
        return _GLYPHS.get(name, "")
    return _CHARACTERS.get(found["one"] or "", "")
