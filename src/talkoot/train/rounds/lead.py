"""The lead of a run in rounds: it says who is there, writes down what replicas report, and never stands in their way.

A replica does not wait for it. It learns of losses and newcomers and publishes a new *view*; it commits a round to the
log once everybody who takes part in it has reported it; at the end it has one replica average them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import talkoot
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.run.greeting import Contact
from talkoot.run.journal import Observer
from talkoot.run.records import End, Resume, Warned
from talkoot.train.crew import NOTICES, PeersLost, Stalled
from talkoot.train.job import Job
from talkoot.train.loop import Result, result_of
from talkoot.train.outlook import start_of
from talkoot.train.records import Evaluated, RolledBack
from talkoot.train.rounds.commits import Commits
from talkoot.train.rounds.messages import Arrived, Collect, Collected, Diverging, Done, Fetch
from talkoot.train.rounds.places import BEHIND
from talkoot.train.rounds.records import Averaged
from talkoot.train.rounds.replica import FAR
from talkoot.train.rounds.reports import Report
from talkoot.train.rounds.stored import find
from talkoot.train.states import RUN, States
from talkoot.world.api import Host, Message

TOPICS = ("arrived", "later", "behind", "round", "diverged", "collected")


class RoundLead(Commits):
    """See the module's text; arguments as for :class:`~talkoot.train.lead.Lead`."""

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
        super().__init__(world, job, log, observer)
        self.folder, self.stages, self.tokenizer_digest = folder, list(stages), tokenizer_digest
        self.stop_requested = False
        self._begun = self._stopping = False
        self._watched: object = None  # what the watchdog waits for
        self._moved_at = world.now()  # when something was heard that told of progress
        self._collector: PeerId | None = None
        self._done = False

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From wherever the log says the run is to its end.

        Raises:
            TalkootError: it cannot go on.
        """
        self._open()
        self.expect_faults()
        for name in self.roster.home:
            self._launch(name)
        while not self._done:
            try:
                await self._hear()
                await self._look_around()
            except PeersLost:
                self._watched = None
                await self._lost()

    def _open(self) -> None:
        if not self.state.position:
            start = start_of(self.job, self.world.kind, self.stages, self.tokenizer_digest)
            self.record("run.start", start)
            return
        resume = Resume(world=self.world.kind, talkoot=talkoot.__version__, steps=self.recipe.train.steps)
        self.record("run.resume", resume)
        self.states = States(self.state["states"])
        self._docket.resume(self.furthest)
        self._go_back("resumed")

    def _go_back(self, why: str) -> None:
        """To the newest states that are stored and whole, or to the start."""
        found, inner = find(self.journal.entries(), self.world.blobs, self.mixing.inner_steps), self.mixing.inner_steps
        self.use(found.sets)
        for warning in found.warnings:
            self.record("run.warning", Warned(text=warning))
        self.rounds = found.kept.round if found.kept else 0
        self.reports.begin(self.rounds)
        if self.rounds * inner < self.step:
            origin = f"round {self.rounds}" if self.rounds else "the start: no whole state is stored"
            self.record("train.rollback", RolledBack(reason=f"{why}, from {origin}"), step=self.rounds * inner)
        if found.kept and dict(found.kept.blobs) != dict(self.mixed.kept):  # what the newest states are from here on
            self.record("train.kept", found.kept, step=self.rounds * inner)

    def _owing(self) -> list[PeerId]:
        """Those whose word the run waits for now."""
        if not self._begun:
            return []
        if self._collector is not None:
            return [self._collector]
        if self.rounds >= self.until:
            return [peer for peer in self.places if peer not in self.arrived()]
        return self.reports.missing(self.rounds, self.places.values())

    async def _hear(self) -> None:
        """One message, or none when it is time to ask somebody for a sign of life.

        Raises:
            PeersLost: somebody is gone.
            TalkootError: a peer failed, or nothing came for ``train.patience_s``.
        """
        world, patience_s, owing = self.world, self.recipe.train.patience_s, self._owing()
        watched = (self.generation, self.rounds, self._number, self._collector) if owing else None
        if watched is not None and watched != self._watched:
            self.watchdog.wait("round" if self._collector is None else "mean", watched, world.now())
        if watched != self._watched:
            self._watched, self._moved_at = watched, world.now()
        deadline = self._moved_at + patience_s
        until = min(deadline, self.watchdog.due) if owing else deadline
        try:
            message = await world.receive(*NOTICES, "pulse", *TOPICS, timeout=max(0.0, until - world.now()))
        except TimeoutError:
            if until == deadline:
                raise self._standstill(owing) from None
            await self._look(owing)
            return
        if message.topic in TOPICS:
            await self._take(message)
        elif message.topic != "pulse":
            self._notice(message)
        elif message.sender in owing:
            if self._feel(message):
                self._moved_at = world.now()
            if self.watchdog.asked:
                await self._look(owing)

    def _standstill(self, owing: Sequence[PeerId]) -> TalkootError:
        patience_s = self.recipe.train.patience_s
        names = self.roster.describe(owing) or "replicas"
        return TalkootError(
            "the swarm stands still",
            where=f"round {self.rounds} of run {self.world.run}, waiting for {names}",
            why=f"no replica reported anything for {patience_s:.0f} s",
            next="look at those machines; raise train.patience_s if rounds really take longer",
            code=Exit.UNREACHABLE,
        )

    def _again(self, why: str) -> NoReturn:
        """All wait for each other: something was lost. In a new view they ask each other what is there already."""
        self.record("run.warning", Warned(text=f"round {self.rounds} is agreed on again: {why}"))
        self.watchdog.rest()
        self._collector, self.changed = None, True
        raise Stalled(why)

    async def _take(self, message: Message) -> None:
        peer = message.sender
        if peer not in self.places or message.generation != self.generation:
            return
        self._moved_at = self.world.now()
        if peer in self._owing():
            self.watchdog.moved(self.world.now())
        try:
            match message.topic:
                case "arrived":
                    self.arrive(peer, message.read(Arrived))
                case "later":
                    self.postpone(peer, message.read(Fetch).round)
                case "behind":
                    self.hear_behind(peer, message.read(Fetch).round)
                case "round":
                    self._report(peer, message.read(Done))
                case "diverged":
                    self._diverged(peer, message.read(Diverging))
                case "collected" if peer == self._collector:
                    self._finish(peer, message.read(Collected))
        except ValueError as problem:
            self.expel(peer, f"its '{message.topic}' makes no sense: {problem}")

    async def _look_around(self) -> None:
        """Whatever follows from what was heard."""
        for name in self.roster.due(self.step) if self._begun else ():
            self._launch(name)
        if not self._begun:
            if not self.ready():
                return
            self._begun = True
            await self.begin_all()
        await self.welcome()
        if self._begun:
            await self.commit()
        if self.stop_requested and not self._stopping:
            self._stopping, self.until, self.changed = True, min(self.until, self.reports.highest + 1), True
        if self.changed and self.places:
            await self.publish()
        if self.rounds >= self.until and self._collector is None and not self._done:
            await self._ask_for_mean()

    # -- losses -----------------------------------------------------------------------------------------------

    async def _lost(self) -> None:
        """Go on without whoever is gone, and start replacements."""
        names = self.replace_lost()
        gone = [peer for peer in self.places if peer not in self.roster.members]
        for peer in gone:
            del self.places[peer]
        if self._collector in gone:
            self._collector = None
        if not (self.places or self.roster.launched or self.roster.members):
            raise TalkootError(
                "no replica is left",
                where=f"round {self.rounds} of run {self.world.run}",
                why=f"{', '.join(names)} went last, and swarm.respawn is off",
                next="set swarm.respawn = true, or run the same command again: it resumes",
                code=Exit.UNREACHABLE,
            )
        self.changed = self.changed or bool(gone)
        if self._begun and self.needy.issuperset(self.places):
            self._start_over()
        await self._settle()

    async def _settle(self) -> None:
        """Look around until nobody is lost by that any more."""
        try:
            await self._look_around()
        except PeersLost:
            await self._lost()

    def _start_over(self) -> None:
        """Nobody is left who has weights: go back to what was stored, with whoever comes now."""
        self._begun = self._stopping = False
        self.places, self.needy, self._collector = {}, set(), None
        self.until = self.planned
        self.generation += 1
        self._go_back("all replicas were lost at once")

    # -- rounds -----------------------------------------------------------------------------------------------

    def _report(self, peer: PeerId, done: Done) -> None:
        """Take a replica's word for a round.

        Raises:
            ValueError: it is not its own, or not about a round of this run that is still open.
        """
        place = self.places[peer]
        number, _, facts = self.reports.check(done, place, self.generation, self._number)
        given_up = number < self.rounds and number < place.since
        if given_up or (number >= self.until and self._collector is not None):
            return  # it comes too late to count
        if not self.rounds <= number < self.planned:
            raise ValueError(f"it is about round {number}, and round {self.rounds} is open")
        name = self.journal.append(done.receipt)
        if done.problem:
            self.record("run.warning", Warned(text=f"{place.name} could not store its state: {done.problem}"))
        self.reports.take(number, peer, Report(facts, name, done.blob))
        if self.reports.far[peer] >= BEHIND:
            self.begin_again(peer, FAR)
        if number >= self.until:  # it had gone further than the end when it heard of it
            self.until, self.changed = number + 1, True

    def _diverged(self, peer: PeerId, said: Diverging) -> None:
        """One replica's numbers are not finite: another's may still be good.

        Raises:
            PeersLost: it is replaced.
            TalkootError: that has happened to too many.
        """
        self.diverging += 1
        if self.diverging < len(self.places):
            self.expel(peer, f"it diverged: {said.why}")
        raise TalkootError(
            "training diverged",
            where=f"round {said.round} of run {self.world.run}",
            why=said.why,
            next="lower train.learning_rate or mixing.outer_rate and start a new run",
        )

    # -- the end ----------------------------------------------------------------------------------------------

    async def _ask_for_mean(self) -> None:
        places = [self.places[peer] for peer in self.arrived()]
        if not places or len(places) < len(self.places):
            return
        contacts = tuple(Contact(place.peer, place.address) for place in places)
        self._collector = PeerId(places[0].peer)
        for peer in self.arrived():
            await self.tell(peer, "collect", Collect(collector=contacts[0], of=contacts), self.step)

    def _finish(self, peer: PeerId, collected: Collected) -> None:
        if collected.problem:
            raise ValueError(collected.problem)
        if self.world.blobs.size(collected.blob) != collected.size and self.job.tokens is not None:
            raise ValueError("the state that it says it stored is not in the store")
        if not 0 < collected.averaged <= len(self.places) or not math.isfinite(collected.held_out or 0.0):
            raise ValueError(f"it states a mean of {collected.averaged} with a loss of {collected.held_out}")
        held = [self.mixed.held_out[place.slot] for place in self.places.values() if place.slot in self.mixed.held_out]
        averaged = Averaged(
            replicas=collected.averaged,
            held_out=collected.held_out,
            best=min(held, default=None),
            mean=sum(held) / len(held) if held else None,
        )
        self.record("train.average", averaged)
        if collected.held_out is not None:
            self.record("train.evaluate", Evaluated(loss=collected.held_out, tokens=self.held_out_tokens()))
        self.store(collected)
        self._done = True

    def end(self, reason: str) -> None:
        """Write down why the run stops here."""
        self.states.note(RUN, "end")
        self.record("run.end", End(reason=reason, state_hash=self.state_hash))

    async def finish(self) -> None:
        """Write down the end and send everybody home."""
        if self.step >= self.recipe.train.steps and (left := self._docket.left(self.step)):
            self.record("run.warning", Warned(text=f"faults that never struck, the run is over: {', '.join(left)}"))
        self.end("done" if self.step >= self.recipe.train.steps else "interrupted")
        for peer in self.roster.members:
            await self.tell(peer, "stop", None, self.step)


async def train_in_rounds(lead: RoundLead) -> Result:
    """Run the job from wherever the log says it is to its end, whatever kind of end it is, and write it down.

    Raises:
        TalkootError: the run cannot go on.
    """
    try:
        await lead.run()
    except TalkootError as problem:
        with suppress(TalkootError):  # the log itself may be what cannot be written
            lead.end(problem.what)
        raise
    await lead.finish()
    return result_of(lead.state, lead.recipe.train.steps)
