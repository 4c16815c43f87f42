"""By the tokens so far, each after the one before it: Bayes' rule over the domains' bigram language models.

The router's rule of that name, applied to every token's past. It knows a domain after a dozen tokens where single
tokens take fifty, for three look-ups per token, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from talkoot.blend.mixture.gates.gate import gates
from talkoot.blend.mixture.gates.naive_bayes import NaiveBayes

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.model.decoder import Cache, Positions

LAST = -2  # where the cache keeps each text's last token


class _Bigram(NaiveBayes):
    """``counts``: of each token in each domain's text, (vocabulary, D); ``pairs``: of hashed pairs, (buckets, D)."""

    buckets = 1 << 18

    def tables(self, vocabulary: int, experts: int) -> dict[str, tuple[int, ...]]:
        sizes = {"counts": (vocabulary, experts), "pairs": (self.buckets, experts)}
        return super().tables(vocabulary, experts) | sizes

    def fit(self, unigrams: Tensor, bigrams: Tensor) -> dict[str, Tensor]:
        return super().fit(unigrams, bigrams) | {"counts": unigrams, "pairs": bigrams}

    def evidence(
        self, tables: Mapping[str, Tensor], tokens: Tensor, positions: Positions, cache: Cache | None
    ) -> Tensor:
        from talkoot.blend.router.bigram import log_chances
        from talkoot.blend.statistics.histogram import hashed

        single, before = tables["chances"][tokens], _before(tokens, positions, cache)
        first = before.clamp(min=0)
        pairs = tables["pairs"][hashed(first, tokens, self.buckets)]
        after = log_chances(pairs, single.exp(), tables["counts"][first])
        return after.where((before >= 0)[..., None], single)


def _before(tokens: Tensor, positions: Positions, cache: Cache | None) -> Tensor:
    """The token in front of each, (B, T); -1 in front of a text's first."""
    before = tokens.roll(1, 1)
    before[:, 0] = -1
    if cache is not None:
        if LAST in cache.carried:
            before[:, 0] = cache.carried[LAST]
        cache.carried[LAST] = tokens[:, -1]
    if positions.padding is not None:
        columns = tokens.new_tensor(range(positions.past, positions.past + tokens.shape[1]))
        before = before.masked_fill(columns <= positions.padding[:, None], -1)
    return before


gates.register("bigram")(_Bigram())
