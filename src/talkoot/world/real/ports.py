"""Addresses and ports of this machine: which never leave it, and who listens where (Linux)."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from talkoot.core.errors import TalkootError

LISTEN = "0A"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address that never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def holder_of(port: int) -> str:
    """A description of the process that listens on TCP ``port``, as far as this user may see."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_link(entry) in inodes for entry in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {process.name} ({command.decode(errors='replace').strip()[:80]})"
        except OSError:
            continue  # another user's process, or one that just ended
    return "a process that this user may not see"


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # closed meanwhile, like the one that lists this very folder
        return ""


def port_taken(host: str, port: int) -> TalkootError:
    """The error for a port that somebody else holds."""
    return TalkootError(
        f"port {port} is already in use",
        where=f"{host}:{port}",
        why=f"it is held by {holder_of(port)}",
        next="choose another one with --port, or let talkoot choose with --port 0",
    )
