"""Hugging Face model folders in and out: what leaves, transformers and vLLM load unmodified.

Reading checks all names and shapes against the configuration before the first tensor is touched, then reads
only the tensors that the stage holds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.folder import INDEX, SINGLE, Entry, check_tensors, read_headers, refuse
from talkoot.model.hf_config import CONFIG, config_files, load_config
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer

__all__ = ["load_config", "load_model", "load_stage", "preflight", "save_folder"]


def preflight(folder: Path | str) -> tuple[ModelConfig, dict[str, Entry]]:
    """The model's shape and the place of each tensor, checked against each other; reads no tensor.

    Raises:
        TalkootError: files are missing or corrupt, the architecture is not supported, or tensors are missing,
            extra or of the wrong shape.
    """
    folder = Path(folder)
    config, entries = load_config(folder), read_headers(folder)
    check_tensors(config, {name: entry.shape for name, entry in entries.items()}, folder)
    return config, entries


def load_stage(
    folder: Path | str,
    first: int,
    last: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> Stage:
    """Layers ``first`` to ``last - 1`` of the model in a folder, reading no other tensor.

    Args:
        folder: holds config.json and safetensors, whole or in shards.
        first, last, dtype, device, autocast: as for ``Stage``.

    Raises:
        TalkootError: as ``preflight``.
    """
    config, entries = preflight(folder)
    stage = Stage(config, first, last, dtype=dtype, device=device, autocast=autocast)
    owners = {copy: owner for owner, copy in tied_names(config)}
    mine = stage.tensors()  # a tied checkpoint's own copy is ignored, as transformers does
    with torch.no_grad():
        for name, value in read_tensors(entries, {name: owners.get(name, name) for name in mine}):
            mine[name].copy_(value)
    return stage


def read_tensors(entries: Mapping[str, Entry], sources: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Values by name, one at a time, from files whose headers were read before.

    Args:
        entries: where each tensor lies.
        sources: wanted name to the name in the files.
    """
    with ExitStack() as files:
        opened: dict[Path, Any] = {}
        for name, source in sources.items():
            path = entries[source].file
            if path not in opened:
                opened[path] = files.enter_context(_open(path))
            yield name, opened[path].get_tensor(source)


def load_model(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> Stage:
    """The whole model in a folder; see ``load_stage``."""
    return load_stage(folder, 0, load_config(folder).layer_count, dtype, device, autocast)


def save_folder(
    folder: Path | str,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Export a complete model; the folder appears whole or not at all.

    Args:
        folder: new, empty, or an earlier export, which is replaced.
        config: the model's shape.
        tensors: all of the model's tensors by canonical name; a tied head is left out of the file.
        tokenizer: written beside the weights.
        max_shard_bytes: weights beyond it are split into shards with an index.
        dtype: type written; None for ``config.dtype``, so that an imported model keeps its bits.

    Raises:
        TalkootError: tensors do not fit the configuration, or the folder holds something else.
    """
    folder = Path(folder)
    check_tensors(config, {name: tuple(value.shape) for name, value in tensors.items()}, folder)
    written = dtype or getattr(torch, config.dtype)
    copies = {copy for _, copy in tied_names(config)}
    names = [n for index in range(config.layer_count) for n in config.layer_shapes(index) if n not in copies]
    files = config_files(config, str(written).removeprefix("torch."))
    write_folder(folder, files, {name: tensors[name] for name in names}, tokenizer, max_shard_bytes, written)


def write_folder(
    folder: Path,
    files: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    max_shard_bytes: int,
    dtype: torch.dtype,
) -> None:
    """Write JSON files, weights and a tokenizer beside the folder, and then put them in its place.

    Args:
        folder: new, empty, or with a config.json: an earlier export, which is replaced.
        files: contents by file name.
        tensors: in the order in which they fill the shards.
        tokenizer, max_shard_bytes, dtype: as for :func:`save_folder`.

    Raises:
        TalkootError: the folder holds something else.
    """
    if folder.exists() and not (folder / CONFIG).exists() and (not folder.is_dir() or any(folder.iterdir())):
        why = f"it exists and holds no {CONFIG}"
        raise refuse("the export would overwrite something else", folder, why, "choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        beside.chmod(0o755)  # mkdtemp's default would hide the export from other users
        for file, content in files.items():
            (beside / file).write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(beside)
        _write_weights(beside, tensors, dtype, max_shard_bytes)
        _swap(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, limit: int) -> None:
    sizes = {name: value.numel() * dtype.itemsize for name, value in tensors.items()}
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    for file, names in zip(files, shards, strict=True):
        # One shard at a time in memory; clone, because safetensors refuses tensors that share storage.
        shard = {name: tensors[name].detach().to("cpu", dtype, copy=True).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if total > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _swap(new: Path, folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old / "folder")
        new.rename(folder)
        shutil.rmtree(old)
    else:
        new.rename(folder)  # replaces an empty folder


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise refuse(f"{path.name} cannot be read", path, str(error), "fetch it again") from error
