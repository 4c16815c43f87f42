"""The peers that a lead starts: who was launched, who said hello, who is gone, and who is started again.

For leads whose peers work by themselves (post-training, experts): a loss takes nothing from the others. Pipelines,
whose peers hold parts of one state, have a crew of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from talkoot.core.codec import negotiate
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.run.greeting import Hello
from talkoot.run.records import Facts, Gone, Joined, Warned
from talkoot.world.api import FAILED, Host, Launch, Lost, Message
from talkoot.world.base import rebuild_failure
from talkoot.world.faults import SIGNALLED, Fault

MAX_RESPAWNS = 20  # of one name without any work in between: a machine that cannot work, not bad luck


class Company:
    """See the module's text.

    Args:
        world: the lead's own.
        record: writes a receipt of the lead's: operation and facts.
        launch: how to start a peer: its name, and whether it is the first time in this session.
        where: says how far the run is, for messages.
    """

    def __init__(
        self,
        world: Host,
        record: Callable[[str, Facts], None],
        launch: Callable[[str, bool], Launch],
        where: Callable[[], str],
    ) -> None:
        self._world, self._record, self._launch, self._where = world, record, launch, where
        self.members: dict[PeerId, str] = {}  # who is here, by name
        self._launched: dict[str, str] = {}  # name -> its launch's ticket
        self._identities: dict[PeerId, str] = {}
        self._attempts: dict[str, int] = {}
        self._started: set[str] = set()

    @property
    def on_their_way(self) -> Iterable[str]:
        """Names of those that were launched and have not said hello."""
        return self._launched.keys()

    @property
    def names(self) -> set[str]:
        """Of all that are here or on their way."""
        return {*self.members.values(), *self._launched}

    def was_started(self, name: str) -> bool:
        """Whether this session has ever launched it."""
        return name in self._started

    def start(self, name: str) -> None:
        """Launch a peer, unless it was launched too often without doing anything: then it is given up.

        Raises:
            TalkootError: it was given up, and nobody else is left.
        """
        attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
        if attempts > MAX_RESPAWNS + 1:
            if self.names:  # the others go on without it
                self._record("run.warning", Warned(text=f"{name} is given up: {attempts - 1} starts without any work"))
                return
            raise TalkootError(
                f"peer {name} keeps dying",
                where=self._where(),
                why=f"it was started {attempts - 1} times and never finished anything",
                next="look at its messages above; the machine may lack memory",
                code=Exit.UNREACHABLE,
            )
        fresh = name not in self._started
        self._started.add(name)
        self._launched[name] = ticket = self._world.launch(self._launch(name, fresh))
        self._identities[self._world.identity(ticket)] = name

    def worked(self, name: str) -> None:
        """It finished something: earlier deaths do not count any more."""
        self._attempts.pop(name, None)

    def admit(self, message: Message) -> str | None:
        """Take in a peer that says hello; its name, or None for a stranger, whose word is no reason for anything.

        Raises:
            TalkootError: it speaks another protocol.
        """
        peer, hello = message.sender, message.read(Hello)
        if self._identities.get(peer) != hello.name or hello.name not in self._launched:
            return None
        negotiate(hello.oldest_protocol, hello.newest_protocol, who=f"peer {hello.name}")
        self._world.meet(peer, hello.address)
        del self._launched[hello.name]
        self.members[peer] = hello.name
        self._record("peer.join", Joined(peer=peer, name=hello.name))
        return hello.name

    def raise_failure(self, message: Message) -> None:
        """Raise the error that one of these peers reports with a ``FAILED`` message; ignore a stranger's."""
        if message.topic == FAILED and message.sender in self._identities:
            raise rebuild_failure(message)

    def lost(self, message: Message) -> tuple[str, str] | None:
        """What a ``LOST`` notice means: the name of a member that is to be struck off, and why. One that died before
        its hello is started again at once; of one that was struck off before nothing more is to be said."""
        for name, ticket in list(self._launched.items()):
            if message.sender == ticket:
                del self._launched[name]
                self.start(name)
                return None
        name = self.members.get(message.sender)
        return (name, message.read(Lost).reason) if name is not None else None

    def strike_off(self, peer: PeerId, reason: str) -> None:
        """Go on without a member; whether to start it again is the caller's to say."""
        name = self.members.pop(peer)
        self._identities.pop(peer, None)
        self._record("peer.lost", Gone(peer=peer, name=name, reason=reason))
        with suppress(KeyError, ProcessLookupError):  # what stands still must not wake up beside its replacement
            self._world.disturb(name, "kill")

    def check_left(self, reason: str) -> None:
        """Raise TalkootError where nobody is here or on the way: ``reason`` took the last one."""
        if not self.names:
            raise TalkootError(
                "no peer is left",
                where=self._where(),
                why=reason,
                next="run the same command again: it resumes",
                code=Exit.UNREACHABLE,
            )

    def expect(self, faults: Iterable[Fault]) -> None:
        """Strike with those faults that come from outside at their time."""
        for number, (name, fault) in enumerate((victim, one) for one in faults for victim in one.victims):
            if fault.at_s is not None and fault.kind in SIGNALLED:
                self._world.spawn(self._strike(name, fault.at_s, fault.kind, fault.seconds), f"fault {number}")

    async def _strike(self, name: str, at_s: float, kind: str, seconds: float) -> None:
        await self._world.sleep(at_s)
        with suppress(KeyError, ProcessLookupError):
            self._world.disturb(name, kind)
            if kind == "stop" and seconds:
                await self._world.sleep(seconds)
                self._world.disturb(name, "continue")


def own_faults(faults: Iterable[Fault], name: str) -> tuple[Fault, ...]:
    """Those faults of a peer that strike from within it."""
    return tuple(f for f in faults if name in f.victims and not (f.at_s is not None and f.kind in SIGNALLED))
