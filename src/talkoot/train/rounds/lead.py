"""The lead of a run in rounds: it says who is there, writes down what replicas report, and never stands in their way.

A replica does not wait for it. It learns of losses and newcomers and publishes a new *view*; it commits a round to the
log once everybody who takes part in it has reported it; at the end it has one replica average them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import talkoot
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.train import checkpoint as snapshots
from talkoot.train.crew import NOTICES, PeersLost
from talkoot.train.job import Job
from talkoot.train.journal import Observer
from talkoot.train.loop import Result, result_of
from talkoot.train.messages import Contact
from talkoot.train.outlook import start_of
from talkoot.train.records import Checkpointed, Committed, End, Evaluated, Resume, RolledBack, Seated, Warned
from talkoot.train.rounds.messages import Arrived, Collect, Collected, Done
from talkoot.train.rounds.places import AHEAD, Seats
from talkoot.train.rounds.prospects import expected_spread, is_far
from talkoot.train.rounds.records import Averaged, Kept, Rounded
from talkoot.train.schedule import learning_rate
from talkoot.train.states import RUN, States
from talkoot.world.api import Host, Message

TOPICS = ("arrived", "round", "collected")


class RoundLead(Seats):
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
        self.state_hash = ""
        self._reports: dict[int, dict[int, tuple[Rounded, str, Done]]] = {}  # by round and slot
        self._begun = False
        self._collector: PeerId | None = None
        self._kept: list[frozenset[str]] = []  # blobs of the last stored states
        self._far = False  # replicas are further apart than they should be, and the log says so
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
            except PeersLost:
                await self._lost()
            await self._look_around()

    def _open(self) -> None:
        inner = self.mixing.inner_steps
        if not self.state.position:
            start = start_of(self.job, self.world.kind, self.stages, self.tokenizer_digest)
            self.record("run.start", start)
            return
        resume = Resume(world=self.world.kind, talkoot=talkoot.__version__, steps=self.recipe.train.steps)
        self.record("run.resume", resume)
        self.states = States(self.state["states"])
        self._docket.resume(self.furthest)
        kept = self.mixed
        whole = all(blob in self.world.blobs for blob in kept.kept.values())
        self.rounds = self.highest = kept.kept_round if whole else 0
        if self.rounds * inner < self.step:
            origin = f"round {self.rounds}" if self.rounds else "the start"
            self.record("train.rollback", RolledBack(reason=f"resumed, from {origin}"), step=self.rounds * inner)

    async def _hear(self) -> None:
        """One message.

        Raises:
            PeersLost: somebody is gone.
            TalkootError: a peer failed, or nothing came for ``train.patience_s``.
        """
        patience_s = self.recipe.train.patience_s
        try:
            message = await self.world.receive(*NOTICES, "pulse", *TOPICS, timeout=patience_s)
        except TimeoutError:
            raise TalkootError(
                "the swarm stands still",
                where=f"round {self.rounds} of run {self.world.run}",
                why=f"no replica reported anything for {patience_s:.0f} s",
                next="look at those machines; raise train.patience_s if rounds really take longer",
                code=Exit.UNREACHABLE,
            ) from None
        if message.topic in TOPICS:
            await self._take(message)
        elif message.topic != "pulse":
            self._notice(message)

    async def _take(self, message: Message) -> None:
        peer = message.sender
        if peer not in self.roster.members or message.generation != self.generation:
            return
        try:
            match message.topic:
                case "arrived":
                    self._arrive(peer, message.read(Arrived))
                case "round":
                    self._report(peer, message.read(Done))
                case "collected" if peer == self._collector:
                    self._finish(peer, message.read(Collected))
        except ValueError as problem:
            self.expel(peer, f"its '{message.topic}' makes no sense: {problem}")

    async def _look_around(self) -> None:
        """Whatever follows from what was heard."""
        for name in self.roster.due(self.step) if self._begun else ():
            self._launch(name)
        if not self._begun:
            if not set(self.roster.home) <= self.roster.names():
                return
            self._begun = True
            await self.begin_all()
        elif any(peer not in self.places for peer in self.roster.members):
            await self.welcome()
        await self._commit()
        if self.stop_requested and self.until > self.highest + 1:
            self.until = self.highest + 1
            await self.publish()
        if self.rounds >= self.until and self._collector is None and not self._done:
            await self._ask_for_mean()

    # -- losses and newcomers ---------------------------------------------------------------------------------

    async def _lost(self) -> None:
        """Go on without whoever is gone, and start replacements."""
        self.states.note(RUN, "drained")
        self.states.note(RUN, "mend")
        names = self.replace_lost()
        gone = [peer for peer in self.places if peer not in self.roster.members]
        for peer in gone:
            del self.places[peer]
        if self._collector in gone:
            self._collector = None
        if not self.places and not (self.roster.launched or self.roster.members):
            raise TalkootError(
                "no replica is left",
                where=f"round {self.rounds} of run {self.world.run}",
                why=f"{', '.join(names)} went last, and swarm.respawn is off",
                next="set swarm.respawn = true, or run the same command again: it resumes",
                code=Exit.UNREACHABLE,
            )
        if self._begun and not self.places:
            self._start_over()
        elif self._begun and gone:
            await self.publish()

    def _start_over(self) -> None:
        """Nobody is left who has weights: go back to what was stored, with whoever comes now."""
        self._begun, self._reports = False, {}
        self.rounds = self.highest = self.mixed.kept_round
        self.generation += 1
        step = self.rounds * self.mixing.inner_steps
        if step < self.step:
            self.record("train.rollback", RolledBack(reason="all replicas were lost at once"), step=step)

    def _arrive(self, peer: PeerId, arrived: Arrived) -> None:
        member = self.roster.members[peer]
        if arrived.problem:
            self.expel(peer, f"it could not begin: {arrived.problem}")
        place = self.places[peer]
        self.places[peer] = msgspec.structs.replace(place, since=max(place.since, arrived.round))
        self.states.note(member.name, "ready")
        self.states.note(member.name, "accept")
        names = [self.places[PeerId(donor)].name for donor in arrived.donors if PeerId(donor) in self.places]
        source = ("replica " + ", ".join(names)) if names else (f"round {self.rounds}" if self.rounds else "start")
        member.stage, member.held = 0, True
        self.record("peer.seat", Seated(peer=peer, name=member.name, stage=0, source=source))

    # -- rounds -----------------------------------------------------------------------------------------------

    def _report(self, peer: PeerId, done: Done) -> None:
        """Take a replica's word for a round.

        Raises:
            ValueError: it is not its own, or not about a round of this run that is still open.
        """
        receipt, place = done.receipt.open(), self.places[peer]
        facts, number = receipt.read(Rounded), receipt.step // self.mixing.inner_steps
        stated = (receipt.peer, receipt.run, receipt.op, receipt.generation, facts.slot)
        if stated != (peer, self.world.run, "train.round", self.generation, place.slot):
            raise ValueError(f"it states {stated}")
        if not self.rounds <= number < self.until or place.slot in self._reports.get(number, {}):
            raise ValueError(f"it is about round {number}, and round {self.rounds} is open")
        if not 0 < facts.steps <= self.mixing.inner_steps:
            raise ValueError(f"it states {facts.steps} steps")
        if not math.isfinite(facts.loss):
            self._diverged(peer, number)
        name = self.journal.append(done.receipt)
        if done.problem:
            self.record("run.warning", Warned(text=f"{place.name} could not store its state: {done.problem}"))
        self._reports.setdefault(number, {})[place.slot] = (facts, name, done)
        self.highest = max(self.highest, number + 1)

    def _diverged(self, peer: PeerId, number: int) -> None:
        """One replica's loss is not finite: another's weights may still be good."""
        if len(self.places) > 1 and self.highest > number - AHEAD:
            self.expel(peer, f"its loss in round {number} is not finite")
        raise TalkootError(
            "training diverged",
            where=f"round {number} of run {self.world.run}",
            why="the loss is not finite",
            next="lower train.learning_rate or mixing.outer_rate and start a new run",
        )

    async def _commit(self) -> None:
        """Write down rounds that everybody has reported, in order."""
        while self._begun and self.places and self.rounds < self.until:
            reports = self._reports.get(self.rounds, {})
            expected = {place.slot for place in self.places.values() if place.since <= self.rounds}
            if not reports or not expected <= reports.keys():
                return
            self._write_round(self.rounds, reports)
            del self._reports[self.rounds]
            self.rounds += 1
            self._watch_spread()

    def _write_round(self, number: int, reports: dict[int, tuple[Rounded, str, Done]]) -> None:
        inner, train = self.mixing.inner_steps, self.recipe.train
        facts = [report for _, (report, _, _) in sorted(reports.items())]
        steps = min(inner, train.steps - number * inner)
        committed = Committed(
            loss=math.fsum(one.loss for one in facts) / len(facts),
            losses=tuple(one.loss for one in facts),
            paths=(),
            tokens=sum(one.tokens for one in facts),
            learning_rate=learning_rate(train, number * inner + steps - 1),
            gradient_norm=math.fsum(one.gradient_norm for one in facts) / len(facts),
            steps=steps,
        )
        parents = tuple(name for _, (_, name, _) in sorted(reports.items()))
        self.record("train.commit", committed, step=number * inner, parents=parents)
        judged = [one for one in facts if one.held_out is not None]
        if judged:
            mean = math.fsum(one.held_out or 0.0 for one in judged) / len(judged)
            self.record("train.evaluate", Evaluated(loss=mean, tokens=self._held_out_tokens()))
        blobs = {slot: done.blob for slot, (_, _, done) in reports.items() if done.blob}
        if blobs and blobs.keys() == reports.keys():
            self.record("train.kept", Kept(round=number + 1, blobs=tuple(sorted(blobs.items()))))
            self._kept = [*self._kept, frozenset(blobs.values())][-self.recipe.train.keep_checkpoints :]
            self.world.blobs.keep_only(set().union(*self._kept))

    def _watch_spread(self) -> None:
        """Warn, once each time, when replicas begin to be much further apart than their rule should keep them."""
        mixed, expected = self.mixed, expected_spread(self.mixing, len(self.places))
        before, self._far = self._far, is_far(mixed, expected, already=self._far)
        if self._far and not before:
            text = (
                f"replicas drift apart: their variance is {mixed.spread or 0:.3g} times that of a round's progress, "
                f"where rule {self.mixing.rule!r} should keep it at {expected or 0:.3g}; "
                f"{mixed.alone / mixed.rounds:.0%} of the rounds so far were alone"
            )
            self.record("run.warning", Warned(text=text))

    def _held_out_tokens(self) -> int:
        train = self.recipe.train
        return self.job.held_out_batches * train.microbatch_size * self.recipe.model.context

    # -- the end ----------------------------------------------------------------------------------------------

    async def _ask_for_mean(self) -> None:
        places = sorted(self.places.values(), key=lambda place: place.slot)
        contacts = tuple(Contact(place.peer, place.address) for place in places)
        self._collector = PeerId(contacts[0].peer)
        for peer in self.places:
            await self.tell(peer, "collect", Collect(collector=contacts[0], of=contacts), self.step)

    def _finish(self, peer: PeerId, collected: Collected) -> None:
        if collected.problem:
            raise ValueError(collected.problem)
        if self.world.blobs.size(collected.blob) != collected.size and self.job.tokens is not None:
            raise ValueError("the state that it says it stored is not in the store")
        held = [self.mixed.held_out[place.slot] for place in self.places.values() if place.slot in self.mixed.held_out]
        averaged = Averaged(
            replicas=collected.averaged,
            held_out=collected.held_out,
            best=min(held, default=None),
            mean=sum(held) / len(held) if held else None,
        )
        self.record("train.average", averaged)
        if collected.held_out is not None:
            self.record("train.evaluate", Evaluated(loss=collected.held_out, tokens=self._held_out_tokens()))
        self._snapshot(collected)
        self._done = True

    def _snapshot(self, collected: Collected) -> None:
        """The mean model as a snapshot like any other: what is exported, served, or trained on."""
        state_hash = snapshots.state_hash(collected.tensors, self.step)
        self.state_hash = state_hash
        if self.folder is None:
            return
        manifest = snapshots.Manifest(
            run=self.world.run,
            step=self.step,
            config=self.job.config,
            tokenizer=self.tokenizer_digest,
            shards=snapshots.shards(self.stages, [(collected.blob, collected.size)]),
            state_hash=state_hash,
            recipe=msgspec.to_builtins(self.recipe),
        )
        self.journal.sync()
        name = snapshots.write_manifest(self.folder, manifest, self.world.blobs.write).name
        facts = Checkpointed(manifest=name, state_hash=state_hash, num_bytes=collected.size)
        self.record("train.checkpoint", facts)
        self.journal.sync()

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
