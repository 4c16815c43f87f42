"""Tensors as raw frames and back. The receiver knows dtype and shape, so a stranger's frame can only fit or not."""

from __future__ import annotations

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
