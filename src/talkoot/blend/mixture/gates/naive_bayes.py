"""By the tokens so far: naive Bayes over what each domain's text consists of, one choice for all blocks.

The score of expert d after t tokens is ``sum over s <= t of log p(token s | d)``; argmax is the likeliest domain under
equal priors (Maron 1961), softmax its posterior. The tables come from token histograms: integers, so federated sums are
exact. A text counts as of one domain: evidence is never forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from talkoot.blend.mixture.gates.gate import Gate, gates, running_sum

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.model.decoder import Cache, Positions

SUMS = -1  # where the cache keeps them: no block's slot


class NaiveBayes(Gate):
    """``chances``: log-probability of each token in each domain, (vocabulary, D)."""

    reads_tokens = True

    def tables(self, vocabulary: int, experts: int) -> dict[str, tuple[int, ...]]:
        return {"chances": (vocabulary, experts)}

    def fit(self, unigrams: Tensor, bigrams: Tensor) -> dict[str, Tensor]:
        from talkoot.blend.router.naive_bayes import token_chances

        return {"chances": token_chances(unigrams).log()}

    def scores(self, tables: Mapping[str, Tensor], tokens: Tensor, positions: Positions, cache: Cache | None) -> Tensor:
        return running_sum(self.evidence(tables, tokens, positions, cache), positions, cache, SUMS)

    def evidence(
        self, tables: Mapping[str, Tensor], tokens: Tensor, positions: Positions, cache: Cache | None
    ) -> Tensor:
        """What each token says about each expert, (B, T, D)."""
        return look_up(tables["chances"], tokens)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (n, D) by indices of any shape; plain indexing says the same and takes twice as long."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


gates.register("naive-bayes")(NaiveBayes())
