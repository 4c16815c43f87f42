"""What chooses a token's experts, as a method: where it looks, and what it remembers of the text so far.

Nothing in this folder imports torch: gates work on the tensors that they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from talkoot.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.model.decoder import Cache, Positions


class Gate:
    """A gate with weights in every block reads states, one with tables of what tokens tell reads tokens; one with
    neither leaves the choice, one expert for a whole text, to the caller (``Mixture.forced``)."""

    reads_states = False
    reads_tokens = False
    buckets = 0  # of pairs of neighbours, in the histograms that the gate is fitted to

    def features(self, x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
        """What a block's linear gate sees of the inputs of its experts, causally: (B, T, n) to as much again.

        Linear, and the same for each of the n numbers: so it may as well be applied to what the gate makes of single
        states, which are D numbers instead of H. Counting does the one, running a model the other.

        Args:
            positions: of these tokens; ``padding`` says which are none.
            cache: where sums over earlier tokens are kept, under ``slot``.
        """
        return x

    def tables(self, vocabulary: int, experts: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what a gate that reads tokens knows, by name; the experts are the last dimension."""
        return {}

    def fit(self, unigrams: Tensor, bigrams: Tensor) -> dict[str, Tensor]:
        """The tables from every domain's counts: (vocabulary, D) and (buckets, D) int64."""
        return {}

    def scores(self, tables: Mapping[str, Tensor], tokens: Tensor, positions: Positions, cache: Cache | None) -> Tensor:
        """Scores of the experts (B, T, D), one for all blocks, from token ids (B, T)."""
        raise NotImplementedError


gates: Registry[Gate] = Registry("gate")


def running_sum(x: Tensor, positions: Positions, cache: Cache | None, slot: int) -> Tensor:
    """Sums over each text up to every token, (B, T, n) in float64, padding left out.

    Double precision, so that a text read token by token gives the sums of one read at once, to the last digits of the
    single precision that decides.
    """
    if positions.padding is not None:
        columns = positions.padding.new_tensor(range(positions.past, positions.past + x.shape[1]))
        x = x.masked_fill((columns < positions.padding[:, None])[..., None], 0)
    total = x.double()
    if x.shape[1] > 1:
        total = total.cumsum(1)
    if cache is not None:
        if slot in cache.carried:
            total = total + cache.carried[slot][:, None]
        cache.carried[slot] = total[:, -1]
    return total


def running_count(x: Tensor, positions: Positions) -> Tensor | int:
    """How many tokens of its text each token has seen, itself included: (T, 1), or (B, T, 1) behind padding."""
    if positions.padding is None and x.shape[1] == 1:
        return positions.past + 1
    seen = x.new_tensor(range(positions.past + 1, positions.past + x.shape[1] + 1))
    if positions.padding is not None:
        seen = (seen - positions.padding[:, None]).clamp(min=1)
    return seen[..., None]
