"""Packages made by hand for the tests of the corpora: Debian archives, wheels, source archives, a compressed Bible."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

WINDOW = 65536


def tar(members: dict[str, bytes | None], mode: str = "w:gz") -> bytes:
    """A tar archive; a member without content is a symbolic link to /etc/passwd."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content or b""))
    return packed.getvalue()


def deb(
    path: Path,
    members: dict[str, bytes | None],
    *,
    depends: str = "",
    version: str = "1:2.0-1",
    padding: int = 0,
) -> Path:
    """A binary package: an ar archive of its format's version, control and data; ``padding`` zeros end the data."""
    fields = {"Package": path.name.split("_")[0], "Version": version, "Architecture": "all", "Maintainer": "A <a@b.c>"}
    if depends:
        fields["Depends"] = depends
    control = "".join(f"{key}: {value}\n" for key, value in fields.items()) + "Description: toy\n"
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": tar({"./control": control.encode()}),
        "data.tar.gz": gzip.compress(tar({f"./{name}": one for name, one in members.items()}, "w") + bytes(padding)),
    }
    data = b"!<arch>\n"
    for name, content in parts.items():
        data += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        data += b"\n" * (len(content) % 2)
    path.write_bytes(data)
    return path


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    """``NAME-VERSION-py3-none-any.whl``."""
    name, version = path.name.split("-")[:2]
    about = f"{name}-{version}.dist-info"
    record = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {
            **members,
            f"{about}/METADATA": record,
            f"{about}/WHEEL": b"Wheel-Version: 1.0\n",
        }.items():
            archive.writestr(member, content)
    return path


def sdist(path: Path, members: dict[str, bytes]) -> Path:
    """``NAME-VERSION.tar.gz`` with everything below ``NAME-VERSION/``."""
    top = path.name.removesuffix(".tar.gz")
    path.write_bytes(tar({f"{top}/{name}": content for name, content in members.items()}))
    return path


def compress(data: bytes) -> bytes:
    """LZW codes as ``compress`` writes them, without the header: widths from 9 to 16 bits, groups of eight codes."""
    table = {bytes([value]): value for value in range(256)}
    bits, group, width, following = "", 0, 9, 257  # 256 is kept for starting anew

    def put(code: int) -> None:
        nonlocal bits, group
        bits = f"{code:0{width}b}" + bits  # the least significant bit comes first
        group = (group + 1) % 8

    word = b""
    for value in data:
        longer = word + bytes([value])
        if longer in table:
            word = longer
            continue
        put(table[word])
        if following < 1 << 16:
            table[longer] = following
            following += 1
        if following > 1 << width and width < 16:
            while group:
                put(0)
            width += 1
        word = bytes([value])
    if word:
        put(table[word])
    return int(bits or "0", 2).to_bytes(-(-len(bits) // 8), "little")


def library(text: bytes, window: int = WINDOW) -> bytes:
    """A text library of the bible program."""
    streams = [compress(text[start : start + window]) for start in range(0, len(text), window)]
    header = b"EC02Compressed Data File".ljust(0x54, b"\0") + struct.pack(">II", window, len(streams))
    offset = len(header) + 4 * (len(streams) + 1) + 3
    offsets = [offset]
    for stream in streams:
        offsets.append(offsets[-1] + len(stream))
    return header + struct.pack(f">{len(offsets)}I", *offsets) + b"\x1f\x9d\x90" + b"".join(streams)


def zipped(text: str) -> bytes:
    """Gzipped UTF-8."""
    return gzip.compress(text.encode(), mtime=0)
