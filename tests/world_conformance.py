"""What every world promises, as programs and checks; run in the simulated one and in the real one.

A check is a lead's program: it launches puppets, gives them orders, and looks at what happens. It knows nothing
about the world it runs in, which is the point.
"""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.keys import Key
from talkoot.world.api import FAILED, HELLO, LOST, Blank, Host, Launch, Lost, Message, World
from talkoot.world.base import MAX_BODY_BYTES, MAX_FRAMES, MAX_TOPIC, rebuild_failure
from talkoot.world.faults import Fault
from talkoot.world.sim.simulation import PEER_FLOPS

PUPPET = "world_conformance:puppet"
STEPPER = "world_conformance:stepper"
SEED = 7
PATIENCE = 20.0  # how long a check waits for what must come


class Hello(msgspec.Struct):
    """A peer introduces itself to its lead."""

    name: str
    address: str


class Order(msgspec.Struct, kw_only=True):
    """Lead to puppet: do this."""

    verb: str
    peer: str = ""
    address: str = ""
    topic: str = "said"
    count: int = 1
    seconds: float = 0.3


class Done(msgspec.Struct):
    """Puppet to lead: that is what came of it."""

    text: str = ""
    number: float = 0.0


class Number(msgspec.Struct):
    """A numbered message."""

    number: int


# -- programs ----------------------------------------------------------------------------------------------------


async def puppet(world: World, argument: bytes) -> None:
    """Say hello, answer pings, do as ordered, report losses; leave when the lead is lost."""
    assert world.lead is not None
    await world.send(world.lead, HELLO, Hello(world.name, world.address))
    while True:
        message = await world.receive("ping", "do", LOST)
        if message.topic == "ping":
            await world.send(
                message.sender,
                "pong",
                message.read(Number),
                message.frames,
                generation=message.generation,
                step=message.step,
            )
        elif message.topic == LOST and message.sender == world.lead:
            await world.send(world.lead, "ghost")
            return
        elif message.topic == LOST:
            await world.send(world.lead, "gone", Done(message.sender))
        elif not await obey(world, message.read(Order)):
            return


async def obey(world: World, order: Order) -> bool:
    """Carry out one order; False = leave."""
    assert world.lead is not None
    done = Done()
    match order.verb:
        case "meet":
            world.meet(PeerId(order.peer), order.address)
        case "say":
            for number in range(order.count):
                await world.send(PeerId(order.peer), order.topic, Number(number))
        case "listen":
            done.text = ",".join(await heard(world, order))
        case "random":
            done.number = world.random(order.topic).random()
        case "blob":
            done.text = world.blobs.put(order.topic.encode())
        case "crunch":
            done.number = await crunch(world, order.seconds)
        case "fail":
            raise TalkootError("no such file", where="a.txt", why="it is gone", next="bring it", code=Exit(4))
        case "bug":
            return bool(1 // (order.count - 1))
        case "leave":
            await world.send(world.lead, "farewell", None, [bytes(4 * 2**20)] * 4)
            return False
    await world.send(world.lead, "done", done)
    return True


async def heard(world: World, order: Order) -> list[str]:
    """Numbers that come on a topic, until ``count`` did or it stays silent."""
    numbers: list[str] = []
    try:
        while len(numbers) < order.count:
            message = await world.receive(order.topic, timeout=order.seconds)
            numbers.append(str(message.read(Number).number))
    except TimeoutError:
        pass
    return numbers


async def crunch(world: World, seconds: float) -> float:
    """How many times longer than the work itself its computation took."""
    spent: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            pass
        spent.append(seconds if world.kind == "simulated" else time.perf_counter() - start)

    started = world.now()
    await world.compute(work, seconds * PEER_FLOPS)
    return (world.now() - started) / spent[0]


async def stillborn(world: World, argument: bytes) -> None:
    """Fail before saying hello."""
    raise TalkootError("no such file", where="a.txt", why="it is gone", next="bring it", code=Exit(4))


async def stepper(world: World, argument: bytes) -> None:
    """Walk through four steps of two phases, twice, and tell the lead when each point was passed."""
    assert world.lead is not None
    await world.send(world.lead, HELLO, Hello(world.name, world.address))
    for _ in range(2):
        for step in range(4):
            for phase in ("forward", "backward"):
                await world.sleep(0.03)  # what was sent leaves the machine
                await world.reached(step, phase)
                await world.send(world.lead, "at", Done(phase, world.now()), step=step)
    await world.receive("do", LOST)


# -- what checks are made of ---------------------------------------------------------------------------------------


class Cast:
    """The lead and the peers it launched, by name."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.peers: dict[str, PeerId] = {}
        self.addresses: dict[str, str] = {}
        self.tickets: dict[str, PeerId] = {}

    async def enter(self, *names: str, program: str = PUPPET, **launch: object) -> None:
        """Launch peers and meet them."""
        for name in names:
            ticket = self.host.launch(Launch(name=name, program=program, **launch))  # type: ignore[arg-type]
            self.tickets[name] = PeerId(ticket)
        for _ in names:
            message = await self.next(HELLO)
            hello = message.read(Hello)
            self.host.meet(message.sender, hello.address)
            self.peers[hello.name], self.addresses[hello.name] = message.sender, hello.address

    async def next(self, *topics: str) -> Message:
        """The next message; a check that waits in vain fails."""
        return await self.host.receive(*topics, timeout=PATIENCE)

    async def order(self, name: str, verb: str, **details: object) -> Done:
        """Give an order and wait for the answer."""
        await self.command(name, verb, **details)
        message = await self.next("done")
        assert message.sender == self.peers[name]
        return message.read(Done)

    async def command(self, name: str, verb: str, **details: object) -> None:
        """Give an order that has no answer."""
        await self.host.send(self.peers[name], "do", Order(verb=verb, **details))  # type: ignore[arg-type]

    async def introduce(self, name: str, to: str) -> None:
        """Let ``to`` meet ``name``."""
        await self.order(to, "meet", peer=self.peers[name], address=self.addresses[name])

    async def ping(self, name: str, number: int = 0, **details: object) -> None:
        """Send a ping; the pong is the caller's to receive."""
        await self.host.send(self.peers[name], "ping", Number(number), **details)  # type: ignore[arg-type]

    async def losses(self, count: int) -> dict[PeerId, str]:
        """The next ``count`` loss notices: reasons by sender."""
        notices = [await self.next(LOST) for _ in range(count)]
        return {notice.sender: notice.read(Lost).reason for notice in notices}

    async def silence(self, *topics: str, seconds: float = 0.3) -> None:
        """Nothing comes on ``topics``."""
        with pytest.raises(TimeoutError):
            await self.host.receive(*topics, timeout=seconds)


# -- checks --------------------------------------------------------------------------------------------------------


async def check_order_is_kept(host: Host) -> None:
    """Messages of a pair arrive in the order in which they were sent, whatever their size."""
    cast = Cast(host)
    await cast.enter("a")
    for number in range(200):
        await cast.ping("a", number, frames=[bytes(number * 997 % 50_000)], step=number, generation=3)
    for number in range(200):
        message = await cast.next("pong")
        assert message.read(Number).number == number
        assert (message.step, message.generation, message.sender) == (number, 3, cast.peers["a"])
        assert len(bytes(message.frames[0])) == number * 997 % 50_000


async def check_frames_are_intact(host: Host) -> None:
    """Any number of frames up to the limit, of any size, and the sender may reuse its buffers at once."""
    cast = Cast(host)
    await cast.enter("a")
    pattern = bytes(range(256)) * 4096
    mutable = bytearray(pattern)
    floats = array.array("f", range(50_000))
    sent = [b"", b"\0", pattern, mutable, memoryview(floats), memoryview(pattern)[5:99]]
    expected = [bytes(frame) for frame in sent]
    await cast.ping("a", frames=sent)
    mutable[:] = bytes(len(mutable))
    floats[:] = array.array("f", bytes(4 * len(floats)))
    assert list(map(bytes, (await cast.next("pong")).frames)) == expected
    await cast.ping("a", frames=[bytes([index]) * index for index in range(MAX_FRAMES)])
    answer = (await cast.next("pong")).frames
    assert [bytes(frame) for frame in answer] == [bytes([index]) * index for index in range(MAX_FRAMES)]
    await cast.ping("a")
    assert list((await cast.next("pong")).frames) == []


async def check_receivers_select_by_topic(host: Host) -> None:
    """Topics wait apart; a receiver of several gets what came first."""
    cast = Cast(host)
    await cast.enter("a")
    for topic in ("one", "two", "three"):
        await cast.order("a", "say", peer=host.me, topic=topic)
    assert host.pending("two")
    assert not host.pending("four")
    assert (await cast.next("two")).topic == "two"
    assert not host.pending("two")
    assert [(await cast.next("three", "one")).topic for _ in range(2)] == ["one", "three"]


async def check_timeouts(host: Host) -> None:
    """Waiting in vain ends with TimeoutError, no earlier than asked for; what comes in time is delivered."""
    cast = Cast(host)
    await cast.enter("a")
    before = host.now()
    await cast.silence("never", seconds=0.2)
    assert 0.19 < host.now() - before < 5
    await host.send(host.me, "self", Number(5), [bytearray(b"abc")], generation=2, step=1)
    message = await host.receive("self", timeout=0)
    assert (message.sender, message.generation, message.step) == (host.me, 2, 1)
    assert message.read(Number) == Number(5)
    assert list(message.frames) == [b"abc"]


async def check_cancelled_receivers_lose_nothing(host: Host) -> None:
    """However a receiver is cancelled, each message is delivered once and in order."""
    cast = Cast(host)
    await cast.enter("a")
    got: list[int] = []
    for number in range(60):
        receiver = host.spawn(host.receive("pong"), "receiver")
        await cast.ping("a", number)
        await host.sleep(number * 0.0001)
        receiver.cancel()
        try:
            got.append((await receiver).read(Number).number)
        except asyncio.CancelledError:
            continue
    while len(got) < 60:
        got.append((await cast.next("pong")).read(Number).number)
    assert got == list(range(60))


async def check_strangers_wait_for_the_introduction(host: Host) -> None:
    """What a peer not met yet sends is kept; what is sent to a peer not met goes nowhere."""
    cast = Cast(host)
    await cast.enter("a", "b")
    await cast.introduce("b", to="a")
    await cast.order("a", "say", peer=cast.peers["b"], count=3)
    await cast.order("b", "say", peer=cast.peers["a"], count=3)
    assert (await cast.order("b", "listen", count=3)).text == ""
    assert (await cast.order("a", "listen", count=3)).text == ""
    await cast.introduce("a", to="b")
    assert (await cast.order("b", "listen", count=3, seconds=PATIENCE)).text == "0,1,2"
    await cast.order("b", "say", peer=cast.peers["a"], count=2)
    assert (await cast.order("a", "listen", count=2, seconds=PATIENCE)).text == "0,1"


async def check_addresses_are_their_owners(host: Host) -> None:
    """Nobody can be met at an address that is malformed or somebody else's."""
    cast = Cast(host)
    await cast.enter("a", "b")
    for peer, address in (
        (cast.peers["a"], cast.addresses["b"]),
        (Key().peer, cast.addresses["a"]),
        (Key().peer, "nonsense"),
        (cast.peers["a"], ""),
    ):
        with pytest.raises(ValueError):
            host.meet(peer, address)
    host.meet(cast.peers["a"], cast.addresses["a"])  # again, which changes nothing
    await cast.ping("a", 1)
    assert (await cast.next("pong")).read(Number).number == 1


async def check_discard(host: Host) -> None:
    """Stale messages vanish, the others stay in order."""
    cast = Cast(host)
    await cast.enter("a")
    for number, generation in enumerate((0, 1, 0, 1)):
        await cast.ping("a", number, generation=generation)
    await cast.order("a", "random")  # answered after the pings
    host.discard(lambda message: message.generation < 1 and message.topic == "pong")
    assert [(await cast.next("pong")).read(Number).number for _ in range(2)] == [1, 3]
    assert not host.pending("pong")


async def check_a_killed_peer_is_noticed(host: Host) -> None:
    """By the lead and by a third peer that met it, within a second, once each; writing to it harms nobody."""
    cast = Cast(host)
    await cast.enter("a", "b")
    await cast.introduce("a", to="b")
    await cast.introduce("b", to="a")
    host.disturb("a", "kill")
    killed = host.now()
    assert set(await cast.losses(2)) == {cast.peers["a"], cast.tickets["a"]}
    gone = await cast.next("gone")
    assert (gone.sender, gone.read(Done).text) == (cast.peers["b"], cast.peers["a"])
    assert host.now() - killed < 1.0
    for number in range(100):
        await cast.ping("a", number, frames=[bytes(100_000)])
    await cast.order("b", "say", peer=cast.peers["a"], count=100)
    with pytest.raises(KeyError):
        host.disturb("a", "kill")
    with pytest.raises(KeyError):
        host.disturb("nobody", "kill")
    await cast.silence(LOST, "gone")
    await cast.introduce("a", to="b")  # too late: whoever meets the dead hears of it
    assert (await cast.next("gone")).read(Done).text == cast.peers["a"]


async def check_a_stopped_peer_is_noticed(host: Host) -> None:
    """Within five seconds, by everybody who met it; when it continues it finds itself alone and harms nobody."""
    cast = Cast(host)
    await cast.enter("a", "b")
    await cast.introduce("a", to="b")
    await cast.introduce("b", to="a")
    host.disturb("a", "stop")
    stopped = host.now()
    assert set(await cast.losses(1)) == {cast.peers["a"]}
    assert (await cast.next("gone")).read(Done).text == cast.peers["a"]
    assert host.now() - stopped < 5.0
    await cast.ping("a")
    host.disturb("a", "continue")
    assert set(await cast.losses(1)) == {cast.tickets["a"]}  # it found its lead lost, and left
    await cast.silence("ghost", "pong", LOST)
    await cast.ping("b", 9)
    assert (await cast.next("pong")).read(Number).number == 9


async def check_a_short_stop_is_survived(host: Host) -> None:
    """A peer that stands still for a moment is not lost, and nothing that was sent to it is."""
    cast = Cast(host)
    await cast.enter("a")
    host.disturb("a", "stop")
    for number in range(5):
        await cast.ping("a", number)
    await host.sleep(0.5)
    assert not host.pending("pong")
    host.disturb("a", "continue")
    assert [(await cast.next("pong", LOST)).read(Number).number for _ in range(5)] == list(range(5))


async def check_a_peer_that_leaves_is_noticed(host: Host) -> None:
    """After its last words, however long they are."""
    cast = Cast(host)
    await cast.enter("a", "b")
    await cast.introduce("a", to="b")
    await cast.command("a", "leave")
    message = await cast.next(LOST, "farewell")
    assert (message.topic, message.nbytes) == ("farewell", 16 * 2**20)
    assert set(await cast.losses(2)) == {cast.peers["a"], cast.tickets["a"]}
    assert (await cast.next("gone")).read(Done).text == cast.peers["a"]


async def check_planned_faults(host: Host) -> None:
    """They strike at their step and phase, once."""
    cast = Cast(host)
    kinds = {
        "kill": Fault(peer="kill", step=2, phase="backward", kind="kill"),
        "delay": Fault(peer="delay", step=1, phase="forward", kind="delay", seconds=0.6),
        "stop": Fault(peer="stop", step=3, phase="backward", kind="stop", seconds=0.6),
    }
    for name, fault in kinds.items():
        await cast.enter(name, program=STEPPER, faults=(fault,))
    passed: dict[str, list[tuple[int, str]]] = {name: [] for name in kinds}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    names = {peer: name for name, peer in cast.peers.items()}
    points = [(step, phase) for step in range(4) for phase in ("forward", "backward")]
    while sum(map(len, passed.values())) < 5 + 16 + 16:
        message = await cast.next("at")
        name, done = names[message.sender], message.read(Done)
        passed[name].append((message.step, done.text))
        times[name].append(done.number)
    assert passed == {"kill": points[:5], "delay": points * 2, "stop": points * 2}
    for name, index in (("delay", 2), ("stop", 7)):
        gaps = [later - earlier for earlier, later in zip(times[name], times[name][1:], strict=False)]
        assert gaps[index - 1] > 0.55
        assert gaps[index - 1 + 8] < 0.55  # the second time round
    assert set(await cast.losses(2)) == {cast.peers["kill"], cast.tickets["kill"]}
    await cast.silence(LOST, "at")


async def check_errors_cross(host: Host) -> None:
    """A user's error in a peer reaches the lead whole, before the news that the peer is gone."""
    cast = Cast(host)
    await cast.enter("a")
    await cast.command("a", "fail")
    message = await cast.next(LOST, FAILED)
    assert (message.topic, message.sender) == (FAILED, cast.peers["a"])
    problem = rebuild_failure(message)
    assert (problem.what, problem.where) == ("no such file", "peer a: a.txt")
    assert (problem.why, problem.next, problem.code) == ("it is gone", "bring it", Exit.FAILED_CHECK)
    assert set(await cast.losses(2)) == {cast.peers["a"], cast.tickets["a"]}


async def check_errors_before_the_hello_cross(host: Host) -> None:
    """A lead hears why what it launched never came, not only that it did not."""
    ticket = host.launch(Launch(name="a", program="world_conformance:stillborn"))
    message = await host.receive(FAILED, LOST, timeout=PATIENCE)
    assert message.topic == FAILED
    assert rebuild_failure(message).where == "peer a: a.txt"
    assert (await host.receive(LOST, timeout=PATIENCE)).sender == ticket


async def check_dismissal(host: Host) -> None:
    """Everybody ends, busy, waiting or frozen, and the lead may start anew."""
    cast = Cast(host)
    await cast.enter("a", "b", "c")
    await cast.introduce("a", to="b")
    await host.dismiss()
    for name in ("a", "b", "c"):
        with pytest.raises(KeyError):
            host.disturb(name, "kill")
    host.discard(lambda message: message.topic in (LOST, "gone"))
    await cast.ping("a")
    await cast.silence("pong")
    first = cast.peers["a"]
    await cast.enter("a")
    assert cast.peers["a"] != first
    await cast.ping("a", 4)
    assert (await cast.next("pong")).read(Number).number == 4


async def check_names_are_reused_after_death(host: Host) -> None:
    """Two living peers never share a name; a relaunched one is a new identity with its own ticket."""
    cast = Cast(host)
    await cast.enter("a")
    first, ticket = cast.peers["a"], cast.tickets["a"]
    with pytest.raises(ValueError, match="already running"):
        host.launch(Launch(name="a", program=PUPPET))
    host.disturb("a", "kill")
    assert set(await cast.losses(2)) == {first, ticket}
    await cast.enter("a")
    assert cast.peers["a"] != first
    assert cast.tickets["a"] != ticket
    await cast.ping("a", 1)
    answer = await cast.next("pong")
    assert (answer.sender, answer.read(Number).number) == (cast.peers["a"], 1)


async def check_speed(host: Host) -> None:
    """A slow peer's computations take longer in proportion."""
    cast = Cast(host)
    await cast.enter("fast")
    await cast.enter("slow", speed=0.25)
    assert 0.95 < (await cast.order("fast", "crunch", seconds=0.05)).number < 3
    assert 3.8 < (await cast.order("slow", "crunch", seconds=0.05)).number < 12
    assert await host.compute(lambda: 6 * 7, 1e6) == 42


async def check_chance_is_reproducible(host: Host) -> None:
    """By seed, name and purpose, and by nothing else: not by the world, not by the identity."""
    cast = Cast(host)
    await cast.enter("a", "b")
    drawn = {(n, p): (await cast.order(n, "random", topic=p)).number for n in "ab" for p in ("x", "y")}
    assert len(set(drawn.values())) == 4
    assert drawn["a", "x"] == EXPECTED_CHANCE
    host.disturb("a", "kill")
    await cast.losses(2)
    await cast.enter("a")
    assert (await cast.order("a", "random", topic="x")).number == EXPECTED_CHANCE


async def check_blobs_are_shared(host: Host) -> None:
    """What one peer stores, the others read by its name."""
    cast = Cast(host)
    await cast.enter("a")
    name = (await cast.order("a", "blob", topic="contents")).text
    assert host.blobs.get(name) == b"contents"


async def check_bad_messages_are_not_sent(host: Host) -> None:
    """What no receiver would accept is refused where it is sent, to others and to oneself, in both worlds."""
    cast = Cast(host)
    await cast.enter("a")
    for to in (cast.peers["a"], host.me):
        for topic, body, frames in (
            (LOST, None, ()),
            (HELLO, None, (b"frame",)),
            (FAILED, None, (b"frame",)),
            ("x" * (MAX_TOPIC + 1), None, ()),
            ("many", None, [b""] * (MAX_FRAMES + 1)),
            ("body", Done("x" * (MAX_BODY_BYTES + 1)), ()),
            ("gaps", None, [memoryview(bytes(100))[::2]]),
        ):
            with pytest.raises(ValueError):
                await host.send(to, topic, body, frames)
    if host.kind == "real":
        for to in (cast.peers["a"], host.me):
            with pytest.raises(ValueError, match="simulations only"):
                await host.send(to, "blank", None, [Blank(10)])
    await cast.ping("a")
    await cast.next("pong")


def _expected_chance() -> float:
    from talkoot.core.ids import RunId
    from talkoot.world.base import PeerWorld
    from talkoot.world.blobs import Blobs

    world = PeerWorld(run=RunId("r"), name="a", key=Key(), seed=SEED, blobs=Blobs(), lead=None)
    return world.random("x").random()


EXPECTED_CHANCE = _expected_chance()

Check = Callable[[Host], Awaitable[None]]
CHECKS: list[Check] = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
