"""A small model trained in one process through a given history of lost stages: the trajectories of a bench.

The layers, batches, gradients and updates are those of a ring of peers; who was lost when is given, and what becomes of
a lost stage is :func:`talkoot.train.recovery.blending.blend`'s. Exact recovery needs no trajectory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from talkoot.bench.peer_layer_orders import tokens
from talkoot.data import Windows
from talkoot.model.config import ModelConfig
from talkoot.model.depth import held_out_loss, layer_order, ring_cut
from talkoot.model.stage import Stage
from talkoot.train.oracle import step_gradients
from talkoot.train.recipe import Recovery, Train
from talkoot.train.recovery.blending import Blended, Neighbour, blend
from talkoot.train.schedule import learning_rate

HELD_OUT_ROWS = 64
EVALUATE_EVERY = 10
TIMES = {"first": "exp_avg", "second": "exp_avg_sq"}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The small model: relay stages and blocks of each, width, vocabulary (bytes), context, and a step's sequences."""

    relays: int = 6
    blocks: int = 2
    width: int = 64
    vocabulary: int = 256
    context: int = 48
    microbatches: int = 2
    samples: int = 4

    @property
    def cut(self) -> list[tuple[int, int]]:
        """Layers of each stage; the first has embedding and head alone."""
        return ring_cut((0, *(self.blocks,) * self.relays))

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        heads = self.width // 16
        return ModelConfig(
            vocab_size=self.vocabulary,
            width=self.width,
            layers=self.blocks * self.relays,
            heads=heads,
            kv_heads=heads,
            head_dim=16,
            hidden=self.width * 11 // 4,
            max_positions=self.context,
        )


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How an arm trains and mends: half its microbatches with swapped ends or not, and how a lost stage is blended."""

    swapped: bool = False
    recovery: Recovery = Recovery()


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory.

    Attributes:
        curve: (steps, held-out loss in order) on the way.
        jumps: rise of the held-out loss at each lost stage: (stage, nats per byte).
        losses: of the steps' microbatches, for checks.
        probes: by merge, the rise of the loss at the end if a stage were lost then, stage by stage.
    """

    curve: tuple[tuple[int, float], ...]
    jumps: tuple[tuple[int, float], ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    probes: dict[str, tuple[float, ...]] = {}

    def steps_to(self, target: float) -> float:
        """Steps until the loss, a mean of three evaluations, reaches ``target``; infinite when it never does."""
        for (step, loss), (later, lower) in pairwise(self.smooth):
            if lower <= target < loss:
                return step + (later - step) * (loss - target) / (loss - lower)
        return math.inf

    @property
    def smooth(self) -> list[tuple[int, float]]:
        """The curve without its ends, each loss the mean of three."""
        windows = zip(self.curve, self.curve[1:], self.curve[2:], strict=False)
        return [(middle[0], (before[1] + middle[1] + after[1]) / 3) for before, middle, after in windows]


class Training:
    """The whole model and its optimizer.

    Args:
        setting: the model.
        train: learning rate and schedule, AdamW's numbers, clip.
        way: how this arm trains.
        seed: of first weights and batches.
    """

    def __init__(self, setting: Setting, train: Train, way: Way, seed: int) -> None:
        self.setting, self.train, self.way, self.seed = setting, train, way, seed
        config = self.config = setting.config
        self.stage = Stage(config, 0, config.layer_count, seed=seed)
        self.tensors = self.stage.tensors()
        of_layer = {name: layer for layer in range(config.layer_count) for name in config.layer_shapes(layer)}
        homes = {layer: s for s, cut in enumerate(setting.cut) for layer in config.held(*cut)}
        self.home = {name: homes[of_layer[name]] for name in self.tensors}
        self.norms = [1.0] * len(setting.cut)
        self.blended: dict[int, int] = {}  # stage -> the step at which it was
        self.optimizer = torch.optim.AdamW(
            self._groups(), betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True
        )

    def _groups(self) -> list[dict[str, object]]:
        groups = [
            {
                "params": [p for name, p in self.tensors.items() if self.home[name] == s and (p.ndim >= 2) == matrix],
                "weight_decay": self.train.weight_decay if matrix else 0.0,
                "stage": s,
            }
            for s in range(len(self.setting.cut))
            for matrix in (True, False)
        ]
        return [group for group in groups if group["params"]]

    def step(self, number: int, rows: Sequence[Tensor]) -> tuple[float, ...]:
        """Take step ``number`` (from 0) and return each microbatch's loss before it."""
        means, losses = step_gradients(self.stage, rows, self.orders(len(rows)))
        if self.way.recovery.stream == "bfloat16":
            means = {name: mean.bfloat16().float() for name, mean in means.items()}
        squares = {name: float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for name, g in means.items()}
        self.norms = [
            math.sqrt(math.fsum(square for name, square in squares.items() if self.home[name] == s))
            for s in range(len(self.norms))
        ]
        norm, clip = math.sqrt(math.fsum(squares.values())), self.train.clip
        for name, parameter in self.tensors.items():
            parameter.grad = means[name].mul_(clip / norm) if clip and norm > clip else means[name]
        rate = learning_rate(self.train, number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.bump(group["stage"], number)
        self.optimizer.step()
        return losses

    def bump(self, stage: int, step: int) -> float:
        """Factor on the learning rate of a stage that was blended."""
        if stage not in self.blended:
            return 1.0
        recovery = self.way.recovery
        return 1.0 + (recovery.bump - 1.0) * (1.0 - recovery.bump_decay) ** (step - self.blended[stage])

    def orders(self, count: int) -> list[tuple[int, ...]]:
        """The layers that each microbatch runs."""
        usual = list(range(len(self.setting.cut)))
        swapped = [0, 2, 1, *usual[3:-2], usual[-1], usual[-2]]
        stages = [swapped if self.way.swapped and m % 2 else usual for m in range(count)]
        return [layer_order(self.config, self.setting.cut, path) for path in stages]

    def lose(self, stage: int, step: int) -> None:
        """Put what a blend makes of its neighbours in the place of a lost stage, after ``step`` steps."""
        found = self.blended_state(stage, step, self.way.recovery)
        for name, parameter in self.tensors.items():
            if self.home[name] == stage:
                with torch.no_grad():
                    parameter.copy_(found.state[f"weight/{name}"])
                moments = {theirs: found.state[f"{ours}/{name}"] for ours, theirs in TIMES.items()}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(found.step)), **moments}
        self.blended[stage] = step

    def blended_state(self, stage: int, step: int, rule: Recovery) -> Blended:
        """What the rule makes of a stage's neighbours."""
        cut = self.setting.cut
        beside = sorted({(stage - 1) % len(cut), (stage + 1) % len(cut)} - {0})
        neighbours = [
            Neighbour(first=cut[s][0], last=cut[s][1], omega=self.norms[s], state=self.state(s)) for s in beside
        ]
        return blend(self.config, cut[stage], neighbours, rule, step=step, seed=self.seed, kept=self.state(stage))

    def probe(self, merge: str, stage: int, held_out: Tensor) -> float:
        """The loss if the stage were lost now and made anew by ``merge``; the model stays as it is."""
        mine = {name: p for name, p in self.tensors.items() if self.home[name] == stage}
        kept = {name: p.detach().clone() for name, p in mine.items()}
        rule = msgspec.structs.replace(self.way.recovery, merge=merge, moments="reset")
        made = self.blended_state(stage, 0, rule).state
        self._set({name: made[f"weight/{name}"] for name in mine})
        after = _loss(self.stage, held_out)
        self._set(kept)
        return after

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self.tensors[name].copy_(value)

    def state(self, stage: int) -> dict[str, Tensor]:
        """Weights and moments of a stage, by the names of a peer's."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.tensors.items():
            if self.home[name] == stage:
                moments = self.optimizer.state.get(parameter, {})
                found[f"weight/{name}"] = parameter.detach()
                for ours, theirs in TIMES.items():
                    found[f"{ours}/{name}"] = moments.get(theirs, torch.zeros_like(parameter))
        return found


def _loss(stage: Stage, rows: Tensor) -> float:
    with torch.no_grad():
        return held_out_loss(stage, [rows])


@cache
def _held_out(context: int) -> Tensor:
    return torch.from_numpy(Windows(tokens(), length=context, batch=HELD_OUT_ROWS, seed=0).held_out(0))


def follow(
    setting: Setting,
    train: Train,
    way: Way,
    seed: int,
    lost: Mapping[int, Sequence[int]],
    *,
    target: float = -math.inf,
    windows: Windows | None = None,
    probes: Sequence[str] = (),
) -> Trained:
    """Train, losing stages on the way.

    Args:
        lost: by number of steps done, the stages that are lost then.
        target: held-out loss at which to stop, some evaluations after it is reached.
        windows: batches; of the bundled text's bytes where none are given.
        probes: merges to try at the end, on every relay stage.
    """
    training = Training(setting, train, way, seed)
    windows = windows or Windows(tokens(), length=setting.context, batch=setting.samples, seed=seed)
    held_out = _held_out(setting.context)
    curve: list[tuple[int, float]] = []
    jumps: list[tuple[int, float]] = []
    losses: list[tuple[float, ...]] = []
    below = 0
    for step in range(train.steps):
        for stage in lost.get(step, ()):
            before = _loss(training.stage, held_out)
            training.lose(stage, step)
            jumps.append((stage, _loss(training.stage, held_out) - before))
        count = setting.microbatches
        losses.append(training.step(step, [torch.from_numpy(windows.train(step, m, count)) for m in range(count)]))
        if (step + 1) % EVALUATE_EVERY == 0:
            curve.append((step + 1, _loss(training.stage, held_out)))
            below = below + 1 if curve[-1][1] <= target else 0
            if below == 3:
                break
    relays, usual = range(1, len(setting.cut)), _loss(training.stage, held_out)
    tried = {merge: tuple(training.probe(merge, stage, held_out) - usual for stage in relays) for merge in probes}
    return Trained(curve=tuple(curve), jumps=tuple(jumps), losses=tuple(losses), probes=tried)
