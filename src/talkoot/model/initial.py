"""First values of a model's tensors: a pure function of (seed, name, shape, config) on every machine.

Peers that cut the model differently, and peers with unlike processors, must start from equal bits.
``torch.randn`` gives other bits on a processor with other vector instructions, so the bell curve here is a
sum of four 16-bit integers (Irwin-Hall): exact integer arithmetic, variance exactly one after scaling, and,
like the usual truncated normal, no value beyond 3.5 standard deviations.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

from talkoot.model.config import ModelConfig, tied_names

SCALE = 0.02  # standard deviation of every matrix, as in GPT-2 (Radford et al. 2019)

_CHUNK = 1 << 20
_CENTRE = 2 * 65535  # mean of the sum of four 16-bit integers
_UNIT = math.sqrt(3 / (2**32 - 1))  # one over that sum's standard deviation


def initial_tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The float32 tensor, on the CPU, from which training starts.

    Norms start at 1, biases at 0, matrices with deviation 0.02, those that write into the residual stream
    with 0.02 / sqrt(2 * layers), so that its variance does not grow with depth. A tied copy has its owner's
    values.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    owner = {copy: owner for owner, copy in tied_names(config)}.get(name, name)
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = SCALE / math.sqrt(2 * config.layers) if residual else SCALE
    return _bell(shape, tensor_seed(seed, owner)).mul_(scale * _UNIT)


def tensor_seed(seed: int, name: str) -> int:
    """A 63-bit seed of one tensor's own random stream."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1


def _bell(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
    for part in flat.split(_CHUNK):  # bounds the memory of the 64-bit words
        words = torch.empty(part.shape, dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=generator)
        part.copy_(sum((words >> shift & 0xFFFF for shift in (16, 32, 48)), words & 0xFFFF) - _CENTRE)
    return flat.view(shape)
