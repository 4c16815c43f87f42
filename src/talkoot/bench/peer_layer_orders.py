"""A tiny model trained along layer orders in one process, and its loss at every depth: the workhorse of a bench."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import msgspec
import numpy as np
import torch
from torch import Tensor

from talkoot.data import Windows, read_documents
from talkoot.model.config import ModelConfig
from talkoot.model.depth import held_out_loss, layer_order, remaining_layers, ring_cut
from talkoot.model.stage import Stage
from talkoot.train.oracle import OrderTraining, batched_gradients
from talkoot.train.recipe import Train

HELD_OUT_ROWS = 64  # of an evaluation batch


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all arms share.

    Attributes:
        stages: of a ring, one block each; the first holds embedding and head too.
        width, context: numbers per activation, tokens per sequence; a token is a byte.
        microbatches: of one step, one sequence each.
        held_out_batches: of 64 sequences, for every evaluation.
        points: evaluations along the way.
    """

    stages: int = 6
    width: int = 64
    context: int = 64
    microbatches: int = 10
    held_out_batches: int = 4
    points: int = 12

    @property
    def cut(self) -> list[tuple[int, int]]:
        """Layers of each stage."""
        return ring_cut((1,) * self.stages)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        heads = self.width // 16
        return ModelConfig(
            vocab_size=256,
            width=self.width,
            layers=self.stages,
            heads=heads,
            kv_heads=heads,
            head_dim=16,
            hidden=self.width * 11 // 4,
            max_positions=self.context,
        )


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training.

    Attributes:
        name: who.
        visits: stages per microbatch, the first included; as many as there are = the full pipeline.
        full_every: every so many steps all microbatches visit all stages; 0 = never.
        swaps: whether neighbouring stages are sometimes visited in reverse.
        learning_rate: peak.
    """

    name: str
    visits: int
    full_every: int = 0
    swaps: bool = False
    learning_rate: float = 2e-3

    def is_full(self, step: int, stages: int) -> bool:
        """Whether nothing is skipped in this step."""
        return self.visits == stages or (self.full_every > 0 and step % self.full_every == self.full_every - 1)


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """An arm's result for one seed.

    Attributes:
        curve: (simulated seconds, held-out loss along the full path) on the way.
        by_depth: number of stages to held-out loss, the mean over all sets of so many stages (the first always).
    """

    curve: tuple[tuple[float, float], ...]
    by_depth: dict[int, float]

    @property
    def seconds(self) -> float:
        """Simulated duration of the training."""
        return self.curve[-1][0]

    @property
    def full(self) -> float:
        """Loss of the whole model."""
        return self.by_depth[max(self.by_depth)]

    @property
    def best(self) -> float:
        """Loss at the depth at which it is lowest."""
        return min(self.by_depth.values())

    def perplexity_ratio(self, depth: int) -> float:
        """Perplexity at ``depth`` relative to that at the best depth."""
        return math.exp(self.by_depth[depth] - self.best)


def balanced_paths(chance: random.Random, arm: Arm, stages: int, microbatches: int) -> list[list[int]]:
    """Stages that each microbatch visits, stage 0 first: every other stage by equally many microbatches.

    Equal up to 1 where the total does not divide. With ``swaps``, two visited neighbours change places with
    probability 1/2, at most twice in a path and each stage once, which is what the limited-swap rule permits.
    """
    counts = [0] * stages
    paths = []
    for _ in range(microbatches):
        # The least visited first, ties by lot: this keeps all counts within 1, and each path's set uniform.
        order = sorted(range(1, stages), key=lambda stage: (counts[stage], chance.random()))
        path = sorted(order[: arm.visits - 1])
        for stage in path:
            counts[stage] += 1
        paths.append([0, *(_swapped(chance, path) if arm.swaps else path)])
    return paths


def _swapped(chance: random.Random, path: Sequence[int]) -> list[int]:
    path, left, place = list(path), 2, 0
    while place + 1 < len(path) and left:
        if path[place + 1] == path[place] + 1 and chance.random() < 0.5:
            path[place], path[place + 1] = path[place + 1], path[place]
            place, left = place + 1, left - 1
        place += 1
    return path


def tokens() -> np.ndarray:
    """The bundled text's bytes."""
    return np.frombuffer("".join(read_documents("bundled:shakespeare")).encode(), np.uint8)


def train(setting: Setting, arm: Arm, steps: int, seed: int, step_s: Callable[[bool], float]) -> Trained:
    """Train an arm for ``steps`` steps, its schedule ending with them, and measure it.

    Args:
        setting, arm: what to train and how.
        steps: optimizer steps.
        seed: of first weights, text order and paths; arms with the same seed start alike and read the same text.
        step_s: simulated seconds of a step, given whether it is a full one.
    """
    stage = Stage(setting.config, 0, setting.config.layer_count, seed=seed)
    recipe = Train(steps=steps, learning_rate=arm.learning_rate, warmup=min(20, steps // 5))
    training = OrderTraining(stage, recipe, batched_gradients)
    text = tokens()
    windows = Windows(text, length=setting.context, batch=1, seed=seed)
    held_out = list(_held_out(setting, text))
    seconds, curve = 0.0, []
    for step in range(steps):
        full = arm.is_full(step, setting.stages)
        training.step(step, _rows(windows, step, setting.microbatches), orders_of(setting, arm, seed, step))
        seconds += step_s(full)
        if (step + 1) * setting.points // steps > step * setting.points // steps:
            curve.append((seconds, held_out_loss(stage, held_out)))
    return Trained(curve=tuple(curve), by_depth=losses_by_depth(setting, stage, held_out))


def _rows(windows: Windows, step: int, microbatches: int) -> list[Tensor]:
    return [torch.from_numpy(windows.train(step, index, microbatches)) for index in range(microbatches)]


def orders_of(setting: Setting, arm: Arm, seed: int, step: int) -> list[tuple[int, ...]]:
    """The layers that each microbatch of a step runs."""
    if arm.is_full(step, setting.stages):
        return [tuple(range(setting.config.layer_count))] * setting.microbatches
    paths = balanced_paths(random.Random(f"{seed}/{step}"), arm, setting.stages, setting.microbatches)
    return [layer_order(setting.config, setting.cut, path) for path in paths]


def _held_out(setting: Setting, text: np.ndarray) -> Iterator[Tensor]:
    windows = Windows(text, length=setting.context, batch=HELD_OUT_ROWS, seed=0)
    for index in range(min(setting.held_out_batches, windows.num_held_out_batches)):
        yield torch.from_numpy(windows.held_out(index))


def losses_by_depth(setting: Setting, stage: Stage, held_out: Sequence[Tensor]) -> dict[int, float]:
    """Held-out loss by number of stages, from half of them up: the mean over every set of dead stages of that size."""
    found = {}
    for depth in range((setting.stages + 1) // 2, setting.stages + 1):
        losses = [
            held_out_loss(stage, held_out, remaining_layers(setting.config, setting.cut, dead))
            for dead in combinations(range(1, setting.stages), setting.stages - depth)
        ]
        found[depth] = math.fsum(losses) / len(losses)
    return found
