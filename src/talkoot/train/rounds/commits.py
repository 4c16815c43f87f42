"""What the lead of a run in rounds writes down: rounds that everybody has reported, stored states, the mean model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.log import Log
from talkoot.run.journal import Observer
from talkoot.run.records import Warned
from talkoot.train import checkpoint as snapshots
from talkoot.train.job import Job
from talkoot.train.records import Checkpointed, Committed, Evaluated
from talkoot.train.rounds.messages import Collected
from talkoot.train.rounds.places import Seats
from talkoot.train.rounds.prospects import drift_in_words, expected_spread, is_far
from talkoot.train.rounds.records import Kept
from talkoot.train.rounds.reports import Report
from talkoot.train.schedule import learning_rate
from talkoot.world.api import Host


class Commits(Seats):
    """A lead's pen, as far as rounds are concerned.

    Attributes:
        folder: of the run; None = nothing lasts.
        stages, tokenizer_digest: as a snapshot states them.
        diverging: replicas that have diverged since the last commit.
        state_hash: of the mean model, in the end.
    """

    def __init__(self, world: Host, job: Job, log: Log, observer: Observer) -> None:
        super().__init__(world, job, log, observer)
        self.folder: Path | None = None
        self.stages: Sequence[tuple[int, int]] = ()
        self.tokenizer_digest = self.state_hash = ""
        self.diverging = 0
        self._kept: list[frozenset[str]] = []  # blobs of the last stored states
        self._pinned: set[str] = set()  # blobs of snapshots
        self._far = False  # replicas are further apart than they should be, and the log says so

    def use(self, sets: Sequence[frozenset[str]]) -> None:
        """These stored states are the run's, oldest first; and what its snapshots need is needed, too."""
        self._kept = list(sets)
        for path in snapshots.manifests(self.folder) if self.folder is not None else ():
            with suppress(TalkootError):
                self._pinned |= {shard.blob for shard in snapshots.read_manifest(path).shards}

    async def commit(self) -> None:
        """Write down rounds that everybody has reported, in order."""
        while self.places and self.rounds < self.until:
            places = self.places.values()
            # Whose account of a round nobody has any more, while all others came later: a round without any.
            over = any(place.since <= self.rounds for place in places) or bool(self.arrived())
            if not over or self.reports.missing(self.rounds, places):
                return
            if self.changed:  # the log must say who took part before it says that all of them did
                await self.publish()
            self._write(self.rounds, self.reports.pop(self.rounds))
            self.rounds, self.diverging = self.rounds + 1, 0
            self._watch_spread()

    def _watch_spread(self) -> None:
        """Warn, once each time, when replicas begin to be much further apart than their rule should keep them."""
        mixed, expected = self.mixed, expected_spread(self.mixing, len(self.places))
        before, self._far = self._far, is_far(mixed, expected, already=self._far)
        if self._far and not before:
            self.record("run.warning", Warned(text=drift_in_words(self.mixing, mixed, expected)))

    def _write(self, number: int, reports: list[Report]) -> None:
        inner, train = self.mixing.inner_steps, self.recipe.train
        facts = [report.facts for report in reports]
        steps = min(inner, train.steps - number * inner)
        committed = Committed(
            loss=math.fsum(one.loss for one in facts) / len(facts) if facts else self.state["train"].loss or 0.0,
            losses=tuple(one.loss for one in facts),
            paths=(),
            tokens=sum(one.tokens for one in facts),
            learning_rate=learning_rate(train, number * inner + steps - 1),
            gradient_norm=math.fsum(one.gradient_norm for one in facts) / max(1, len(facts)),
            steps=steps,
        )
        parents = tuple(report.receipt for report in reports)
        self.record("train.commit", committed, step=number * inner, parents=parents)
        judged = [one.held_out for one in facts if one.held_out is not None]
        if judged:
            mean = math.fsum(judged) / len(judged)
            self.record("train.evaluate", Evaluated(loss=mean, tokens=self.held_out_tokens()))
        blobs = {report.facts.slot: report.blob for report in reports}
        if blobs and all(blobs.values()) and steps == inner:  # a run that is prolonged cannot go on from a cut round
            self.record("train.kept", Kept(round=number + 1, blobs=tuple(sorted(blobs.items()))))
            self._kept = [*self._kept, frozenset(blobs.values())][-train.keep_checkpoints :]
            self.world.blobs.keep_only(self._pinned.union(*self._kept))

    def held_out_tokens(self) -> int:
        """Tokens of an evaluation."""
        train = self.recipe.train
        return self.job.held_out_batches * train.microbatch_size * self.recipe.model.context

    def store(self, collected: Collected) -> None:
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
