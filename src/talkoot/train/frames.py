"""Tensors as raw frames and back. The receiver knows dtype and shape, so a stranger's frame can only fit or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from talkoot.core.errors import Exit, TalkootError
from talkoot.world.api import Blank, Frame


def to_frame(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy if it is contiguous and on the CPU; it must not change while they travel."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array).toreadonly()  # a writable buffer would be copied before it is sent


def split_states(data: bytes) -> list[bytes]:
    """The safetensors containers that ``data`` is a sequence of.

    Raises:
        TalkootError: it is cut short, or no such sequence.
    """
    found: list[bytes] = []
    at = 0
    try:
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            header = json.loads(data[at + 8 : at + 8 + length])
            size = max(
                (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
            )
            end = at + 8 + length + size
            if not at < end <= len(data):
                raise ValueError(f"{len(data) - at} bytes are left of {end - at}")
            found.append(data[at:end])
            at = end
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as problem:
        raise unreadable(f"byte {at} of {len(data)}", problem) from problem
    return found


def unreadable(where: str, problem: Exception) -> TalkootError:
    """What to say about a state that is none."""
    return TalkootError(
        "a stage's state cannot be read",
        where=where,
        why=str(problem),
        next="check that all peers run the same version of talkoot; a damaged snapshot can be removed",
        code=Exit.FAILED_CHECK,
    )


def from_frame(frame: Frame, dtype: torch.dtype, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """A fresh tensor with the frame's content.

    Raises:
        TalkootError: the frame's size is not that of such a tensor.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    expected = tensor.numel() * tensor.element_size()
    if isinstance(frame, Blank) or len(frame) != expected:
        raise TalkootError(
            "a peer sent a tensor of the wrong size",
            where=f"a tensor of shape {tuple(shape)}",
            why=f"{len(frame)} bytes arrived, {expected} were expected",
            next="check that all peers run the same version of talkoot on the same model folder",
            code=Exit.FAILED_CHECK,
        )
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
    return tensor.to(device)
