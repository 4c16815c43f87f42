"""The lead's side of the swarm: who is present, who holds what, the log, snapshots and recovery.

The lead computes nothing. It proposes work, collects receipts, writes them to the log, and seats peers. What it knows
it knows from the log, so it can be started again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import talkoot
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.plan.drift import Drift
from talkoot.plan.newcomers import stages_for
from talkoot.plan.steps import View
from talkoot.run.journal import Observer
from talkoot.run.records import End, Resume, Warned
from talkoot.train import checkpoint as snapshots
from talkoot.train.crew import NOTICES, Crew, PeersLost
from talkoot.train.job import Job
from talkoot.train.outlook import start_of, view_of
from talkoot.train.period import Period
from talkoot.train.records import Blended, Recovered, RolledBack
from talkoot.train.recovery import Source, Unrecoverable, climb
from talkoot.train.seating import arrange_keepers, introduce, loss_of, seat
from talkoot.train.states import RUN, States
from talkoot.train.succession import Succession
from talkoot.world.api import HELLO, Host, Message


class Lead(Crew):
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
        super().__init__(world, job, log, observer)
        self.succession = Succession(self)
        self.folder, self.stages, self.num_stages = folder, list(stages), len(stages)
        self.held_out_batches, self.tokenizer_digest = held_out_batches, tokenizer_digest
        self.evaluated_at: int | None = None
        self.saved_at: int | None = None
        self.stop_requested = False
        recovery = self.recipe.recovery
        self.period = Period(self.recipe.train.checkpoint_every, recovery.failures_per_hour, self.num_stages)
        self.state_hash = ""
        self.routes = self.recipe.routes  # as planned, or as the peers agreed on last
        self.routed_for: Mapping[str, int] = dict(self.roster.home) if self.routes else {}  # who held what then
        self.drift = Drift(self.recipe.train.replan_at)
        self._vacated = False
        self._recovering: Recovered | None = None
        self.hurt: tuple[str, ...] = ()  # names lost in the recovery under way
        self.served: dict[int, set[PeerId]] = {}  # who held each stage since the newest snapshot
        self.repeated: dict[int, set[PeerId]] = {}  # of them, who is gone but whose words were computed again
        self.failed: set[tuple[int, str]] = set()  # (stage, rung) that brought nothing usable in this recovery
        self._sources: dict[int, Source] = {}  # where stages that nobody holds get their state from
        self.manifest: snapshots.Manifest | None = None  # of the newest snapshot

    def members_changed(self) -> None:
        self.succession.note()

    def handles(self, message: Message) -> bool:
        return self.succession.takes(message)

    def view(self, num_microbatches: int) -> View:
        """What a planner is told about this step."""
        view = view_of(self.job, self.roster, self.stages, self.step, num_microbatches)
        return msgspec.structs.replace(view, routes=self.routes)

    # -- seats -----------------------------------------------------------------------------------------------

    def assemble(self) -> None:
        """Start or continue the run: launch all peers and go back to the newest snapshot."""
        self._open()
        self.expect_faults()
        for name in self.roster.home:
            self._launch(name)
        self._roll_back("resumed")

    def _open(self) -> None:
        if self.state.position:
            stages, steps = tuple(self.stages), self.recipe.train.steps
            resume = Resume(world=self.world.kind, talkoot=talkoot.__version__, stages=stages, steps=steps)
            self.record("run.resume", resume)
            self.states = States(self.state["states"])  # nobody is there yet
            self._docket.resume(self.furthest)
        else:
            self.record("run.start", start_of(self.job, self.world.kind, self.stages, self.tokenizer_digest))

    def _roll_back(self, reason: str, step: int | None = None) -> None:
        """Vacate all seats; whoever is seated next starts from the snapshot at or before ``step``."""
        self.manifest = None
        if self.folder is not None:
            self.manifest, warnings = snapshots.newest(
                self.folder, self.world.blobs, self.step if step is None else step, self.world.run, self.job.config
            )
            for warning in warnings:
                self.record("run.warning", Warned(text=warning))
        if self.manifest is not None:
            snapshots.check_tokenizer(self.manifest, self.tokenizer_digest, f"{self.folder}")
        self._vacated = True
        for name in sorted(self.roster.names()):
            self.states.note(name, "vacate")
        self.roster.vacate()
        self.keepers.clear()
        self.served, self.repeated, self._sources = {}, {}, {}
        self.evaluated_at = None
        self.saved_at, self.state_hash = None, ""
        if self.manifest is not None:
            self.saved_at, self.state_hash = self.manifest.step, self.manifest.state_hash
        start = self.saved_at or 0
        if start < self.step:
            origin = (
                "the newest whole snapshot" if self.manifest is not None else "the start: there is no whole snapshot"
            )
            self.record("train.rollback", RolledBack(reason=f"{reason}, from {origin}"), step=start)

    async def restore(self) -> None:
        """Make the swarm whole: recover from losses, then seat whoever has no seat yet.

        Raises:
            PeersLost: somebody was lost meanwhile; call it again.
        """
        while self.world.pending(*NOTICES):
            await self.next(HELLO, ())
        for name in self.roster.due(self.step):
            self._launch(name)
        if self.roster.lost:
            await self.succession.seal()  # whoever lost them may be cut off itself: then it starts and ends nobody
            self.states.note(RUN, "drained")
            self._recover()
            self.states.note(RUN, "plan")
            await self.succession.seal()  # it may have gone back; nobody is to do that under two leads
            if self.roster.lost:
                raise PeersLost(self.roster.lost)
        while self._await_names():
            await self.next(HELLO, self._await_names())
        if self.strangers:
            await introduce(self)
        await self._fill_seats()
        newcomers = self.roster.newcomers()
        if newcomers:
            self.roster.home |= stages_for(newcomers, self.view(self.recipe.train.microbatches))
            await self._fill_seats()
        if self._recovering is not None:
            pause = 0.0 if self.lost_at is None else self.world.now() - self.lost_at
            self.record("train.recover", msgspec.structs.replace(self._recovering, pause_s=pause))
            self._recovering, self.lost_at, self.hurt = None, None, ()
            self.failed.clear()
        self.states.note(RUN, "begin")
        self.states.note(RUN, "whole")
        self.flush_states()
        await arrange_keepers(self)
        await self.succession.tend()

    async def _fill_seats(self) -> None:
        vacant = self.roster.unseated()
        if vacant:
            await seat(self, vacant, self._sources)
            self._vacated = False
            for stage in {stage for _, stage in vacant} & set(self._sources):
                self._note_blend(stage, self._sources.pop(stage))

    def _note_blend(self, stage: int, source: Source) -> None:
        """From here on the run is not what it would have been, and the log says so."""
        if source.exact:
            return
        self.keepers.drop(stage)
        recovery = self.recipe.recovery
        blended = Blended(
            stage=stage,
            sources=tuple((self.roster.name_of(share.peer), share.stage, share.norm) for share in source.shares),
            merge=recovery.merge,
            omega_power=recovery.omega_power,
            moments=recovery.moments,
            bump=recovery.bump,
            loss=self.state["train"].loss,
        )
        self.record("train.blend", blended)

    def _await_names(self) -> set[str]:
        """Peers without whom no step can be computed and who are still on their way."""
        names, hopeless = self.roster.missing()
        for stage, spare in zip(list(hopeless), self.roster.newcomers(), strict=False):
            self.roster.home[spare.name] = stage  # whoever waited for a stage that needs it
            hopeless.remove(stage)
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
        """Decide what the losses mean: replacements, and where lost stages come from, or how far everybody goes back.

        Raises:
            Unrecoverable: no rung of the ladder can serve.
        """
        self.generation += 1
        self.hurt = (*self.hurt, *self.replace_lost())
        if self._vacated:
            if self._recovering is not None:
                self._recovering = msgspec.structs.replace(self._recovering, lost=self.hurt)
            return  # nobody holds anything since the last roll-back: there is nothing to recover, only seats to fill
        loss = loss_of(self)
        try:
            sources = climb(self.recipe.recovery.ladder, loss)
        except Unrecoverable:
            self.states.note(RUN, "give_up")
            raise
        words = "+".join(sorted({source.rung for source in sources.values()})) or "replica"
        approximate = tuple(stage for stage, source in sources.items() if not source.exact)
        self._recovering = Recovered(rung=words, lost=self.hurt, pause_s=0.0, approximate=approximate)
        back = [source.step for source in sources.values() if source.how == "rollback"]
        if back:
            self._roll_back(f"{words}: nobody holds stages {loss.empty_stages} any more", min(back))
        else:
            self._sources = {stage: sources[stage] for stage in loss.empty_stages}

    def blobs_of(self, stage: int) -> tuple[str, ...]:
        """Where the stage lies in the newest snapshot; none before there is one."""
        return () if self.manifest is None else self.manifest.blobs_for(*self.stages[stage])

    def bumps(self, step: int) -> dict[int, float]:
        """By stage, factors on the learning rate of stages that were approximated, where they are not 1."""
        recovery = self.recipe.recovery
        found: dict[int, float] = {}
        for stage, at in self.state["train"].blended.items():
            excess = (recovery.bump - 1.0) * (1.0 - recovery.bump_decay) ** (step - at)
            if excess:
                found[stage] = 1.0 + excess
        return found

    # -- snapshots and the end -------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Write down why the run stops here."""
        self.states.note(RUN, "end")
        self.record("run.end", End(reason=reason, state_hash=self.state_hash))

    async def finish(self) -> None:
        """Write down the end and send everybody home."""
        if self.step >= self.recipe.train.steps and (left := self._docket.left(self.step)):
            self.record("run.warning", Warned(text=f"faults that never struck, the run is over: {', '.join(left)}"))
        self.end("done" if self.step >= self.recipe.train.steps else "interrupted")
        await self.succession.close()
        for peer in self.roster.members:
            await self.tell(peer, "stop", None, self.step)
