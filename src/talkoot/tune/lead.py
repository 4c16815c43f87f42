"""The lead of a post-training run: it says who takes part, writes down what peers report, and starts lost ones again.

Peers do not wait for it between rounds. What it knows is in the log: a new session begins at the newest round of which
every peer's state is stored, and goes on with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import talkoot
from talkoot.core.codec import encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.run.company import Company, own_faults
from talkoot.run.greeting import Hello
from talkoot.run.journal import Journal, Observer
from talkoot.run.records import End, Facts, Resume, Start, Warned
from talkoot.tune.job import TuneJob
from talkoot.tune.messages import Begin, Done, Ended, Place, Ready, View
from talkoot.tune.records import KEPT, Generated, Kept, TuneRolledBack, TuneState, Updated, Viewed
from talkoot.world.api import FAILED, HELLO, LOST, Host, Launch, Message
from talkoot.world.faults import Fault

PROGRAM = "talkoot.tune.peer:tune_peer"
STOP_AGAIN_S = 1.0
IDLE_ROUNDS = 5  # without learning anything, after which the user is told
SOLVED = 0.99  # mean reward from which on there is nothing left to learn


@dataclass(slots=True)
class Member:
    """A peer that said hello; ``ready`` once its policy is loaded, ``since`` once it is in the view, ``ended`` when it
    has done its last round."""

    name: str
    address: str
    ready: Ready | None = None
    since: int = 0
    ended: bool = False


class TuneLead:
    """See the module's text.

    Args:
        world: the lead's own.
        job: what peers are told.
        log: an open log; what it holds is continued.
        observer: called with each new entry and the state after it.
    """

    def __init__(self, world: Host, job: TuneJob, log: Log, observer: Observer) -> None:
        self.world, self.job, self.recipe = world, job, job.recipe
        self.journal = Journal(world, log, self.recipe.seed, observer)
        self.stop_requested = False
        self.members: dict[PeerId, Member] = {}
        self.until = self.recipe.tune.rounds
        self.company = Company(world, self.record, self._launch, lambda: f"round {self.tuned.round} of run {world.run}")
        self._number = 0
        self._begun = self._stopping = False
        self._before = 0  # rounds that earlier sessions have seen
        self._from_round = 0  # at which this one begins
        self._idle: dict[str, int] = {}  # rounds in a row in which a peer learned nothing

    @property
    def state(self) -> State:
        """The run's state, as folded from its log."""
        return self.journal.state

    @property
    def tuned(self) -> TuneState:
        """The chapter of the state that this is about."""
        return self.state["tune"]

    def record(self, op: str, facts: Facts, step: int | None = None) -> None:
        """A receipt of the lead's own."""
        self.journal.record(op, facts, 0, self.tuned.round if step is None else step)

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From wherever the log says that the run is to its end.

        Raises:
            TalkootError: it cannot go on.
        """
        self._open()
        for text in self.recipe.doubts():
            self.record("run.warning", Warned(text=text))
        self.company.expect(self._faults())
        self._launch_due()
        while not self._done:
            await self._hear()
        self.record("run.end", End(reason="done" if self.tuned.round >= self.recipe.tune.rounds else "interrupted"))
        for peer in self.members:
            await self.world.send(peer, "stop")
        self.journal.sync()

    def _open(self) -> None:
        plain = self.recipe.plain()
        if not self.state.position:
            start = Start(
                world=self.world.kind,
                talkoot=talkoot.__version__,
                recipe=plain,
                config={},
                parameters=0,
                stages=(),
            )
            self.record("run.start", start)
            return
        self._before = self.tuned.furthest
        self.record("run.resume", Resume(world=self.world.kind, talkoot=talkoot.__version__, steps=self.until))
        self._from_round = whole = self._whole_round()
        newest = {name: max((n for n, _ in self._kept(name) if n <= whole), default=0) for name in self.recipe.names}
        if any(self._rounds(name) > newest[name] for name in newest):
            self.record("tune.rollback", TuneRolledBack(round=whole, reason="the lead was started again"), whole)
        for name in self.recipe.names if self.recipe.exchange.wait_s else ():
            if self.recipe.peer(name).from_round <= whole and self._rounds(name) < whole:
                text = f"{name} is behind: it goes on from its state after {self._rounds(name)} rounds"
                self.record("run.warning", Warned(text=text), whole)
        self.world.blobs.keep_only(self._wanted())

    def _launch_due(self) -> None:
        """Start those whose time has come and who were never started in this session."""
        for name in self.recipe.names:
            if not self.company.was_started(name) and self.recipe.peer(name).from_round <= self.tuned.furthest:
                self.company.start(name)

    def _whole_round(self) -> int:
        """The newest round that all can go back to: their states after it are stored and still there.

        Not all: one that is so far behind the furthest that no round is left which both have (it was lost and not
        started again, for instance) does not take the others back with it. Nor does one that came late and has stored
        nothing yet. Where nobody waits for anybody, everybody goes on from where it was."""
        founders = [n for n in self.recipe.names if self.recipe.peer(n).from_round == 0 or self._kept(n)]
        if not self.recipe.exchange.wait_s:
            return max(max(self._stored_rounds(name)) for name in founders)
        common: set[int] = set()
        for stored in sorted(map(self._stored_rounds, founders), key=max, reverse=True):
            common = (common & stored or common) if common else stored
        return max(common, default=0)

    def _stored_rounds(self, name: str) -> set[int]:
        """Rounds that a peer can go back to; to the beginning, as long as it has forgotten nothing on its way."""
        kept = self._kept(name)
        stored = {number for number, blob in kept if self.world.blobs.holds_whole(blob)}
        return stored | {0} if len(kept) < KEPT or not stored else stored

    def _kept(self, name: str) -> tuple[tuple[int, str], ...]:
        peer = self.tuned.peers.get(name)
        return peer.kept if peer else ()

    @property
    def _done(self) -> bool:
        return self._begun and not self._working()

    def _working(self) -> list[str]:
        """Names of those that still have a round to do or a state to store, on their way ones included."""
        busy = {member.name for member in self.members.values() if member.ready and not member.ended}
        return sorted(name for name in self.company.names if self._rounds(name) < self.until or name in busy)

    def _rounds(self, name: str) -> int:
        peer = self.tuned.peers.get(name)
        return peer.rounds if peer else 0

    def _faults(self) -> list[Fault]:
        """Planned misfortune that earlier sessions have not seen."""
        return [f for f in self.recipe.faults if not self._before or (f.step is not None and f.step > self._before)]

    # -- hearing ----------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        patience_s = self.recipe.tune.patience_s
        topics = ("ready", "round", "ended", LOST, FAILED, HELLO)
        deadline = self.world.now() + patience_s
        while True:  # a request to stop comes from outside, without a message
            try:
                message = await self.world.receive(*topics, timeout=min(STOP_AGAIN_S, patience_s))
                break
            except TimeoutError:
                if self.stop_requested and not self._stopping:
                    await self._stop_early()
                    return
                if self.world.now() >= deadline:
                    raise self._standstill() from None
        try:
            await self._take(message)
        except ValueError as problem:
            if message.sender in self.members:
                await self._strike_off(message.sender, f"its {message.topic!r} makes no sense: {problem}")
        if self.stop_requested and not self._stopping:
            await self._stop_early()

    async def _take(self, message: Message) -> None:
        match message.topic:
            case "ready":
                await self._ready(message.sender, message.read(Ready))
            case "round":
                await self._report(message.sender, message.read(Done))
            case "ended" if message.sender in self.members:
                member, ended = self.members[message.sender], message.read(Ended)
                member.ended = True
                if ended.blob:
                    self._keep(member.name, ended.round, ended.blob)
            case _ if message.topic == HELLO:
                await self._admit(message)
            case _ if message.topic == LOST:
                await self._lose(message)
            case _:
                self.company.raise_failure(message)

    def _standstill(self) -> TalkootError:
        return TalkootError(
            "the swarm stands still",
            where=f"round {self.tuned.round} of run {self.world.run}, waiting for {', '.join(self._working())}",
            why=f"no peer reported anything for {self.recipe.tune.patience_s:.0f} s",
            next="look at those machines; raise tune.patience_s if rounds really take longer",
            code=Exit.UNREACHABLE,
        )

    async def _stop_early(self) -> None:
        """Let everybody end with the round that the furthest is in, and store its state."""
        self._stopping = True
        # Whoever is in the middle of a round hears of it before the next one, and stores its state after that.
        # Where nobody waits for anybody, the slowest need not catch up.
        rounds = [self._rounds(member.name) for member in self.members.values() if member.ready]
        last = max(rounds, default=0) if self.recipe.exchange.wait_s else min(rounds, default=0)
        self.until = min(self.until, last + 2) if self._begun else 0
        self._begun = True
        await self._publish()

    # -- members ----------------------------------------------------------------------------------------------

    def _launch(self, name: str, fresh: bool) -> Launch:
        return Launch(
            name=name,
            program=PROGRAM,
            argument=encode(self.job),
            speed=self.recipe.peer(name).speed,
            faults=own_faults(self._faults(), name) if fresh else (),
            threads=self.recipe.tune.threads,
        )

    async def _admit(self, message: Message) -> None:
        name, peer = self.company.admit(message), message.sender
        if name is None:
            return
        self.members[peer] = Member(name, message.read(Hello).address)
        newest = next((blob for _, blob in reversed(self._kept(name)) if self.world.blobs.holds_whole(blob)), "")
        await self.world.send(peer, "begin", Begin(newest))

    async def _ready(self, peer: PeerId, ready: Ready) -> None:
        member = self.members.get(peer)
        if member is None:
            return
        member.ready = ready
        if self._begun:  # the others have gone on; they wait for it from the round after the next one on
            member.since = max(self._rounds(member.name), min(self.tuned.furthest + 2, self.until - 1))
            if not self.recipe.vertical:
                text = f"{member.name} has missed rounds: from here on its weights are not those of the others"
                self.record("run.warning", Warned(text=text), member.since)
            await self._publish()
        else:
            await self._begin()

    async def _begin(self) -> None:
        """Publish the first view as soon as everybody is ready that was started and is still there."""
        everybody = all(other.ready for other in self.members.values()) and not self.company.on_their_way
        if not self._begun and self.members and everybody:
            self._begun = True
            for other in self.members.values():
                other.since = self._rounds(other.name)
                if self.recipe.exchange.wait_s:  # one that is behind leaves out what the others would wait for
                    other.since = max(other.since, min(self._from_round, self.until - 1))
            await self._publish()

    async def _publish(self) -> None:
        """Tell everybody who takes part."""
        self._number += 1
        named = sorted((m.name, peer, m) for peer, m in self.members.items() if m.ready is not None)
        places = tuple(
            Place(peer, name, member.address, member.ready.tokenizer if member.ready else "", self._since(member))
            for name, peer, member in named
        )
        viewed = Viewed(number=self._number, places=tuple((p.name, p.since) for p in places), until=self.until)
        self.record("tune.view", viewed)
        for _, peer, _ in named:
            await self.world.send(peer, "view", View(self._number, places, self.until))

    def _since(self, member: Member) -> int:
        """From which round on others wait for it: one that is done sends nothing any more."""
        return member.since if self._rounds(member.name) < self.until else self.until

    async def _lose(self, message: Message) -> None:
        if (lost := self.company.lost(message)) is not None:
            await self._strike_off(message.sender, lost[1])
        elif not self._begun:  # one that died before its hello may have been given up
            await self._begin()

    async def _strike_off(self, peer: PeerId, reason: str) -> None:
        """Go on without a peer, and start it again unless the run is over for it."""
        name = self.members.pop(peer).name
        self.company.strike_off(peer, reason)
        if self.recipe.tune.respawn and not self._stopping and self._rounds(name) < self.until:
            self.company.start(name)
        self.company.check_left(f"{name} went last: {reason}; tune.respawn = true starts lost peers again")
        if self._begun:
            await self._publish()
        else:
            await self._begin()

    # -- rounds -----------------------------------------------------------------------------------------------

    async def _report(self, peer: PeerId, done: Done) -> None:
        """Take a peer's word for a round.

        Raises:
            ValueError: it is not its own, or not about the round that is next for it.
        """
        member = self.members.get(peer)
        if member is None:
            return
        number = self._check(peer, member, done)
        self.journal.append(done.generated)
        self.journal.append(done.updated)
        self.company.worked(member.name)
        if not self._stopping:
            self._launch_due()
        self._notice_idle(member.name, done)
        if done.blob:
            self._keep(member.name, number + 1, done.blob)

    def _keep(self, name: str, rounds: int, blob: str) -> None:
        """Write down that a peer's state is stored, and drop what nobody goes back to any more.

        Raises:
            ValueError: it is not in the store.
        """
        size = self.world.blobs.size(blob)
        if size is None:
            raise ValueError("the state that it says it stored is not in the store")
        before = self._wanted()
        self.record("tune.kept", Kept(name=name, round=rounds, blob=blob, num_bytes=size), rounds)
        self.world.blobs.drop(before - self._wanted())

    def _notice_idle(self, name: str, done: Done) -> None:
        """Say once when a peer's updates move nothing for some rounds: a curve that stays flat does not tell why."""
        facts = done.updated.open().read(Updated)
        idle = self._idle[name] = self._idle.get(name, 0) + 1 if facts.reason and facts.reward < SOLVED else 0
        if idle == IDLE_ROUNDS:
            cut_off = facts.learned.get("truncated_share", 0.0)
            text = (
                f"{name} has learned nothing for {idle} rounds: {facts.reason} (reward {facts.reward:.2f}, "
                f"{cut_off:.0%} of the completions cut off)"
            )
            self.record("run.warning", Warned(text=text), facts.round)

    def _check(self, peer: PeerId, member: Member, done: Done) -> int:
        for signed, op in ((done.generated, "tune.generate"), (done.updated, "tune.update")):
            receipt = signed.open()
            if (receipt.peer, receipt.run, receipt.op) != (peer, self.world.run, op):
                raise ValueError(f"a {receipt.op} of {receipt.peer[:8]} where its own {op} belongs")
        generated, updated = done.generated.open().read(Generated), done.updated.open().read(Updated)
        if generated.round != updated.round or not member.since <= updated.round < self.recipe.tune.rounds:
            raise ValueError(f"it is about rounds {generated.round} and {updated.round}, which are not open to it")
        return updated.round

    def _wanted(self) -> set[str]:
        """The blobs that the run may go back to."""
        return {blob for peer in self.tuned.peers.values() for _, blob in peer.kept}
