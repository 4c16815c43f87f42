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
from talkoot.train import checkpoint as snapshots
from talkoot.train.crew import NOTICES, Crew
from talkoot.train.job import Job
from talkoot.train.journal import Observer
from talkoot.train.messages import Assign, Contact, Give, Introduce, Ready
from talkoot.train.outlook import start_of, view_of
from talkoot.train.records import (
    End,
    PeerState,
    Recovered,
    Resume,
    RolledBack,
    Seated,
    Warned,
)
from talkoot.train.recovery import Loss, climb
from talkoot.world.api import HELLO, Host


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
        self.folder, self.stages, self.num_stages = folder, list(stages), len(stages)
        self.held_out_batches, self.tokenizer_digest = held_out_batches, tokenizer_digest
        self.evaluated_at: int | None = None
        self.saved_at: int | None = None
        self.stop_requested = False
        self.state_hash = ""
        self.routes = self.recipe.routes  # as planned, or as the peers agreed on last
        self.routed_for: Mapping[str, int] = dict(self.roster.home) if self.routes else {}  # who held what then
        self.drift = Drift(self.recipe.train.replan_at)
        self.busy_peers: tuple[PeerState, ...] = ()  # each present peer's account, as of the end of the run
        self._vacated = False
        self._recovering: tuple[str, tuple[str, ...]] | None = None
        self._manifest: snapshots.Manifest | None = None  # where seats without a donor take their state from

    def view(self, num_microbatches: int) -> View:
        """What a planner is told about this step."""
        view = view_of(self.job, self.roster, self.stages, self.step, num_microbatches)
        return msgspec.structs.replace(view, routes=self.routes)

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
            await self.next(HELLO, ())
        for name in self.roster.due(self.step):
            self._launch(name, faults=True)
        if self.roster.lost:
            self._recover()
        while self._await_names():
            await self.next(HELLO, self._await_names())
        await self._fill_seats()
        newcomers = self.roster.newcomers()
        if newcomers:
            self.roster.home |= stages_for(newcomers, self.view(self.recipe.train.microbatches))
            await self._fill_seats()
        if self._recovering is not None:
            rung, names = self._recovering
            self._recovering = None
            pause = 0.0 if self.lost_at is None else self.world.now() - self.lost_at
            self.record("train.recover", Recovered(rung=rung, lost=names, pause_s=pause))
            self.lost_at = None

    async def _fill_seats(self) -> None:
        vacant = self.roster.unseated()
        if vacant:
            await self._seat(vacant)

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
        rescue = climb(self.recipe.recovery.ladder, loss)
        self._recovering = (rescue.rung, before + names)
        if loss.empty_stages or rescue.step < self.step:
            self._roll_back(f"{rescue.rung}: nobody holds stages {loss.empty_stages} any more", rescue.step)

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
            member.stage = stage
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
