"""The lead's side of having a standby: no single machine whose loss ends a run.

The standby (:mod:`talkoot.train.standby`) keeps a copy of the log. Two leads never act at once, by these rules:

* A lead tells nobody to apply a commit before its standby has acknowledged it: the commit is *sealed*.
* Without that word (the standby is lost) it first has more than half of the seated peers promise not to follow that
  standby. What counts as seated is what the standby may believe: every seating since its last word must agree. When
  they do not promise, the lead stops, with a diagnosis: it is the lead that is cut off.
* A standby leads only if it lost the lead itself and at least half of the peers that are seated by its log told it
  that they lost it too. Such a peer obeys its old lead no more, and makes no promise to it. "At least half" and "more
  than half" share a peer, which has done one or the other. (Both halves of an even split wait for somebody, and the
  standby's half may go on: a lead and half of its peers may be lost at once.)
* A new lead has a higher generation, and a key that the old one has named in the log (``run.standby``); the fold
  refuses any other's ``run.succeed``, and after it every receipt that the old one writes.
* Where both write to one file, the log itself decides: its next entry is written once.

This is the vote of replicated logs (Oki and Liskov 1988; Ongaro and Ousterhout 2014), with a single replica and the
peers as witnesses: they hold no log, so a step costs one round trip to one machine.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from talkoot.core.codec import encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import PeerId
from talkoot.core.receipt import Signed
from talkoot.run.greeting import Contact, Hello, Introduce
from talkoot.run.records import Appointed
from talkoot.train.allegiance import SUPERSEDED
from talkoot.train.crew import PeersLost
from talkoot.train.job import Job
from talkoot.train.messages import Cut, Entered, Entries, Heir
from talkoot.world.api import HELLO, LOST, Launch, Lost, Message

if TYPE_CHECKING:
    from talkoot.train.lead import Lead

PROGRAM = "talkoot.train.standby:stand_by"
NAME = "standby"
BATCH_BYTES = 2**20
NEARLY = 200  # receipts that a newcomer may lack while the run waits for it
SEAL_S = 10.0  # without any word: the standby does not keep up, whatever its link says


class Superseded(TalkootError):
    """This lead may not go on: another one does, or may."""


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby is told at its launch: what a lead knows that is not in the log.

    ``process``: of the lead, in the real world.
    """

    job: Job
    stages: tuple[tuple[int, int], ...]
    folder: str | None
    held_out_batches: int
    tokenizer_digest: str
    process: int


def seated(state: State) -> frozenset[PeerId]:
    """Who holds a stage, by the log: those whose word counts when lead and standby lose each other."""
    return frozenset(PeerId(peer) for peer, held in state["peers"].present.items() if held.stage is not None)


def is_more_than_half(some: set[PeerId], of: frozenset[PeerId]) -> bool:
    """Enough for the lead. Without anybody seated the standby cannot lead, and the lead needs nobody."""
    return not of or 2 * len(some & of) > len(of)


def is_half(some: set[PeerId], of: frozenset[PeerId]) -> bool:
    """Enough for the standby; see the module's text."""
    return bool(of) and 2 * len(some & of) >= len(of)


class Succession:
    """A lead's standby: launched, taught, appointed, heard, dismissed.

    Attributes:
        wait: nothing begins before the first standby is there; a lead that took over does not wait.
        after: a lead that took over starts none before this is done.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self.wait = True
        self.after: asyncio.Task[None] | None = None
        self._name = self._reason = ""
        self._ticket = ""
        self._standby: PeerId | None = None  # once it said hello
        self._address = ""
        self._appointed = self._lost = False
        self._sent = self._entered = 0
        self._told: set[PeerId] = set()
        self._seatings: list[frozenset[PeerId]] = []  # what the standby may believe

    # -- what the lead hears ----------------------------------------------------------------------------------

    def takes(self, message: Message) -> bool:
        """Whether a notice was from or about the standby; it has been dealt with then.

        Raises:
            PeersLost: the standby says that a peer obeys this lead no more.
            Superseded: a peer says that it obeys another one.
        """
        lead, sender = self._lead, message.sender
        if message.topic == SUPERSEDED:
            if sender in lead.roster.members:
                raise self.superseded(f"{lead.roster.name_of(sender)} follows another lead")
            return True
        if message.topic == "cut" and sender == self._standby:
            with suppress(ValueError):
                peer = PeerId(message.read(Cut).peer)
                if peer in lead.roster.members:
                    lead.expel(peer, "it lost the lead, and obeys it no more")
            return True
        if not self._ticket or sender not in (self._ticket, lead.world.identity(self._ticket)):
            return False
        if message.topic == LOST:
            self._lose(message.read(Lost).reason)
        elif message.topic == HELLO:
            with suppress(ValueError):  # one that makes no sense changes nothing
                hello = message.read(Hello)
                lead.world.meet(sender, hello.address)
                self._standby, self._address = sender, hello.address
        return True

    def _lose(self, reason: str) -> None:
        self._ticket, self._lost, self._reason = "", True, reason

    def note(self) -> None:
        """Somebody joined, took a seat or was lost: the standby may learn of it, or not."""
        if self._appointed:
            self._seatings.append(seated(self._lead.state))

    # -- between steps ----------------------------------------------------------------------------------------

    async def tend(self) -> None:
        """See to it that there is a standby, that it knows everybody, and everybody it.

        Raises:
            PeersLost: somebody was lost meanwhile.
        """
        lead = self._lead
        if self._lost:
            await self._dismiss()
        if not lead.recipe.swarm.standbys or (self.after is not None and not self.after.done()):
            return
        if not self._ticket:
            self._launch()
        while self.wait and self._standby is None:
            await lead.next(HELLO, (self._name,))
            if self._lost:
                await self._dismiss()
                self._launch()
        if self._standby is not None and not self._appointed:
            await self._appoint(self._standby)
        if self._appointed and self._told != set(lead.roster.members):
            await self._introduce()

    def _launch(self) -> None:
        lead = self._lead
        self._name = NAME + (str(lead.state["run"].successions + 1) if lead.state["run"].successions else "")
        lead.roster.count_launch(self._name, lead.step)
        post = Post(
            job=lead.job,
            stages=tuple(lead.stages),
            folder=None if lead.folder is None else str(lead.folder.absolute()),
            held_out_batches=lead.held_out_batches,
            tokenizer_digest=lead.tokenizer_digest,
            process=os.getpid(),
        )
        orphan_s = 2 * lead.recipe.train.patience_s
        launch = Launch(name=self._name, program=PROGRAM, argument=encode(post), host=True, orphan_s=orphan_s)
        self._ticket, self._standby = lead.world.launch(launch), None
        self._sent = self._entered = 0

    async def _appoint(self, standby: PeerId) -> None:
        """Teach it the log; then name it there, and count on it from that entry on."""
        lead = self._lead
        await self._send()
        while not self.wait and lead.world.pending("entered"):
            await self._hear()
        if self.wait or lead.state.position - self._entered < NEARLY:
            await self._teach()
        if self._lost or self._entered < lead.state.position:
            return
        lead.record("run.standby", Appointed(peer=standby, name=self._name))
        self._appointed, self.wait, self._told = True, False, set()
        lead.roster.attempts.pop(self._name, None)
        self._seatings = [seated(lead.state)]
        await self._send()

    async def _introduce(self) -> None:
        lead, standby = self._lead, self._standby
        if standby is None:
            return
        members = lead.roster.members
        contacts = tuple(Contact(peer, member.address) for peer, member in members.items())
        processes = {name: pid for name in sorted(lead.roster.names()) if (pid := lead.world.process(name))}
        await lead.tell(standby, "introduce", Introduce(contacts, processes), lead.step)
        for peer in sorted(members.keys() - self._told):
            await lead.tell(peer, "heir", Heir(standby, self._address), lead.step)
        self._told = set(members)

    # -- sealing ----------------------------------------------------------------------------------------------

    async def seal(self) -> None:
        """Return when nobody can lead this run who does not know the log as it is now.

        Peers lost meanwhile stand in ``lead.roster.lost``.

        Raises:
            Superseded: that cannot be had.
        """
        if self._appointed and not self._lost:
            await self._teach()
        if self._lost:
            await self._dismiss()

    async def _teach(self) -> None:
        lead = self._lead
        try:
            while not self._lost and self._entered < lead.state.position:
                await self._send()  # also what was written while this waited: that somebody was lost
                with suppress(PeersLost):
                    async with asyncio.timeout(SEAL_S):
                        await self._hear()
        except TimeoutError:
            self._lose(f"it did not answer for {SEAL_S:.0f} s")
        except ValueError as problem:
            self._lose(f"its answer makes no sense: {problem}")
        if not self._lost:
            self._seatings = [seated(lead.state)]

    async def _hear(self) -> None:
        message = await self._lead.next("entered", (self._name,))
        if message.topic == "entered" and message.sender == self._standby:
            self._entered = min(max(self._entered, message.read(Entered).position), self._sent)

    async def _send(self) -> None:
        """Everything that the standby has not been sent yet."""
        lead, standby = self._lead, self._standby
        if standby is not None:
            for batch in _batches(lead.journal.signed(self._sent + 1)):
                after, self._sent = self._sent, self._sent + len(batch)
                entries = Entries(after, tuple(batch), lead.journal.chain_at(self._sent))
                await lead.tell(standby, "entries", entries, lead.step)

    async def _dismiss(self) -> None:
        """Go on without the standby that was lost, if enough peers promise not to follow it."""
        lead, standby = self._lead, self._standby
        lead.put_down(self._name)
        if self._appointed and standby is not None:
            pledged = await self._pledges(standby)
            if not all(is_more_than_half(pledged, seating) for seating in self._seatings):
                raise self.superseded("it lost its standby, and with it too many of its peers")
            lead.record("run.standby", Appointed(peer="", name=self._name, reason=self._reason))
        self._standby, self._appointed, self._lost, self._seatings = None, False, False, []

    async def _pledges(self, standby: PeerId) -> set[PeerId]:
        lead = self._lead
        pledged: set[PeerId] = set()
        for peer in lead.roster.members:
            await lead.tell(peer, "dismiss", Heir(standby), lead.step)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.8 * lead.recipe.train.patience_s):  # they may be computing
                while waiting := lead.roster.members.keys() - pledged:
                    if all(is_more_than_half(pledged, seating) for seating in self._seatings):
                        break
                    with suppress(PeersLost, ValueError):
                        message = await lead.next("dismissed", waiting)
                        if message.topic == "dismissed" and message.read(Heir).peer == standby:
                            pledged.add(message.sender)
        return pledged

    async def close(self) -> None:
        """The run ends here: the standby is to know, and to leave."""
        await self._send()
        if self._standby is not None:
            await self._lead.tell(self._standby, "stop", None, self._lead.step)

    # -- the other lead ---------------------------------------------------------------------------------------

    def overtaken(self) -> Superseded | None:
        """The error that says so, if somebody else's succession stands in the log that this lead writes to."""
        with suppress(ValueError, sqlite3.Error):  # then this is not what ails the log
            for signed in self._lead.journal.signed(self._lead.state.position + 1):
                receipt = signed.open()
                if receipt.op == "run.succeed":
                    return self.superseded(f"its standby has taken over under generation {receipt.generation}")
        return None

    def superseded(self, why: str) -> Superseded:
        """The error that ends a lead which may not go on."""
        lead = self._lead
        return Superseded(
            "this lead has lost its run",
            where=f"step {lead.step} of run {lead.world.run}",
            why=f"it stood still or was cut off: {why}",
            next="see with `talkoot status` who leads it now; if nobody does, the same command resumes",
            code=Exit.UNREACHABLE,
        )


def _batches(signed: Iterator[Signed]) -> Iterator[list[Signed]]:
    batch: list[Signed] = []
    size = 0
    for one in signed:
        batch.append(one)
        size += len(one.raw)
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
