"""Fit weights to text on one machine: AdamW steps under one schedule, resumable to the bit.

For what needs no swarm: seeds, experts, gates, warm starts. A run over many peers has its own arithmetic
(`talkoot.train`), because it must agree about every sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from talkoot.core.errors import TalkootError
from talkoot.model.config import tied_names
from talkoot.model.stage import Stage

Trained = Literal["all", "mlp"]
_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class FitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW (Loshchilov and Hutter 2019) and its schedule.

    Attributes:
        learning_rate: the highest, after the warm-up.
        horizon: steps that the schedule spans. A run may stop earlier: 300 steps of a horizon of 600 are the first half
            of that schedule, not a shorter one.
        warmup: steps in which the rate rises in a line.
        schedule: ``cosine`` (Loshchilov and Hutter 2017) or ``linear``, from the warm-up's end to the horizon.
        final: rate at the horizon, as a share of the highest; it stays there.
        clip: largest norm of a step's gradient.
        weight_decay: of matrices; vectors have none.
    """

    learning_rate: float
    horizon: int
    warmup: int = 0
    schedule: Literal["cosine", "linear"] = "cosine"
    final: float = 0.1
    clip: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon < 1 or not 0 <= self.warmup <= self.horizon:
            raise ValueError(f"a warm-up of {self.warmup} steps does not fit a schedule of {self.horizon}")
        if not 0 < self.learning_rate < math.inf or not 0 <= self.final <= 1 or not self.clip > 0:
            raise ValueError("learning_rate and clip must be positive numbers, final a share")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * ((step + 1) / self.warmup)
        left = max(0, self.horizon - step) / max(1, self.horizon - self.warmup)
        share = left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate * (self.final + (1 - self.final) * share)


class Fitter:
    """Moves some parameters down the gradient of a loss; all others are left alone.

    Args:
        parameters: by name; the state goes by these names.
        settings: rates and limits.
        ties: pairs ``(owner, copy)`` of names with equal values: the copy's gradient counts for the owner, and the copy
            follows it.

    Attributes:
        steps: how many were taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: FitSettings,
        ties: Iterable[tuple[str, str]] = (),
    ) -> None:
        if not parameters:
            raise ValueError("there is no parameter to fit")
        self.settings, self.steps = settings, 0
        self._all = dict(parameters)
        self._ties = [pair for pair in ties if set(pair) <= self._all.keys()]
        copies = {copy for _, copy in self._ties}
        self._own = {name: value for name, value in self._all.items() if name not in copies}
        groups = [
            {"params": [p for p in self._own.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._own.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.learning_rate, betas=(0.9, 0.95)
        )

    def step(self, loss: Tensor) -> float:
        """One step; the loss before it.

        Args:
            loss: a scalar that depends on the parameters; its graph is used up.

        Raises:
            TalkootError: the loss or its gradient is not finite; nothing moved then.
        """
        found = torch.autograd.grad(loss, list(self._all.values()), allow_unused=True)
        gradients = dict(zip(self._all, found, strict=True))
        for owner, copy in self._ties:
            one, other = gradients[owner], gradients[copy]
            gradients[owner] = other if one is None else one if other is None else one + other
        for name, parameter in self._own.items():
            parameter.grad = gradients[name]
        norm = float(nn.utils.clip_grad_norm_(self._own.values(), self.settings.clip))
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(norm):
            self._adamw.zero_grad()
            raise TalkootError(
                "training has diverged",
                where=f"step {self.steps + 1}",
                why=f"the loss is {value}, the norm of its gradient {norm}",
                next="lower the learning rate, or lengthen the warm-up",
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.settings.rate(self.steps)
        self._adamw.step()
        self._adamw.zero_grad()
        with torch.no_grad():
            for owner, copy in self._ties:
                self._all[copy].copy_(self._all[owner])
        self.steps += 1
        return value

    def state(self) -> dict[str, Tensor]:
        """Copies of moments and counts by name, for a resume that gives the same bits; weights are not in it."""
        found = {"steps": torch.tensor(self.steps)}
        for name, parameter in self._own.items():
            for part, value in self._adamw.state.get(parameter, {}).items():
                found[f"{part}/{name}"] = value.detach().clone()
        return found

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` gave.

        Raises:
            TalkootError: it is of other parameters; nothing was changed then.
        """
        parts = ("step", *_MOMENTS)
        known = {f"{part}/{name}": (part, name) for name in self._own for part in parts}
        strange = sorted(tensors.keys() - known.keys() - {"steps"})
        fresh: dict[str, dict[str, Tensor]] = {}
        for key in known.keys() & tensors.keys():
            part, name = known[key]
            if tensors[key].shape != (torch.Size([]) if part == "step" else self._own[name].shape):
                strange.append(key)
            fresh.setdefault(name, {})[part] = tensors[key].detach().clone()
        strange += [name for name, values in fresh.items() if len(values) < len(parts)]
        if strange or "steps" not in tensors or tensors["steps"].numel() != 1:
            raise TalkootError(
                "a saved state of training does not fit these parameters",
                where=strange[0] if strange else "steps",
                why="it is absent, of another shape, or of a parameter that is not trained here",
                next="resume with the model and settings that the training was started with",
            )
        self._adamw.state.clear()
        for name, values in fresh.items():
            self._adamw.state[self._own[name]] = values
        self.steps = int(tensors["steps"])


def stage_fitter(stage: Stage, settings: FitSettings, trained: Trained = "all") -> Fitter:
    """A fitter of a model's weights: ``all``, or those of its feed-forward layers (``mlp``) alone."""
    chosen = {name: value for name, value in stage.tensors().items() if trained == "all" or ".mlp." in name}
    return Fitter(chosen, settings, tied_names(stage.config))


def next_token_loss(stage: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: rows int64 (B, T + 1), of which each predicts its next."""
    logits = stage(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def fit(stage: Stage, batches: Iterable[Tensor], fitter: Fitter) -> list[float]:
    """One step per batch; deterministic.

    Args:
        stage: a whole model, of whose weights ``fitter`` is.
        batches: int64 (B, T + 1) on the stage's device, such as ``torch.from_numpy(windows.train(step, 0, 1))``.
        fitter: goes on from where it is, so that training in two parts gives the bits of training in one.

    Returns:
        Loss of each step in nats per token, before that step.

    Raises:
        TalkootError: as :meth:`Fitter.step`.
    """
    return [fitter.step(next_token_loss(stage, rows)) for rows in batches]
