"""Who is in the swarm and who holds what: bookkeeping without any I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.steps import Seat
from talkoot.train.recipe import Swarm

MAX_RESPAWNS = 20  # of one name without any work between: a machine that cannot work, not bad luck


class Member(msgspec.Struct):
    """A peer that said hello: its launch's ticket, the step of its launch, the stage it holds, if any, and since
    when; ``held``: whether it ever held one."""

    name: str
    address: str
    ticket: str
    stage: int | None = None
    since: int = 0
    seated: int = 0
    held: bool = False


class Roster:
    """The swarm's members.

    Attributes:
        home: for every name that a stage was chosen for, that stage.
        members: peers that said hello, by identity.
        launched: names started and not heard of yet, with their launch's ticket.
        awaited: the identity that the latest start of each name has.
        lost: names lost since the last recovery.
        attempts: how often each name was started without a step being done in between.
        measured: speeds that turned out to be others than the recipe's.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.num_stages = swarm.num_stages
        self.home = dict(swarm.peers)
        self._speeds = {name: swarm.speed(index) for index, name in enumerate(self.home)}
        self._slots = {name: swarm.slots_of(index) for index, name in enumerate(self.home)}
        self._joiners = {joiner.name: joiner for joiner in swarm.joiners}
        self._speeds |= {name: joiner.speed for name, joiner in self._joiners.items()}
        self._slots |= {name: joiner.slots for name, joiner in self._joiners.items()}
        self.members: dict[PeerId, Member] = {}
        self.launched: dict[str, str] = {}
        self.awaited: dict[str, PeerId] = {}
        self.lost: list[str] = []
        self.attempts: dict[str, int] = {}
        self._launched_at: dict[str, int] = {}
        self.measured: dict[str, float] = {}

    def speed(self, name: str) -> float:
        """Relative speed of the peer of that name, as far as is known by now."""
        return self.measured.get(name, self._speeds[name])

    def stated_speed(self, name: str) -> float:
        """The recipe's speed of that peer, which it is held back to."""
        return self._speeds[name]

    def slots(self, name: str) -> int:
        """Microbatches that the peer of that name can hold at once; 0 = any number."""
        return self._slots[name]

    def names(self) -> set[str]:
        """Names of all members."""
        return {member.name for member in self.members.values()}

    def name_of(self, peer: PeerId) -> str:
        """A member's name."""
        return self.members[peer].name

    def knows(self, peer: PeerId) -> bool:
        """Whether this is a member, or a peer that was launched and is on its way."""
        return peer in self.members or any(self.awaited[name] == peer for name in self.launched)

    def describe(self, peers: Iterable[str]) -> str:
        """Names where known, for messages."""
        return ", ".join(sorted(self.members[PeerId(p)].name if p in self.members else p for p in peers))

    def count_launch(self, name: str, step: int) -> None:
        """Count one more start of a name.

        Raises:
            TalkootError: it was replaced too often without having worked.
        """
        attempts = self.attempts[name] = self.attempts.get(name, 0) + 1
        self._launched_at[name] = step
        if attempts > MAX_RESPAWNS + 1:
            raise TalkootError(
                f"peer {name} keeps dying",
                where=f"step {step}",
                why=f"it was started {attempts - 1} times and never finished a step",
                next="look at its messages above; the machine may lack memory",
                code=Exit.UNREACHABLE,
            )

    def admit(self, peer: PeerId, name: str, address: str) -> None:
        """Take in a peer that was launched.

        Raises:
            ValueError: nobody waits for one of that name.
        """
        if name not in self.launched:
            raise ValueError(f"nobody waits for {name!r}")
        self.members[peer] = Member(name, address, self.launched.pop(name), since=self._launched_at.get(name, 0))

    def find(self, gone: str) -> PeerId | None:
        """The member that a loss notice means: by identity, or by its launch's ticket."""
        return next((peer for peer, member in self.members.items() if gone in (peer, member.ticket)), None)

    def stillborn(self, gone: str) -> str | None:
        """The name whose launch ended before its hello, taken off the list of launches."""
        for name, ticket in self.launched.items():
            if ticket == gone:
                del self.launched[name]
                return name
        return None

    def seated(self) -> list[tuple[PeerId, int]]:
        """Peers that hold a stage, in order of stage and name."""
        held = [(m.stage, m.name, peer) for peer, m in self.members.items() if m.stage is not None]
        return [(peer, stage) for stage, _, peer in sorted(held)]

    def unseated(self) -> list[tuple[PeerId, int]]:
        """Members without a seat, each with the stage that waits for it, in the same order."""
        free = [(self.home[m.name], m.name, peer) for peer, m in self._without_seat() if m.name in self.home]
        return [(peer, stage) for stage, _, peer in sorted(free)]

    def newcomers(self) -> list[Seat]:
        """Members for whom no stage was chosen yet; they count as being in none."""
        found = sorted((m.name, peer) for peer, m in self._without_seat() if m.name not in self.home)
        return [Seat(peer, -1, self.speed(name), name, self.slots(name)) for name, peer in found]

    def due(self, step: int) -> list[str]:
        """Peers that come by this step and were never started."""
        return [name for name, joiner in self._joiners.items() if joiner.step <= step and name not in self.awaited]

    def _without_seat(self) -> list[tuple[PeerId, Member]]:
        return [(peer, member) for peer, member in self.members.items() if member.stage is None]

    def vacate(self) -> None:
        """Take everybody's seat away: their states no longer count."""
        for member in self.members.values():
            member.stage = None

    def holders(self, stage: int) -> tuple[PeerId, ...]:
        """Peers that hold ``stage``, in an order that everybody shares."""
        return tuple(peer for peer, held in self.seated() if held == stage)

    def seats(self) -> list[Seat]:
        """What a planner sees."""
        named = [(peer, stage, self.name_of(peer)) for peer, stage in self.seated()]
        return [Seat(peer, stage, self.speed(name), name, self.slots(name)) for peer, stage, name in named]

    def returns(self, name: str) -> bool:
        """Whether a peer of that name is on its way, or will be started again."""
        return name in self.launched or self._swarm.respawn

    def missing(self) -> tuple[set[str], list[int]]:
        """What hinders work: names still to come for stages that nobody holds, and such stages without a name."""
        coming = self.names() | set(self.launched)
        wanted: set[str] = set()
        hopeless = []
        for stage in range(self.num_stages):
            if not self.holders(stage):
                candidates = {name for name in coming if self.home.get(name) == stage}
                wanted |= candidates
                if not candidates:
                    hopeless.append(stage)
        return wanted - self.names(), hopeless

    def tie(self, peer: PeerId, stage: int) -> tuple[tuple[PeerId, ...], PeerId | None]:
        """Partners at the pipeline's other end, for a tied embedding: (send to, receive from)."""
        if self._swarm.layout == "ring" or self.num_stages == 1 or stage not in (0, self.num_stages - 1):
            return (), None  # one peer holds both, or neither
        mine, theirs = self.holders(stage), self.holders(self.num_stages - 1 - stage)
        index = mine.index(peer)
        to = tuple(other for i, other in enumerate(theirs) if i % len(mine) == index)
        return to, theirs[index % len(theirs)]
