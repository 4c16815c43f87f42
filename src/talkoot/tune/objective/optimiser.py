"""One optimizer step: clip, refuse what is not finite, AdamW. Shared by all that train a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from talkoot.core.errors import TalkootError
from talkoot.tune.objective.settings import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did.

    Attributes:
        applied: the weights moved.
        reason: why they did not; empty if they did.
        grad_norm: global norm before clipping; None where it is not finite.
        learning_rate: of this step.
    """

    applied: bool
    reason: str
    grad_norm: float | None
    learning_rate: float


class PolicyOptimizer:
    """AdamW over a policy's trainable parameters; gradients are in their ``.grad``.

    Args:
        parameters: in a fixed order: the saved state goes by it.
        settings: rates and limits.

    Attributes:
        steps: how many were applied.
        skipped: how many were not.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Optimizer) -> None:
        self._parameters, self._settings = list(parameters), settings
        if not self._parameters:
            raise ValueError("a policy without trainable parameters cannot learn")
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._fused = all(p.device.type in ("cpu", "cuda") for p in self._parameters)
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=self._fused,
        )
        self.steps = self.skipped = 0

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rate, warmup = self._settings.learning_rate, self._settings.warmup
        return rate * (self.steps + 1) / warmup if self.steps < warmup else rate

    def step(self) -> StepFacts:
        """Clip the gradients, move the weights, forget the gradients. A gradient that is not finite moves nothing: the
        step is skipped and says so, because one NaN in a moment would stay there."""
        rate = self.learning_rate
        if all(p.grad is None for p in self._parameters):
            return self._skip("no gradient", 0.0, rate)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.clip or math.inf))
        if not math.isfinite(norm):
            return self._skip("non-finite gradient", None, rate)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.clear()
        self.steps += 1
        return StepFacts(applied=True, reason="", grad_norm=norm, learning_rate=rate)

    def skip(self, reason: str) -> StepFacts:
        """Take no step and forget the gradients: nothing moves, momentum included."""
        return self._skip(reason, 0.0, self.learning_rate)

    def _skip(self, reason: str, norm: float | None, rate: float) -> StepFacts:
        self.clear()
        self.skipped += 1
        return StepFacts(applied=False, reason=reason, grad_norm=norm, learning_rate=rate)

    def state(self) -> dict[str, Tensor]:
        """Copies of all moments and counts by name, for a resume that gives the same bits; gradients are not in it."""
        found = {"steps": torch.tensor(self.steps), "skipped": torch.tensor(self.skipped)}
        for index, parameter in enumerate(self._parameters):
            for name, value in self._adamw.state.get(parameter, {}).items():
                found[f"{name}/{index}"] = value.detach().clone()
        return found

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` gave.

        Raises:
            TalkootError: it is of other parameters; nothing was changed then.
        """
        fresh = {}
        for index, parameter in enumerate(self._parameters):
            mine = {name: tensors.get(f"{name}/{index}") for name in ("step", *_MOMENTS)}
            if any(value is not None for value in mine.values()):
                fresh[parameter] = self._fitting(index, parameter, mine)
        counts = [tensors.get(name) for name in ("steps", "skipped")]
        known = {f"{name}/{i}" for name in ("step", *_MOMENTS) for i in range(len(self._parameters))}
        strange = sorted(set(tensors) - known - {"steps", "skipped"})
        if strange or any(count is None or count.numel() != 1 for count in counts):
            raise _misfit(strange[0] if strange else "steps", "absent, or of a parameter that this policy has not")
        self.steps, self.skipped = (int(count) for count in counts if count is not None)
        self._adamw.state.clear()
        for parameter, values in fresh.items():
            self._adamw.state[parameter] = values
        self.clear()

    def _fitting(self, index: int, parameter: nn.Parameter, saved: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        chosen: dict[str, Tensor] = {}
        for name, value in saved.items():
            shape = torch.Size([]) if name == "step" else parameter.shape
            if value is None or value.shape != shape:
                raise _misfit(f"{name}/{index}", f"absent or not of shape {tuple(shape)}")
            # Fused kernels want the count where the parameter is, others want it on the CPU.
            device = parameter.device if name != "step" or self._fused else torch.device("cpu")
            chosen[name] = value.detach().to(device, copy=True)
        return chosen


def _misfit(name: str, why: str) -> TalkootError:
    return TalkootError(
        "a saved optimizer state does not fit this policy",
        where=name,
        why=f"it is {why}",
        next="resume with the model and adapter that the run was started with",
    )
