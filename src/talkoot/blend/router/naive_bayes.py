"""Naive Bayes with multinomial counts of tokens (McCallum and Nigam 1998), add-a-half smoothed."""

from __future__ import annotations

from torch import Tensor

from talkoot.blend.router.rule import Counted, Scorer, rules

SMOOTHING = 0.5


@rules.register("naive-bayes")
def naive_bayes(counted: Counted) -> Scorer:
    """Log-likelihood of the tokens, as if each came by itself."""
    table = token_chances(counted.unigrams).log()
    return lambda ids: table[ids].sum(0)


def token_chances(unigrams: Tensor) -> Tensor:
    """Each domain's probability of each token, (vocabulary, D) float64."""
    counts = unigrams.double() + SMOOTHING
    return counts / counts.sum(0)
