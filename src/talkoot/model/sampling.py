"""Drawing tokens: randomness by address, what top-k and top-p leave, and the inverse of a distribution.

A row's draws are a function of its seed and of how many tokens it has drawn (a counter through the finaliser of
SplitMix64, Steele et al. 2014), so they depend neither on the rest of the batch nor on a generator's history.
Top-k: Fan et al. 2018; top-p: Holtzman et al. 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-6
_BLOCK = 512  # tokens whose probabilities are added up before any is looked at, in a large vocabulary


class Drawn(NamedTuple):
    """One token per row: ids int64 (B,), natural logarithms float32 (B,).

    Attributes:
        logp: under the whole vocabulary, at the sampling temperature (at 1 where that is 0), before any cut.
        kept: of the probability that top-k and top-p left; None where they cut nothing.
    """

    ids: Tensor
    logp: Tensor
    kept: Tensor | None


def draw(logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Drawn:
    """Choose a token for each row.

    Args:
        logits: (B, V), finite.
        uniform: float64 (B,), from 0, below 1: see :func:`uniforms`.
        temperature: 0 takes the likeliest token, and so does one that would make the logits overflow.
        top_k: keep so many of the likeliest; 0 = all.
        top_p: of those keep the likeliest up to this share of their probability together; 1 = all.
    """
    temperature = 0.0 if temperature < COLDEST else temperature
    logp = (logits / temperature if temperature > 0 else logits).log_softmax(-1, dtype=torch.float32)
    kept = None
    if temperature == 0:
        ids = logits.argmax(-1)
    elif 0 < top_k < logits.shape[1] or top_p < 1:
        ranked, order = _likeliest(logp, top_k)
        mass = ranked.exp().double()
        before = mass.cumsum(-1) - mass
        # The nucleus is every token before which less than top_p was collected; the first is always in it.
        mass = mass.where(before < top_p * mass.sum(-1, keepdim=True), 0)
        ids = order.gather(1, _place(mass, uniform)[:, None])[:, 0]
        kept = mass.sum(-1).clamp(max=1).log().float()
    else:
        ids = _pick(logp.exp(), uniform)
    return Drawn(ids, logp.gather(1, ids[:, None])[:, 0], kept)


def _likeliest(logp: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if 0 < top_k < logp.shape[1]:
        return logp.topk(top_k, dim=-1)
    return logp.sort(dim=-1, descending=True, stable=True)


def _pick(mass: Tensor, uniform: Tensor) -> Tensor:
    """The inverse of a distribution, mass (B, V): first to a block of tokens, then within it."""
    rows, size = mass.shape
    if size <= 2 * _BLOCK:
        return _place(mass.double(), uniform)
    blocks = torch.nn.functional.pad(mass, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    block = _place(sums, uniform)
    every = torch.arange(rows, device=mass.device)
    ahead = sums.cumsum(-1) - sums
    # What is left of the draw within its block, as a share of the block.
    rest = (uniform * sums.sum(-1) - ahead[every, block]) / sums[every, block]
    return block * _BLOCK + _place(blocks[every, block].double(), rest.clamp(0, 1 - 2**-40))


def _place(mass: Tensor, uniform: Tensor) -> Tensor:
    """First column whose cumulated float64 mass exceeds the draw; never one without mass."""
    reach = mass.cumsum(-1)
    return (reach <= uniform[:, None] * reach[:, -1:]).sum(-1)


def uniforms(seeds: Sequence[int], count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws 0 to ``count - 1`` of each sequence: float64 (B, count) from 0, below 1, of 48 bits.

    Args:
        seeds: one per sequence; their lower 64 bits count.
    """
    words = [_signed(seed % 2**64) for seed in seeds]
    start = torch.tensor(words, dtype=torch.int64, device=device)[:, None]
    x = start + torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 16).double() * 2.0**-48


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
