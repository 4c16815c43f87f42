"""A lost stage's weights made of its neighbours': approximate, for when nobody is left who holds the stage.

Each block of the lost stage becomes the mean of the corresponding blocks before and after it, weighed by the norm of
the neighbours' gradients: who still learns fast hands over more of its job (CheckFree; Blagoev et al., 2025, arXiv
2506.15461). Beyond the paper: neighbours of other depths, an exponent on the norm, and the choice to keep the mean of
the neighbours' second moments, without which Adam's first step is a full one for every weight. Not theirs either: the
norms are of whole mean gradients *before* clipping, which would make them all equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import msgspec
import torch
from torch import Tensor

from talkoot.model.config import ModelConfig
from talkoot.model.initial import initial_tensor
from talkoot.train.sections import Recovery

MOMENTS = ("first", "second")


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A stage beside the lost one.

    Attributes:
        first, last: the layers that it holds, as of :class:`~talkoot.model.stage.Stage`.
        omega: norm of its mean gradient in its last committed step, before clipping.
        state: its tensors by the names of ``TensorStage.state()``; the weights of its blocks, and their second moments
            where those are blended too.
    """

    first: int
    last: int
    omega: float
    state: Mapping[str, Tensor]

    def blocks(self, config: ModelConfig) -> range:
        """Indices of the decoder blocks among its layers."""
        return range(max(self.first, 1), min(self.last, config.layers + 1))


class Blended(msgspec.Struct, frozen=True):
    """What the lost stage goes on with.

    Attributes:
        state: weights and both moments of all its blocks, by the names of ``TensorStage.state()``, in new memory.
        step: the optimizer's step count that belongs to them: 0 where the moments start anew.
        shares: of each neighbour that was given, in that order; they add up to 1.
    """

    state: dict[str, Tensor]
    step: int
    shares: tuple[float, ...]


def blend(
    config: ModelConfig,
    lost: tuple[int, int],
    neighbours: Sequence[Neighbour],
    rule: Recovery,
    *,
    step: int,
    seed: int,
    kept: Mapping[str, Tensor] | None = None,
) -> Blended:
    """The state of the stage of layers ``lost``, a half-open range of decoder blocks, from its neighbours'.

    Deterministic, symmetric in the neighbours (but for a copy, which is of the first one), and elementwise between
    them: equal neighbours reproduce themselves bit for bit, a single one is copied, and so is one whose
    partner has a gradient of 0. Neighbours without blocks have no say.

    Args:
        config: the model's shape.
        lost: its layers.
        neighbours: one or two, the one before first.
        rule: ``merge``, ``omega_power`` and ``moments`` are used.
        step: committed steps, for the optimizer's count; ``seed``: of the run; together they seed random weights.
        kept: both moments of the lost stage, for ``moments = "exact"``.

    Raises:
        ValueError: a layer that is no block (nothing else resembles embedding and head), no neighbour with blocks,
            a norm that is negative or not finite, or no kept moments where they are wanted.
    """
    first, last = lost
    if not 1 <= first < last <= config.layers + 1:
        raise ValueError(f"layers {first} to {last - 1} are not all decoder blocks: only blocks can be blended")
    shares = _shares(config, neighbours, rule)
    exact = rule.moments == "exact"
    if exact and kept is None:
        raise ValueError("exact moments were asked for, and nobody kept them")
    state: dict[str, Tensor] = {}
    for place in range(last - first):
        sources = [
            (share, beside.state, _source(config, beside, place, last - first))
            for share, beside in zip(shares, neighbours, strict=True)
            if share
        ]
        for slot, (name, shape) in enumerate(config.layer_shapes(first + place).items()):

            def mean(part: str, slot: int = slot, sources: Sequence[_Source] = sources) -> Tensor:
                return _mean([(share, tensors[f"{part}/{names[slot]}"]) for share, tensors, names in sources])

            if rule.merge == "random":
                state[f"weight/{name}"] = initial_tensor(config, name, shape, _seed(seed, step))
            else:
                state[f"weight/{name}"] = mean("weight")
            state |= _moments(name, state[f"weight/{name}"], rule, mean, kept)
    return Blended(state, 0 if rule.moments == "reset" else step, shares)


_Source = tuple[float, Mapping[str, Tensor], list[str]]  # share, state, names of the block's tensors in it


def _shares(config: ModelConfig, neighbours: Sequence[Neighbour], rule: Recovery) -> tuple[float, ...]:
    """How much each neighbour has to say."""
    able = [len(beside.blocks(config)) > 0 for beside in neighbours]
    norms = [beside.omega for beside in neighbours]
    if not any(able):
        raise ValueError("no neighbour holds a decoder block")
    if any(not 0 <= norm < math.inf for norm in norms):
        raise ValueError(f"gradient norms {norms}: they are finite and at least 0")
    weights = [float(it) for it in able]
    if rule.merge == "copy":
        weights = [float(place == able.index(True)) for place in range(len(able))]
    elif rule.merge == "norm":  # relative to the largest, whose powers stay in the range of floats
        most = max(norm for norm, it in zip(norms, able, strict=True) if it) or 1.0
        power = rule.omega_power
        powers = [(norm / most) ** power if it else 0.0 for norm, it in zip(norms, able, strict=True)]
        weights = powers if any(powers) else weights
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _source(config: ModelConfig, beside: Neighbour, place: int, depth: int) -> list[str]:
    """Names of the tensors of the neighbour's block that stands for block ``place`` (from 0) of ``depth``."""
    blocks = beside.blocks(config)
    return list(config.layer_shapes(blocks[-(-(place + 1) * len(blocks) // depth) - 1]))


def _mean(weighted: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The weighted mean, never outside what it is the mean of: rounding may not make equal neighbours unequal."""
    tensors = [tensor for _, tensor in weighted]
    if len(tensors) == 1:
        return tensors[0].clone()
    mean = reduce(torch.add, (tensor * share for share, tensor in weighted))
    return mean.clamp(reduce(torch.minimum, tensors), reduce(torch.maximum, tensors))


def _moments(
    name: str,
    weight: Tensor,
    rule: Recovery,
    mean: Callable[[str], Tensor],
    kept: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    if rule.moments == "exact" and kept is not None:
        return {f"{moment}/{name}": kept[f"{moment}/{name}"].clone() for moment in MOMENTS}
    second = mean("second") if rule.moments == "neighbours" else torch.zeros_like(weight)
    return {f"first/{name}": torch.zeros_like(weight), f"second/{name}": second}


def _seed(seed: int, step: int) -> int:
    """Of random weights: neither the run's first ones nor those of another loss of the same stage."""
    return seed ^ ((step + 1) << 20)
