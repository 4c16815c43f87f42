"""A router as one file: its tokenizer, its embeddings, every domain's statistics, and what was calibrated.

What is stored is what was counted, and loading fits anew: so domains can be added to a router that was loaded, and a
file and its router cannot disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save as pack
from torch import Tensor

from talkoot.blend.router.calibration import Calibration
from talkoot.blend.router.router import Router
from talkoot.blend.statistics import Features, Statistics
from talkoot.blend.statistics.file import check_sizes, opened
from talkoot.blend.statistics.provenance import Outline
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest
from talkoot.model.folder import write_file
from talkoot.model.tokenizer import Tokenizer

VERSION = 1
_WHAT = "the router"
_MAX_TOKENIZER = 1 << 28


class _Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    rule: str
    calibration: Calibration
    features: Digest
    names: tuple[str, ...]
    outlines: tuple[Outline, ...]
    vocabulary: int
    width: int
    buckets: int
    tokenizer: tuple[int, int]  # bytes of its two files


def save(router: Router, path: Path) -> None:
    """Write, whole or not at all."""
    features = router.features
    content, settings = features.tokenizer.content.encode(), json.dumps(features.tokenizer.settings).encode()
    sheet = _Sheet(
        version=VERSION,
        rule=router.rule,
        calibration=router.calibration,
        features=features.id,
        names=router.names,
        outlines=tuple(one.outline() for one in router.statistics.values()),
        vocabulary=features.vocabulary,
        width=features.width,
        buckets=features.buckets,
        tokenizer=(len(content), len(settings)),
    )
    tensors = {"tokenizer": torch.frombuffer(bytearray(content + settings), dtype=torch.uint8)}
    if features.table is not None:
        tensors["table"] = features.table
    for index, one in enumerate(router.statistics.values()):
        tensors |= {f"{index}.{name}": part for name, part in one.numbers().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, pack(tensors, {"router": msgspec.json.encode(sheet).decode()}))


def load(path: Path) -> Router:
    """Read; sizes are checked before any number is.

    Raises:
        TalkootError: it is missing, broken or no router.
    """
    try:
        with opened(path, _WHAT) as file:
            sheet = msgspec.json.decode((file.metadata() or {}).get("router", ""), type=_Sheet)
            if sheet.version != VERSION:
                raise ValueError(f"it is of version {sheet.version}, this talkoot reads {VERSION}")
            wanted = _sizes(sheet)
            check_sizes(file, wanted)
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in wanted}
        statistics = {
            name: Statistics.rebuilt(outline, {part: tensors[f"{index}.{part}"] for part in outline.tensors()})
            for index, (name, outline) in enumerate(zip(sheet.names, sheet.outlines, strict=True))
        }
        features = Features(_tokenizer(sheet, tensors["tokenizer"], path), tensors.get("table"), sheet.buckets)
        if features.id != sheet.features:
            raise ValueError("its tokenizer or its embeddings were changed")
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        next = "fit the router again with `talkoot blend route`"
        raise TalkootError("the router cannot be read", where=str(path), why=str(problem), next=next) from None
    return Router(statistics, features, sheet.rule, sheet.calibration)


def _sizes(sheet: _Sheet) -> dict[str, tuple[str, tuple[int, ...]]]:
    if not all(0 < size < _MAX_TOKENIZER for size in sheet.tokenizer) or not sheet.calibration.points:
        raise ValueError("its header is broken")
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"tokenizer": ("U8", (sum(sheet.tokenizer),))}
    if sheet.width:
        wanted["table"] = "I8", (sheet.vocabulary, sheet.width)
    for index, outline in enumerate(sheet.outlines):
        wanted |= {f"{index}.{name}": form for name, form in outline.tensors().items()}
    return wanted


def _tokenizer(sheet: _Sheet, stored: Tensor, path: Path) -> Tokenizer:
    data, size = stored.numpy().tobytes(), sheet.tokenizer[0]
    return Tokenizer(data[:size].decode(), json.loads(data[size:]), where=path)
