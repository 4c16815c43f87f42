"""The lead's side of the swarm: who is present, who holds what, the log, snapshots and recovery.

The lead computes nothing. It proposes work, collects receipts, writes them to the log, and seats peers. What it knows
it knows from the log, so it can be started again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

import talkoot
from talkoot.core.codec import encode, negotiate
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import Digest, PeerId
from talkoot.core.log import Log
from talkoot.core.receipt import Signed
from talkoot.plan.steps import View
from talkoot.train import checkpoint as snapshots
from talkoot.train.journal import Journal, Observer, Share
from talkoot.train.messages import Assign, Contact, Cut, Give, Hello, Introduce, Ready
from talkoot.train.outlook import start_of, view_of
from talkoot.train.peer import Job
from talkoot.train.records import (
    End,
    Facts,
    Gone,
    Joined,
    PeerState,
    Recovered,
    Resume,
    RolledBack,
    Seated,
    Warned,
)
from talkoot.train.recovery import Loss, climb
from talkoot.train.roster import Roster
from talkoot.world.api import FAILED, HELLO, LOST, Host, Launch, Lost, Message
from talkoot.world.base import rebuild_failure

NOTICES = (LOST, FAILED, HELLO, "cut")
PROGRAM = "talkoot.train.peer:train_peer"

A = TypeVar("A")


class PeersLost(Exception):
    """Somebody is gone; what was under way must be done again."""


class Lead:
    """See the module's text.

    Args:
        world: the lead's own.
        job: recipe, model shape and tokens.
        stages: layer range of each stage.
        log: an open log; what it holds is continued.
        folder: the run's folder; None keeps no snapshots on disk.
        held_out_batches: how many batches an evaluation takes.
        tokenizer_digest: of the run's tokenizer, for the snapshots' manifests.
        observer: called with each new entry.
    """

    def __init__(
        self,
        world: Host,
        job: Job,
        stages: Sequence[tuple[int, int]],
        log: Log,
        folder: Path | None = None,
        held_out_batches: int = 0,
        tokenizer_digest: str = "",
        observer: Observer = lambda entry, state: None,
    ) -> None:
        self.world, self.job, self.recipe, self.folder = world, job, job.recipe, folder
        self.stages, self.num_stages = list(stages), len(stages)
        self.held_out_batches, self.tokenizer_digest = held_out_batches, tokenizer_digest
        self.evaluated_at: int | None = None
        self.saved_at: int | None = None
        self.stop_requested = False
        self.journal = Journal(world, log, self.recipe.seed, observer)
        self.generation = self.state["train"].generation + (1 if self.state.position else 0)
        self.roster = Roster(self.recipe.swarm)
        self.state_hash = ""
        self.busy_peers: tuple[PeerState, ...] = ()  # each present peer's account, as of the end of the run
        self._lost_at = 0.0
        self._vacated = False
        self._recovering: tuple[str, tuple[str, ...]] | None = None
        self._manifest: snapshots.Manifest | None = None  # where seats without a donor take their state from

    @property
    def state(self) -> State:
        """The run's state, as folded from its log."""
        return self.journal.state

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.state["train"].step

    def record(self, op: str, facts: Facts, *, step: int | None = None, parents: tuple[str, ...] = ()) -> None:
        """Write a receipt of the lead's own into the log."""
        self.journal.record(op, facts, self.generation, self.step if step is None else step, parents)

    def accept_work(self, peer: PeerId, signed: Signed | None, step: int, share: Share) -> Digest:
        """Write a peer's receipt for its part of ``step`` into the log, or expel it; returns the receipt's id."""
        try:
            return self.journal.append_work(peer, signed, self.generation, step, share)
        except ValueError as problem:
            self.expel(peer, f"its receipt is not acceptable: {problem}")

    # -- talking ---------------------------------------------------------------------------------------------

    async def tell(self, peer: PeerId, topic: str, facts: msgspec.Struct | None, step: int) -> None:
        """Send to one peer under the current generation."""
        await self.world.send(peer, topic, facts, generation=self.generation, step=step)

    def view(self, num_microbatches: int) -> View:
        """What a planner is told about this step."""
        return view_of(self.job, self.roster, self.stages, self.step, num_microbatches)

    async def gather(
        self, topic: str, peers: Iterable[PeerId], kind: type[A], step: int, *, any_number: bool = False
    ) -> dict[PeerId, A]:
        """One answer of type ``kind`` on ``topic`` from each of ``peers``, of this generation and ``step``.

        With ``any_number`` it returns with the first one.

        Raises:
            PeersLost: somebody went away meanwhile, or sent nonsense and was expelled.
            TalkootError: a peer failed, or nothing moved for ``train.patience_s``.
        """
        answers: dict[PeerId, A] = {}
        wanted = set(peers)
        while wanted:
            message = await self._next(topic, wanted)
            current = (message.topic, message.generation, message.step) == (topic, self.generation, step)
            if current and message.sender in wanted:
                try:
                    answers[message.sender] = message.read(kind)
                except ValueError as problem:
                    self.expel(message.sender, f"its '{topic}' makes no sense: {problem}")
                wanted.discard(message.sender)
                if any_number:
                    break
        return {peer: answers[peer] for peer in sorted(answers)}

    async def _next(self, topic: str, waiting_for: Iterable[str]) -> Message:
        try:
            message = await self.world.receive(*NOTICES, topic, timeout=self.recipe.train.patience_s)
        except TimeoutError:
            names = self.roster.describe(waiting_for)
            raise TalkootError(
                "the swarm stands still",
                where=f"step {self.step}, waiting for '{topic}' from {names}",
                why=f"nothing arrived for {self.recipe.train.patience_s:.0f} s",
                next="look at those machines; raise train.patience_s if steps really take longer",
                code=Exit.UNREACHABLE,
            ) from None
        if message.topic == LOST:
            if self._lose(message):
                raise PeersLost(self.roster.lost)
        elif message.topic == FAILED:
            self._fail(message)
        elif message.topic == HELLO:
            self._admit(message)
        elif message.topic == "cut":
            self._cut(message)
        return message

    def _fail(self, message: Message) -> None:
        """A peer's own fatal error ends the run; one that was struck off has no say any more."""
        try:
            if self.roster.knows(message.sender):
                raise rebuild_failure(message)
        except ValueError as problem:
            if message.sender in self.roster.members:
                self.expel(message.sender, f"its failure notice makes no sense: {problem}")

    def _cut(self, message: Message) -> None:
        """Two peers cannot reach each other: one has to go. The report of the other one then concerns a stranger."""
        if message.sender not in self.roster.members:
            return
        try:
            cut = message.read(Cut)
        except ValueError as problem:
            self.expel(message.sender, f"its 'cut' makes no sense: {problem}")
        if cut.peer in self.roster.members:
            self.expel(PeerId(cut.peer), f"{self.roster.name_of(message.sender)} lost it: {cut.reason}")

    def _admit(self, message: Message) -> None:
        try:
            hello = message.read(Hello)
            if self.roster.awaited.get(hello.name) != message.sender:
                return  # not a peer that was launched: what it says is no reason for anything
            negotiate(hello.oldest_protocol, hello.newest_protocol, who=f"peer {hello.name}")
            self.world.meet(message.sender, hello.address)
            self.roster.admit(message.sender, hello.name, hello.address)
        except ValueError:
            return  # a stranger's hello that makes no sense changes nothing
        self.record("peer.join", Joined(peer=message.sender, name=hello.name))

    def _lose(self, message: Message) -> bool:
        """Take a loss notice; whether a member is lost by it. What that means is decided elsewhere."""
        roster = self.roster
        stillborn = roster.stillborn(message.sender)
        if stillborn is not None:
            self._launch(stillborn)
        peer = roster.find(message.sender)
        if peer is None:
            return False  # known already: both its connection and its process report the same end
        self._strike_off(peer, message.read(Lost).reason)
        return True

    def _strike_off(self, peer: PeerId, reason: str) -> None:
        roster = self.roster
        member = roster.members.pop(peer)
        self.record("peer.lost", Gone(peer=peer, name=member.name, reason=reason))
        if self.step > member.since:
            roster.attempts.pop(member.name, None)  # it did work: being lost now and then is not "keeps dying"
        if not roster.lost and self._recovering is None:
            self._lost_at = self.world.now()
        roster.lost.append(member.name)

    def expel(self, peer: PeerId, reason: str) -> NoReturn:
        """End a peer whose word cannot be taken, and treat it as lost.

        Raises:
            PeersLost: always.
        """
        self._put_down(self.roster.name_of(peer))
        self._strike_off(peer, reason)
        raise PeersLost(self.roster.lost)

    def _put_down(self, name: str) -> None:
        """End the process of that name, if there is one: what stands still must not wake up beside its replacement."""
        with suppress(KeyError, ProcessLookupError):  # it is gone, as it should be
            self.world.disturb(name, "kill")

    def _launch(self, name: str, *, faults: bool = False) -> None:
        self.roster.count_launch(name, self.step)
        self._put_down(name)
        launch = Launch(
            name=name,
            program=PROGRAM,
            argument=encode(self.job),
            speed=self.roster.speed(name),
            faults=tuple(fault for fault in self.recipe.faults if faults and fault.peer == name),
            threads=self.recipe.swarm.threads,
        )
        self.roster.launched[name] = ticket = self.world.launch(launch)
        self.roster.awaited[name] = self.world.identity(ticket)

    # -- seats -----------------------------------------------------------------------------------------------

    def assemble(self) -> None:
        """Start or continue the run: launch all peers and go back to the newest snapshot."""
        resumed = self.state.position > 0
        self._open()
        for name in self.roster.home:
            self._launch(name, faults=not resumed)
        self._roll_back("resumed from the newest whole snapshot")

    def _open(self) -> None:
        if self.state.position:
            stages, steps = tuple(self.stages), self.recipe.train.steps
            resume = Resume(world=self.world.kind, talkoot=talkoot.__version__, stages=stages, steps=steps)
            self.record("run.resume", resume)
        else:
            self.record("run.start", start_of(self.job, self.world.kind, self.stages, self.tokenizer_digest))

    def _roll_back(self, reason: str, step: int | None = None) -> None:
        """Vacate all seats; whoever is seated next starts from the snapshot at or before ``step``."""
        self._manifest = None
        if self.folder is not None:
            self._manifest, warnings = snapshots.newest(
                self.folder, self.world.blobs, self.step if step is None else step, self.world.run
            )
            for warning in warnings:
                self.record("run.warning", Warned(text=warning))
        if self._manifest is not None:
            snapshots.check_tokenizer(self._manifest, self.tokenizer_digest, f"{self.folder}")
        self._vacated = True
        self.roster.vacate()
        self.evaluated_at = None
        self.saved_at, self.state_hash = None, ""
        if self._manifest is not None:
            self.saved_at, self.state_hash = self._manifest.step, self._manifest.state_hash
        start = self.saved_at or 0
        if start < self.step:
            self.record("train.rollback", RolledBack(reason=reason), step=start)

    async def restore(self) -> None:
        """Make the swarm whole: recover from losses, then seat whoever has no seat yet.

        Raises:
            PeersLost: somebody was lost meanwhile; call it again.
        """
        while self.world.pending(*NOTICES):
            await self._next(HELLO, ())
        if self.roster.lost:
            self._recover()
        while self._await_names():
            await self._next(HELLO, self._await_names())
        vacant = self.roster.unseated()
        if vacant:
            await self._seat(vacant)
        if self._recovering is not None:
            rung, names = self._recovering
            self._recovering = None
            pause = self.world.now() - self._lost_at
            self.record("train.recover", Recovered(rung=rung, lost=names, pause_s=pause))

    def _await_names(self) -> set[str]:
        """Peers without whom no step can be computed and who are still on their way."""
        names, hopeless = self.roster.missing()
        if hopeless:
            raise TalkootError(
                f"nobody is left to hold stages {hopeless}",
                where=f"step {self.step}",
                why="their peers are gone and swarm.respawn is off",
                next="set swarm.respawn = true, or run the same command again: it resumes",
                code=Exit.UNREACHABLE,
            )
        return names

    def _recover(self) -> None:
        """Decide what the losses mean: replacements, and how far everybody goes back."""
        self.generation += 1
        roster, names = self.roster, self.replace_lost()
        before = self._recovering[1] if self._recovering is not None else ()
        if self._vacated:
            if self._recovering is not None:
                self._recovering = (self._recovering[0], before + names)
            return  # nobody holds anything since the last roll-back: there is nothing to recover, only seats to fill
        survivors = tuple(roster.holders(stage) for stage in range(self.num_stages))
        loss = Loss(survivors, self.step, self.state["train"].checkpoint)
        rescue = climb(self.recipe.train.recovery, loss)
        self._recovering = (rescue.rung, before + names)
        if loss.empty_stages or rescue.step < self.step:
            self._roll_back(f"{rescue.rung}: nobody holds stages {loss.empty_stages} any more", rescue.step)

    def replace_lost(self) -> tuple[str, ...]:
        """Start replacements for whoever is lost (unless that is off); returns the names."""
        names, self.roster.lost = tuple(self.roster.lost), []
        for name in names:
            if self.recipe.swarm.respawn and name not in self.roster.launched:
                self._launch(name)
        return names

    async def _seat(self, vacant: Sequence[tuple[PeerId, int]]) -> None:
        """Give each peer its stage's state, from a donor where one holds it, else from the snapshot."""
        contacts = tuple(Contact(peer, member.address) for peer, member in self.roster.members.items())
        for peer in self.roster.members:
            others = tuple(contact for contact in contacts if contact.peer != peer)
            await self.tell(peer, "introduce", Introduce(others), self.step)
        sources: dict[PeerId, str] = {}
        for peer, stage in vacant:
            first, last = self.stages[stage]
            donor = self.roster.holders(stage)[-1] if self.roster.holders(stage) else None
            blobs = self._manifest.blobs_for(first, last) if self._manifest and donor is None else ()
            sources[peer] = "replica" if donor else f"snapshot of step {self.step}" if blobs else "start"
            assign = Assign(
                stage=stage,
                num_stages=self.num_stages,
                first=first,
                last=last,
                step=self.step,
                donor=donor,
                blobs=blobs,
            )
            await self.tell(peer, "assign", assign, self.step)
            if donor is not None:
                await self.tell(donor, "give", Give(peer), self.step)
        await self.gather("ready", sources, Ready, self.step)
        self._vacated = False
        for peer, stage in vacant:
            member = self.roster.members[peer]
            member.stage, member.since = stage, self.step
            self.record("peer.seat", Seated(peer=peer, name=member.name, stage=stage, source=sources[peer]))

    # -- snapshots and the end -------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Write down why the run stops here."""
        self.record("run.end", End(reason=reason, state_hash=self.state_hash))

    async def finish(self) -> None:
        """Write down the end and send everybody home."""
        self.busy_peers = tuple(self.state["peers"].present.values())
        self.end("done" if self.step >= self.recipe.train.steps else "interrupted")
        for peer in self.roster.members:
            await self.tell(peer, "stop", None, self.step)
