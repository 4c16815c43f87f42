"""The King James Bible out of the text library of Debian's ``bible`` program: its format is read here, nothing is run.

The file (magic ``EC02``) has a table of offsets and, for every 64 KiB of text, one stream of LZW codes (Welch 1984) as
``compress`` writes them, without its three bytes of header. Lines are ``Ge1:1 In the beginning ...``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_TABLE, _CLEAR, _WIDEST = 0x54, 256, 16


def chapters(root: Path) -> Iterator[str]:
    """One document per chapter: a verse a line, without its reference.

    Raises:
        ValueError: the file is not in that format.
    """
    verses: list[str] = []
    current = ""
    for line in text_library((root / "usr/lib/bible.data").read_bytes()).decode("latin-1").splitlines():
        found = re.match(r"(\d?[A-Z][A-Za-z]*\d+):\d+ (.*)", line)
        if found is None:
            continue  # the title
        if found[1] != current and verses:
            yield "\n".join(verses)
            verses = []
        current = found[1]
        verses.append(found[2])
    if verses:
        yield "\n".join(verses)


def text_library(data: bytes) -> bytes:
    """All text of such a file.

    Raises:
        ValueError: the magic, the table or a stream is wrong.
    """
    if data[:4] != b"EC02" or len(data) < _TABLE + 8:
        raise ValueError("it is no text library of the bible program")
    window, count = struct.unpack_from(">II", data, _TABLE)
    if count > len(data) // 4 or window > 1 << 24 or len(data) < _TABLE + 12 + 4 * count:
        raise ValueError("the table of a text library is wrong")
    offsets = struct.unpack_from(f">{count + 1}I", data, _TABLE + 8)
    return b"".join(expand(data[first:last], window) for first, last in pairwise(offsets))


def expand(stream: bytes, limit: int) -> bytes:
    """Undo ``compress``: codes of 9 to 16 bits, least significant first, in groups of eight.

    Args:
        stream: the codes, without the header.
        limit: bytes that may come out.

    Raises:
        ValueError: a code that cannot be, or more than ``limit`` bytes.
    """
    table = [bytes([value]) for value in range(256)] + [b""]
    out, size, previous, width, bit, group = list[bytes](), 0, b"", 9, 0, 0
    while bit + width <= 8 * len(stream):
        word = int.from_bytes(stream[bit >> 3 : (bit >> 3) + 4], "little")
        code = (word >> (bit & 7)) & ((1 << width) - 1)
        bit += width
        if code == _CLEAR:
            bit = group = group + -(-(bit - group) // (8 * width)) * 8 * width
            previous, width = b"", 9
            del table[257:]
            continue
        if code > len(table) or (code == len(table) and not previous):
            raise ValueError("a stream of a text library is broken")
        entry = table[code] if code < len(table) else previous + previous[:1]
        out.append(entry)
        size += len(entry)
        if size > limit:
            raise ValueError("a stream of a text library is longer than its window")
        if previous and len(table) < 1 << _WIDEST:
            table.append(previous + entry[:1])
        previous = entry
        if len(table) >= 1 << width and width < _WIDEST:  # the rest of the group is padding
            bit = group = group + -(-(bit - group) // (8 * width)) * 8 * width
            width += 1
    return b"".join(out)
