"""A mixture of experts as a whole model: whatever runs a `Stage` (generation, scoring, caches) runs it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.layer import MixtureBlock, MixtureEmbedding, MixtureLayer, Routing
from talkoot.blend.mixture.names import is_gate, is_trunk
from talkoot.model.decoder import Cache, Embedding, Positions
from talkoot.model.stage import Stage


class Mixture(Stage):
    """Experts over one trunk.

    Args:
        config: the shape.
        seed, dtype, device, autocast: as for ``Stage``; without a seed every value is NaN until it is loaded.
    """

    config: MixtureConfig

    def __init__(
        self,
        config: MixtureConfig,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, 0, config.layer_count, seed, dtype, device, autocast)

    def _layer(self, index: int) -> nn.Module:
        if index == 0 and gates[self.config.gate].reads_tokens:
            return MixtureEmbedding(self.config)
        return MixtureBlock(self.config, index) if 0 < index <= self.config.layers else super()._layer(index)

    def _positions(self, x: Tensor, front: int, past: int, cache: Cache | None) -> Positions:
        positions = super()._positions(x, front, past, cache)
        first = self.layers[0]
        if front == 0 and isinstance(first, MixtureEmbedding):
            positions.scores = gates[self.config.gate].scores(dict(first.gate.items()), x, positions, cache)
        return positions

    @property
    def mixtures(self) -> list[MixtureLayer]:
        """Experts and gate of every block, in order."""
        return [layer.mlp for layer in self.layers if isinstance(layer, MixtureBlock)]

    def trunk(self) -> dict[str, nn.Parameter]:
        """What all experts share, by canonical name."""
        return {name: value for name, value in self.tensors().items() if is_trunk(name)}

    def gate_tensors(self) -> dict[str, nn.Parameter]:
        """What the gates consist of, by canonical name; empty where the caller chooses."""
        return {name: value for name, value in self.tensors().items() if is_gate(name)}

    def forced(self, expert: str) -> Stage:
        """One expert over the trunk, for all tokens: a dense model that shares this one's weights and copies none.

        It runs what a dense model runs, so it gives the expert's bits if the trunk is the expert's; and because nothing
        of the choice is kept here, texts with unlike experts can be generated at the same time.

        Raises:
            TalkootError: there is no such expert.
        """
        number = self.config.index(expert)
        stage = Stage(self.config.dense(number), 0, self.config.layer_count, device="meta", autocast=self.autocast)
        for place, layer in enumerate(self.layers):
            if isinstance(layer, MixtureBlock):
                for name, part in layer.named_children():
                    setattr(stage.layers[place], name, part.experts[number] if isinstance(part, MixtureLayer) else part)
            elif isinstance(layer, Embedding):
                stage.layers[place].weight = layer.weight
            else:
                stage.layers[place] = layer
        return stage

    @contextmanager
    def watched(self) -> Iterator[list[Routing]]:
        """Collect where tokens go, block by block and pass by pass; not for several threads at once."""
        seen: list[Routing] = []
        for layer in self.mixtures:
            layer.seen = seen
        try:
            yield seen
        finally:
            for layer in self.mixtures:
                layer.seen = None
