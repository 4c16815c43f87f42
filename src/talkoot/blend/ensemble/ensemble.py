"""Scoring with a posterior ensemble, and what happens when an expert is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from talkoot.blend.ensemble.posterior import Floats, Prior, chosen, mix
from talkoot.blend.ensemble.priors import priors, uniform
from talkoot.blend.ensemble.scorers import Gone, TokenScorer
from talkoot.core.errors import Exit, TalkootError


class Scored(NamedTuple):
    """What an ensemble says to a text of T tokens.

    Attributes:
        log_probs: (T-1,) nats, of each token but the first given those before it.
        weights: (T-1, K), of the experts when each of these tokens was to come.
        after: (K,), of the experts after the whole text.
        names: of the K experts.
        gone: experts that did not answer, and why; their weights are 0 throughout.
    """

    log_probs: Floats
    weights: Floats
    after: Floats
    names: tuple[str, ...]
    gone: dict[str, str]


class PosteriorEnsemble:
    """Experts mixed by how likely each finds the text so far; see :mod:`~talkoot.blend.ensemble.posterior`.

    Args:
        scorers: the experts by name, at least one; they share a tokenizer.
        prior: over them, in their order; uniform by default.
        keep: go on with so many experts, the likeliest ones, from token ``after`` on; 0 = all. The others are not even
            asked for the rest of the text.
        after: how many tokens behind the first everybody hears.

    Raises:
        ValueError: no expert, a prior for another number of them, or negative counts.
    """

    def __init__(
        self, scorers: Mapping[str, TokenScorer], prior: Prior | None = None, *, keep: int = 0, after: int = 0
    ) -> None:
        self.scorers, self.names = dict(scorers), tuple(scorers)
        self.mixing = Mixing(self.names, prior, keep=keep, after=after)

    def score(self, ids: Sequence[int]) -> Scored:
        """The ensemble's word on a text.

        Raises:
            TalkootError: no expert answers, or the text is not for them.
        """
        gone: dict[str, str] = {}
        first = self._ask(self.names, self.mixing.first(ids), gone)
        rest: dict[str, Floats] = {}
        while wanted := self.mixing.wanted(ids, first, rest, gone):  # again when one is lost meanwhile
            rest |= self._ask(wanted, ids, gone)
        return self.mixing.scored(first, rest, len(ids) - 1, gone)

    def _ask(self, names: Iterable[str], ids: Sequence[int], gone: dict[str, str]) -> dict[str, Floats]:
        answers: dict[str, Floats] = {}
        for name in names:
            try:
                answers[name] = self.scorers[name].log_probs(ids)
            except Gone as problem:
                gone[name] = str(problem)
        return answers


def evidence(scorers: Mapping[str, TokenScorer], texts: Iterable[Sequence[int]]) -> Floats:
    """(N, K): log-probability of each held-out text under each expert, for a prior's rule."""
    rows = [[float(scorer.log_probs(ids).sum()) for scorer in scorers.values()] for ids in texts]
    return np.asarray(rows, np.float64).reshape(len(rows), len(scorers))


def prior_from(rule: str, scorers: Mapping[str, TokenScorer], held_out: Iterable[Sequence[int]] = ()) -> Prior:
    """A prior by the name of its rule.

    Args:
        rule: one of ``priors``.
        scorers: the experts.
        held_out: tokens of validation texts (never of test texts), for rules that look at some.

    Raises:
        TalkootError: an unknown rule, or one that needs held-out text and gets none.
    """
    return priors[rule](len(scorers), evidence(scorers, held_out))


def nobody_answers(gone: Mapping[str, str], *, next: str) -> TalkootError:
    """The error when experts without whom it cannot go on are gone; ``gone`` says why, by name."""
    return TalkootError(
        "no answer from experts of the ensemble",
        where=", ".join(gone) or "ensemble",
        why="; ".join(f"{name}: {why}" for name, why in gone.items()) or "the prior believes in none of them",
        next=next,
        code=Exit.UNREACHABLE,
    )


class Mixing:
    """What scoring here and scoring over a network have in common: who is asked for what, and the sum.

    Args:
        names, prior, keep, after: as for :class:`PosteriorEnsemble`.
    """

    def __init__(self, names: Sequence[str], prior: Prior | None = None, *, keep: int = 0, after: int = 0) -> None:
        self.names, self.keep, self.after = tuple(names), keep, after
        if not names or min(keep, after) < 0:
            raise ValueError("an ensemble has at least one expert, and counts are not negative")
        self.prior = uniform(len(names), np.empty((0, 0))) if prior is None else prior
        if self.prior.log_weights.shape != (len(names),):
            raise ValueError(f"a prior of shape {self.prior.log_weights.shape} for {len(names)} experts")

    def sparse(self, ids: Sequence[int]) -> bool:
        """Whether some of the experts need not hear all of this text."""
        return 0 < self.keep < len(self.names) and self.after + 1 < len(ids)

    def first(self, ids: Sequence[int]) -> Sequence[int]:
        """What everybody is to hear."""
        return ids[: self.after + 1] if self.sparse(ids) else ids

    def wanted(
        self, ids: Sequence[int], first: Mapping[str, Floats], rest: Mapping[str, Floats], gone: Mapping[str, str]
    ) -> list[str]:
        """Who is still to hear all of the text, given who has said what to the first part and to all of it."""
        prior = self._prior_without(gone)
        if not self.sparse(ids) or prior is None:
            return []
        kept = chosen(self._table(self.after, first), prior, keep=self.keep, after=self.after)
        return [name for name, stays in zip(self.names, kept, strict=True) if stays and name not in rest]

    def scored(
        self, first: Mapping[str, Floats], rest: Mapping[str, Floats], count: int, gone: dict[str, str]
    ) -> Scored:
        """The result from the answers to the first part and to the whole text.

        Raises:
            TalkootError: nobody is left.
        """
        prior = self._prior_without(gone)
        if prior is None:
            raise nobody_answers(gone, next="start the experts' peers again, or score with experts on this machine")
        # Where both are there, the first part's answers count: the choice was made by them.
        mixed = mix(self._table(count, rest, first), prior, keep=self.keep, after=self.after)
        return Scored(mixed.log_probs, mixed.weights[:-1], mixed.weights[-1], self.names, gone)

    def _table(self, count: int, *answers: Mapping[str, Floats]) -> Floats:
        """(K, count): what was said, the later answers over the earlier ones; 0 where nothing was."""
        table = np.zeros((len(self.names), count))
        for row, name in zip(table, self.names, strict=True):
            for said in answers:
                if name in said:
                    row[: len(said[name])] = said[name][:count]
        return table

    def _prior_without(self, gone: Mapping[str, str]) -> Prior | None:
        absent = np.array([name in gone for name in self.names])
        log = np.where(absent, -np.inf, self.prior.log_weights)
        return Prior(log, self.prior.fixed) if np.isfinite(log).any() else None
