"""The real world: what every world promises, over processes, signals and sockets, and what only this one does."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

import world_conformance as conformance
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, LOST, Launch, Lost
from talkoot.world.real.host import RealHost
from talkoot.world.real.peer import RealWorld, Settings
from talkoot.world.real.ports import is_loopback
from talkoot.world.real.wire import Address, Wire, read_address, write_address
from world_conformance import PUPPET, Cast, Number


def run_real(check, folder, **settings):
    async def main():
        host = RealHost(
            Settings(run="test", name="lead", seed=conformance.SEED, folder=str(folder), **settings),
            preload=("world_conformance",),
        )
        try:
            return await check(host)
        finally:
            await host.dismiss()
            await host.close()

    result = asyncio.run(main())
    assert not multiprocessing.active_children()
    return result


@pytest.mark.parametrize("encrypt", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_promise(check, encrypt, tmp_path):
    run_real(check, tmp_path, encrypt=encrypt)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=10.0):
    """Wait for the kernel's word that every process ended; returns those that did not in time."""
    with selectors.DefaultSelector() as selector:
        for pid in pids:
            try:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + seconds
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                selector.unregister(key.fd)
                os.close(key.fd)
        left = [key.data for key in selector.get_map().values()]
        for key in list(selector.get_map().values()):
            os.close(key.fd)
        return left


def test_dismissal_leaves_no_process_behind(tmp_path):
    async def check(host):
        cast = Cast(host)
        await cast.enter("idle", "frozen", "busy")
        await cast.command("busy", "crunch", seconds=0.5)
        host.disturb("frozen", "stop")
        pids = [host.pid(name) for name in ("idle", "frozen", "busy")]
        assert all(map(alive, pids))
        await host.dismiss()
        return pids

    pids = run_real(check, tmp_path)
    assert not any(map(alive, pids))


def test_a_bug_in_a_peer_surfaces_at_the_lead(tmp_path):
    async def check(host):
        cast = Cast(host)
        await cast.enter("a")
        await cast.command("a", "bug")
        message = await cast.next(FAILED, LOST)
        assert message.topic == FAILED
        problem = conformance.rebuild_failure(message)
        assert problem.code is Exit.BUG
        assert problem.why.startswith("ZeroDivisionError: ")
        assert problem.where.startswith("peer a: world_conformance.py, line ")
        losses = await cast.losses(2)
        assert losses[cast.tickets["a"]].endswith("ended with code 1")

    run_real(check, tmp_path)


def test_an_unknown_program_surfaces_at_the_lead(tmp_path):
    async def check(host):
        host.launch(Launch(name="a", program="no.such:program"))
        problem = conformance.rebuild_failure(await host.receive(FAILED, timeout=20))
        assert problem.code is Exit.BUG
        assert "ModuleNotFoundError" in problem.why
        await host.receive(LOST, timeout=20)

    run_real(check, tmp_path)


def test_a_peer_that_dies_before_its_hello_is_known_by_its_ticket(tmp_path):
    async def check(host):
        ticket = host.launch(Launch(name="a", program=PUPPET))
        os.kill(host.pid("a"), signal.SIGKILL)
        notice = await host.receive(LOST, timeout=20)
        assert notice.sender == ticket
        assert notice.read(Lost).reason.endswith("ended with code -9")

    run_real(check, tmp_path)


LEAD = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from world_conformance import Cast
from talkoot.world.real.host import RealHost
from talkoot.world.real.peer import Settings

async def main():
    host = RealHost(Settings(run="test", name="lead"))
    cast = Cast(host)
    await cast.enter("a", "b")
    await cast.introduce("a", to="b")
    print(host.pid("a"), host.pid("b"), flush=True)
    await host.receive("never")

asyncio.run(main())
"""


def test_peers_die_with_their_lead():
    command = [sys.executable, "-c", LEAD, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lead:
        pids = [int(pid) for pid in lead.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        lead.kill()
        assert wait_until_gone(pids) == []


# -- strangers on the socket -----------------------------------------------------------------------------------------


def world_here(name="lead", **settings):
    return RealWorld(Settings(run="test", name=name, **settings))


def test_rubbish_on_the_inbox_is_counted_and_harms_nobody():
    async def main():
        world, friend = world_here(), world_here("friend")
        endpoint = read_address(world.me, world.address).endpoint
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(endpoint)
        for parts in ([b""], [b"x"] * 100, [b"\x9b" * 50, b""], [bytes(10_000)] * 3, [b"", b""]):
            socket.send_multipart(parts)
        stranger = Wire(Key(), "test")
        for number in range(300):  # more than are kept for an introduction that never comes
            socket.send_multipart([*stranger.pack(world.me, "said", b"%d" % number, (), 0, 0)])
        friend.meet(world.me, world.address)
        await friend.send(world.me, "hello")
        message = await world.receive("hello", timeout=20)
        assert message.sender == friend.me
        world.meet(friend.me, friend.address)
        await friend.send(world.me, "said")
        assert (await world.receive("said", timeout=20)).sender == friend.me
        assert world.refused["malformed header"] == 5
        assert world.mailbox.dropped >= 300 - 256
        socket.close(linger=0)
        context.term()
        await friend.close()
        await world.close()

    asyncio.run(main())


def test_a_peer_that_comes_back_under_its_old_identity_is_met_again():
    async def main():
        key, lead = Key(), world_here()
        for life in range(2):
            peer = RealWorld(Settings(run="test", name="a"), key)
            peer.meet(lead.me, lead.address)
            await peer.send(lead.me, "hello", conformance.Hello("a", peer.address))
            hello = await lead.receive("hello", timeout=20)
            lead.meet(hello.sender, hello.read(conformance.Hello).address)
            await lead.send(peer.me, "said", Number(life))
            assert (await peer.receive("said", timeout=20)).read(Number).number == life
            await peer.send(lead.me, "said", Number(life))
            assert (await lead.receive("said", timeout=20)).read(Number).number == life
            if life == 0:
                first = peer  # still open when the second comes: the lead has not noticed anything
        assert not lead.mailbox.holds(LOST)
        await first.close()
        await peer.close()
        assert (await lead.receive(LOST, timeout=20)).sender == key.peer
        await lead.close()

    asyncio.run(main())


def test_whoever_does_not_answer_is_lost():
    async def main():
        world, key = world_here(), Key()
        nobody = Wire(key, "test").address("tcp://127.0.0.1:1", "")
        world.meet(key.peer, nobody)
        notice = await world.receive(LOST, timeout=20)
        assert (notice.sender, notice.read(Lost).reason) == (key.peer, "nobody listens at its address")
        await world.send(key.peer, "said")
        world.meet(key.peer, nobody)  # again: a new attempt, a new notice
        assert (await world.receive(LOST, timeout=20)).sender == key.peer
        await world.close()

    asyncio.run(main())


def test_a_wrong_curve_key_is_no_connection():
    async def main():
        world, other = world_here(), world_here("other", encrypt=True)
        assert read_address(other.me, other.address).curve
        address = read_address(other.me, other.address)
        public, _ = zmq.curve_keypair()
        world.meet(other.me, write_address(other.key, Address(address.endpoint, public.decode(), address.exchange)))
        assert (await world.receive(LOST, timeout=20)).sender == other.me
        await other.close()
        await world.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.1:9", "tcp://example.org:9", "tcp://127.0.0.1:99999"], ids=["ip", "name", "port"]
)
def test_addresses_that_nobody_may_or_can_have(endpoint):
    async def main():
        world, key = world_here(), Key()
        with pytest.raises(ValueError):
            world.meet(key.peer, Wire(key, "test").address(endpoint, ""))
        for curve, half in (("", "0" * 64), ('"' * 40, "ab" * 32)):  # no points, no keys
            with pytest.raises(ValueError):
                world.meet(key.peer, write_address(key, Address("tcp://127.0.0.1:9", curve, half)))
        await world.send(key.peer, "said")
        await world.close()

    asyncio.run(main())


def test_loopback():
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_a_taken_port_names_its_holder():
    async def main():
        world = world_here()
        port = int(read_address(world.me, world.address).endpoint.rpartition(":")[2])
        with pytest.raises(TalkootError) as caught:
            world_here("other", port=port)
        assert f"process {os.getpid()} " in caught.value.why
        assert "--port" in caught.value.next
        with pytest.raises(TalkootError, match="cannot listen") as caught:
            world_here("other", host="203.0.113.7")
        assert caught.value.code is Exit.BAD_INPUT
        await world.close()

    asyncio.run(main())


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_peer_checks_that_others_can_reach_it(encrypt):
    async def main():
        world = RealWorld(Settings(run="r", name="alder", encrypt=encrypt))
        try:
            await world.ready()
            assert world.refused == {}
        finally:
            await world.close()

    asyncio.run(main())


def test_a_peer_that_nobody_can_reach_says_so(monkeypatch):
    monkeypatch.setattr("talkoot.world.real.endpoint.ANSWER_MS", 300)

    async def main():
        world = RealWorld(Settings(run="r", name="alder"))
        try:
            world._endpoint._inbox.unbind(world._endpoint.bound)  # as a firewall would
            with pytest.raises(TalkootError, match="cannot reach this address"):
                await world.ready()
        finally:
            await world.close()

    asyncio.run(main())
