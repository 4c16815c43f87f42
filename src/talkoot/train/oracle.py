"""Training along layer orders in a single process: what a run must equal, however its work is spread.

In a pipeline whose microbatches skip and swap stages (Blagoev et al., 2025, "SkipPipe", arXiv 2502.19913), a stage is
visited by some of a step's microbatches only. Its gradient is the mean over those that did visit it, not over all:
otherwise skipping a third of the visits would shrink the gradient of every stage but the first by as much, which Adam
hides and clipping does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from talkoot.model.config import tied_names
from talkoot.model.stage import Stage
from talkoot.train.mixing.rule import add
from talkoot.train.recipe import Train
from talkoot.train.schedule import learning_rate
from talkoot.train.treesum import TreeSum

Order = Sequence[int]  # layers in the order of running, embedding first and head last
StepGradients = tuple[dict[str, Tensor], tuple[float, ...]]


def step_gradients(stage: Stage, rows: Sequence[Tensor], orders: Sequence[Order]) -> StepGradients:
    """Every tensor's mean gradient over the microbatches that ran its layer, and each microbatch's loss.

    Sums follow the fixed tree over all microbatches (``talkoot.train.treesum``), where one that passed a layer by
    adds zero; the sum is then divided by the number of those that ran the layer. A tied pair gets the sum of both.

    Args:
        stage: a whole model.
        rows: int64 tokens (B, T + 1) of each microbatch.
        orders: the layers that each of them runs.

    Returns:
        Gradients by canonical name, without tensors of layers that nobody ran: an optimizer must leave those alone.
        Losses in nats per token.
    """
    tensors = stage.tensors()
    total: TreeSum[Tensor] = TreeSum(len(rows), add)
    losses = []
    for index, (tokens, order) in enumerate(zip(rows, orders, strict=True)):
        logits = stage.run_layers(tokens[:, :-1], order)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        parts = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True, materialize_grads=True)
        total.insert((index, index + 1), torch.cat([part.reshape(-1) for part in parts]))
        losses.append(float(loss.detach()))
    sums = total.total.split([parameter.numel() for parameter in tensors.values()])
    shaped = {name: part.view_as(parameter) for (name, parameter), part in zip(tensors.items(), sums, strict=True)}
    return _means(stage, shaped, orders), tuple(losses)


def batched_gradients(stage: Stage, rows: Sequence[Tensor], orders: Sequence[Order]) -> StepGradients:
    """What ``step_gradients`` gives, up to rounding, several times faster: equal layers run as one batch.

    The lowest layer that some microbatch needs next runs for all that need it next, so that without swaps every
    layer runs once. Microbatches must have equal shapes.
    """
    head, tokens = stage.config.layers + 1, torch.cat(list(rows))
    streams = list(stage.run_layers(tokens[:, :-1], (0,)).split([len(one) for one in rows]))
    waiting = [list(order[1:-1]) for order in orders]
    while left := [one[0] for one in waiting if one]:
        layer = min(left)
        group = [index for index, one in enumerate(waiting) if one[:1] == [layer]]
        outputs = stage.run_layers(torch.cat([streams[index] for index in group]), (layer,))
        for index, output in zip(group, outputs.split([len(rows[index]) for index in group]), strict=True):
            streams[index] = output
            waiting[index].pop(0)
    logits = stage.run_layers(torch.cat(streams), (head,))
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = each.view(len(rows), -1).mean(1)
    tensors = stage.tensors()
    sums = torch.autograd.grad(losses.sum(), list(tensors.values()), allow_unused=True, materialize_grads=True)
    return _means(stage, dict(zip(tensors, sums, strict=True)), orders), tuple(losses.detach().tolist())


def _means(stage: Stage, sums: Mapping[str, Tensor], orders: Sequence[Order]) -> dict[str, Tensor]:
    visits = Counter(layer for order in orders for layer in set(order))
    of_layer = {name: layer for layer in stage.held for name in stage.config.layer_shapes(layer)}
    means = {name: total * (1.0 / visits[of_layer[name]]) for name, total in sums.items() if visits[of_layer[name]]}
    for owner, copy in tied_names(stage.config):
        means[owner] = means[copy] = means[owner] + means[copy]
    return means


class OrderTraining:
    """A whole model and its optimizer, advanced one step at a time along given layer orders.

    Args:
        stage: the whole model; trained in place.
        train: learning rate and schedule, AdamW's numbers, clip.
        gradients: ``step_gradients`` for the runtime's own bits, ``batched_gradients`` for speed.
    """

    def __init__(
        self,
        stage: Stage,
        train: Train,
        gradients: Callable[[Stage, Sequence[Tensor], Sequence[Order]], StepGradients] = step_gradients,
    ) -> None:
        self.stage, self.train, self._gradients = stage, train, gradients
        self._tensors = stage.tensors()
        matrices = [one for one in self._tensors.values() if one.ndim >= 2]
        vectors = [one for one in self._tensors.values() if one.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            fused=True,
        )

    def step(self, number: int, rows: Sequence[Tensor], orders: Sequence[Order]) -> tuple[float, ...]:
        """Take step ``number`` (from 0) of the schedule and return each microbatch's loss before it."""
        means, losses = self._gradients(self.stage, rows, orders)
        copies = {copy for _, copy in tied_names(self.stage.config)}  # a tied tensor counts once in the norm
        norm = math.sqrt(
            math.fsum(
                float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2
                for name, one in means.items()
                if name not in copies
            )
        )
        clip = self.train.clip
        scale = clip / norm if clip and norm > clip else 1.0
        for name, parameter in self._tensors.items():
            parameter.grad = means[name].mul(scale) if name in means else None
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.train, number)
        self._optimizer.step()
        return losses
