"""Programs that want out: each is refused by name, inside its limit, and the machine is looked at afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.rewards import comparisons, jail, sandbox
from talkoot.tune.rewards.sandbox import Limits, run_program

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in jail._CALLS, reason="programs are refused on this machine"
)

QUICK = Limits(cpu_s=1, wall_s=4.0)
# The os module, for a program that may not import it.
OS = "g = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__\n"
SYS = OS + "s = g['sys']\n"


def children() -> set[str]:
    """Process ids below this process, dead or alive."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def escaped() -> set[int]:
    """Processes of this sandbox that belong to this process, or to nobody any more."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        if jail.__file__.encode() in command and parent in (1, os.getpid()):
            found.add(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def _host_unharmed():
    """No process, no open file and no signal is left over."""
    before, files = children(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert children() == before
    assert not escaped()
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def timed(program: str, limits: Limits = QUICK) -> tuple[sandbox.Outcome, float]:
    start = time.monotonic()
    outcome = run_program(program, limits)
    return outcome, time.monotonic() - start


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        # fork bombs
        (OS + "while True: g['fork']()", "processes"),
        (OS + "while True:\n  try: g['fork']()\n  except BaseException: pass", "processes"),
        (OS + "g['system']('sleep 100 &')", "processes"),
        (OS + "g['posix_spawn']('/bin/sh', ['sh'], {})", "processes"),
        (OS + "g['execv']('/bin/sh', ['sh'])", "processes"),
        # endless
        ("while True: pass", "timeout"),
        ("10**10**9", "timeout"),
        ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "timeout"),
        ("import re\nre.match('(a+)+b', 'a' * 60)", "timeout"),
        (OS + "g['close'](1)\nwhile True: pass", "timeout"),
        # memory
        ("x = bytes(10 * 2**30)", "memory"),
        ("x = []\nwhile True: x.append(bytes(10**7))", "memory"),
        # network, through what is loaded
        (SYS + "s.modules['builtins'].__import__('_socket')", "import"),
        (OS + "g['sys'].modules['ctypes'].CDLL(None).socket(2, 1, 0)", "system call"),
        # writes
        ("open('/tmp/talkoot-was-here', 'w')", "write"),
        ("open('talkoot-was-here', 'x')", "write"),
        ("open('/etc/passwd', 'a')", "write"),
        (OS + "g['remove']('/etc/hostname')", "write"),
        (OS + "g['mkdir']('/tmp/talkoot-was-here')", "write"),
        (OS + "g['open']('/tmp/talkoot-was-here', 65)", "write"),
        # reads: soft, as for a file that is not there
        ("print(open('/etc/passwd').read())", "error"),
        ("print(open('/proc/self/environ').read())", "error"),
        (OS + "print(g['listdir']('/proc'))", "error"),
        # output
        ("while True: print('x' * 1000)", "output"),
        (OS + "while True: g['write'](1, b'x' * 100000)", "output"),
        # imports
        ("import os", "import"),
        ("import subprocess", "import"),
        ("import calc", "import"),
        ("import math, socket", "import"),
        ("from . import x", "import"),
        ("if False:\n  import os", "import"),
        ("import importlib\nimportlib.import_module('os')", "import"),
        ("__import__('os').system('true')", "import"),
        ("exec('import os')", "import"),
        ("eval(\"__import__('os')\", {})", "import"),
        ("import math\nmath.__loader__.load_module('posix')", "error"),
        (SYS + "s.modules['importlib._bootstrap']._gcd_import('_posixsubprocess')", "error"),
        # signals, and the end of the parent
        (OS + "g['kill'](g['getppid'](), 9)", "system call"),
        (OS + "g['kill'](-1, 9)", "system call"),
        (OS + "g['killpg'](0, 9)", "system call"),
        (OS + "g['setsid']()", "system call"),
        # just bad
        ("1 / 0", "error"),
        ("def f(): f()\nf()", "error"),
        ("print(", "error"),
        ("(" * 5000, "error"),
        ("-" * 30000 + "1", "memory"),  # the parser's own word for too deep
        ("\0", "error"),
        ("x = 1\n" * 20000, "too long"),
        ("raise SystemExit(87)", "error"),
        ("raise SystemExit(3)", "error"),
        (
            "b = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'BuiltinImporter'][0]\n"
            "m = b.load_module('_signal')\nm.signal(24, m.SIG_IGN)\nwhile True: pass",
            "killed",  # it ignores the first signal, but not the second
        ),
        ("\ud800", "error"),
    ],
)
def test_who_wants_out_is_refused_by_name_and_in_time(program, reason):
    outcome, wall_s = timed(program)
    assert outcome.reason == reason
    assert wall_s < 4.5
    assert len(outcome.output) <= QUICK.output_bytes
    assert not Path("/tmp/talkoot-was-here").exists()
    assert not Path("/talkoot-was-here").exists()


# What a program does that has got past every check in Python, and calls the kernel itself.
WALL = """
import ctypes, os, signal, socket, sys
sys.path.insert(0, {folder!r})
import jail
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
jail.lock()
print("locked", flush=True)
result = {attempt}
print("done" if result == -1 else "THROUGH", flush=True)
os._exit(0)
"""
SOFT = "done"


@pytest.mark.parametrize(
    ("attempt", "ends"),
    [
        ("libc.fork()", "killed"),
        ("libc.vfork()", "killed"),
        ("libc.syscall(56, 17, 0, 0, 0, 0)", "killed"),  # clone
        ("libc.syscall(435, 0, 0)", "killed"),  # clone3
        ("libc.execve(b'/bin/true', None, None)", "killed"),
        ("libc.socket(2, 1, 0)", "killed"),
        ("libc.socketpair(1, 1, 0, 0)", "killed"),
        ("libc.kill(parent, 0)", "killed"),
        ("libc.kill(os.getpid(), 0)", "killed"),
        ("libc.ptrace(16, parent, 0, 0)", "killed"),
        ("libc.syscall(310, parent, 0, 0, 0, 0, 0)", "killed"),  # process_vm_readv
        ("libc.prctl(1, 0, 0, 0, 0)", "killed"),
        ("libc.setsid()", "killed"),
        ("libc.unshare(0x10000000)", "killed"),
        ("libc.mount(0, 0, 0, 0, 0)", "killed"),
        ("libc.syscall(437, -100, b'/etc/passwd', 0, 0)", "killed"),  # openat2
        ("libc.syscall(425, 1, 0)", "killed"),  # io_uring_setup
        ("libc.syscall(321, 0, 0, 0)", "killed"),  # bpf
        ("libc.memfd_create(b'x', 0)", "killed"),
        ("libc.shmget(0, 4096, 0o1600)", "killed"),
        ("libc.unlink(b'/tmp/nothing')", "killed"),
        ("libc.mkdir(b'/tmp/talkoot-was-here', 0o700)", "killed"),
        ("libc.rename(b'/tmp/a', b'/tmp/b')", "killed"),
        ("libc.chmod(b'/tmp', 0o777)", "killed"),
        ("libc.setuid(0)", "killed"),
        ("libc.setrlimit(0, 0)", "killed"),
        ("libc.personality(0)", "killed"),
        ("libc.syscall(39 + 0x40000000)", "killed"),  # getpid in the x32 numbering
        ("libc.open(b'/etc/passwd', 0)", SOFT),
        ("libc.open(b'/tmp/talkoot-was-here', 65, 0o600)", SOFT),
        ("libc.syscall(2, b'/etc/passwd', 0)", SOFT),
        ("libc.syscall(257, -100, b'/proc/self/environ', 0)", SOFT),
        ("libc.access(b'/etc/passwd', 4)", SOFT),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_the_wall_stands_without_anything_above_it(attempt, ends):
    program = WALL.format(folder=str(Path(jail.__file__).parent), attempt=attempt)
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=20)
    if ends == "killed":
        assert (done.stdout, done.returncode) == ("locked\n", -31), done.stderr
    else:
        assert (done.stdout, done.returncode) == ("locked\ndone\n", 0), done.stderr
    assert not Path("/tmp/talkoot-was-here").exists()


NAMING = """
import os, sys
sys.path.insert(0, {folder!r})
import jail, socket, subprocess, tempfile, shutil
jail.name_reasons()
{attempt}
"""


@pytest.mark.parametrize(
    ("attempt", "code"),
    [
        ("socket.socket()", jail.NETWORK),
        ("os.fork()", jail.PROCESSES),
        ("subprocess.Popen(['true'])", jail.PROCESSES),
        ("os.system('true')", jail.PROCESSES),
        ("open('x', 'w')", jail.WRITE),
        ("os.open('x', os.O_CREAT)", jail.WRITE),
        ("shutil.rmtree('/tmp/nothing')", jail.WRITE),
        ("tempfile.mkstemp()", jail.WRITE),
        ("os.kill(os.getppid(), 0)", jail.SYSTEM_CALL),
        ("import zipfile", jail.IMPORT),
    ],
)
def test_attempts_are_named_where_python_sees_them(attempt, code, tmp_path):
    program = NAMING.format(folder=str(Path(jail.__file__).parent), attempt=attempt)
    done = subprocess.run([sys.executable, "-S", "-c", program], timeout=20, cwd=tmp_path)
    assert done.returncode == code
    assert not list(tmp_path.iterdir())


def test_a_program_sees_nothing_of_who_runs_it(monkeypatch):
    monkeypatch.setenv("TALKOOT_SECRET", "the answer is 42")
    program = SYS + "print(sorted(g['environ'].items()), s.argv[1:], [m for m in s.modules if 'talkoot' in m])"
    assert (
        run_program(program, QUICK).output
        == "[('LC_CTYPE', 'C.UTF-8'), ('PYTHONHASHSEED', '0')] ['1', '268435456'] []\n"
    )
    for descriptor in range(3, 20):
        outcome = run_program(OS + f"g['read']({descriptor}, 10)", QUICK)
        assert outcome.reason == "error"  # there is no such file
    assert run_program(OS + "print(g['getuid'](), g['getpid']() > 0)", QUICK).reason == "system call"


def test_it_is_nobody_when_started_by_root():
    able = int(Path("/proc/self/status").read_text().partition("CapEff:\t")[2].split()[0], 16) >> 7 & 1
    if os.geteuid() != 0 or not able:
        pytest.skip("this is not root, or root without its rights")
    with subprocess.Popen(
        [sys.executable, "-s", "-S", "-B", "-P", jail.__file__, "5", str(2**28)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"print('here', flush=True)\nwhile True: pass")
        process.stdin.close()
        assert process.stdout.read(6) == jail.LOCKED + b"here\n"
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert lines["Uid"].split() == ["65534"] * 4
    assert int(lines["CapEff"], 16) == 0
    assert (lines["NoNewPrivs"], lines["Seccomp"]) == ("1", "2")


def test_printing_the_answer_before_the_crime_earns_nothing():
    result = comparisons["code"].reward("1", "print(1)\nimport os")
    assert (result.value, result.reason) == (0.0, "import")


def test_honest_programs_run():
    program = """
import math, re, json, itertools, collections, datetime, random, statistics, decimal, fractions, heapq, functools
print(sum(range(101)), math.gcd(12, 18), re.sub('a', 'b', 'banana'))
print(json.dumps({'a': [1, 2]}), list(itertools.permutations('ab')), collections.Counter('aab').most_common(1))
print(datetime.datetime.strptime('2024-02-29', '%Y-%m-%d').date(), fractions.Fraction(1, 3), decimal.Decimal('0.1') * 3)
print(sorted({'x', 'y'}), heapq.nsmallest(2, [3, 1, 2]), functools.reduce(int.__mul__, range(1, 6)))
class A:
    def __repr__(self): return 'A'
try:
    1 / 0
except ZeroDivisionError as error:
    print(A(), error)
"""
    outcome = run_program(program)
    assert outcome.reason == "ran"
    assert outcome.output.splitlines() == [
        "5050 6 bbnbnb",
        "{\"a\": [1, 2]} [('a', 'b'), ('b', 'a')] [('a', 2)]",
        "2024-02-29 1/3 0.3",
        "['x', 'y'] [1, 2] 120",
        "A division by zero",
    ]


def test_every_module_of_the_allow_list_can_be_imported():
    outcome = run_program("".join(f"import {name}\nprint({name}.__name__)\n" for name in jail.ALLOWED))
    assert outcome.output.split() == list(jail.ALLOWED)


def test_the_same_program_prints_the_same():
    program = "import random\nprint({str(n) for n in range(50)}, hash('x'), random.random())"
    first, again = run_program(program), run_program(program)
    assert first.reason == "ran"
    assert first == again


@pytest.mark.parametrize(
    ("completion", "value", "reason"),
    [
        ("print(7)", 1.0, "right"),
        ("I think:\n```python\nprint(7)\n```\nthat is it", 1.0, "right"),
        ("```\nprint(8)\n```\nno:\n```py\nprint('7  ')\nprint()\n```", 1.0, "right"),
        ("print(8)", 0.0, "wrong output"),
        ("pass", 0.0, "wrong output"),
        ("print(7) or 1/0", 0.0, "error"),
        ("7 is my answer", 0.0, "error"),
    ],
)
def test_what_a_program_earns(completion, value, reason):
    code = comparisons["code"]
    result = code.reward("7", code.extract(completion))
    assert (result.value, result.reason) == (value, reason)


def test_a_machine_without_the_wall_refuses_and_runs_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(TalkootError, match="cannot be run safely") as raised:
        run_program("print(1)")
    assert "darwin" in raised.value.why
    monkeypatch.undo()
    # A child that dies before it could lock itself never runs the program.
    broken = tmp_path / "jail.py"
    broken.write_text(Path(jail.__file__).read_text().replace("0xC000003E", "1").replace("libc.prctl(38", "1 or (38"))
    monkeypatch.setattr(sandbox.jail, "__file__", str(broken))
    with pytest.raises(TalkootError, match="cannot be run safely"):
        run_program("print(1)")


def test_a_program_costs_little():
    run_program("print(1)")
    before = os.times()
    for _ in range(10):
        assert run_program("print(1)").reason == "ran"
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    assert cpu_s / 10 < 0.06
