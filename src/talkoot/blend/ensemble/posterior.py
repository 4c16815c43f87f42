"""The arithmetic of a posterior ensemble: experts' log-probabilities in, the mixture's and the experts' weights out.

Expert j gives p_j(x_t | x_<t). With prior pi, w_tj is proportional to pi_j * prod_{s<t} p_j(x_s | x_<s), and the
ensemble's p(x_t | x_<t) = sum_j w_tj p_j(x_t | x_<t): Bayes' rule over "which expert wrote this" (arXiv:2208.03306,
arXiv:2502.19385). All in logarithms, natural, float64: products of thousands of probabilities are no float. While no
expert is dropped, on every text and for every j, -log p <= -log p_j - log pi_j.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Prior(NamedTuple):
    """What is believed of the experts before the first token.

    Attributes:
        log_weights: (K,), normalised; -inf leaves an expert out.
        fixed: the weights do not move with the text: a plain average of probabilities.
    """

    log_weights: Floats
    fixed: bool = False


class Mixed(NamedTuple):
    """What the ensemble says to N tokens.

    Attributes:
        log_probs: (N,), of each token given those before it.
        weights: (N + 1, K); row n held when token n was to come, the last row after all of them.
    """

    log_probs: Floats
    weights: Floats


class Belief:
    """Which expert the text so far is from; moves token by token.

    Args:
        prior: over K experts.
    """

    def __init__(self, prior: Prior) -> None:
        self._log, self._fixed = _normalised(np.asarray(prior.log_weights, np.float64)), prior.fixed

    @property
    def log_weights(self) -> Floats:
        """(K,), normalised; -inf for experts that were dropped."""
        return self._log

    @property
    def weights(self) -> Floats:
        """(K,), their sum is 1."""
        return np.exp(self._log)

    def update(self, log_probs: Floats) -> None:
        """A token came to which each expert had given this log-probability, (K,); what dropped ones say is ignored."""
        if not self._fixed:
            alive = np.isfinite(self._log)
            self._log = _normalised(np.where(alive, self._log + np.where(alive, log_probs, 0.0), -np.inf))

    def keep(self, count: int) -> NDArray[np.bool_]:
        """Drop all but the ``count`` likeliest (of equals, the first); which are left, (K,)."""
        kept = likeliest(self._log, count)
        self._log = _normalised(np.where(kept, self._log, -np.inf))
        return kept


def mix(log_probs: Floats, prior: Prior, *, keep: int = 0, after: int = 0) -> Mixed:
    """The ensemble over a text's tokens.

    Args:
        log_probs: (K, N), finite: what each expert gives each of N tokens. Of a dropped expert the entries from
            ``after`` on do not matter.
        prior: over the K experts.
        keep: from token ``after`` on, go on with so many of the experts, those that are likeliest then; 0 = all. With
            one it is a router that decides after ``after`` tokens.

    Raises:
        ValueError: shapes that do not fit, a number that is not finite, or a prior that believes in nobody.
    """
    heard = np.asarray(log_probs, np.float64)
    if heard.ndim != 2 or heard.shape[0] != len(prior.log_weights) or not np.isfinite(heard).all():
        raise ValueError(
            f"log-probabilities of shape {heard.shape} for {len(prior.log_weights)} experts cannot be mixed"
        )
    experts, count = heard.shape
    log = np.repeat(np.asarray(prior.log_weights, np.float64)[:, None], count + 1, axis=1)
    if not prior.fixed:
        log[:, 1:] += np.cumsum(heard, axis=1)
    if 0 < keep < experts and after <= count:
        log[~chosen(heard, prior, keep=keep, after=after), after:] = -np.inf
    log = _normalised(log)
    return Mixed(log_sum(log[:, :count] + heard), np.exp(log).T)


def chosen(log_probs: Floats, prior: Prior, *, keep: int, after: int) -> NDArray[np.bool_]:
    """Which experts :func:`mix` goes on with, (K,), from at least ``after`` tokens' log-probabilities (K, N)."""
    log = np.asarray(prior.log_weights, np.float64)
    if after and not prior.fixed:
        log = log + np.cumsum(log_probs[:, :after], axis=1)[:, -1]
    return likeliest(log, keep) & np.isfinite(log)


def likeliest(log_weights: Floats, count: int) -> NDArray[np.bool_]:
    """Which are the ``count`` largest, (K,); of equals, the first."""
    kept = np.zeros(len(log_weights), bool)
    kept[np.argsort(-log_weights, kind="stable")[:count]] = True
    return kept


def log_sum(log: Floats) -> Floats:
    """Logarithm of the sum over the first axis."""
    largest = log.max(axis=0)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(log - shift).sum(axis=0)) + shift


def _normalised(log: Floats) -> Floats:
    total = log_sum(log)
    if not np.isfinite(total).all():
        raise ValueError("no expert is left that could have written this")
    return log - total
