"""By the tokens so far: naive Bayes over what each domain's text consists of, one choice for all blocks.

The score of expert d after t tokens is ``sum over s <= t of log p(token s | d)``; argmax is the likeliest domain under
equal priors (Maron 1961), softmax its posterior. The table comes from token histograms: integers, so federated sums are
exact. A text counts as of one domain: evidence is never forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from talkoot.blend.mixture.gates.gate import Gate, gates, running_sum

if TYPE_CHECKING:
    from torch import Tensor

    from talkoot.model.decoder import Cache, Positions

SLOT = -1  # no block's: the sum is one for the whole model


class _NaiveBayes(Gate):
    reads_tokens = True

    def scores(self, evidence: Tensor, positions: Positions, cache: Cache | None) -> Tensor:
        return running_sum(evidence, positions, cache, SLOT)


gates.register("naive-bayes")(_NaiveBayes())
