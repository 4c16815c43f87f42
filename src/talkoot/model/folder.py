"""Files of a model folder, read with suspicion: bounded, never outside the folder, headers before data.

Nothing here imports torch. Weights are read only as safetensors; pickle runs code and is refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.model.config import ModelConfig, tied_names

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# The types a dense checkpoint may hold, with bytes per number; quantised ones need another forward pass.
STORED = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}

_MAX_JSON, _MAX_INDEX, _MAX_HEADER = 1 << 20, 1 << 26, 100_000_000

T = TypeVar("T")


class Entry(NamedTuple):
    """Where a tensor lies and what it looks like."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def refuse(what: str, path: Path, why: str, next: str) -> TalkootError:
    """The error to raise about a file; kept short because every reader here needs it."""
    return TalkootError(what, where=str(path), why=why, next=next)


def read_bounded(path: Path, limit: int) -> bytes:
    """Content of a file of at most ``limit`` bytes.

    Raises:
        TalkootError: the file is missing, unreadable or larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise refuse(
            f"{path.name} cannot be read", path, error.strerror or str(error), "check the folder's path"
        ) from error
    if len(data) > limit:
        raise refuse(f"{path.name} is too large", path, f"more than {limit} bytes", "use an intact folder")
    return data


def read_json(path: Path, kind: type[T], limit: int = _MAX_JSON) -> T:
    """Decode a bounded JSON file into a typed value."""
    return decode_json(read_bounded(path, limit), kind, path)


def decode_json(data: bytes, kind: type[T], path: Path) -> T:
    """Decode JSON into a typed value; ``path`` is for the message."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        next = "fetch the folder again, or export it anew with transformers' save_pretrained"
        raise refuse(f"{path.name} is corrupt", path, str(error), next) from error


def write_file(path: Path, data: bytes) -> None:
    """Write through a sibling and rename, so that a reader sees the old content or the new, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(data)
    beside.replace(path)


def check_finite(name: str, value: Any, where: Path | str) -> None:
    """Refuse a tensor with a number that is none; whatever it goes into would answer nonsense and look healthy.

    Args:
        name, value: the tensor.
        where: its model, for the message.

    Raises:
        TalkootError: some are NaN or infinite.
    """
    if not bool(value.detach().isfinite().all()):
        raise TalkootError(
            "the model's weights cannot be used",
            where=f"{where}, tensor {name}",
            why="some are NaN or infinite",
            next="export the model again, or use an earlier state of it",
        )


def read_headers(folder: Path) -> dict[str, Entry]:
    """All tensors that a folder's safetensors files declare, by name; no tensor is read.

    Raises:
        TalkootError: there are no safetensors, or an index or a header is corrupt.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return _file_entries(folder / SINGLE)
    if not index.exists():
        raise _no_weights(folder)
    listed = read_json(index, _Index, _MAX_INDEX).weight_map
    files = sorted(set(listed.values()))
    for file in files:
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            why = f"it names {file!r}; only plain names of .safetensors files in the same folder are read"
            raise refuse("the index points outside its folder", index, why, "do not trust this folder")
    entries: dict[str, Entry] = {}
    for file in files:
        found = _file_entries(folder / file)
        wrong = {name for name, where in listed.items() if where == file} ^ found.keys()
        if wrong:
            why = f"{file} and the index disagree about {_some(wrong)}"
            raise refuse("the index is corrupt", index, why, "fetch the folder again")
        entries |= found
    return entries


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors, whole or in shards."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _no_weights(folder: Path) -> TalkootError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return refuse(
            "a pickle checkpoint is not read",
            folder,
            "loading .bin, .pt or .pth files can run any code that their author put there",
            "convert it where you trust it: AutoModelForCausalLM.from_pretrained(X).save_pretrained(Y)",
        )
    why = f"neither {SINGLE} nor {INDEX} is there"
    return refuse("the folder holds no weights", folder, why, "check the path, or fetch the missing files")


def _file_entries(path: Path) -> dict[str, Entry]:
    """Parse one safetensors header: eight bytes of length, then JSON; extents must tile the file exactly."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            size = os.fstat(file.fileno()).st_size
            body = file.read(length) if 2 <= length <= min(_MAX_HEADER, size) else b""
    except OSError as error:
        next = "fetch the missing file"
        raise refuse(f"{path.name} cannot be read", path, error.strerror or str(error), next) from error
    header = decode_json(body, dict[str, msgspec.Raw], path)
    header.pop("__metadata__", None)
    tensors = {name: decode_json(bytes(raw), _Tensor, path) for name, raw in header.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in STORED:
            why = f"{name} has type {tensor.dtype}; read are {', '.join(STORED)}"
            next = "convert quantised weights back to bfloat16 with transformers first"
            raise refuse("the checkpoint's number type is not supported", path, why, next)
        first, last = tensor.data_offsets
        if first != end or last - first != prod(tensor.shape) * STORED[tensor.dtype][1] or min(first, *tensor.shape, 0):
            raise refuse(f"{path.name} is corrupt", path, f"the extent of {name} is wrong", "fetch it again")
        end = last
    if 8 + length + end != size:
        why = f"it has {size} bytes, its header promises {8 + length + end}"
        raise refuse(f"{path.name} is truncated or padded", path, why, "fetch it again")
    return {name: Entry(path, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def stored_dtype(entries: Iterable[Entry]) -> str:
    """The one type that holds every tensor exactly, in torch's spelling."""
    kinds = {STORED[entry.dtype][0] for entry in entries}
    return kinds.pop() if len(kinds) == 1 else "float32"


def check_tensors(config: ModelConfig, shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    """Compare tensor names and shapes with what the configuration demands.

    Raises:
        TalkootError: a block or tensor is missing, extra or of another shape.
    """
    wanted = {n: s for index in range(config.layer_count) for n, s in config.layer_shapes(index).items()}
    optional = {copy for _, copy in tied_names(config)}
    missing = wanted.keys() - shapes.keys() - optional
    # Old Llama checkpoints stored the rotary frequencies, which follow from the configuration.
    extra = {n for n in shapes.keys() - wanted.keys() if not n.endswith("rotary_emb.inv_freq")}
    next = "use the config.json that belongs to these weights"
    blocks = len({name.split(".")[2] for name in shapes if name.startswith("model.layers.") and name.count(".") > 2})
    if blocks not in (0, config.layers):
        why = f"the configuration says {config.layers} blocks, the checkpoint holds {blocks}"
        raise refuse("the number of layers differs", where, why, next)
    if missing:
        hint = nearest(min(missing), extra) if extra else f"the checkpoint holds {len(shapes)} tensors"
        raise refuse("the checkpoint lacks tensors", where, f"missing {_some(missing)}; {hint}", next)
    if extra:
        why = f"unknown to family {config.family!r}: {_some(extra)}"
        raise refuse("the checkpoint holds extra tensors", where, why, next)
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            why = f"{name} has shape {shapes[name]}, the configuration says {shape}"
            raise refuse("a tensor has the wrong shape", where, why, next)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
