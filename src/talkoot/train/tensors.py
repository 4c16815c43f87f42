"""A stage's arithmetic with real tensors: forward, backward, mixing, AdamW, and its state as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId, digest
from talkoot.data import Windows
from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.huggingface import load_stage
from talkoot.model.stage import Stage
from talkoot.train.compute import CHUNK_BYTES, KINDS, Gradients, Neighbour, stage_flops
from talkoot.train.frames import from_frame, split_states, to_frame, unreadable
from talkoot.train.mixing import step_rule
from talkoot.train.mixing.rule import add
from talkoot.train.recipe import Recipe
from talkoot.train.recovery import blending
from talkoot.train.treesum import TreeSum
from talkoot.world.api import Frame
from talkoot.world.base import MAX_FRAMES

MOMENTS = {"exp_avg": "first", "exp_avg_sq": "second"}  # torch's names -> ours in saved states


def choose_device(name: str) -> torch.device:
    """``auto``: CUDA, then MPS, then the CPU; anything else is torch's own name."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as problem:  # torch built without CUDA asserts
            raise TalkootError(
                "this device cannot be used",
                where=f"model.device = {name!r}",
                why=str(problem).partition("\n")[0],
                next="set model.device to auto or cpu",
            ) from problem
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class TensorStage:
    """A :class:`~talkoot.train.compute.StageCompute` with real tensors.

    Args:
        config, first, last: the layers held.
        recipe: batch sizes, optimizer and numerics.
        windows: batches by address; needed by the first stage (tokens) and the last (targets).
    """

    def __init__(self, config: ModelConfig, first: int, last: int, recipe: Recipe, windows: Windows) -> None:
        model, train = recipe.model, recipe.train
        self._device = choose_device(model.device)
        self._fused = self._device.type in ("cpu", "cuda")
        autocast = torch.bfloat16 if model.dtype == "bfloat16" else None
        if model.load is None:
            self.stage = Stage(config, first, last, seed=recipe.seed, device=self._device, autocast=autocast)
        else:
            self.stage = load_stage(model.load, first, last, device=self._device, autocast=autocast)
        if model.compile:
            self.stage.compile()
        self._tensors = self.stage.tensors()
        self._parameters = list(self._tensors.values())
        self._ring, self._is_first = first < 0, first <= 0
        self._is_last = last == config.layer_count  # of a line: it computes the loss as part of its forward
        self._body = [index for index in config.held(first, last) if not (self._ring and index == config.layers + 1)]
        self._num_head = len(list(self.stage.layers[0].parameters())) if self._ring else 0  # they come first
        self._windows, self._train = windows, train
        self.forward_flops, self.loss_flops = stage_flops(config, first, last, recipe)
        self.num_values = sum(parameter.numel() for parameter in self._parameters)
        self._shape = (train.microbatch_size, model.context, config.width)
        ties = tied_names(config)
        self._owner, self._copy = ties[0] if ties else ("", "")
        self._rule = step_rule(recipe.mixing.rule)
        self.turns = self._rule.turns
        self._range, self._recovery, self._seed = (first, last), recipe.recovery, recipe.seed
        self._stream = getattr(torch, recipe.recovery.stream)
        self._optimizer = self._make_optimizer()
        self.steps_done = 0
        self.begin(0, 1, False)

    def _make_optimizer(self) -> torch.optim.AdamW:
        train = self._train
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            fused=self._fused,
        )

    def begin(self, step: int, num_microbatches: int, evaluate: bool, visitors: Sequence[int] | None = None) -> None:
        self._step, self._count, self._evaluate = step, num_microbatches, evaluate
        self._live: dict[int, tuple[Tensor, Tensor]] = {}  # microbatch -> (input, output) awaiting backward
        self._heads: dict[int, Tensor] = {}  # microbatch -> the head's gradient, until the backward joins it
        self._losses: dict[int, Tensor] = {}
        self._own: TreeSum[Tensor] = TreeSum(num_microbatches, add)  # what was computed here
        self._counted: set[int] = set()
        self.amend(range(num_microbatches) if visitors is None else visitors)
        self.start_mixing()

    def amend(self, visitors: Sequence[int]) -> None:
        absent = frozenset(range(self._count)).difference(visitors)
        parts, self._own = list(self._own), TreeSum(self._count, add, absent)
        for node, value in parts:
            self._own.insert(node, value)

    def start_mixing(self) -> None:
        self._sum, self._gradient = self._own, None

    def forward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        if self._is_first:
            x = self._tokens(microbatch)[:, :-1]
        else:
            x = from_frame(frames[0], torch.float32, self._shape, self._device)
        if not self._is_first and not self._evaluate:
            x.requires_grad_(True)
        with torch.set_grad_enabled(not self._evaluate):
            y = self.stage.run_layers(x, self._body) if self._ring else self.stage(x)
            if self._is_last:
                y = self._cross_entropy(microbatch, y)
        if not self._evaluate:
            self._live[microbatch] = (x, y)
        return [] if self._is_last else [to_frame(y.float())]

    def loss(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        x = from_frame(frames[0], torch.float32, self._shape, self._device)
        with torch.set_grad_enabled(not self._evaluate):
            x.requires_grad_(not self._evaluate)
            value = self._cross_entropy(microbatch, self.stage.run_layers(x, self.stage.held[:1]))
        if self._evaluate:
            return []
        outgoing, *gradients = torch.autograd.grad(value, [x, *self._parameters[: self._num_head]])
        self._heads[microbatch] = torch.cat([g.reshape(-1) for g in gradients])
        return [to_frame(outgoing.float())]

    def _cross_entropy(self, microbatch: int, logits: Tensor) -> Tensor:
        targets = self._tokens(microbatch)[:, 1:]
        value = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        self._losses[microbatch] = value.detach()
        return value

    def _tokens(self, microbatch: int) -> Tensor:
        windows = self._windows
        rows = windows.held_out(microbatch) if self._evaluate else windows.train(self._step, microbatch, self._count)
        return torch.from_numpy(rows).to(self._device)

    def backward(self, microbatch: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        x, y = self._live.pop(microbatch)
        gradient = None if self._is_last else from_frame(frames[0], torch.float32, y.shape, self._device).to(y.dtype)
        parameters = self._parameters[self._num_head :]
        wanted = parameters if self._is_first else [x, *parameters]
        gradients = list(torch.autograd.grad(y, wanted, gradient))
        outgoing = [] if self._is_first else [to_frame(gradients.pop(0).float())]
        heads = [self._heads.pop(microbatch)] if self._ring else []
        if microbatch not in self._counted:  # else a neighbour's crash only made it come by again
            self._counted.add(microbatch)
            self._own.insert((microbatch, microbatch + 1), torch.cat([*heads, *(g.reshape(-1) for g in gradients)]))
        return outgoing

    def outgoing(self, turn: int, me: PeerId, group: Sequence[PeerId]) -> Mapping[PeerId, Gradients]:
        vectors = self._rule.outgoing(turn, me, group, self._sum)
        return {peer: [(node, to_frame(value)) for node, value in parts] for peer, parts in vectors.items()}

    def merge(self, turn: int, me: PeerId, group: Sequence[PeerId], received: Mapping[PeerId, Gradients]) -> None:
        vectors = {
            peer: [(node, from_frame(frame, torch.float32, (len(frame) // 4,), self._device)) for node, frame in parts]
            for peer, parts in received.items()
        }
        merged = self._rule.merge(turn, me, group, self._sum, vectors)
        if turn == self.turns - 1 and len(merged.total) != self.num_values:
            raise ValueError(f"the gradient that was agreed on has {len(merged.total)} values, not {self.num_values}")
        self._sum = merged

    def _mean(self) -> dict[str, Tensor]:
        """Mean gradient over the microbatches that came by, by tensor, as views of one flat vector."""
        if self._gradient is None:
            self._gradient = self._sum.total * (1.0 / (self._count - len(self._own.absent)))
        parts = torch.split(self._gradient, [p.numel() for p in self._parameters])
        return {name: part.view_as(p) for (name, p), part in zip(self._tensors.items(), parts, strict=True)}

    def tied_gradient(self) -> Sequence[Frame]:
        gradients = self._mean()
        # A copy: the frame may still be on its way when the other side's gradient is added in place.
        return [to_frame(gradients[self._owner if self._is_first else self._copy].clone())]

    def merge_tied(self, frames: Sequence[Frame]) -> None:
        mine = self._mean()[self._owner if self._is_first else self._copy]
        # Embedding plus head on both sides; addition commutes, so both sides get the same bits.
        mine.add_(from_frame(frames[0], torch.float32, mine.shape, self._device))

    def finish(self) -> tuple[dict[int, float], tuple[float, ...]]:
        losses = {microbatch: float(loss) for microbatch, loss in self._losses.items()}
        if self._evaluate:
            return losses, ()
        gradients = self._mean()
        if self._owner in gradients and self._copy in gradients:
            gradients[self._owner].add_(gradients[self._copy])
            gradients[self._copy].copy_(gradients[self._owner])
        if self._stream != torch.float32 and self._gradient is not None:
            self._gradient.copy_(self._gradient.to(self._stream))  # what is kept elsewhere is what is applied here
        return losses, tuple(
            float(torch.linalg.vector_norm(g.cpu() if g.device.type == "mps" else g, dtype=torch.float64)) ** 2
            for name, g in gradients.items()
            if name != self._copy  # a tied tensor counts once
        )

    def gradient(self) -> Sequence[Frame]:
        self._mean()
        if self._gradient is None:
            raise ValueError("there is no gradient yet")
        # A copy: it may be on its way, or kept, when ours is scaled in place.
        return [to_frame(self._gradient.to(self._stream) if self._stream != torch.float32 else self._gradient.clone())]

    def adopt(self, frames: Sequence[Frame]) -> None:
        self._gradient = from_frame(frames[0], self._stream, (self.num_values,), self._device).to(torch.float32)

    def apply(self, learning_rate: float, scale: float) -> None:
        gradients = self._mean()
        if scale != 1.0 and self._gradient is not None:
            self._gradient.mul_(scale)
        for name, parameter in self._tensors.items():
            parameter.grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        self.begin(self._step + 1, self._count, False)

    def layer_sizes(self) -> list[int]:
        """Parameters of each layer held, in the order of :meth:`weights`."""
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in self.stage.layers]

    def weights(self) -> Tensor:
        """All weights as one flat vector, a copy."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    def put_weights(self, flat: Tensor) -> None:
        """The opposite of :meth:`weights`."""
        with torch.no_grad():
            parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def state(self) -> dict[str, Tensor]:
        """Weights and both moments by name (``weight/...``, ``first/...``, ``second/...``).

        ``count/...``: how many updates the moments have seen, where that is not the number of steps done.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._tensors.items():
            state[f"weight/{name}"] = parameter.detach()
            moments = self._optimizer.state.get(parameter, {})
            for theirs, ours in MOMENTS.items():
                value = moments.get(theirs)
                state[f"{ours}/{name}"] = torch.zeros_like(parameter) if value is None else value
            if moments and int(moments["step"]) != self.steps_done:
                state[f"count/{name}"] = moments["step"]
        return state

    def save(self) -> tuple[bytes, dict[str, str]]:
        state = {name: tensor.contiguous().cpu() for name, tensor in self.state().items()}
        digests: dict[str, str] = {name: digest(to_frame(tensor), "tensor") for name, tensor in state.items()}
        return write_safetensors(state), digests

    def pack(self, kinds: Sequence[str] = KINDS) -> Sequence[Frame]:
        state = {name: tensor.contiguous().cpu() for name, tensor in self.state().items()}
        view = memoryview(write_safetensors({name: t for name, t in state.items() if name.split("/")[0] in kinds}))
        chunk = max(CHUNK_BYTES, -(-len(view) // MAX_FRAMES))
        return [view[at : at + chunk] for at in range(0, len(view), chunk)]

    def finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.state().values())

    def blend(self, neighbours: Sequence[Neighbour], step: int) -> None:
        states = {(n.first, n.last): _read([n.state]) for n in neighbours}
        kept = states.pop(self._range, None)  # what somebody keeps of this very stage
        beside = [
            blending.Neighbour(first=n.first, last=n.last, omega=n.norm, state=states[n.first, n.last])
            for n in neighbours
            if (n.first, n.last) in states
        ]
        rule = self._recovery
        made = blending.blend(self.stage.config, self._range, beside, rule, step=step, seed=self._seed, kept=kept)
        counts = {f"count/{name}": torch.tensor(float(made.step)) for name in self._tensors if made.step != step}
        self._put(made.state | counts, step)

    def load(self, parts: Sequence[bytes], step: int) -> None:
        self._put(_read(parts), step)

    def _put(self, saved: Mapping[str, Tensor], step: int) -> None:
        mine = self.state()
        for name, tensor in mine.items():
            if name.startswith("count/"):
                continue
            count = saved.get(f"count/{name.partition('/')[2]}")
            scalar = count is None or count.numel() == 1
            if (
                not scalar
                or name not in saved
                or saved[name].shape != tensor.shape
                or saved[name].dtype != tensor.dtype
            ):
                raise TalkootError(
                    "a saved state does not fit this model",
                    where=name,
                    why="it is absent, or of another shape or type, in the checkpoint or the donor's state",
                    next="resume with the recipe that the run was started with",
                )
        with torch.no_grad():
            for name, parameter in self._tensors.items():
                parameter.copy_(saved[f"weight/{name}"])
                count = float(saved[f"count/{name}"]) if f"count/{name}" in saved else float(step)
                self._optimizer.state[parameter] = {
                    # where a fresh optimizer would keep it: fused kernels want it on the device
                    "step": torch.tensor(count, device=self._device if self._fused else "cpu"),
                    **{theirs: saved[f"{ours}/{name}"].to(self._device).clone() for theirs, ours in MOMENTS.items()},
                }
        if step == 0:
            self._optimizer.state.clear()
        self.steps_done = step
        self.begin(step, self._count, False)


def _read(parts: Sequence[bytes]) -> dict[str, Tensor]:
    """The tensors of all states in these parts."""
    saved: dict[str, Tensor] = {}
    for part in parts:
        for state in split_states(part):
            try:
                saved.update(read_safetensors(state))
            except (SafetensorError, ValueError, KeyError) as problem:
                raise unreadable(f"a state of {len(state)} bytes", problem) from problem
    return saved
