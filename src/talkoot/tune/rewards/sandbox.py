"""Run a program that a model wrote, so that it can neither harm the machine nor look at it.

What protects, from the outside in:

- A new process of a bare interpreter, in a session of its own, with an empty environment and no open file but two
  pipes. It never holds the answer: the parent compares what was printed.
- Hard limits of the kernel: processor time, memory, no byte to any file, no process, no core dump.
- A seccomp filter (:mod:`talkoot.tune.rewards.jail`): the kernel ends the process at any system call that does more
  than compute and print. Files cannot be opened, so secrets, answers and ``/proc`` cannot be read; without ``fork``
  nothing escapes the kill. As root the process becomes nobody first. Works without privileges.
- The parent reads a bounded output, and kills the whole process group at the wall-clock limit.

A program gets no standard input, no files and no threads, and modules of the allow-list only. The same program prints
the same (hashes and ``random`` are seeded) as long as it does not read the clock or work close to a limit. Where the
kernel has no seccomp (other systems than Linux, other processors than x86-64 and arm64) programs are refused: there is
no weaker mode. What this does not stop: what exploits a bug of the kernel in one of the 21 permitted calls, and side
channels of the processor.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.tune.rewards import jail

MAX_SOURCE_BYTES = 32768
_REASONS = {
    0: "ran",
    jail.IMPORT: "import",
    jail.PROCESSES: "processes",
    jail.NETWORK: "network",
    jail.WRITE: "write",
    jail.MEMORY: "memory",
    jail.SYSTEM_CALL: "system call",
    -signal.SIGXCPU: "timeout",
    -signal.SIGKILL: "killed",  # not by us: the processor time that nothing can ignore, or a kernel out of memory
    -signal.SIGSYS: "system call",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a program may use.

    Attributes:
        cpu_s: processor time, whole seconds; what decides, since it depends little on what else the machine does.
        wall_s: time until everything is killed.
        memory_bytes: of address space, the interpreter's 30 MB included.
        output_bytes: printed at most.
    """

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 16384


class Outcome(msgspec.Struct, frozen=True):
    """How a program ended: ``ran``, or the reason why not; and what it printed until then."""

    reason: str
    output: str


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run Python ``source`` in the sandbox.

    Raises:
        TalkootError: this machine cannot protect itself; nothing was run.
    """
    limits = limits or Limits()
    data = source.encode(errors="replace")
    if len(data) > MAX_SOURCE_BYTES:
        return Outcome("too long", "")
    if sys.platform != "linux":
        raise _no_wall(sys.platform)
    # As isolated as -I, but for the one variable that makes hashes the same in every run.
    command = [sys.executable, "-s", "-S", "-B", "-P", "-X", "utf8", str(Path(jail.__file__).resolve())]
    with subprocess.Popen(
        [*command, str(limits.cpu_s), str(limits.memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
    ) as process:
        try:
            reason, output = _watch(process, data, limits)
        finally:
            _kill(process)
    if not reason and not output.startswith(jail.LOCKED):
        raise _no_wall(f"{os.uname().machine} with this kernel")
    reason = reason or _REASONS.get(process.returncode, "error")
    return Outcome(reason, output.removeprefix(jail.LOCKED).decode(errors="replace"))


def _watch(process: subprocess.Popen[bytes], source: bytes, limits: Limits) -> tuple[str, bytes]:
    """Feed the program and collect what it prints; the reason when one of the parent's limits was reached."""
    deadline, output = time.monotonic() + limits.wall_s, b""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise ValueError("the sandbox has no pipes")
    try:
        stdin.write(source)
        stdin.close()
    except BrokenPipeError:  # it died before it read: its exit code says why
        pass
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            piece = os.read(stdout.fileno(), 65536)
            output += piece
            if len(output) > limits.output_bytes:
                return "output", output[: limits.output_bytes]
            if not piece:
                break
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return "timeout", output
    return "", output


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # not yet waited for, so the number is still this process's
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _no_wall(machine: str) -> TalkootError:
    return TalkootError(
        "programs that a model wrote cannot be run safely here",
        where="the code reward",
        why=f"{machine} offers no seccomp filter that talkoot knows (Linux on x86-64 or arm64 does)",
        next="choose a task without programs, or let a Linux machine take part in this one",
    )
