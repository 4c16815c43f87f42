"""Mean of the tokens' linear scores: a bag of tokens seen through its embeddings.

The averaged variant of "IR3DE" (arXiv 2606.06098), but with every domain counting alike and columns left as they are:
on real domains the published normalisation cost this rule fourteen points of accuracy at 64 tokens.
"""

from __future__ import annotations

from talkoot.blend.router.rule import Counted, Scorer, rules
from talkoot.blend.router.votes import token_scores


@rules.register("average")
def average(counted: Counted) -> Scorer:
    """The mean over all tokens."""
    table = token_scores(counted, published=False)
    return lambda ids: table[ids].mean(0)
