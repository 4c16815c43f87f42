"""Packages of a Debian system's own mirrors: downloaded and unpacked, never installed, without special rights."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from talkoot.core.errors import Exit, TalkootError
from talkoot.data.corpora.parcel import Parcel, parcel
from talkoot.data.corpora.unpack import broken, unpack

_TIMEOUT_S = 900.0


def get(package: str, wanted: tuple[str, ...], scratch: Path) -> tuple[Path, tuple[Parcel, ...]]:
    """Download ``package`` in the version that this system's lists name, and unpack the wanted files.

    Returns:
        The folder with the files, and what was downloaded.

    Raises:
        TalkootError: there is no apt here, it does not know the package, the network is down, or the package is broken.
    """
    root, parcels = scratch / "files", list[Parcel]()
    while True:
        archive = _download(package, scratch / f"download-{len(parcels)}")
        name, version, depends = _about(archive)
        parcels.append(parcel(name, version, archive))
        if unpack(archive, root, wanted):
            return root, tuple(parcels)
        needs = [need.strip() for need in depends.split(",") if need.strip()]
        if len(parcels) > 1 or len(needs) != 1 or "|" in needs[0]:
            raise broken(archive.name, f"no file in it matches {' or '.join(wanted)}")
        package = needs[0].split()[0]  # a package without text of its own stands for the release's current one


def _download(package: str, folder: Path) -> Path:
    if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package):  # it may stand in a stranger's list of needs
        raise broken(package, "this is no package's name")
    folder.mkdir()
    _run(["apt-get", "download", "-q", package], folder, package)
    found = list(folder.glob("*.deb"))
    if len(found) != 1:
        raise broken(package, f"apt-get left {len(found)} files instead of one")
    return found[0]


def _about(archive: Path) -> list[str]:
    shown = "${Package}\\t${Version}\\t${Depends}"
    fields = _run(["dpkg-deb", "--show", f"--showformat={shown}", archive.name], archive.parent, archive.name)
    return [*fields.split("\t"), "", ""][:3]


def _run(command: list[str], folder: Path, package: str) -> str:
    where = f"{command[0]} for {package}"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise TalkootError(
            "this corpus comes from a Debian package, and there is no apt here",
            where=where,
            why=f"the program {command[0]} is not installed",
            next="fetch it on a Debian or Ubuntu machine and copy its folder from the cache, or use another corpus",
        ) from None
    except subprocess.TimeoutExpired:
        raise _failed(where, f"it took more than {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        if command[0] == "dpkg-deb":
            raise broken(package, _complaint(done.stderr))
        raise _failed(where, _complaint(done.stderr))
    return done.stdout


def _complaint(text: str) -> str:
    errors = re.findall(r"^(?:E|dpkg-deb: error): *(.+)", text, re.MULTILINE)
    return (errors or text.strip().splitlines() or ["it gives no reason"])[0]


def _failed(where: str, why: str) -> TalkootError:
    unknown = "Unable to locate" in why or "no candidate" in why.lower() or "No packages found" in why
    return TalkootError(
        "the package cannot be downloaded",
        where=where,
        why=why,
        next="refresh the lists with `apt-get update`; if this release lacks the package, use another corpus"
        if unknown
        else "check the network and the disk, and run the same command again",
        code=Exit.BAD_INPUT if unknown else Exit.UNREACHABLE,
    )
