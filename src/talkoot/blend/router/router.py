"""Which expert a prompt goes to: a table of what was counted, and a rule that reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from talkoot.blend.router.bigram import language_model
from talkoot.blend.router.calibration import Calibration, Wanted, calibrate
from talkoot.blend.router.rule import Counted, rules
from talkoot.blend.statistics import Features, Statistics
from talkoot.blend.statistics.features import CHUNKS
from talkoot.blend.statistics.histogram import as_ids
from talkoot.core.errors import TalkootError
from talkoot.core.ids import Digest, digest, short

RULE = "bigram"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A routed prompt.

    Attributes:
        expert: the likeliest.
        scores: each expert's probability, calibrated.
        confidence: the chosen one's.
        known: False where the prompt is unlike all domains, or the confidence too low: then a general model should
            answer, or several experts together.
        familiarity: nats per token of the prompt under the domain that finds it least strange.
    """

    expert: str
    scores: dict[str, float]
    confidence: float
    known: bool
    familiarity: float


class Router:
    """Fitted, and never changed: adding or removing a domain gives another one, to be swapped in whole.

    It is a function of its statistics: adding a domain and removing it again gives the same bits as before.

    Args:
        statistics: of each domain by name.
        features: what they were counted with.
        rule: by name.
        calibration: from held-out prompts; without one, scores are what the rule says and everything is known.

    Raises:
        TalkootError: fewer than two domains, an empty one, other features, or a rule that needs what was not counted.
    """

    def __init__(
        self, statistics: Mapping[str, Statistics], features: Features, rule: str, calibration: Calibration
    ) -> None:
        counted = collect(statistics, features)
        self.statistics, self.features, self.rule, self.calibration = dict(statistics), features, rule, calibration
        self._score, self._log_likelihoods = rules[rule](counted), language_model(counted)

    @classmethod
    def fit(cls, statistics: Mapping[str, Statistics], features: Features, rule: str = RULE) -> Router:
        """A router that is not calibrated yet; see the class."""
        return cls(statistics, features, rule, Calibration())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the experts."""
        return tuple(self.statistics)

    @property
    def is_calibrated(self) -> bool:
        """Whether its probabilities were held against prompts, and anything can be unknown to it."""
        return self.calibration != Calibration()

    @cached_property
    def version(self) -> Digest:
        """Digest of all that a decision depends on."""
        contents = {name: one.outline().content for name, one in self.statistics.items()}
        parts = [self.features.id, self.rule, contents, self.calibration]
        return digest(msgspec.json.encode(parts), "router")

    def route(self, ids: Sequence[int] | Tensor) -> Decision:
        """Decide about a prompt, given as ids of the features' tokenizer.

        Raises:
            ValueError: an id is not the tokenizer's.
        """
        tokens = as_ids(ids, self.features.vocabulary)
        if not len(tokens):
            even = dict.fromkeys(self.names, 1 / len(self.names))
            name = self.names[0]
            return Decision(expert=name, scores=even, confidence=even[name], known=False, familiarity=-math.inf)
        scores, familiarity = self.measure(tokens)
        point = self.calibration.at(len(tokens))
        chances = dict(zip(self.names, (scores / point.temperature).softmax(0).tolist(), strict=True))
        expert = max(chances, key=lambda name: chances[name])
        return Decision(
            expert=expert,
            scores=chances,
            confidence=chances[expert],
            known=familiarity >= point.familiarity and chances[expert] >= point.confidence,
            familiarity=familiarity,
        )

    def route_text(self, text: str) -> Decision:
        """Decide about a prompt."""
        return self.route(self.features.tokenizer.encode(text))

    def scored(self, tokens: Tensor) -> Tensor:
        """The rule's scores (D,), before calibration; of at least one token."""
        return self._score(tokens)

    def measure(self, tokens: Tensor) -> tuple[Tensor, float]:
        """The rule's scores (D,), and the familiarity, before calibration; of at least one token."""
        return self.scored(tokens), float(self._log_likelihoods(tokens).mean(0).max())

    def calibrated(self, documents: Mapping[str, Sequence[Sequence[int]]], wanted: Wanted | None = None) -> Router:
        """The same router with probabilities and thresholds from held-out documents of each domain (token ids)."""
        calibration = calibrate(self.measure, self.names, documents, wanted or Wanted())
        return Router(self.statistics, self.features, self.rule, calibration)

    def adding(self, name: str, statistics: Statistics) -> Router:
        """With one more domain, or another version of one; what was calibrated stays until it is done anew."""
        return Router({**self.statistics, name: statistics}, self.features, self.rule, self.calibration)

    def without(self, name: str) -> Router:
        """Without a domain.

        Raises:
            TalkootError: there is none of that name, or only one would be left.
        """
        if name not in self.statistics:
            why = f"it knows {', '.join(self.names)}"
            raise TalkootError(f"the router has no domain {name!r}", where=name, why=why, next="name one of these")
        rest = {other: one for other, one in self.statistics.items() if other != name}
        return Router(rest, self.features, self.rule, self.calibration)

    def save(self, path: Path) -> None:
        """Write one file that holds all of it; see :mod:`talkoot.blend.router.file`."""
        from talkoot.blend.router import file  # the file knows what it holds

        file.save(self, path)

    @classmethod
    def load(cls, path: Path) -> Router:
        """Read what :meth:`save` wrote.

        Raises:
            TalkootError: it is missing, broken or no router.
        """
        from talkoot.blend.router import file

        return file.load(path)


def collect(statistics: Mapping[str, Statistics], features: Features) -> Counted:
    """All domains' statistics side by side.

    Raises:
        TalkootError: fewer than two domains, an empty one, or other features.
    """
    if len(statistics) < 2:
        why = f"there are statistics of {', '.join(statistics) or 'no domain'}, and a choice needs two"
        next = "count the statistics of another domain too"
        raise TalkootError("there is nothing to choose between", where="statistics", why=why, next=next)
    for name, one in statistics.items():
        if one.histogram is None or not one.tokens:
            raise TalkootError("the domain is empty", where=name, why="it has no token", next="count some text")
        try:
            features.check(one)
        except ValueError as problem:
            next = "count its text anew with the router's tokenizer, embeddings and sizes"
            what = "a domain's statistics are of other features"
            raise TalkootError(what, where=name, why=str(problem), next=next) from None
    _refuse_same_text(statistics)
    histograms = [one.histogram for one in statistics.values() if one.histogram is not None]
    return Counted(
        names=tuple(statistics),
        features=features,
        unigrams=torch.stack([histogram.unigrams for histogram in histograms], dim=1),
        bigrams=torch.stack([histogram.bigrams.to(torch.int32) for histogram in histograms], dim=1),
        grams={name: one.grams[CHUNKS] for name, one in statistics.items() if CHUNKS in one.grams},
    )


def _refuse_same_text(statistics: Mapping[str, Statistics]) -> None:
    """Two domains of one text cannot be told apart, and a router of them would be a coin."""
    seen: dict[str, str] = {}
    for name, one in statistics.items():
        for source in one.provenance.sources:
            if source.dataset in seen:
                where = f"{seen[source.dataset]} and {name}"
                why = f"both were counted on data set {short(source.dataset)}"
                next = "give one of them text of its own, or remove it"
                raise TalkootError("two domains have the same text", where=where, why=why, next=next)
            seen[source.dataset] = name
