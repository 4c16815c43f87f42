"""What runs inside the sandbox: locks its own process, then runs the program that it read from standard input.

:mod:`talkoot.tune.rewards.sandbox` starts this file as a script of a bare interpreter; it imports nothing of talkoot.
The wall is a seccomp filter, which the kernel enforces and nobody can take off again: a process that may compute, write
to the pipes it has, and end, and do nothing else. No file can be opened, no process or thread begun, no socket made, no
signal sent. What stands above the wall (a check of the program's imports, an audit hook) only gives the reasons names.
Nothing of the program is looked at, not even parsed, before the wall stands.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # what runs in the sandbox spares itself the import of typing
if TYPE_CHECKING:
    from typing import Any

ALLOWED = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "numbers", "operator", "random", "re", "statistics", "string", "textwrap", "typing"),
)
_ALSO = {"datetime": ["_strptime"]}  # what they would import when first used: there is no file to be had then

# How the process ends, for the parent; the reasons themselves stand there.
IMPORT, PROCESSES, NETWORK, WRITE, MEMORY, ERROR, SYSTEM_CALL = range(80, 87)
LOCKED = b"\x06"  # printed before the program runs: without it nothing of the program ran

# System calls by machine: those that compute, and those that fail softly because libraries try them in passing.
_CALLS = {
    "x86_64": {
        "arch": 0xC000003E,
        # read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise
        # getpid exit gettid futex clock_gettime exit_group getrandom
        "allowed": [0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 60, 186, 202, 228, 231, 318],
        # open stat lstat ioctl access fcntl getcwd readlink getdents64 openat newfstatat statx
        "soft": [2, 4, 6, 16, 21, 72, 79, 89, 217, 257, 262, 332],
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "allowed": [63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172, 93, 178, 98, 113, 94, 278],
        "soft": [29, 48, 25, 17, 78, 61, 56, 79, 291],
    },
}
_KILL, _EACCES, _ALLOW = 0x80000000, 0x0005000D, 0x7FFF0000

_PROCESS_EVENTS = ("os.fork", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.", "pty.")
_WRITE_EVENTS = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.utime", "shutil.", "tempfile."),
)
_NAMES = (
    *((event, PROCESSES) for event in _PROCESS_EVENTS),
    *((event, WRITE) for event in _WRITE_EVENTS),
    ("socket.", NETWORK),
    ("os.kill", SYSTEM_CALL),
    ("ctypes.", SYSTEM_CALL),
)


def limit(cpu_s: int, memory_bytes: int) -> None:
    """Bound what this process uses; the limits cannot be raised again."""
    for name, value in (
        ("RLIMIT_CPU", cpu_s),
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_NOFILE", 16),
    ):
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        # One second between the signal that can be told apart (SIGXCPU) and the one that cannot be ignored.
        limits = (value, value + (name == "RLIMIT_CPU"))
        soft, hard = limits if ceiling == resource.RLIM_INFINITY else (min(limits[0], ceiling), min(limits[1], ceiling))
        resource.setrlimit(kind, (soft, hard))


def lock() -> None:
    """Raise the wall: from here on every other system call ends this process."""
    calls = _CALLS[os.uname().machine]
    allowed, soft = calls["allowed"], calls["soft"]

    def jump(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x15, then, otherwise, value)

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def end(action: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, action)

    steps = [load(4), jump(calls["arch"], 1, 0), end(_KILL), load(0)]
    count = len(allowed) + len(soft)
    for at, call in enumerate([*allowed, *soft]):  # behind the comparisons stand: kill, soft, allow
        steps.append(jump(call, count - at + (1 if at < len(allowed) else 0), 0))
    code = b"".join([*steps, end(_KILL), end(_EACCES), end(_ALLOW)])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    zero = ctypes.c_ulong(0)
    if libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(22, ctypes.c_ulong(2), program, zero, zero):
        raise OSError("this kernel takes no filter")


def name_reasons() -> None:
    """End at the first forbidden attempt, with a code that says what it was (the wall would end it all the same)."""
    leave, plain = os._exit, builtins.__import__
    permitted = {*ALLOWED, *(name for also in _ALSO.values() for name in also)}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
            leave(WRITE)
        if event == "import" and not str(arguments[0]).startswith("encodings."):
            leave(IMPORT)
        for prefix, code in _NAMES:
            if event.startswith(prefix):
                leave(code)

    def guarded(name: str, globals=None, locals=None, fromlist=(), level: int = 0):
        if name.partition(".")[0] not in permitted and (globals or {}).get("__name__") in (None, "__main__"):
            leave(IMPORT)
        return plain(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded
    sys.addaudithook(watch)


def imported(code: Any) -> list[str]:
    """Names of all modules that a syntax tree imports, wherever in it."""
    names: list[str] = []
    pending: list[Any] = [code]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif hasattr(node, "_fields"):
            kind = type(node).__name__
            if kind == "Import":
                names += [alias.name for alias in node.names]
            elif kind == "ImportFrom":
                names.append(node.module if not node.level else "")
            pending.extend(getattr(node, field, None) for field in node._fields)
    return names


def main() -> None:
    """Read the program, raise the wall, run it."""
    only_tree = 0x400
    leave, out = os._exit, sys.stdout
    source = sys.stdin.buffer.read().decode()
    for name in ALLOWED:
        if name in source:
            for module in (name, *_ALSO.get(name, [])):
                __import__(module)
    if "random" in sys.modules:
        sys.modules["random"].seed(0)  # the same program prints the same everywhere
    limit(cpu_s=int(sys.argv[1]), memory_bytes=int(sys.argv[2]))
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container may know no other user; the wall stands all the same
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
    lock()
    os.write(1, LOCKED)
    sys.excepthook = lambda kind, value, trace: leave(MEMORY if kind is MemoryError else ERROR)
    tree: Any = compile(source, "<program>", "exec", only_tree, dont_inherit=True)
    if any((name or "").partition(".")[0] not in ALLOWED for name in imported(tree)):
        leave(IMPORT)
    name_reasons()
    exec(compile(tree, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
    out.flush()
    leave(0)


if __name__ == "__main__":
    main()
