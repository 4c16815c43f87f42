"""A model at part of its depth: which layers run when stages are skipped, swapped or dead, and how well it predicts.

A block adds to the residual stream, so the stream passes a missing block unchanged and the model still answers
(Veit et al., 2016, "Residual networks behave like ensembles"); trained with blocks left out at random it answers well
(stochastic depth, Huang et al., 2016; LayerDrop, Fan et al., 2020; for pipelines SkipPipe, Blagoev et al., 2025).
Only the two ends, embedding and head, can never be missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage

Cut = Sequence[tuple[int, int]]  # the half-open range of layers of each stage; (-1, k) opens and closes a ring


def ring_cut(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """The cut in which stage 0 holds embedding, head and ``blocks[0]`` blocks, and stage s the next ``blocks[s]``."""
    ends = list(accumulate(blocks, initial=1))[1:]
    return [(-1, ends[0]), *pairwise(ends)]


def layer_order(config: ModelConfig, cut: Cut, path: Sequence[int]) -> tuple[int, ...]:
    """The layers that a microbatch runs when it visits these stages, for ``Stage.run_layers``.

    Args:
        config: the model's shape.
        cut: the layers of each stage.
        path: stages in the order of visiting, both ends among them (a ring's stage 0, which holds both, once).

    Raises:
        TalkootError: a stage that does not exist or comes twice, or a path that misses an end.
    """
    ends = 0, config.layers + 1
    strange = [stage for stage in path if not 0 <= stage < len(cut)]
    if strange or len(set(path)) != len(path):
        raise _bad(path, f"there are stages 0 to {len(cut) - 1}, each to be visited once at most")
    held = [index for stage in path for index in config.held(*cut[stage])]
    if not set(ends) <= set(held):
        needed = [stage for stage, (first, last) in enumerate(cut) if {*config.held(first, last)} & {*ends}]
        raise _bad(path, f"embedding and head are in stages {needed}, which no path can leave out")
    return (ends[0], *(index for index in held if index not in ends), ends[1])


def remaining_layers(config: ModelConfig, cut: Cut, dead_stages: Collection[int]) -> tuple[int, ...]:
    """The layers that still run, in the model's order, when these stages are gone.

    Raises:
        TalkootError: a stage that does not exist, or one that holds the embedding or the head.
    """
    if not set(dead_stages) <= set(range(len(cut))):
        raise _bad(sorted(dead_stages), f"they cannot all be dead: there are stages 0 to {len(cut) - 1}")
    return layer_order(config, cut, [stage for stage in range(len(cut)) if stage not in dead_stages])


@torch.no_grad()
def held_out_loss(stage: Stage, batches: Iterable[Tensor], layers: Sequence[int] | None = None) -> float:
    """Mean cross-entropy in nats per token, each batch weighing the same.

    Args:
        stage: a whole model.
        batches: int64 rows (B, T + 1), inputs and shifted targets, such as ``Windows.held_out`` gives.
        layers: the order to run; None for the whole model.

    Raises:
        TalkootError: an order that the model cannot run.
        ValueError: no batch.
    """
    order = range(stage.config.layer_count) if layers is None else layers
    losses = []
    for rows in batches:
        rows = rows.to(stage.device)
        logits = stage.run_layers(rows[:, :-1], order)
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())))
    if not losses:
        raise ValueError("there is no held-out batch")
    return math.fsum(losses) / len(losses)


def _bad(stages: Sequence[int], why: str) -> TalkootError:
    return TalkootError(
        "the model cannot run through these stages",
        where=f"stages {list(stages)}",
        why=why,
        next="name stages that exist, and leave those that hold the embedding and the head alive",
    )
