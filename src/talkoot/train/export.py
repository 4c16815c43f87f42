"""A run's newest snapshot as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load as read_safetensors
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.model.huggingface import save_folder
from talkoot.model.tokenizer import Tokenizer
from talkoot.train.checkpoint import Manifest, newest
from talkoot.train.prepare import TOKENIZER_FOLDER
from talkoot.world.blobs import Blobs


def export_run(run: Path, out: Path) -> Manifest:
    """Write the newest whole snapshot of the run in folder ``run`` to ``out``; returns its manifest.

    Raises:
        TalkootError: there is no snapshot, or the run's tokenizer is not the snapshot's.
    """
    blobs = Blobs(run / "blobs")
    manifest, warnings = newest(run, blobs)
    if manifest is None:
        raise TalkootError(
            "there is nothing to export",
            where=str(run),
            why=warnings[0] if warnings else "the run has no snapshot yet",
            next="let the run reach its first checkpoint (train.checkpoint_every) or its end",
        )
    tokenizer = Tokenizer.load(run / TOKENIZER_FOLDER)
    if tokenizer.digest() != manifest.tokenizer:
        raise TalkootError(
            "the tokenizer is not the one that this snapshot was trained with",
            where=str(run / TOKENIZER_FOLDER),
            why=f"its digest is {tokenizer.digest()[:8]}, the snapshot names {manifest.tokenizer[:8]}",
            next="restore the run's own tokenizer folder from a backup",
        )
    weights: dict[str, Tensor] = {}
    for shard in manifest.shards:
        for name, tensor in read_safetensors(blobs.get(shard.blob)).items():
            kind, _, canonical = name.partition("/")
            if kind == "weight":
                weights[canonical] = tensor
    save_folder(out, manifest.config, weights, tokenizer)
    return manifest
