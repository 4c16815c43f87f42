"""Linear scores of single tokens, of which the surest vote: the rule of "IR3DE" (arXiv 2606.06098).

Ridge regression of the domain's label on the token's embedding; each column divided by its norm; a softmax over
domains; then the ``VOTERS`` tokens of least entropy vote for their best domain. As an embedding depends on its token
alone, ``sum x~ x~^T = E^T diag(counts) E``, and scores are a table with a row per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from talkoot.blend.router.rule import Counted, Scorer, rules
from talkoot.blend.solve import solve
from talkoot.core.errors import TalkootError

VOTERS, STRENGTH = 10, 1e-2


@rules.register("votes")
def votes(counted: Counted) -> Scorer:
    """The surest ten tokens vote."""
    return _election(counted, VOTERS)


@rules.register("all")
def all_vote(counted: Counted) -> Scorer:
    """Every token votes."""
    return _election(counted, None)


def _election(counted: Counted, voters: int | None) -> Scorer:
    scores = token_scores(counted, published=True)
    chances = scores.softmax(1)
    entropy, ballots = torch.special.entr(chances).sum(1), scores.argmax(1)
    domains = scores.shape[1]

    def score(ids: Tensor) -> Tensor:
        cast = ballots[ids]
        if voters is not None and voters < len(ids):
            cast = cast[entropy[ids].topk(voters, largest=False, sorted=False).indices]
        return torch.bincount(cast, minlength=domains) / len(cast)

    return score


def token_scores(counted: Counted, *, published: bool) -> Tensor:
    """Each token's score for each domain, (vocabulary, D) float64.

    Args:
        published: as the paper has it: an absolute penalty, and columns divided by their norm. Otherwise the penalty
            is relative, every domain counts alike, and columns stay as they are.

    Raises:
        TalkootError: the features have no embeddings.
    """
    table = counted.features.table
    if table is None:
        raise needs_table()
    extended = torch.cat([table.double(), torch.ones(len(table), 1, dtype=torch.float64)], dim=1)
    counts = counted.unigrams.double()
    if not published:
        counts = counts / counts.sum(0)
    matrix = extended.T @ (extended * counts.sum(1, keepdim=True))
    fit = solve(matrix, extended.T @ counts, counted.names, strength=STRENGTH, paper=published)
    if not published:
        return extended @ fit.weights
    norms = fit.weights[:-1].norm(dim=0)
    return extended @ (fit.weights / norms.where(norms > 0, torch.ones_like(norms)))


def needs_table() -> TalkootError:
    """The error of a rule that has nothing to look at."""
    return TalkootError(
        "this rule needs embeddings",
        where="the routing rule",
        why="the statistics were counted without a table of embeddings",
        next="count them with one, or use the rule bigram or naive-bayes",
    )
