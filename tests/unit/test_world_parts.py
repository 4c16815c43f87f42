"""Blobs, links, faults, ports, the frame around a program, and the virtual loop."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talkoot.core.codec import encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId, RunId, digest
from talkoot.core.keys import Key
from talkoot.world import base, blobs
from talkoot.world.api import FAILED, Failure, Message
from talkoot.world.base import PeerWorld, load_program, rebuild_failure, run_program
from talkoot.world.blobs import Blobs, write_atomically
from talkoot.world.faults import Fault, FaultPlan
from talkoot.world.links import Link, Network
from talkoot.world.real.ports import holder_of, port_taken
from talkoot.world.sim.loop import Deadlock, VirtualLoop

# -- blobs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return Blobs(tmp_path / "blobs" if request.param == "disk" else None)


def test_blobs_are_named_by_their_bytes(store):
    for data in (b"", b"x", bytes(100_000)):
        name = store.put(data)
        assert name == digest(data, "blob")
        assert store.put(memoryview(data)) == name
        assert store.get(name) == data
        assert name in store
    absent = digest(b"absent", "blob")
    assert absent not in store
    with pytest.raises(KeyError):
        store.get(absent)


def test_only_names_are_names(store, tmp_path):
    (tmp_path / "secret").write_text("x")
    hostile = ["../secret", "/etc/passwd", "", ".", "..", "x" * 64, "A" * 64, "a" * 63, "a" * 65, "../" + "a" * 61]
    for name in [*hostile, "a" * 63 + "/", "a" * 63 + "\0"]:
        assert name not in store
        with pytest.raises(KeyError):
            store.get(name)


def test_keep_only(store):
    names = [store.put(bytes([number])) for number in range(5)]
    store.keep_only(names[1:3])
    assert [name in store for name in names] == [False, True, True, False, False]
    store.keep_only(iter(()))
    assert not any(name in store for name in names)


def test_keep_only_leaves_other_files_alone(tmp_path):
    store = Blobs(tmp_path)
    store.keep_only([])
    name = store.put(b"x")
    (tmp_path / "README").write_text("mine")
    (tmp_path / ".writing-abc").write_text("another peer's, on its way")
    (tmp_path / "folder").mkdir()
    store.keep_only([])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-abc", "README", "folder"]
    assert name not in store


def test_damage_is_found_and_repaired(tmp_path):
    store = Blobs(tmp_path)
    name = store.put(b"contents")
    for damaged in (b"", b"content", b"Contents", b"contents\0"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            store.get(name)
        assert store.put(b"contents") == name
        assert store.get(name) == b"contents"


def test_nothing_is_written_twice(tmp_path):
    store = Blobs(tmp_path)
    before = (tmp_path / store.put(b"x")).stat().st_ino
    assert (tmp_path / store.put(b"x")).stat().st_ino == before


WRITE = """
import sys
from pathlib import Path
from talkoot.world.blobs import write_atomically
target = Path(sys.argv[1])
while True:
    for value in (b"a", b"b"):
        write_atomically(target, value * 3_000_000)
        print("written", flush=True)
"""


def test_a_killed_writer_leaves_the_file_whole(tmp_path):
    target = tmp_path / "file"
    chance = random.Random(0)
    with subprocess.Popen([sys.executable, "-c", WRITE, str(target)], stdout=subprocess.PIPE) as writer:
        for _ in range(chance.randrange(3, 8)):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    data = target.read_bytes()
    assert len(data) == 3_000_000
    assert len(set(data)) == 1


def in_a_small_world(limit, script, *arguments):
    """Run a script whose files cannot grow beyond ``limit`` bytes."""
    prefix = "import signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    return subprocess.run(
        [sys.executable, "-c", prefix + script, *map(str, arguments)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"old")
    script = "from talkoot.world.blobs import *; write_atomically(Path(sys.argv[1]), bytes(10_000))"
    done = in_a_small_world(1000, script, target)
    assert "a file cannot be written" in done.stderr
    assert "10000 bytes could not be written: File too large" in done.stderr
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def mount_small(folder: Path) -> bool:
    if os.geteuid():
        return False
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    return not subprocess.run(command, capture_output=True).returncode


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    if not mount_small(tmp_path):
        pytest.skip("needs the right to mount a small file system")
    try:
        store = Blobs(tmp_path)
        small = store.put(b"small")
        with pytest.raises(TalkootError, match="disk is full") as caught:
            store.put(bytes(1_000_000))
        assert "resumes" in caught.value.next
        assert [path.name for path in tmp_path.iterdir()] == [small]
        assert store.get(small) == b"small"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_unusable_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TalkootError, match="cannot be written"):
        Blobs(tmp_path / "file").put(b"x")


def test_an_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(blobs.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"x")
    assert list(tmp_path.iterdir()) == []


# -- links and faults ----------------------------------------------------------------------------------------------

NONSENSE = (-1.0, float("nan"), float("-inf"))


@pytest.mark.parametrize(
    "figures",
    [{name: value} for name in ("latency_s", "jitter_s", "bytes_per_s", "loss") for value in NONSENSE]
    + [{"latency_s": float("inf")}, {"jitter_s": float("inf")}, {"bytes_per_s": 0.0}, {"loss": 1.0}],
)
def test_links_that_make_no_sense(figures):
    with pytest.raises(TalkootError, match="make no sense") as caught:
        Link(**figures)
    assert caught.value.where == "links"


@pytest.mark.parametrize("name", ["a-b", "a->", "->b", "a -> b", "a->b->c", ""])
def test_links_without_a_name(name):
    with pytest.raises(TalkootError, match="names no link"):
        Network(links={name: Link()})


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 0.9), st.integers())
def test_delays(latency, jitter, loss, seed):
    link = Link(latency_s=latency, jitter_s=jitter, loss=loss)
    delay = link.delay(random.Random(seed))
    assert delay == link.delay(random.Random(seed))
    assert delay >= latency
    if not loss:
        assert delay <= latency + jitter
    assert Link(latency_s=latency, bytes_per_s=float("inf")).delay(random.Random(seed)) == latency


def test_faults_strike_once_and_in_order():
    first, second = (Fault(peer="a", step=1, phase="forward", kind=kind) for kind in ("delay", "kill"))
    plan = FaultPlan([first, second, Fault(peer="a", step=2, phase="reduce")])
    assert plan.at(1, "backward") is None
    assert plan.at(2, "forward") is None
    assert plan.at(1, "forward") is first
    assert plan.at(1, "forward") is second
    assert plan.at(1, "forward") is None
    assert plan.at(2, "reduce").kind == "kill"
    assert plan.at(2, "reduce") is None


# -- the frame around a program ------------------------------------------------------------------------------------


def world(name="a", seed=1, lead=None):
    return PeerWorld(run=RunId("r"), name=name, key=Key(), seed=seed, blobs=Blobs(), lead=lead)


def test_chance_depends_on_seed_name_and_purpose_alone():
    assert world().random("x").random() == world().random("x").random()
    draws = [world(n, s).random(p).random() for n in ("a", "a/b") for s in (1, 2) for p in ("x", "b/x")]
    assert len(set(draws)) == len(draws) == 8


def test_too_many_strangers_are_dropped_and_counted(monkeypatch):
    peer = world()
    for number in range(base.MAX_STRANGERS + 3):
        peer.hold(number, 1)
    assert peer.mailbox.dropped == 3
    with pytest.raises(NotImplementedError):
        peer.meet(Key().peer, "")
    peer = world()
    monkeypatch.setattr(base, "MAX_STRANGERS_BYTES", 10)
    for size in (6, 6, 4):
        peer.hold(size, size)
    assert peer.mailbox.dropped == 1


def test_programs_are_loaded_by_name():
    assert load_program("talkoot.world.base:run_program") is run_program
    with pytest.raises(AttributeError):
        load_program("talkoot.world.base:nothing")


@pytest.mark.parametrize("error", [TalkootError("what", where="w", why="y", next="n"), ZeroDivisionError("no")])
def test_without_a_lead_errors_are_raised(error):
    async def program(world, argument):
        async with asyncio.TaskGroup():
            raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(run_program(world(), program, b""))
    assert caught.value is error


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (1, 1), (2, 2), (4, 4), (77, 1), (-3, 1), (130, 130)])
def test_a_failure_never_counts_as_success(code, expected):
    body = encode(Failure("what", "where", "why", "next", code))
    problem = rebuild_failure(Message(PeerId("p"), FAILED, 0, 0, body))
    assert problem.code is Exit(expected)
    assert str(problem) == "what\n  where: where\n  why:   why\n  next:  next"


def test_a_malformed_failure_is_a_value_error():
    with pytest.raises(ValueError):
        rebuild_failure(Message(PeerId("p"), FAILED, 0, 0, b"\x01"))


# -- ports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_holder_of_a_port_is_named(family, host):
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listener.listen()
        port = listener.getsockname()[1]
        assert holder_of(port).startswith(f"process {os.getpid()} (")
        problem = port_taken(host, port)
    assert problem.what == f"port {port} is already in use"
    assert holder_of(port) == "a process that this user may not see"


LISTEN = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    input()
"""


def test_a_holder_in_another_process():
    command = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        assert holder_of(port).startswith(f"process {other.pid} ({sys.executable}"[:80])
        other.communicate(b"\n")


# -- the virtual loop ----------------------------------------------------------------------------------------------


def virtual(main, explain=lambda: "nobody can act"):
    loop = VirtualLoop(explain)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_time_jumps_and_timers_keep_their_order():
    async def main(loop):
        seen = []
        for delay in (3.0, 1.0, 86400.0 * 3, 2.0, 0.0):
            loop.call_later(delay, lambda delay=delay: seen.append((delay, loop.time())))
        await asyncio.sleep(86400.0 * 4)
        return seen

    assert virtual(main) == [(delay, pytest.approx(delay)) for delay in (0.0, 1.0, 2.0, 3.0, 86400.0 * 3)]


@pytest.mark.parametrize("start", [1e3, 1e7, 1e9, 1e12])
def test_late_in_a_long_run_timers_still_fire(start):
    async def main(loop):
        loop._jump.now = start
        for _ in range(100):
            await asyncio.sleep(0.1)
        return loop.time()

    assert virtual(main) == pytest.approx(start + 10, rel=1e-12, abs=0.01 * start / 1e9)


def test_timeouts_and_cancellation_work_in_virtual_time():
    async def main(loop):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e5):
                await asyncio.sleep(1e6)
        assert loop.time() == pytest.approx(1e5)
        task = asyncio.ensure_future(asyncio.sleep(50))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loop.time()

    assert virtual(main) == pytest.approx(1e5 + 1)


def test_a_deadlock_is_an_error_that_explains_itself():
    async def main(loop):
        await asyncio.sleep(2)
        await loop.create_future()

    with pytest.raises(Deadlock, match=r"deadlock at virtual time 2\.0+s: a waits for b"):
        virtual(main, lambda: "a waits for b")
