"""A replica's arithmetic with real tensors: inner steps on a whole model, messages, merges, its state as bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest
from talkoot.train.frames import from_frame, to_frame
from talkoot.train.job import Job, make_stage
from talkoot.train.mixing import RoundRule, settled, wires
from talkoot.train.mixing.codecs import codecs
from talkoot.train.rounds.replica import FAR, Apart, Diverged, Exchange, Unmergeable, costs, sampled, share, slots
from talkoot.train.seating import scale_of
from talkoot.train.tensors import TensorStage
from talkoot.world.api import Frame

USUAL = 0.2  # of the newest distance in the running mean that "usual" means


@dataclass
class _Held:
    """An exchange under way.

    Attributes:
        own: one's own vectors as others get them.
        fast: the fragment's fast weights when they were made.
        total: the sum so far, in a group of all.
        before: slow weights and buffers before the merge, while it can be taken back.
        samples: of slow weights and outer gradients.
    """

    own: list[Tensor]
    fast: Tensor
    total: list[Tensor]
    samples: Tensor
    before: tuple[Tensor, dict[str, Tensor]] | None = None


class TensorReplica:
    """See :class:`~talkoot.train.rounds.replica.ReplicaCompute`.

    Args:
        job: recipe, model shape, text.
        rule: how replicas mix.
        slot: which share of the data is this replica's.
    """

    def __init__(self, job: Job, rule: RoundRule, slot: int) -> None:
        recipe = job.recipe
        stage = make_stage(job, 0, job.config.layer_count)
        if not isinstance(stage, TensorStage):
            raise ValueError("a replica with tensors needs text")
        self._stage, self._rule, self._recipe = stage, rule, recipe
        self._mixing = settled(recipe.mixing)
        self.num_values, self.fragments = stage.num_values, int(self._mixing.fragments or 1)
        self.step_flops, self.held_out_flops = costs(job, self.num_values)
        self._count, first = slots(recipe) * share(recipe), slot * share(recipe)
        self._mine = range(first, first + share(recipe))
        self._slow = stage.weights()
        self._buffers = {name: torch.zeros_like(self._slow) for name in rule.buffers}
        self._slices = _fragments(stage.layer_sizes(), self.fragments)
        self._codecs = [codecs[name] for name in wires(rule, self._mixing)]
        self._held: dict[Exchange, _Held] = {}
        self._usual: dict[int, float] = {}  # squared distance to partners, by fragment

    # -- inner steps ------------------------------------------------------------------------------------------

    def step(self, step: int, rate: float) -> tuple[float, float]:
        stage = self._stage
        stage.begin(step, self._count, False, self._mine)
        for microbatch in self._mine:
            stage.forward(microbatch, [])
            stage.backward(microbatch, [])
        losses, squares = stage.finish()
        norm = math.sqrt(sum(squares))
        if math.isfinite(norm):
            stage.apply(rate, scale_of(self._recipe.train.clip, norm))
        return math.fsum(losses.values()) / len(losses), norm

    def evaluate(self, batches: int) -> float:
        stage, fast = self._stage, self._stage.weights()
        stage.put_weights(self._slow)
        stage.begin(0, batches, True)
        for batch in range(batches):
            stage.forward(batch, [])
        losses, _ = stage.finish()
        stage.put_weights(fast)
        stage.begin(0, 1, False)
        return math.fsum(losses.values()) / len(losses)

    # -- one fragment -----------------------------------------------------------------------------------------

    def _gather(self, vector: Tensor, fragment: int) -> Tensor:
        return torch.cat([vector[one] for one in self._slices[fragment]])

    def _scatter(self, vector: Tensor, fragment: int, values: Tensor) -> None:
        at = 0
        for one in self._slices[fragment]:
            length = one.stop - one.start
            vector[one] = values[at : at + length]
            at += length

    def _encode(self, vectors: Iterable[Tensor]) -> list[Frame]:
        return [codec.encode(vector, self._mixing) for codec, vector in zip(self._codecs, vectors, strict=True)]

    def _decode(self, frames: Sequence[Frame], like: Sequence[Tensor]) -> list[Tensor]:
        if len(frames) != len(self._codecs):
            raise ValueError(f"a message has {len(self._codecs)} vectors, this one {len(frames)}")
        return [
            codec.decode(frame, len(own), self._mixing, own.dtype, own.device)
            for codec, frame, own in zip(self._codecs, frames, like, strict=True)
        ]

    def _parts(self, fragment: int) -> tuple[Tensor, dict[str, Tensor]]:
        buffers = {name: self._gather(buffer, fragment) for name, buffer in self._buffers.items()}
        return self._gather(self._slow, fragment), buffers

    def _store(self, fragment: int, buffers: dict[str, Tensor], slow: Tensor | None = None) -> None:
        for name, values in buffers.items():
            self._scatter(self._buffers[name], fragment, values)
        if slow is not None:
            self._scatter(self._slow, fragment, slow)

    def message(self, key: Exchange, weight: float) -> list[Frame]:
        fragment = key[1]
        for old in [other for other in self._held if other[0] < key[0] - 1]:  # somebody may still ask for the last one
            del self._held[old]
        slow, buffers = self._parts(fragment)
        fast = self._gather(self._stage.weights(), fragment)
        vectors = self._rule.message(self._mixing, slow, buffers, fast, weight)
        if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
            raise Diverged("its weights are not finite")
        frames = self._encode(vectors)
        own = self._decode(frames, vectors)
        self._rule.sent(self._mixing, buffers, vectors, own)
        self._store(fragment, buffers)
        where = self._sample(key, len(slow))
        samples = torch.stack([slow[where], fast[where] - slow[where]]).float()
        self._held[key] = _Held(own, fast, [vector.clone() for vector in own], samples)
        return [*frames, to_frame(samples.cpu())]

    def _sample(self, key: Exchange, count: int) -> Tensor:
        seed = hashlib.blake2b(repr((self._recipe.seed, key)).encode(), digest_size=8).digest()
        chosen = np.random.default_rng(int.from_bytes(seed, "big")).integers(0, count, sampled(count))
        return torch.from_numpy(chosen)

    def merge(self, key: Exchange, frames: Sequence[Frame] | None) -> Apart | None:
        held = self._held[key]
        if frames is None:
            self._apply(key, held, held.own)
            return None
        try:
            theirs = self._decode(frames[:-1], held.own)
            samples = from_frame(frames[-1], torch.float32, (2, held.samples.shape[1]), torch.device("cpu"))
        except (ValueError, TalkootError, IndexError) as problem:
            raise Unmergeable(f"it cannot be read: {problem}") from problem
        square = sum(float((one - two).double().square().sum()) for one, two in zip(held.own, theirs, strict=True))
        if not (math.isfinite(square) and bool(torch.isfinite(samples).all())):
            raise Unmergeable("it is not finite")
        usual = self._usual.get(key[1], square)
        if square > self._mixing.distance**2 * max(usual, 1e-30):
            raise Unmergeable(f"{FAR}: {math.sqrt(square / max(usual, 1e-30)):.0f} times as far as is usual")
        self._usual[key[1]] = usual + USUAL * (square - usual)
        self._apply(key, held, [(one + two) * 0.5 for one, two in zip(held.own, theirs, strict=True)])
        slow, progress = (float(part) for part in (held.samples.cpu() - samples).double().square().mean(1))
        return Apart(slow, progress)

    def _apply(self, key: Exchange, held: _Held, means: Sequence[Tensor]) -> None:
        fragment, keep = key[1], self._mixing.keep
        slow, buffers = self._parts(fragment)
        held.before = (slow.clone(), {name: buffer.clone() for name, buffer in buffers.items()})
        self._rule.merge(self._mixing, slow, buffers, means)
        self._store(fragment, buffers, slow)
        weights = self._stage.weights()
        now = self._gather(weights, fragment)
        # With ``keep``, of what was learned meanwhile survives as much as of everything else; without, all of it.
        fast = keep * now + (1 - keep) * slow if keep else slow + (now - held.fast)
        self._scatter(weights, fragment, fast)
        self._stage.put_weights(weights)

    def take_back(self, key: Exchange) -> None:
        held, fragment = self._held[key], key[1]
        if held.before is None:
            return
        together = self._gather(self._slow, fragment)
        slow, buffers = held.before
        self._rule.merge(self._mixing, slow, buffers, held.own)
        self._store(fragment, buffers, slow)
        weights = self._stage.weights()
        shift = (1 - (self._mixing.keep or 0.0)) * (slow - together)
        self._scatter(weights, fragment, self._gather(weights, fragment) + shift)
        self._stage.put_weights(weights)
        held.before = None

    def settle(self, key: Exchange) -> None:
        if key in self._held:
            self._held[key].before = None

    # -- sums over all ----------------------------------------------------------------------------------------

    def _slice(self, key: Exchange, index: int, count: int) -> list[Tensor]:
        totals = self._held[key].total
        return [total[len(total) * index // count : len(total) * (index + 1) // count] for total in totals]

    def part(self, key: Exchange, index: int, count: int) -> list[Frame]:
        return self._encode([part.clone() for part in self._slice(key, index, count)])

    def add(self, key: Exchange, index: int, count: int, frames: Sequence[Frame]) -> None:
        mine = self._slice(key, index, count)
        for part, arrived in zip(mine, self._decode(frames, mine), strict=True):
            part.add_(arrived)

    def put(self, key: Exchange, index: int, count: int, frames: Sequence[Frame]) -> None:
        mine = self._slice(key, index, count)
        for part, arrived in zip(mine, self._decode(frames, mine), strict=True):
            part.copy_(arrived)

    def total(self, key: Exchange) -> list[Frame]:
        return [to_frame(total.to(torch.float32).clone()) for total in self._held[key].total]

    def adopt(self, key: Exchange, frames: Sequence[Frame]) -> None:
        held = self._held[key]
        if len(frames) != len(held.total):
            raise ValueError(f"a sum has {len(held.total)} vectors, this one {len(frames)}")
        for total, frame in zip(held.total, frames, strict=True):
            total.copy_(from_frame(frame, torch.float32, total.shape, total.device))

    def clear(self, key: Exchange) -> None:
        for total in self._held[key].total:
            total.zero_()

    def restart(self, key: Exchange) -> None:
        held = self._held[key]
        held.total = [vector.clone() for vector in held.own]

    def finish(self, key: Exchange, members: int) -> None:
        held = self._held[key]
        if not all(bool(torch.isfinite(total).all()) for total in held.total):
            raise Diverged("the mean of all is not finite")
        self._apply(key, held, [total / members for total in held.total])
        held.before = None

    # -- whole states -----------------------------------------------------------------------------------------

    def donate(self) -> bytes:
        return write_safetensors({"slow": self._slow, **{f"buffer/{n}": b for n, b in self._buffers.items()}})

    def join(self, states: Sequence[bytes]) -> None:
        read = [self._read(state, ["slow", *(f"buffer/{name}" for name in self._buffers)]) for state in states]
        self._slow = torch.stack([one["slow"] for one in read]).mean(0)
        for name in self._buffers:
            self._buffers[name] = torch.stack([one[f"buffer/{name}"] for one in read]).mean(0)
        self._stage.put_weights(self._slow)
        self._usual.clear()

    def _read(self, state: bytes, names: Sequence[str]) -> dict[str, Tensor]:
        try:
            tensors = read_safetensors(bytes(state))
        except (SafetensorError, ValueError, KeyError) as problem:
            raise ValueError(f"a state of {len(state)} bytes cannot be read: {problem}") from problem
        for name in names:
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != self._slow.shape or tensor.dtype != self._slow.dtype:
                raise ValueError(f"{name!r} is missing or of another size: it is of another model or another rule")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name!r} is not finite")
        device = self._slow.device
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def save(self) -> bytes:
        tensors = {f"stage/{name}": t.contiguous().cpu() for name, t in self._stage.state().items()}
        tensors |= {f"buffer/{name}": buffer.cpu() for name, buffer in self._buffers.items()}
        usual = [self._usual.get(fragment, -1.0) for fragment in range(self.fragments)]
        tensors |= {"slow": self._slow.cpu(), "usual": torch.tensor(usual, dtype=torch.float64)}
        return write_safetensors(tensors)

    def load(self, state: bytes, step: int) -> None:
        read = self._read(state, ["slow", *(f"buffer/{name}" for name in self._buffers)])
        own = {name.removeprefix("stage/"): t.cpu() for name, t in read.items() if name.startswith("stage/")}
        self._stage.load([write_safetensors(own)], step)
        self._slow = read["slow"].clone()
        self._buffers = {name: read[f"buffer/{name}"].clone() for name in self._buffers}
        usual = read.get("usual", torch.empty(0)).tolist()
        self._usual = {fragment: value for fragment, value in enumerate(usual) if value >= 0}

    def digest(self) -> str:
        return digest(to_frame(self._slow), "tensor")

    def weights(self) -> list[Frame]:
        return [to_frame(self._slow.clone())]

    def average(self, all_weights: Sequence[Sequence[Frame]]) -> int:
        total, used = torch.zeros_like(self._slow, dtype=torch.float64), 0
        for frames in all_weights:
            with suppress(TalkootError, IndexError):  # one replica's nonsense does not spoil the others' mean
                weights = from_frame(frames[0], torch.float32, total.shape, total.device)
                if bool(torch.isfinite(weights).all()):
                    total, used = total + weights, used + 1
        if not used:
            raise ValueError("no replica's weights are finite")
        self._slow = (total / used).float()
        self._stage.put_weights(self._slow)
        return used

    def snapshot(self, step: int) -> tuple[bytes, dict[str, str]]:
        self._stage.put_weights(self._slow)
        return self._stage.save()


def _fragments(sizes: Sequence[int], count: int) -> list[list[slice]]:
    """Layer ``i`` belongs to fragment ``i`` modulo ``count`` (strided: Douillard et al., 2025)."""
    ends = np.cumsum(sizes).tolist()
    layers = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [layers[fragment::count] for fragment in range(count)]
