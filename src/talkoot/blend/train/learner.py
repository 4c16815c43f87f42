"""One model on its way: weights, optimizer and place in the text, with nothing around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import Tensor

from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.train.jobs import Job
from talkoot.core.errors import TalkootError
from talkoot.data.windows import Windows
from talkoot.model.config import ModelConfig
from talkoot.model.fit import FitSettings, next_token_loss, stage_fitter
from talkoot.model.huggingface import load_model
from talkoot.model.initial import tensor_seed
from talkoot.model.stage import Stage

_WEIGHTS, _FIT = "weights/", "fit/"


class Learner:
    """Trains one job's model.

    Args:
        recipe, job: what and how.
        config: the model's shape.
        start: blob of the weights that it begins with; empty = its own first ones.
    """

    def __init__(self, recipe: BlendRecipe, job: Job, config: ModelConfig, start: bytes = b"") -> None:
        self.recipe, self.job = recipe, job
        if job.kind == "general" and recipe.model.load:
            self.stage = load_model(recipe.model.load)
        else:
            self.stage = Stage(config, 0, config.layer_count, seed=tensor_seed(recipe.seed, f"general {job.size}"))
        if start:
            self.stage.load(from_bytes(start)[0])
        general = job.kind == "general"
        experts = recipe.experts
        horizon = max(1, job.steps) if general else recipe.experts.span
        settings = FitSettings(
            learning_rate=recipe.general.learning_rate if general else experts.learning_rate,
            horizon=horizon,
            warmup=min(experts.warmup, horizon),
        )
        self.fitter = stage_fitter(self.stage, settings, "all" if general else experts.trained)

    @property
    def steps(self) -> int:
        """That were taken."""
        return self.fitter.steps

    def advance(self, tokens: np.ndarray, until: int) -> float:
        """Train up to step ``until``; the mean loss on the way, in nats per token."""
        recipe = self.recipe
        windows = Windows(
            tokens, length=recipe.model.context, batch=recipe.experts.batch, seed=recipe.seed, held_out=0.0
        )
        losses = []
        while self.fitter.steps < until:
            rows = torch.from_numpy(windows.train(self.fitter.steps, 0, 1))
            losses.append(self.fitter.step(next_token_loss(self.stage, rows)))
        return fmean(losses)

    def state(self) -> bytes:
        """Everything that a resume with the same bits needs."""
        return _to_bytes({**_named(_WEIGHTS, self.stage.tensors()), **_named(_FIT, self.fitter.state())})

    def load(self, state: bytes) -> None:
        """Take back what :meth:`state` gave."""
        weights, fit = from_bytes(state)
        self.stage.load(weights)
        self.fitter.load_state(fit)

    def result(self) -> bytes:
        """The weights alone."""
        return _to_bytes(_named(_WEIGHTS, self.stage.tensors()))


def held_out_rows(tokens: np.ndarray, length: int, windows: int) -> Tensor:
    """Windows from all over a text, int64 (at most ``windows``, length + 1); documents differ, the first is not all.

    Raises:
        TalkootError: the text has not one window.
    """
    there = (len(tokens) - 1) // length
    if there < 1:
        raise TalkootError(
            "there is too little held-out text",
            where=f"{len(tokens)} tokens",
            why=f"a window takes {length + 1}",
            next="give the domain more text, or shorten model.context",
        )
    count = min(windows, there)
    starts = [number * there // count * length for number in range(count)]
    return torch.from_numpy(np.stack([tokens[at : at + length + 1] for at in starts]).astype(np.int64))


@torch.no_grad()
def held_out_loss(stage: Stage, tokens: np.ndarray, length: int, windows: int, batch: int = 8) -> float:
    """Mean cross-entropy over windows from all over a text, in nats per token.

    Raises:
        TalkootError: the text has not one window.
    """
    rows = held_out_rows(tokens, length, windows)
    count = len(rows)
    total = math.fsum(
        float(next_token_loss(stage, rows[at : at + batch])) * len(rows[at : at + batch])
        for at in range(0, count, batch)
    )
    return total / count


def from_bytes(blob: bytes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by canonical name, and the optimizer's state where it is there.

    Raises:
        TalkootError: these are no such bytes.
    """
    try:
        tensors = read_safetensors(blob)
    except SafetensorError as problem:
        raise TalkootError(
            "a stored model cannot be read",
            where="a blob of the run",
            why=str(problem),
            next="run the same command again: an older state is used, or start anew with --out",
        ) from problem
    weights = {name.removeprefix(_WEIGHTS): value for name, value in tensors.items() if name.startswith(_WEIGHTS)}
    return weights, {name.removeprefix(_FIT): value for name, value in tensors.items() if name.startswith(_FIT)}


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def _to_bytes(tensors: dict[str, Tensor]) -> bytes:
    return write_safetensors(
        {name: value.detach().cpu().contiguous().clone() for name, value in sorted(tensors.items())}
    )
