"""One snapshot, from the question to the moment it counts."""

from __future__ import annotations

import msgspec

from talkoot.train import checkpoint as snapshots
from talkoot.train.lead import Lead
from talkoot.train.messages import Saved
from talkoot.train.records import Checkpointed


async def save_snapshot(lead: Lead) -> None:
    """Have one peer of each stage save its state; then the manifest, the log's word for it, and only then the pruning.

    The log is made durable first: after a power cut it must not be older than the only snapshot there is.

    Raises:
        PeersLost: somebody went away meanwhile, or claimed a state that is not in the store; nothing changed then.
    """
    world, folder, step = lead.world, lead.folder, lead.step
    started = world.now()
    savers = [lead.roster.holders(stage)[0] for stage in range(lead.num_stages)]
    for peer in savers:
        await lead.tell(peer, "save", None, step)
    answers = await lead.gather("saved", savers, Saved, step)
    for peer in savers:
        if world.blobs.size(answers[peer].blob) != answers[peer].size:
            lead.expel(peer, "the state it says it saved is not in the store")
    saved = [answers[peer] for peer in savers]
    tensors = {name: value for shard in saved for name, value in shard.tensors.items()}
    manifest = snapshots.Manifest(
        run=world.run,
        step=step,
        config=lead.job.config,
        tokenizer=lead.tokenizer_digest,
        shards=snapshots.shards(lead.stages, [(shard.blob, shard.size) for shard in saved]),
        state_hash=snapshots.state_hash(tensors, step),
        approximate=tuple(sorted(lead.state["train"].blended.items())),
        recipe=msgspec.to_builtins(lead.recipe),
    )
    lead.journal.sync()
    name = "" if folder is None else snapshots.write_manifest(folder, manifest).name
    size = sum(shard.size for shard in saved)
    lead.record("train.checkpoint", Checkpointed(manifest=name, state_hash=manifest.state_hash, num_bytes=size))
    lead.journal.sync()
    if folder is not None:
        snapshots.prune(folder, world.blobs, lead.recipe.train.keep_checkpoints, step)
    lead.period.snapshot_took(world.now() - started)
    lead.state_hash, lead.saved_at, lead.manifest = manifest.state_hash, step, manifest
