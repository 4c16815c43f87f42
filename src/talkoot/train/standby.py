"""A standby: follows the run's log, and leads on where the lead is lost. Why there are never two leads: see
:mod:`talkoot.train.succession`.

Nobody goes back. The peers keep what they hold; whoever prepared a step that stands in the log and was not told so yet
is told now, and the run goes on with the step after it. Whoever does not answer is lost, as if it had been lost before.
"""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from pathlib import Path

from talkoot.core.codec import OLDEST_PROTOCOL, PROTOCOL, decode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State, fold
from talkoot.core.ids import PeerId
from talkoot.core.log import Log, put_in_place
from talkoot.run.folder import LOG, stop_on_signals
from talkoot.run.greeting import Hello, Introduce
from talkoot.run.journal import OBSERVER
from talkoot.run.lock import seized
from talkoot.run.records import Succeeded
from talkoot.train.crew import PeersLost
from talkoot.train.lead import Lead
from talkoot.train.loop import conduct, order_of
from talkoot.train.messages import Commit, Cut, Entered, Entries, Follow, Orphan
from talkoot.train.records import Committed, PeerState
from talkoot.train.roster import Member
from talkoot.train.states import RUN
from talkoot.train.succession import Post, Superseded, is_half, seated
from talkoot.world.api import HELLO, LOST, Host, Message

GRACE_S = 10.0  # for peers that are still there: they notice a silent lead at unlike times, or compute
BUSY_S = 1.0  # a receipt is written within milliseconds
MAX_AHEAD = 1000  # generations that a peer may have seen and this standby not
ATTEMPTS = 5  # a lead that wakes up may write into the same log until the succession stands there


async def stand_by(world: Host, argument: bytes) -> None:
    """A standby's program; ``argument`` is an encoded :class:`~talkoot.train.succession.Post`."""
    standby = Standby(world, decode(argument, Post))
    if await standby.follow():
        with suppress(TalkootError):  # it stands in the log, or the log cannot be had
            await standby.take_over()


class Standby:
    """See the module's text."""

    def __init__(self, world: Host, post: Post) -> None:
        if world.lead is None:
            raise ValueError("a standby needs a lead")
        self.world, self.post, self.lead = world, post, world.lead
        self.log, self.state = Log(None), State()
        self.generation = 0
        self.addresses: dict[PeerId, str] = {}
        self.votes: set[PeerId] = set()
        self.gone: set[PeerId] = set()
        self.bereaved_at: float | None = None
        self.elected_at: float | None = None

    # -- while there is a lead --------------------------------------------------------------------------------

    async def follow(self) -> bool:
        """Copy the log until the lead is lost; whether this standby is to lead now."""
        world = self.world
        await world.send(self.lead, HELLO, Hello(world.name, world.address, OLDEST_PROTOCOL, PROTOCOL))
        while self._undecided():
            try:
                message = await world.receive(
                    "entries", "introduce", "orphan", "stop", LOST, timeout=self._patience_s()
                )
            except TimeoutError:
                break
            if message.topic == "orphan":
                self._count(message)
                if self.bereaved_at is None:  # the lead may be well, and wait for a peer that does not hear it
                    await world.send(self.lead, "cut", Cut(message.sender, "it lost the lead"))
            elif message.topic == LOST:
                if message.sender == self.lead:
                    self.bereaved_at = world.now()
                self.gone.add(message.sender)
            elif message.sender == self.lead and self.bereaved_at is None:
                self.generation = max(self.generation, message.generation)
                if message.topic == "stop":
                    return False
                await self._learn(message)
            if self.elected_at is None and is_half(self.votes, seated(self.state)):
                self.elected_at = world.now()
        return self.elected_at is not None and self._is_heir()

    def _count(self, orphan: Message) -> None:
        with suppress(ValueError):  # nonsense is as good as silence
            generation = orphan.read(Orphan).generation
            if orphan.sender in seated(self.state) and generation <= self.generation + MAX_AHEAD:
                self.generation = max(self.generation, generation)
            self.votes.add(orphan.sender)

    def _is_heir(self) -> bool:
        run = self.state["run"]
        return run.heir == self.world.me and not run.ended

    def _undecided(self) -> bool:
        if self.bereaved_at is None:
            return True
        return self._is_heir() and not seated(self.state) <= self.votes | self.gone

    def _patience_s(self) -> float | None:
        if self.bereaved_at is None:
            return None
        until = self.bereaved_at + self.post.job.recipe.train.patience_s
        if self.elected_at is not None:
            until = min(until, max(self.elected_at, self.bereaved_at) + GRACE_S)
        return max(0.0, until - self.world.now())

    async def _learn(self, message: Message) -> None:
        """More of the log, checked like any reader's copy, or where a peer lives."""
        if message.topic == "introduce":
            told = message.read(Introduce)
            for contact in told.contacts:
                peer = PeerId(contact.peer)
                self.world.meet(peer, contact.address)
                self.addresses[peer] = contact.address
            for name, process in told.processes.items():
                self.world.adopt(name, process)
            return
        entries = message.read(Entries)
        if entries.after == self.state.position:
            for signed in entries.signed:
                _, self.state = self.log.append(signed, self.state)
        if self.state.chain != entries.chain:
            raise ValueError("the lead's log and its copy differ")
        await self.world.send(self.lead, "entered", Entered(self.state.position), generation=message.generation)

    # -- taking over ------------------------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Lead on, to the end of the run.

        Raises:
            TalkootError: the run cannot go on; it is in the log where that could be written.
        """
        world, post = self.world, self.post
        world.follow(world.me)
        folder = None if post.folder is None else Path(post.folder)
        alone = nullcontext() if folder is None or world.kind == "simulated" else seized(folder, post.process)
        with alone, closing(self.log if folder is None else self._carry_over(folder / LOG)) as log:
            try:
                lead = self._succeed(log, folder)
                if world.kind == "real":
                    stop_on_signals(lead)
                await self._rally(lead, _untold(log, lead))
                await conduct(lead)
            except Superseded:
                world.abandon()
                raise
            finally:
                await world.dismiss()

    def _carry_over(self, path: Path) -> Log:
        """The run's own log with everything in it that this standby knows; made anew where the folder is gone.

        A lead may have been stopped in the middle of writing; then it keeps the file, and the run gets a new one.
        """
        log = Log(path)
        shared = min(len(log), len(self.log))
        if log.chain_at(shared) != self.log.chain_at(shared):
            log.close()
            raise TalkootError(
                "the folder holds another log than the one that this standby followed",
                where=str(path),
                why=f"they differ within the first {shared} receipts",
                next="look at both with `talkoot status`; nothing was written to the folder",
                code=Exit.FAILED_CHECK,
            )
        if not log.is_free(BUSY_S):
            receipts = [*self.log.signed(), *log.signed(len(self.log) + 1)]
            log.close()
            put_in_place(path, receipts)
            return Log(path)
        if shared < len(self.log):
            state = fold(log.entries())
            for signed in self.log.signed(shared + 1):
                _, state = log.append(signed, state)
        return log

    def _succeed(self, log: Log, folder: Path | None) -> Lead:
        """A lead, once the log says that this is the one.

        What the old lead wrote there last and could not have sealed holds all the same: nobody has acted on it yet.

        Raises:
            TalkootError: the log says that the run has ended, or is somebody else's to lead.
        """
        post, world, attempt = self.post, self.world, 0
        while True:
            attempt += 1
            lead = Lead(
                world, post.job, post.stages, log, folder, post.held_out_batches, post.tokenizer_digest, OBSERVER.get()
            )
            lead.generation = max(lead.generation, self.generation + 1)
            run = lead.state["run"]
            if run.heir != world.me or run.ended:
                raise lead.succession.superseded("the log says that the run has ended, or goes on elsewhere")
            votes = tuple(sorted(self.votes & set(self.addresses)))
            try:
                lead.record("run.succeed", Succeeded(name=world.name, former=self.lead, peers=votes))
                break
            except TalkootError:  # somebody wrote in between
                if attempt == ATTEMPTS:
                    raise
        lead.lost_at = self.bereaved_at
        lead.succession.wait, lead.succession.after = False, world.spawn(world.warm(), "warm")
        return lead

    async def _rally(self, lead: Lead, untold: Commit | None) -> None:
        """Have everybody who lost the lead follow this one, and see what they hold; the others are lost.

        Args:
            untold: what is to be done with the last step of the log, where whoever prepared it may not know.
        """
        roster, step = lead.roster, lead.step
        present: dict[PeerId, PeerState] = {PeerId(peer): held for peer, held in lead.state["peers"].present.items()}
        for peer, held in present.items():
            roster.awaited[held.name] = peer
            address, seat = self.addresses.get(peer, ""), held.stage is not None
            roster.members[peer] = Member(held.name, address, "", since=step, held=seat)
            if held.stage is not None:
                roster.home[held.name] = held.stage
        if lead.recipe.swarm.respawn:
            roster.lost += sorted(set(roster.home) - roster.names())
        for name in roster.lost:  # they were on their way
            lead.states.note(name, "lost")
            lead.states.note(RUN, "loss")
        for peer in present:
            if peer in self.votes - self.gone and peer in self.addresses:
                await lead.tell(peer, "claim", None, step)
            else:
                lead.strike_off(peer, "it was lost with the lead")
        for peer, answer in (await self._answers(lead)).items():
            held, behind = present[peer], answer.applied == answer.prepared == step - 1
            if held.stage is None or peer not in roster.members:
                continue
            if answer.stage == held.stage and (answer.applied == step or (behind and untold is not None)):
                roster.members[peer].stage, roster.members[peer].seated = held.stage, step
                lead.served.setdefault(held.stage, set()).add(peer)
                if behind:  # what it keeps is behind, too, and is asked for anew
                    await lead.tell(peer, "commit", untold, step - 1)
                    continue
                for stage, base, kept in answer.keeps:
                    if kept == step and 0 <= stage < lead.num_stages and stage != held.stage:
                        lead.keepers.restore(stage, peer, base, kept, lead.generation)
            else:
                await lead.tell(peer, "stop", None, step)
                lead.strike_off(peer, f"its state is of step {answer.applied}, the log is at step {step}")
        if not roster.lost:  # then a recovery that was under way is over
            lead.states.note(RUN, "drained")
            lead.states.note(RUN, "plan")
        lead.strangers = True  # a link that broke meanwhile opens again, or is reported again

    async def _answers(self, lead: Lead) -> dict[PeerId, Follow]:
        answers: dict[PeerId, Follow] = {}
        while waiting := lead.roster.members.keys() - answers:
            with suppress(PeersLost):
                answers |= await lead.gather("follow", waiting, Follow, lead.step, any_number=True)
        return {peer: answers[peer] for peer in sorted(answers)}


def _untold(log: Log, lead: Lead) -> Commit | None:
    """The order that goes with the log's last commit; None when the run went back after it."""
    for position in range(len(log), 0, -1):
        receipt = next(log.entries(position, position)).receipt
        if receipt.op == "train.commit" and receipt.step == lead.step - 1:
            return order_of(lead, receipt.read(Committed))
        if receipt.op in ("train.commit", "train.rollback"):
            return None
    return None
