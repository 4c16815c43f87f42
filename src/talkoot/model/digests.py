"""A tensor's name by its content."""

from __future__ import annotations

import torch
from torch import Tensor

from talkoot.core.ids import Digest, digest


def tensor_digest(value: Tensor) -> Digest:
    """Digest of the bytes of a tensor, wherever it lies."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest(flat.numpy().data, "tensor")
