"""Snapshots count when they are whole; what cannot be read is passed over, never trusted."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.train import checkpoint as snapshots
from talkoot.train.checkpoint import Manifest, Shard
from talkoot.world.blobs import Blobs

CONFIG = ModelConfig.from_depth(2, 300)


def save(folder: Path, step: int, contents: tuple[bytes, ...] | None = None) -> Manifest:
    """A snapshot with one blob for each stage."""
    blobs = Blobs(folder / "blobs")
    contents = contents or (b"stage 0 of step %d" % step, b"stage 1 of step %d" % step)
    saved = [(blobs.put(data), len(data)) for data in contents]
    manifest = Manifest(
        run="run",
        step=step,
        config=CONFIG,
        tokenizer="t",
        shards=snapshots.shards([(0, 2), (2, 4)], saved),
        state_hash=snapshots.state_hash({"a": str(step)}, step),
    )
    snapshots.write_manifest(folder, manifest)
    return manifest


def newest(folder: Path, at_most: int | None = None) -> tuple[Manifest | None, list[str]]:
    return snapshots.newest(folder, Blobs(folder / "blobs"), at_most)


def path_of(folder: Path, step: int) -> Path:
    return folder / snapshots.FOLDER / f"step-{step:08d}.json"


def test_the_newest_whole_snapshot_is_taken(tmp_path):
    assert newest(tmp_path) == (None, [])
    first, second = save(tmp_path, 9), save(tmp_path, 10)
    assert newest(tmp_path) == (second, [])
    assert newest(tmp_path, at_most=9) == (first, [])
    assert newest(tmp_path, at_most=8) == (None, [])


def damaged_blob(folder: Path, manifest: Manifest) -> None:
    path = folder / "blobs" / manifest.shards[1].blob
    path.write_bytes(b"X" + path.read_bytes()[1:])


def short_blob(folder: Path, manifest: Manifest) -> None:
    path = folder / "blobs" / manifest.shards[0].blob
    path.write_bytes(path.read_bytes()[:-1])


def absent_blob(folder: Path, manifest: Manifest) -> None:
    (folder / "blobs" / manifest.shards[0].blob).unlink()


def rewrite(folder: Path, manifest: Manifest, **values: object) -> None:
    path = path_of(folder, manifest.step)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def half_manifest(folder: Path, manifest: Manifest) -> None:
    path = path_of(folder, manifest.step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_manifest(folder: Path, manifest: Manifest) -> None:
    path_of(folder, manifest.step).write_bytes(b"")


def not_an_object(folder: Path, manifest: Manifest) -> None:
    path_of(folder, manifest.step).write_text("[1, 2]")


def deep_nonsense(folder: Path, manifest: Manifest) -> None:
    path_of(folder, manifest.step).write_text("[" * 100_000)


def missing_field(folder: Path, manifest: Manifest) -> None:
    path = path_of(folder, manifest.step)
    tree = json.loads(path.read_text())
    del tree["shards"]
    path.write_text(json.dumps(tree))


def version_in_words(folder: Path, manifest: Manifest) -> None:
    rewrite(folder, manifest, version="one")


def newer_version(folder: Path, manifest: Manifest) -> None:
    rewrite(folder, manifest, version=snapshots.VERSION + 1)


def wrong_size(folder: Path, manifest: Manifest) -> None:
    shards = [[s.first, s.last, s.blob, s.size + 1] for s in manifest.shards]
    keys = ("first", "last", "blob", "size")
    rewrite(folder, manifest, shards=[dict(zip(keys, shard, strict=True)) for shard in shards])


def foreign_blob_name(folder: Path, manifest: Manifest) -> None:
    rewrite(folder, manifest, shards=[{"first": 0, "last": 4, "blob": "../../etc/passwd", "size": 3}])


DAMAGES = [
    damaged_blob,
    short_blob,
    absent_blob,
    half_manifest,
    empty_manifest,
    not_an_object,
    deep_nonsense,
    missing_field,
    version_in_words,
    newer_version,
    wrong_size,
    foreign_blob_name,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_snapshot_that_is_not_whole_is_passed_over_with_a_warning_that_names_it(damage, tmp_path):
    good, bad = save(tmp_path, 4), save(tmp_path, 8)
    damage(tmp_path, bad)
    found, warnings = newest(tmp_path)
    assert found == good
    assert len(warnings) == 1
    assert warnings[0].startswith("step-00000008.json is damaged and was passed over: ")


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    newer_version(tmp_path, save(tmp_path, 8))
    with pytest.raises(TalkootError, match="newer talkoot") as caught:
        snapshots.read_manifest(path_of(tmp_path, 8))
    assert "upgrade" in caught.value.next


def test_other_files_in_the_folder_are_no_snapshots(tmp_path):
    save(tmp_path, 4)
    for name in ("step-5.json", "step-00000006.json.bak", ".writing-abc", "step-0000000x.json"):
        (tmp_path / snapshots.FOLDER / name).write_text("{}")
    assert [path.name for path in snapshots.manifests(tmp_path)] == ["step-00000004.json"]


def whole(folder: Path) -> list[int]:
    """Steps whose snapshot can be read completely."""
    found = []
    for path in snapshots.manifests(folder):
        step = snapshots.read_manifest(path).step
        if newest(folder, at_most=step)[0] is not None and newest(folder, at_most=step)[0].step == step:
            found.append(step)
    return found


def test_pruning_keeps_the_newest_whole_with_all_blobs_even_those_shared_with_older_ones(tmp_path):
    shared = b"this stage has not changed"
    save(tmp_path, 2, (shared, b"old"))
    save(tmp_path, 4, (shared, b"middle"))
    save(tmp_path, 6, (shared, b"new"))
    blobs = Blobs(tmp_path / "blobs")
    snapshots.prune(tmp_path, blobs, keep=2, step=6)
    assert whole(tmp_path) == [6, 4]
    assert len(list((tmp_path / "blobs").iterdir())) == 3
    snapshots.prune(tmp_path, blobs, keep=9, step=6)
    assert whole(tmp_path) == [6, 4]


def test_pruning_drops_snapshots_of_steps_that_were_rolled_back_not_the_one_just_written(tmp_path):
    save(tmp_path, 4)
    damaged_blob(tmp_path, save(tmp_path, 8))
    save(tmp_path, 5)
    snapshots.prune(tmp_path, Blobs(tmp_path / "blobs"), keep=1, step=5)
    assert whole(tmp_path) == [5]


def test_pruning_deletes_no_blob_while_a_kept_manifest_cannot_be_read(tmp_path):
    save(tmp_path, 2)
    half_manifest(tmp_path, save(tmp_path, 4))
    save(tmp_path, 6)
    before = sorted((tmp_path / "blobs").iterdir())
    snapshots.prune(tmp_path, Blobs(tmp_path / "blobs"), keep=2, step=6)
    assert sorted((tmp_path / "blobs").iterdir()) == before


def test_the_blobs_of_any_range_of_layers_are_those_that_overlap_it():
    shards = (Shard(0, 2, "a", 1), Shard(2, 3, "b", 1), Shard(3, 6, "c", 1))
    config = msgspec.structs.replace(CONFIG, layers=4)  # six in the list, embedding and head included
    manifest = Manifest(run="r", step=1, config=config, tokenizer="", shards=shards, state_hash="")
    assert manifest.blobs_for(-1, 1) == ("a", "c"), "a ring's first stage begins with the head"
    for first in range(6):
        for last in range(first + 1, 7):
            wanted = {shard.blob for shard in shards for i in range(first, last) if shard.first <= i < shard.last}
            assert set(manifest.blobs_for(first, last)) == wanted


def test_the_state_hash_sees_every_tensor_its_name_and_the_step_and_no_order():
    tensors = {"weight/a": "1", "first/a": "2"}
    base = snapshots.state_hash(tensors, 3)
    assert base == snapshots.state_hash(dict(reversed(tensors.items())), 3)
    others = [
        snapshots.state_hash(tensors, 4),
        snapshots.state_hash({"weight/a": "2", "first/a": "1"}, 3),
        snapshots.state_hash({"weight/b": "1", "first/a": "2"}, 3),
        snapshots.state_hash({"weight/a": "1"}, 3),
    ]
    assert len({base, *others}) == 5
