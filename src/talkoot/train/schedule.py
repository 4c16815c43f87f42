"""Learning rate by step: pure functions, filed by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from talkoot.core.registry import Registry
from talkoot.train.recipe import Train

schedules: Registry[Callable[[Train, float], float]] = Registry("schedule")


def learning_rate(train: Train, step: int) -> float:
    """The rate of ``step`` (counted from 0): linear warm-up, then the named schedule over the rest."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    progress = (step - train.warmup) / max(1, train.steps - train.warmup)
    return train.learning_rate * schedules[train.schedule](train, min(progress, 1.0))


@schedules.register("cosine")
def cosine(train: Train, progress: float) -> float:
    """Half a cosine from 1 to ``final_rate`` (Loshchilov and Hutter, 2017)."""
    return train.final_rate + (1 - train.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))


@schedules.register("constant-decay")
def constant_decay(train: Train, progress: float) -> float:
    """Constant, then linear to ``final_rate`` over the last ``decay`` share (Hägele et al., 2024)."""
    start = 1 - train.decay
    if progress <= start:
        return 1.0
    return 1 - (1 - train.final_rate) * (progress - start) / train.decay
