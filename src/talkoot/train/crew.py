"""Who is in a run and talking to them: launches, greetings, notices of loss, questions and answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NoReturn, TypeVar

import msgspec

from talkoot.core.codec import encode, negotiate
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import Digest, PeerId
from talkoot.core.log import Log
from talkoot.core.receipt import Signed
from talkoot.run.greeting import Hello
from talkoot.run.journal import Journal, Observer
from talkoot.run.records import Facts, Gone, Joined, Warned
from talkoot.train.allegiance import SUPERSEDED
from talkoot.train.chaos import LEAD, Docket
from talkoot.train.job import Job
from talkoot.train.keepers import Keepers
from talkoot.train.messages import Cut, Keeps
from talkoot.train.roster import Member, Roster
from talkoot.train.states import RUN, Moved, States
from talkoot.train.watchdog import Pulse, Watchdog
from talkoot.train.work import Share, append_work
from talkoot.world.api import FAILED, HELLO, LOST, Host, Launch, Lost, Message
from talkoot.world.base import rebuild_failure
from talkoot.world.faults import Fault

NOTICES = (LOST, FAILED, HELLO, "cut", "keeping", SUPERSEDED)
A = TypeVar("A")


class PeersLost(Exception):
    """Somebody is gone; what was under way must be done again."""


class Stalled(PeersLost):
    """Nobody is gone, but nothing moves any more; what was under way must be done again under a new generation."""


class Crew:
    """See the module's text.

    Args:
        world: the lead's own.
        job: recipe, model shape and tokens.
        log: an open log; what it holds is continued.
        observer: called with each new entry.
    """

    program = "talkoot.train.peer:train_peer"  # of those it launches

    def __init__(self, world: Host, job: Job, log: Log, observer: Observer) -> None:
        self.world, self.job, self.recipe = world, job, job.recipe
        self.journal = Journal(world, log, self.recipe.seed, observer)
        self.generation = self.state["train"].generation + (1 if self.state.position else 0)
        self.roster = Roster(self.recipe.swarm)
        self.keepers = Keepers(self.recipe.recovery)
        self.states = States(self.state["states"])
        self.watchdog = Watchdog(self.recipe.recovery.watchdog_s)
        self.strangers = False  # whether peers may have missed who the others are
        self.furthest = self.step  # the most steps that there have been, whatever was rolled back since
        self._docket, self._started = Docket(self.recipe.faults), world.now()
        self.lost_at: float | None = None  # when the first of those not recovered from yet was lost

    @property
    def state(self) -> State:
        """The run's state, as folded from its log."""
        return self.journal.state

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.state["train"].step

    def record(self, op: str, facts: Facts, *, step: int | None = None, parents: tuple[str, ...] = ()) -> None:
        """Write a receipt of the lead's own into the log, after what has happened to slots meanwhile."""
        self.flush_states()
        self.journal.record(op, facts, self.generation, self.step if step is None else step, parents)
        self.furthest = max(self.furthest, self.step)
        if op == "train.commit":
            self.watchdog.committed()
        if op.startswith("peer."):
            self.members_changed()

    def members_changed(self) -> None:
        """Somebody joined, took a seat or was lost."""

    def handles(self, message: Message) -> bool:
        """Whether a notice was none of the crew's business, and has been dealt with."""
        return False

    def flush_states(self) -> None:
        """Write down what has happened to slots and to the run since the last time."""
        if moves := self.states.take():
            self.journal.record("state.move", Moved(moves=moves), self.generation, self.step)

    def accept_work(self, peer: PeerId, signed: Signed | None, step: int, share: Share) -> Digest:
        """Write a peer's receipt for its part of ``step`` into the log, or expel it; returns the receipt's id."""
        try:
            return append_work(self.journal, self.world.run, peer, signed, (step, self.generation), share)
        except ValueError as problem:
            self.expel(peer, f"its receipt is not acceptable: {problem}")

    # -- talking ---------------------------------------------------------------------------------------------

    async def tell(self, peer: PeerId, topic: str, facts: msgspec.Struct | None, step: int) -> None:
        """Send to one peer under the current generation."""
        await self.world.send(peer, topic, facts, generation=self.generation, step=step)

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
        # A whole state may be on its way for long, and who writes one down is deaf meanwhile (1.6 GB: 27 s).
        slow_s = self.recipe.train.patience_s / 4 if topic in ("ready", "saved") else 0.0
        self.watchdog.wait(topic.partition("/")[0], (self.generation, step), self.world.now(), slow_s)
        while wanted:
            message = await self.next(topic, wanted, watch=True)
            current = (message.topic, message.generation, message.step) == (topic, self.generation, step)
            if current and message.sender in wanted:
                try:
                    answers[message.sender] = message.read(kind)
                except ValueError as problem:
                    self.expel(message.sender, f"its '{topic}' makes no sense: {problem}")
                self.watchdog.moved(self.world.now())
                self.states.note(self.roster.name_of(message.sender), "alive")
                wanted.discard(message.sender)
                if any_number:
                    break
        return {peer: answers[peer] for peer in sorted(answers)}

    async def next(self, topic: str, owing: Collection[str], *, watch: bool = False) -> Message:
        """The next message on ``topic``, or one about who is there, which has been dealt with.

        With ``watch``, those who owe it have to move; see :mod:`talkoot.train.watchdog`.

        Raises:
            PeersLost, TalkootError: as :meth:`gather`.
        """
        patience_s = self.recipe.train.patience_s
        deadline = self.world.now() + patience_s
        while True:
            until = min(deadline, self.watchdog.due) if watch else deadline
            try:
                message = await self.world.receive(*NOTICES, "pulse", topic, timeout=max(0.0, until - self.world.now()))
            except TimeoutError:
                if until < deadline:
                    await self._look(owing)
                    continue
                raise _standstill(self.step, topic, self.roster.describe(owing), patience_s) from None
            if message.topic != "pulse":
                self._notice(message)
                return message
            if watch and message.sender in owing and self._feel(message):
                deadline = self.world.now() + patience_s
            if watch and self.watchdog.asked:
                await self._look(owing)

    def _feel(self, message: Message) -> bool:
        """Take a pulse; whether it tells of progress."""
        self.states.note(self.roster.name_of(message.sender), "alive")
        try:
            return self.watchdog.hear(message.sender, message.read(Pulse), self.world.now())
        except ValueError as problem:
            self.expel(message.sender, f"its pulse makes no sense: {problem}")

    async def _look(self, owing: Collection[str]) -> None:
        """Do what the watchdog says about those who owe something."""
        verdict = self.watchdog.look(self.world.now(), [peer for peer in owing if peer in self.roster.members])
        for peer in verdict.probe:
            self.states.note(self.roster.name_of(PeerId(peer)), "suspect")
            await self.tell(PeerId(peer), "probe", None, self.step)
        for peer in verdict.lost:
            self._end(PeerId(peer), verdict.why)
        if verdict.lost:
            raise PeersLost(self.roster.lost)
        if verdict.again:
            self.strangers = True  # the introduction may be what was lost
            self._again(verdict.why)

    def _again(self, why: str) -> NoReturn:
        """Begin again what is under way, although nobody is lost.

        Raises:
            Stalled: always.
        """
        self.record("run.warning", Warned(text=f"step {self.step} is done again: {why}"))
        self.watchdog.rest()
        self.generation += 1
        raise Stalled(why)

    def _notice(self, message: Message) -> None:
        """Deal with news about who is there."""
        if self.handles(message):
            return
        if message.topic == LOST:
            if self._lose(message):
                raise PeersLost(self.roster.lost)
        elif message.topic == FAILED:
            self._fail(message)
        elif message.topic == HELLO:
            self._admit(message)
        elif message.topic == "cut":
            self._cut(message)
        elif message.topic == "keeping":
            self._note_keeper(message)

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
            resigned = cut.peer == message.sender
            by = "" if resigned else f"{self.roster.name_of(message.sender)} lost it: "
            self.expel(PeerId(cut.peer), f"{by}{cut.reason}")

    def _note_keeper(self, message: Message) -> None:
        try:
            keeps = message.read(Keeps)
        except ValueError:
            return  # then it is not waited for, and nothing is asked of it
        if keeps.step > self.step:
            return
        if self.keepers.note(keeps.stage, message.sender, keeps.step, message.generation):
            name = self.roster.describe([message.sender])
            self._again(f"{name}, which keeps stage {keeps.stage}, missed something that was sent for it")

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
        self.states.note(hello.name, "join")
        self.record("peer.join", Joined(peer=message.sender, name=hello.name))

    def _lose(self, message: Message) -> bool:
        """Take a loss notice; whether a member is lost by it. What that means is decided elsewhere."""
        roster = self.roster
        stillborn = roster.stillborn(message.sender)
        if stillborn is not None:
            self.states.note(stillborn, "lost")
            self._launch(stillborn)
        peer = roster.find(message.sender)
        if peer is None:
            return False  # known already: both its connection and its process report the same end
        self.strike_off(peer, message.read(Lost).reason)
        return True

    def strike_off(self, peer: PeerId, reason: str) -> None:
        """Write down that a member is lost; what that means is decided elsewhere."""
        roster = self.roster
        self.watchdog.rest()
        member = roster.members.pop(peer)
        self.keepers.forget(peer)
        seated = member.stage is not None
        self._docket.strike_off(member.name, self.in_reach(peer, seated), seated=seated, held=member.held)
        self.note_loss(member.name)
        self.record("peer.lost", Gone(peer=peer, name=member.name, reason=reason))
        if self.has_worked(peer, member):
            roster.attempts.pop(member.name, None)  # the run went on: being lost now and then is not "keeps dying"
        if self.lost_at is None:
            self.lost_at = self.world.now()
        roster.lost.append(member.name)

    def note_loss(self, name: str) -> None:
        """What a loss does to the states."""
        self.states.note(name, "lost")
        self.states.note(RUN, "loss")

    def in_reach(self, peer: PeerId, seated: bool) -> range:
        """The steps at which a planned fault may have struck a peer that is lost now."""
        at = self.step if seated else self.furthest
        return range(at, at + 1)

    def has_worked(self, peer: PeerId, member: Member) -> bool:
        """Whether the run went on with a peer since its start."""
        return self.step > member.since

    def expel(self, peer: PeerId, reason: str) -> NoReturn:
        """End a peer whose word cannot be taken, and treat it as lost.

        Raises:
            PeersLost: always.
        """
        self._end(peer, reason)
        raise PeersLost(self.roster.lost)

    def _end(self, peer: PeerId, reason: str) -> None:
        """Strike off a member and end its process. A lead that was overtaken cannot write, and so ends nobody."""
        name = self.roster.name_of(peer)
        self.strike_off(peer, reason)
        self.put_down(name)

    def put_down(self, name: str) -> None:
        """End the process of that name, if there is one: what stands still must not wake up beside its replacement."""
        with suppress(KeyError, ProcessLookupError):  # it is gone, as it should be
            self.world.disturb(name, "kill")

    def expect_faults(self) -> None:
        """Let planned faults strike from here on: one's own, and at their times the signals that others get."""
        self._started = self.world.now()
        self.world.expect(self._docket.of(LEAD, self.step))
        for number, (name, fault) in enumerate(self._docket.signals()):
            self.world.spawn(self._signal(name, fault), f"fault {number}")

    async def _signal(self, name: str, fault: Fault) -> None:
        """Strike whoever bears the name when it is time."""
        await self.world.sleep(fault.at_s or 0.0)
        victim = self.roster.awaited.get(name)
        with suppress(KeyError, ProcessLookupError):  # nobody does
            self.world.disturb(name, fault.kind)
            if fault.kind == "stop" and fault.seconds:
                await self.world.sleep(fault.seconds)
                if self.roster.awaited.get(name) == victim:
                    self.world.disturb(name, "continue")

    def _launch(self, name: str) -> None:
        self.roster.count_launch(name, self.step)
        self.states.note(name, "launch")
        self.put_down(name)
        launch = Launch(
            name=name,
            program=self.program,
            argument=encode(self.job),
            speed=self.roster.stated_speed(name),
            faults=self._docket.of(name, self.furthest, self.world.now() - self._started),
            threads=self.recipe.swarm.threads,
            orphan_s=2 * self.recipe.train.patience_s if self.recipe.swarm.standbys else 0.0,
        )
        self.roster.launched[name] = ticket = self.world.launch(launch)
        self.roster.awaited[name] = self.world.identity(ticket)

    def replace_lost(self) -> tuple[str, ...]:
        """Start replacements for whoever is lost (unless that is off); returns the names."""
        names, self.roster.lost = tuple(self.roster.lost), []
        for name in names:
            if self.recipe.swarm.respawn and name not in self.roster.launched:
                self._launch(name)
        return names


def _standstill(step: int, topic: str, names: str, patience_s: float) -> TalkootError:
    return TalkootError(
        "the swarm stands still",
        where=f"step {step}, waiting for '{topic}' from {names}",
        why=f"nothing arrived for {patience_s:.0f} s",
        next="look at those machines; raise train.patience_s if steps really take longer",
        code=Exit.UNREACHABLE,
    )
