"""By the tokens so far, each after the one before it: Bayes' rule over the domains' bigram language models.

The router's rule of that name, applied to every token's past. It knows a domain after a dozen tokens where single
tokens take fifty, for three look-ups per token, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from talkoot.blend.mixture.gates.gate import gates
from talkoot.blend.mixture.gates.naive_bayes import NaiveBayes, look_up

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

        single, (before, first) = look_up(tables["chances"], tokens), _before(tokens, positions, cache)
        pairs = look_up(tables["pairs"], hashed(before, tokens, self.buckets))
        after = log_chances(pairs, single.exp(), look_up(tables["counts"], before))
        return after if first is None else single.where(first[..., None], after)


def _before(tokens: Tensor, positions: Positions, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
    """The token in front of each, and which tokens are a text's first or padding; None if none is. (B, T) both."""
    known = cache.carried.get(LAST) if cache is not None else None
    if cache is not None:
        cache.carried[LAST] = tokens[:, -1]
    if known is not None and positions.padding is None and tokens.shape[1] == 1:
        return known[:, None], None
    before = tokens.roll(1, 1)
    if known is not None:
        before[:, 0] = known
    columns = tokens.new_tensor(range(positions.past, positions.past + tokens.shape[1]))
    padding = 0 if positions.padding is None else positions.padding[:, None]
    return before, (columns <= padding).expand(tokens.shape)


gates.register("bigram")(_Bigram())
