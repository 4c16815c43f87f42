"""A contiguous part of a model: what one peer of a pipeline holds. The whole model is the longest stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from talkoot.core.errors import TalkootError
from talkoot.model.config import ModelConfig, tied_names
from talkoot.model.decoder import Cache, Positions, build_layer, canonical_name, rotary_frequencies
from talkoot.model.initial import initial_tensor


class Stage(nn.Module):
    """Layers ``first`` to ``last - 1`` of the list of ``config.layer_count`` layers.

    ``Stage(config, 0, config.layer_count)`` is the whole model. ``Stage(config, -1, k)`` is the stage that closes a
    ring of stages: it holds the first ``k`` layers and the head. However a model is cut, its stages run the
    same operations on the same parameters, so logits and gradients keep their bits. ``stage.compile()``,
    which every module has, switches on torch.compile.

    Args:
        config: the whole model's shape.
        first, last: the half-open range of layers held; -1 is the head, in front of layer 0.
        seed: initial values from it; None fills with NaN, so that a tensor nobody loads cannot go unnoticed.
        dtype: of the parameters.
        device: where they live.
        autocast: type in which matrix products run (``torch.bfloat16``), or None for the parameters' own.

    Raises:
        TalkootError: the range is empty or outside the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        first: int,
        last: int,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not -1 <= first < last <= config.layer_count + min(first, 0):
            raise TalkootError(
                "a stage must hold a non-empty range of the model's layers",
                where=f"Stage(first={first}, last={last})",
                why=f"the model has layers 0 (embedding) to {config.layer_count - 1} (head)",
                next=f"choose 0 <= first < last <= {config.layer_count}",
            )
        self.config, self.first, self.last, self.autocast = config, first, last, autocast
        self.held = tuple(config.held(first, last))
        self._place = {index: place for place, index in enumerate(self.held)}
        with torch.device("meta"):  # allocates nothing and leaves torch's global random state alone
            layers = [self._layer(index) for index in self.held]
        self.layers = nn.ModuleList(layers).to(dtype).to_empty(device=device)
        self._frequencies = rotary_frequencies(config)
        self._fill(seed)

    def _layer(self, index: int) -> nn.Module:
        """Layer ``index`` of the list, values not yet set; other kinds of models build others."""
        return build_layer(self.config, index)

    def _positions(self, x: Tensor, front: int, past: int, cache: Cache | None) -> Positions:
        """What the blocks of one pass share; ``x`` is the input of layer ``front``."""
        return Positions.after(past, x.shape[1], self._frequencies, cache.padding if cache else None)

    @torch.no_grad()
    def _fill(self, seed: int | None) -> None:
        for name, parameter in self.tensors().items():
            if seed is None:
                parameter.fill_(float("nan"))
            else:
                parameter.copy_(initial_tensor(self.config, name, tuple(parameter.shape), seed))

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device

    @property
    def whole(self) -> bool:
        """Whether the stage is the complete model, from tokens to logits."""
        return len(self.held) == self.config.layer_count

    def tensors(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the order of layers and then names; the caller may change them."""
        return {
            canonical_name(self.config, index, local): parameter
            for index, layer in zip(self.held, self.layers, strict=True)
            for local, parameter in sorted(layer.named_parameters())
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values in by canonical name; the mapping may hold more, and a tied copy may be absent.

        Raises:
            TalkootError: a tensor is missing or has another shape; nothing was changed then.
        """
        owners = {copy: owner for owner, copy in tied_names(self.config)}
        mine = self.tensors()
        chosen: dict[str, Tensor] = {}
        for name, parameter in mine.items():
            value = tensors.get(name, tensors.get(owners.get(name, name)))
            if value is None or value.shape != parameter.shape:
                found = "absent" if value is None else f"of shape {tuple(value.shape)}"
                raise TalkootError(
                    f"tensor {name} cannot be loaded",
                    where=f"stage of layers {self.first} to {self.last - 1}",
                    why=f"it is {found}; the model needs shape {tuple(parameter.shape)}",
                    next="load tensors of the same ModelConfig",
                )
            chosen[name] = value
        for name, value in chosen.items():
            mine[name].copy_(value)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Run all layers held.

        Args:
            x: int64 tokens (B, T) if layer 0 is held, else activations (B, T, D).
            cache: earlier tokens of the same texts, extended in place; only without gradients.

        Returns:
            Activations (B, T, D), or float32 logits (B, T, vocabulary) if the last layer is held.
        """
        return self._run(x, sorted(self.held), cache)

    def run_layers(self, x: Tensor, order: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Run the layers ``order`` names, in that order: a block may be skipped, swapped or repeated.

        Args:
            x: as for ``forward``, for the first layer of ``order``.
            order: indices in the model's list; 0 only in front, the head only at the end.
            cache: as for ``forward``; every call with it must name the same order.

        Raises:
            TalkootError: a layer is not held here, or an end stands in the middle.
        """
        ends = {0: order[0] if order else None, self.config.layers + 1: order[-1] if order else None}
        misplaced = [end for end, found in ends.items() if end in order and (found != end or order.count(end) > 1)]
        strange = [index for index in order if index not in self._place]
        if not order or misplaced or strange:
            raise TalkootError(
                "these layers cannot be run in this order",
                where=f"order {list(order)}",
                why=f"the stage holds layers {self.first} to {self.last - 1}; the embedding (0) can come "
                f"only first and the head ({self.config.layers + 1}) last",
                next="name at least one layer, each of them held, the ends at the ends",
            )
        return self._run(x, order, cache)

    def _run(self, x: Tensor, order: Sequence[int], cache: Cache | None) -> Tensor:
        past = cache.length if cache is not None else 0
        self._check(x, order[0], past, cache)
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        positions = self._positions(x, order[0], past, cache)
        cast = torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext()
        with cast:
            for slot, index in enumerate(order):
                layer = self.layers[self._place[index]]
                block = 0 < index <= self.config.layers
                x = layer(x, positions, cache, slot) if block else layer(x)
        if cache is not None:
            cache.length = past + positions.length
        return x

    def _check(self, x: Tensor, front: int, past: int, cache: Cache | None) -> None:
        shape = tuple(x.shape)
        right = x.dtype == torch.int64 and x.ndim == 2 if front == 0 else shape[2:] == (self.config.width,)
        if not right or x.numel() == 0:
            wanted = "int64 tokens (B, T)" if front == 0 else f"activations (B, T, {self.config.width})"
            why = f"layer {front} takes {wanted}, this is {x.dtype} {shape}"
        elif past + shape[1] > self.config.max_positions:
            why = f"{past + shape[1]} tokens are more than the model's {self.config.max_positions} positions"
        elif cache is not None and torch.is_grad_enabled():
            why = "a cache overwrites what a backward pass would need; run under torch.no_grad()"
        else:
            return
        raise TalkootError(
            "the stage cannot run on this input",
            where=f"stage of layers {self.first} to {self.last - 1}",
            why=why,
            next="pass input of the shape that the layer takes, at most max_positions tokens",
        )
