"""What was downloaded, for the record."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """One downloaded package.

    Attributes:
        package, version: as the package itself says.
        sha256: of the downloaded file in hex; empty where nothing was downloaded.
        download_bytes: its size.
    """

    package: str
    version: str
    sha256: str = ""
    download_bytes: int = 0


def parcel(package: str, version: str, archive: Path) -> Parcel:
    """The record about a downloaded archive."""
    with archive.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Parcel(package=package, version=version, sha256=sha256, download_bytes=archive.stat().st_size)
