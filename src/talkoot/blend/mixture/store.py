"""Mixtures as folders: what leaves in a standard format, transformers and vLLM load unmodified."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.formats import Format, formats
from talkoot.blend.mixture.model import Mixture
from talkoot.blend.mixture.names import is_gate
from talkoot.core.errors import TalkootError, nearest
from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.folder import Entry, check_tensors, read_headers, read_json, refuse
from talkoot.model.hf_config import CONFIG, config_files
from talkoot.model.huggingface import read_tensors, write_folder
from talkoot.model.tokenizer import Tokenizer

STANDARD = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


def standard_format(config: MixtureConfig) -> str:
    """The standard format that can say this mixture; ``custom`` if none can."""
    name = STANDARD[config.family]
    return "custom" if formats[name].obstacle(config) else name


def save_mixture(
    folder: Path | str,
    mixture: Mixture,
    tokenizer: Tokenizer | None = None,
    format: str = "",
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> str:
    """Export a mixture; the folder appears whole or not at all.

    Standard formats have no temperature, so it is folded into the gates, and one width, so narrower experts are padded
    with units whose output is 0: both exact.

    Args:
        folder: new, empty, or an earlier export, which is replaced.
        format: a name in `talkoot.blend.mixture.formats`; empty for :func:`standard_format`.
        tokenizer, max_shard_bytes, dtype: as for :func:`talkoot.model.huggingface.save_folder`.

    Returns:
        The format's name.

    Raises:
        TalkootError: the format cannot say this mixture, the gates were never set, or the folder holds something else.
    """
    config, folder = mixture.config, Path(folder)
    format = format or standard_format(config)
    method = formats[format]
    if why := method.obstacle(config):
        next = f"use format {standard_format(config)!r}, or assemble with a gate of the kind 'token' without bias"
        raise TalkootError(f"format {format!r} cannot hold this mixture", where=str(folder), why=why, next=next)
    if not all(bool(value.isfinite().all()) for value in mixture.gate_tensors().values()):
        why = "they hold numbers that are not finite: they were never set"
        raise TalkootError("the gates cannot be saved", where=str(folder), why=why, next="fit them to statistics first")
    written = dtype or getattr(torch, config.dtype)
    fields = {name: getattr(config, name) for name in ModelConfig.__struct_fields__}
    files = config_files(ModelConfig(**fields), str(written).removeprefix("torch."))
    files[CONFIG] |= method.entries(config)
    copies = {copy for _, copy in tied_names(config)}
    tensors = {
        method.stored(name): _fitted(name, value.detach(), config, method)
        for name, value in mixture.tensors().items()
        if name not in copies
    }
    tensors |= {name: torch.zeros(shape) for name, shape in method.fillers(config).items()}
    write_folder(folder, files, tensors, tokenizer, max_shard_bytes, written)
    return format


def _fitted(name: str, value: Tensor, config: MixtureConfig, method: Format) -> Tensor:
    if not method.equal_widths:
        return value
    if is_gate(name):
        return value / config.temperature if config.top_k > 1 else value  # of one expert the weight is 1 anyhow
    if ".experts." not in name:
        return value
    across = name.endswith("down_proj.weight")
    missing = config.hidden - value.shape[1 if across else 0]
    return F.pad(value, (0, missing) if across else (0, 0, 0, missing))


class _Kind(msgspec.Struct):
    model_type: str


def mixture_preflight(folder: Path | str) -> tuple[MixtureConfig, dict[str, Entry]]:
    """The mixture's shape and the place of each of its tensors, by the name in the files; reads no tensor.

    Raises:
        TalkootError: files are missing or corrupt, it is no mixture or one that is not supported, or tensors are
            missing, extra or of the wrong shape.
    """
    config, entries, _ = _preflight(Path(folder))
    return config, entries


def _preflight(folder: Path) -> tuple[MixtureConfig, dict[str, Entry], Format]:
    kind = read_json(folder / CONFIG, _Kind).model_type
    known = {formats[name].model_type: formats[name] for name in formats}
    if kind not in known:
        why = f"model_type {kind!r}; {nearest(kind, known)}"
        next = "name a mixture's folder; a dense model is loaded with talkoot.model.huggingface.load_model"
        raise refuse("this is no mixture of experts", folder / CONFIG, why, next)
    method = known[kind]
    config, entries = method.read(folder), read_headers(folder)
    for name, shape in method.fillers(config).items():
        if name in entries and entries[name].shape == shape:
            del entries[name]
    names = [name for index in range(config.layer_count) for name in config.layer_shapes(index)]
    canonical = {method.stored(name): name for name in names}
    check_tensors(config, {canonical.get(name, name): entry.shape for name, entry in entries.items()}, folder)
    return config, entries, method


def load_mixture(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> Mixture:
    """The mixture in a folder, of any format; see :func:`mixture_preflight`."""
    config, entries, method = _preflight(Path(folder))
    mixture = Mixture(config, dtype=dtype, device=device, autocast=autocast)
    owners = {copy: owner for owner, copy in tied_names(config)}
    mine = mixture.tensors()
    with torch.no_grad():
        for name, value in read_tensors(entries, {name: method.stored(owners.get(name, name)) for name in mine}):
            mine[name].copy_(value)
    return mixture
