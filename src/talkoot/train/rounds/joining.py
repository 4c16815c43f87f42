"""How a newcomer gets its weights: from replicas that go on training, piece by piece, from others when one is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from talkoot.core.ids import PeerId, digest
from talkoot.run.greeting import Contact
from talkoot.train.rounds.messages import Chunk, Enter, Fetch
from talkoot.world.api import Message, frame_bytes

if TYPE_CHECKING:
    from talkoot.train.rounds.peer import RoundPeer

CHUNK_BYTES = 2**20
OVERHEAD_BYTES = 2**16  # of a state beside its numbers


class Donor:
    """Gives this replica's weights to newcomers, and takes what donors send where it is the newcomer itself."""

    def __init__(self, peer: RoundPeer) -> None:
        self._peer = peer
        self._asked: dict[PeerId, int] = {}  # by newcomer, from which round on it may have them
        self._taken: dict[PeerId, dict[int, Message]] = {}
        self._over = False

    async def ask(self, newcomer: PeerId, fetch: Fetch) -> None:
        """Somebody wants this replica's weights as of a round."""
        self._asked[newcomer] = fetch.round
        if self._over:
            self._serve(self._peer.round)
        elif fetch.round <= self._peer.round:
            await self._peer.send(newcomer, "later", Fetch(self._peer.round + 1))

    def owes(self, round: int) -> bool:
        """Whether somebody waits for the state with which that round begins."""
        return any(wanted <= round for wanted in self._asked.values())

    async def later(self, donor: PeerId, fetch: Fetch) -> None:
        """A donor's state will be that of a later round."""
        peer = self._peer
        if donor in self._taken and fetch.round > peer.round:
            peer.round = fetch.round
            await peer.refuse(peer.mail.forget(peer.round), "another round")  # the donor itself may wait for this one
            await peer.tell("later", fetch)

    def entered(self, round: int) -> None:
        """This replica begins that round: whoever waits for it gets its weights."""
        self._over = False
        self._serve(round)

    def finish(self) -> None:
        """This replica has done all its rounds."""
        self._over = True

    def _serve(self, round: int) -> None:
        for newcomer in [peer for peer, wanted in self._asked.items() if wanted <= round]:
            del self._asked[newcomer]
            self._peer.world.spawn(self._give(newcomer, round, self._peer.replica.donate()), "give")

    async def _give(self, newcomer: PeerId, round: int, state: bytes) -> None:
        peer, view, name = self._peer, memoryview(state), digest(state)
        count = max(1, -(-len(state) // CHUNK_BYTES))
        for number in range(count):
            await peer.reached("give", late=True)
            piece = view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            await peer.send(newcomer, "chunk", Chunk(round, number, count, name), [piece])

    def take(self, message: Message) -> None:
        """A piece of a donor's state."""
        taken = self._taken.get(message.sender)
        if taken is not None:
            taken[message.read(Chunk).number] = message
            self._peer.work += 1
            self._peer.mail.wake()

    async def fetch(self, donor: Contact, round: int, most_bytes: int) -> tuple[int, bytes]:
        """A donor's state, and the round that it is of.

        Raises:
            ValueError: it is gone, too slow, or sent what makes no sense.
        """
        peer, sender = self._peer, PeerId(donor.peer)
        taken = self._taken[sender] = {}
        peer.world.meet(sender, donor.address)
        await peer.send(sender, "fetch", Fetch(round))

        def complete() -> bool:
            first = next(iter(taken.values()), None)
            return sender in peer.mail.gone or (first is not None and len(taken) >= first.read(Chunk).count)

        try:
            await peer.wait(complete, peer.job.recipe.train.patience_s / 2)
            if not taken or not complete() or sender in peer.mail.gone:
                raise ValueError(f"{donor.peer[:8]} sent {len(taken)} pieces and no more")
            facts = [message.read(Chunk) for _, message in sorted(taken.items())]
            if [(one.number, one.count) for one in facts] != [(at, len(facts)) for at in range(len(facts))]:
                raise ValueError(f"{donor.peer[:8]} sent pieces that make no whole")
            if sum(frame_bytes(frame) for message in taken.values() for frame in message.frames) > most_bytes:
                raise ValueError(f"{donor.peer[:8]} sent more than a state")
            state = b"".join(_bytes(frame) for _, message in sorted(taken.items()) for frame in message.frames)
            if digest(state) != facts[0].digest:
                raise ValueError(f"{donor.peer[:8]} sent a state that is damaged")
            return facts[0].round, state
        finally:
            del self._taken[sender]


def _bytes(frame) -> bytes:
    return bytes(frame) if not hasattr(frame, "nbytes") or isinstance(frame, memoryview) else b""


class Given(NamedTuple):
    """A donor's state, and the round with whose beginning it is."""

    donor: PeerId
    round: int
    state: bytes


async def fetch(peer: RoundPeer, enter: Enter) -> tuple[int, list[PeerId]]:
    """Start from the mean of as many donors as are wanted, or as there are; returns the round and who they were.

    Where all replicas have the same slow weights, only those of one and the same round can be used.

    Raises:
        ValueError: none of them could give anything.
    """
    found: list[Given] = []
    problems: list[str] = []
    peer.round = max(peer.round, enter.round)
    most = 4 * peer.replica.num_values * (1 + len(peer.rule.buffers)) + OVERHEAD_BYTES
    for number, donor in enumerate((*enter.donors, *enter.donors)):
        usable = _usable(peer, found)
        if len(usable) == enter.wanted or (number >= len(enter.donors) and usable):
            break
        try:
            round, state = await peer.donor.fetch(donor, peer.round, most)
            peer.replica.join([state])
        except ValueError as problem:
            problems.append(str(problem))
            continue
        peer.round = max(peer.round, round)
        found.append(Given(PeerId(donor.peer), round, state))
    usable = _usable(peer, found)
    if not usable:
        raise ValueError("; ".join(problems) or "there is no donor")
    peer.replica.join([given.state for given in usable])
    return peer.round, [given.donor for given in usable]


def _usable(peer: RoundPeer, found: Sequence[Given]) -> list[Given]:
    return [given for given in found if given.round == peer.round or peer.rule.partners != "all"]
