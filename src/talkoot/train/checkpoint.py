"""Snapshots: one blob per stage, and a manifest that exists only once all of them do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest_of_digests
from talkoot.model.config import ModelConfig
from talkoot.world.blobs import Blobs, write_atomically

FOLDER = "checkpoints"
VERSION = 1
_NAME = re.compile(r"step-(\d{8})\.json")


class Shard(msgspec.Struct, frozen=True):
    """One stage's part: layers ``[first, last)`` (-1 is the head) in blob ``blob`` of ``size`` bytes."""

    first: int
    last: int
    blob: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole snapshot.

    Attributes:
        step: committed steps it contains.
        approximate: stages that nobody held any more and that were blended of others at some step, and the step.
        state_hash: digest over the digests of all weights and moments, however they are cut into stages.
    """

    version: int = VERSION
    run: str
    step: int
    config: ModelConfig
    tokenizer: str
    shards: tuple[Shard, ...]
    state_hash: str
    approximate: tuple[tuple[int, int], ...] = ()
    recipe: dict[str, Any] = {}

    def blobs_for(self, first: int, last: int) -> tuple[str, ...]:
        """Names of the blobs that hold any of the layers ``[first, last)``."""
        wanted = set(self.config.held(first, last))
        return tuple(shard.blob for shard in self.shards if wanted & set(self.config.held(shard.first, shard.last)))


def state_hash(tensors: dict[str, str], step: int) -> str:
    """One digest for a whole training state: every tensor's digest by name, and the step."""
    return digest_of_digests([*tensors.items(), ("step", str(step))])


def write_manifest(folder: Path, manifest: Manifest, write: Callable[[Path, bytes], None] = write_atomically) -> Path:
    """Make a snapshot count: its blobs are already stored, and ``write`` puts its file beside them.

    Raises:
        TalkootError: the disk is full, the folder cannot be written, or another run's manifest is in the way.
    """
    path = folder / FOLDER / f"step-{manifest.step:08d}.json"
    if _is_foreign(path, manifest.run):
        raise TalkootError(
            "another run's checkpoint is in the way",
            where=str(path),
            why=f"it belongs to run {read_manifest(path).run}, this one is {manifest.run}, and nothing is overwritten",
            next="move it to its own run's folder",
        )
    write(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return path


def manifests(folder: Path) -> list[Path]:
    """All manifests, newest first."""
    named = [path for path in (folder / FOLDER).glob("step-*.json") if _NAME.fullmatch(path.name)]
    return sorted(named, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """A manifest from its file.

    Raises:
        TalkootError: missing, cut short, or written by a newer talkoot.
    """
    try:
        data = path.read_bytes()
        version = json.loads(data).get("version", 0)
        if version > VERSION:
            raise TalkootError(
                "this checkpoint was written by a newer talkoot",
                where=str(path),
                why=f"its format is {version}, this talkoot reads up to {VERSION}",
                next="upgrade talkoot: pip install --upgrade talkoot",
            )
        return msgspec.json.decode(data, type=Manifest)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as problem:
        raise TalkootError(
            "a checkpoint cannot be read",
            where=str(path),
            why=str(problem),
            next="remove this file: the snapshot before it is used then",
        ) from problem


def _is_foreign(path: Path, run: str | None) -> bool:
    """Whether a manifest is there, whole, and another run's."""
    try:
        return run is not None and read_manifest(path).run != run
    except TalkootError:
        return False


def newest(
    folder: Path,
    blobs: Blobs,
    at_most: int | None = None,
    run: str | None = None,
    config: ModelConfig | None = None,
) -> tuple[Manifest | None, list[str]]:
    """The newest whole snapshot, and one warning for each newer one that is damaged or another run's.

    Args:
        folder: the run's.
        blobs: where the shards lie.
        at_most: ignore snapshots of later steps.
        run, config: pass over snapshots of other runs and other models.
    """
    warnings: list[str] = []
    for path in manifests(folder):
        try:
            manifest = read_manifest(path)
            if run not in (None, manifest.run):
                warnings.append(f"{path.name} belongs to run {manifest.run} and was passed over")
                continue
            if at_most is not None and manifest.step > at_most:
                continue
            if config not in (None, manifest.config):
                raise ValueError("it is of another model")
            for shard in manifest.shards:
                if len(blobs.get(shard.blob)) != shard.size:
                    raise ValueError(f"blob {shard.blob[:8]} has another size than the manifest says")
            return manifest, warnings
        except (TalkootError, ValueError, KeyError, OSError) as problem:
            why = problem.why if isinstance(problem, TalkootError) else str(problem)
            warnings.append(f"{path.name} is damaged and was passed over: {why}")
    return None, warnings


def check_tokenizer(manifest: Manifest, digest: str, where: str) -> None:
    """Refuse to go on from a snapshot with another tokenizer than its own.

    Raises:
        TalkootError: saying which two there are.
    """
    if manifest.tokenizer != digest:
        raise TalkootError(
            "this tokenizer is not the one that the checkpoint was trained with",
            where=f"{where}, snapshot of step {manifest.step}",
            why=f"its digest is {digest[:8]}, the snapshot names {manifest.tokenizer[:8]}",
            next="restore the run's own tokenizer folder from a backup, or start a new run with --out",
        )


def prune(folder: Path, blobs: Blobs, keep: int, step: int, run: str | None = None) -> None:
    """Keep the newest ``keep`` snapshots up to ``step``, the one just written, and the blobs they need.

    Later ones are of commits that were rolled back (or they were damaged, and passed over): they go, because counted
    among the newest they would push out the good ones. Other runs' are left alone, with ``run``, which is this one's.
    """
    last = f"step-{step:08d}.json"
    foreign = [path for path in manifests(folder) if _is_foreign(path, run)]
    own = [path for path in manifests(folder) if path not in foreign]
    paths = [path for path in own if path.name <= last]
    for path in [*paths[keep:], *(path for path in own if path.name > last)]:
        path.unlink(missing_ok=True)
    wanted: set[str] = set()
    for path in [*paths[:keep], *foreign]:
        try:
            wanted |= {shard.blob for shard in read_manifest(path).shards}
        except TalkootError:
            return  # an unreadable manifest may need any blob: delete nothing
    blobs.keep_only(wanted)


def shards(ranges: Sequence[tuple[int, int]], saved: Sequence[tuple[str, int]]) -> tuple[Shard, ...]:
    """Shards from the stages' layer ranges and their (blob, size)."""
    return tuple(Shard(first, last, *blob) for (first, last), blob in zip(ranges, saved, strict=True))
