"""Priors over experts, registered: what to believe before the first token.

A rule sees how likely each expert finds some *held-out* texts (validation, never test), as nats, and says what to
believe. A new one is one function and one registration.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from talkoot.blend.ensemble.posterior import Floats, Prior, log_sum
from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry

#: rules by name: (number of experts, evidence) to a prior; evidence (N, K) = log-probability of text n under expert k
priors: Registry[Callable[[int, Floats], Prior]] = Registry("prior")

_DECAY, _MOST = 0.3, 100


@priors.register("uniform")
def uniform(experts: int, evidence: Floats) -> Prior:
    """Every expert alike; needs no held-out text."""
    return Prior(np.full(experts, -np.log(experts)))


@priors.register("simple")
def simple(experts: int, evidence: Floats) -> Prior:
    """Every expert alike, and the text changes nothing: the arithmetic mean of the experts' probabilities."""
    return Prior(np.full(experts, -np.log(experts)), fixed=True)


@priors.register("cached")
def cached(experts: int, evidence: Floats) -> Prior:
    """The posteriors of held-out texts, averaged with decaying weight (Li et al. 2022, arXiv:2208.03306).

    pi_j is proportional to sum_i 0.3^i p(D = j | x_i) over the first 100 texts, i from 1, each posterior under a
    uniform prior; so the first texts count by far most. Computed in logarithms: rounding rules no expert out.

    Raises:
        TalkootError: there is no held-out text.
    """
    rows = np.asarray(evidence, np.float64)[:_MOST]
    if not len(rows):
        raise TalkootError(
            "the cached prior needs held-out text",
            where="prior 'cached'",
            why="it is made of the experts' posteriors on texts that none of them learned, and there are none",
            next="give some validation texts (never test texts), or use the prior 'uniform'",
        )
    if rows.shape[1:] != (experts,) or not np.isfinite(rows).all():
        raise ValueError(f"evidence of shape {rows.shape} for {experts} experts")
    posteriors = rows - log_sum(rows.T)[:, None]
    decayed = posteriors + np.log(_DECAY) * np.arange(1, len(rows) + 1)[:, None]
    log_weights = log_sum(decayed)
    return Prior(log_weights - log_sum(log_weights))
