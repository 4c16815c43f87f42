"""One snapshot, from the question to the moment it counts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.run.records import Warned
from talkoot.train import checkpoint as snapshots
from talkoot.train.lead import Lead
from talkoot.train.messages import Saved
from talkoot.train.records import Checkpointed


async def save_snapshot(lead: Lead) -> None:
    """Have one peer of each stage save its state; then the manifest, the log's word for it, and only then the pruning.

    The log is made durable first: after a power cut it must not be older than the only snapshot there is. A disk that
    takes no snapshot costs that snapshot alone: the older ones stay, the log has a warning, and training goes on; but a
    run does not end without its last state.

    Raises:
        PeersLost: somebody went away meanwhile, or claimed a state that is not in the store; nothing changed then.
        TalkootError: the state of the last step could not be saved, or the log not be written.
    """
    step, started = lead.step, lead.world.now()
    await lead.world.reached(step, "save")
    saved = await _ask(lead, step)
    problem = next((shard.problem for shard in saved if shard.problem), "")
    manifest = _manifest(lead, saved, step)
    lead.journal.sync()
    name = ""
    if lead.folder is not None and not problem:
        name, problem = _write(lead, lead.folder, manifest)
    if problem:
        _give_up(lead, step, problem)
    else:
        size = sum(shard.size for shard in saved)
        lead.record("train.checkpoint", Checkpointed(manifest=name, state_hash=manifest.state_hash, num_bytes=size))
        lead.journal.sync()
        lead.period.snapshot_took(lead.world.now() - started)
        lead.served = {stage: set(lead.roster.holders(stage)) for stage in range(lead.num_stages)}
        lead.repeated = {}
        lead.state_hash, lead.saved_at, lead.manifest = manifest.state_hash, step, manifest
    if lead.folder is not None:  # what is left of one that was given up goes, too
        snapshots.prune(lead.folder, lead.world.blobs, lead.recipe.train.keep_checkpoints, step, lead.world.run)


async def _ask(lead: Lead, step: int) -> list[Saved]:
    """What each stage's peers stored; where one could not, another one is asked."""
    saved: dict[int, Saved] = {}
    for turn in range(max(len(lead.roster.holders(stage)) for stage in range(lead.num_stages))):
        holders = {stage: lead.roster.holders(stage)[turn:] for stage in range(lead.num_stages)}
        wanting = [stage for stage in holders if stage not in saved or saved[stage].problem]
        asked = {holders[stage][0]: stage for stage in wanting if holders[stage]}
        if not asked:
            break
        for peer in asked:
            await lead.tell(peer, "save", None, step)
        answers = await lead.gather("saved", asked, Saved, step)
        for peer, stage in asked.items():
            if not answers[peer].problem and lead.world.blobs.size(answers[peer].blob) != answers[peer].size:
                lead.expel(peer, "the state it says it saved is not in the store")
            saved[stage] = answers[peer]
    return [saved[stage] for stage in range(lead.num_stages)]


def _manifest(lead: Lead, saved: list[Saved], step: int) -> snapshots.Manifest:
    tensors = {name: value for shard in saved for name, value in shard.tensors.items()}
    return snapshots.Manifest(
        run=lead.world.run,
        step=step,
        config=lead.job.config,
        tokenizer=lead.tokenizer_digest,
        shards=snapshots.shards(lead.stages, [(shard.blob, shard.size) for shard in saved]),
        state_hash=snapshots.state_hash(tensors, step),
        approximate=tuple(sorted(lead.state["train"].blended.items())),
        recipe=msgspec.to_builtins(lead.recipe),
    )


def _write(lead: Lead, folder: Path, manifest: snapshots.Manifest) -> tuple[str, str]:
    """The manifest's file name, or why there is none."""
    try:
        return snapshots.write_manifest(folder, manifest, lead.world.blobs.write).name, ""
    except TalkootError as problem:
        return "", f"{problem.what}: {problem.why}"


def _give_up(lead: Lead, step: int, problem: str) -> None:
    kept = lead.state["train"].checkpoint
    newest = "there is no other: it would start over" if kept is None else f"the newest one is that of step {kept}"
    lead.record("run.warning", Warned(text=f"no snapshot of step {step}: {problem}; {newest}"))
    if step >= lead.recipe.train.steps or lead.stop_requested:
        raise TalkootError(
            "the last state cannot be saved",
            where=f"step {step} of run {lead.world.run}{'' if lead.folder is None else f', in {lead.folder}'}",
            why=problem,
            next=f"free some space and run the same command again: it resumes ({newest})",
        )
