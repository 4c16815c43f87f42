"""A block's experts and their gate: every token runs through the experts that it is sent to, and through no other.

Sparsely gated mixtures: Shazeer et al. 2017 (arXiv 1701.06538). Shapes: B texts, T tokens, N = B T, H width, D experts,
K visited per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.gates import gates
from talkoot.core.errors import TalkootError
from talkoot.model.decoder import Block, Cache, Embedding, Positions, SwiGLU


class Routing(NamedTuple):
    """Where a block sent its tokens.

    Attributes:
        scores: of all experts, divided by the temperature, (N, D).
        chosen: the experts visited, int64 (N, K), best first.
        weights: of their outputs, (N, K).
    """

    scores: Tensor
    chosen: Tensor
    weights: Tensor


class MixtureLayer(nn.Module):
    """Experts and gate of one block: (B, T, H) to (B, T, H).

    Attributes:
        seen: where each pass leaves its routing while somebody wants it; None otherwise.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.method, self.top_k = gates[config.gate], config.top_k
        self.temperature, self.renormalised = config.temperature, config.renormalised
        self.experts = nn.ModuleList(SwiGLU(config.dense(number)) for number in range(len(config.experts)))
        self.gate = nn.Linear(config.width, len(config.experts), bias=config.bias) if self.method.reads_states else None
        self.seen: list[Routing] | None = None

    def forward(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        scores = self._scores(x, positions, cache, slot).flatten(0, 1)
        if self.top_k == 1 and self.renormalised and self.seen is None:
            if len(scores) == 1:
                return self.experts[int(scores.argmax())](x)  # one token: nothing to sort
            return run_grouped(self.experts, x.flatten(0, 1), scores.argmax(-1, keepdim=True)).view_as(x)
        routing = route(scores / self.temperature, self.top_k, self.renormalised)
        if self.seen is not None:
            self.seen.append(routing)
        out = run_grouped(self.experts, x.flatten(0, 1), routing.chosen).unflatten(0, (-1, self.top_k))
        return (out * routing.weights[..., None].to(out.dtype)).sum(1).view_as(x)

    def _scores(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        if self.gate is not None:
            return self.method.features(self.gate(x), positions, cache, slot)
        if positions.scores is None:
            raise TalkootError(
                "the mixture does not know which expert to use",
                where="forward",
                why="its gate leaves the choice, one expert for a whole text, to the caller"
                if not self.method.reads_tokens
                else "its gate reads tokens, and this pass did not begin with them",
                next="run mixture.forced(NAME)" if not self.method.reads_tokens else "run the model from its embedding",
            )
        return positions.scores


def route(scores: Tensor, top_k: int, renormalised: bool) -> Routing:
    """The best experts by score (N, D), weighted by a softmax over those chosen, or by their shares of one over all."""
    best, chosen = scores.topk(top_k, dim=-1)
    if renormalised:
        return Routing(scores, chosen, best.softmax(-1, dtype=torch.float32))
    return Routing(scores, chosen, scores.softmax(-1, dtype=torch.float32).gather(-1, chosen))


def run_grouped(experts: Sequence[nn.Module] | nn.ModuleList, rows: Tensor, chosen: Tensor) -> Tensor:
    """Send rows (N, H) to their experts, int64 (N, K): sorted by expert, one product each, and back: (N K, H).

    Row ``n K + k`` of the result is what expert ``chosen[n, k]`` makes of row n. An expert without rows does not run.
    """
    flat, top_k = chosen.flatten(), chosen.shape[1]
    counts = flat.bincount(minlength=len(experts)).tolist()
    if max(counts) == len(flat):  # all agree, as in a text of one domain
        return experts[counts.index(len(flat))](rows if top_k == 1 else rows.repeat_interleave(top_k, 0))
    order = flat.argsort(stable=True)
    parts = rows.index_select(0, order if top_k == 1 else order // top_k).split(counts)
    done = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
    return torch.empty_like(done).index_copy(0, order, done)


class MixtureBlock(Block):
    """Attention as in a dense model, then the experts."""

    def __init__(self, config: MixtureConfig, index: int) -> None:
        super().__init__(config.dense(0), index)
        self.mlp = MixtureLayer(config)

    def forward(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, cache, slot)
        return x + self.mlp(self.post_attention_layernorm(x), positions, cache, slot)


class MixtureEmbedding(Embedding):
    """With the tables of a gate that reads tokens: counts, which no gradient moves."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        tables = gates[config.gate].tables(config.vocab_size, len(config.experts))
        self.gate = nn.ParameterDict({n: nn.Parameter(torch.empty(s), requires_grad=False) for n, s in tables.items()})
