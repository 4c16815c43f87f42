"""Which rule routes a set of domains best, by held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from talkoot.blend.router.calibration import Wanted, draw_prompts
from talkoot.blend.router.router import Router
from talkoot.blend.router.rule import rules
from talkoot.blend.statistics import Features, Statistics


def choose(
    statistics: Mapping[str, Statistics],
    features: Features,
    documents: Mapping[str, Sequence[Sequence[int]]],
    *,
    among: Iterable[str] = (),
    wanted: Wanted | None = None,
) -> tuple[Router, dict[str, float]]:
    """The calibrated router of the best rule, and each rule's accuracy on held-out prompts.

    Args:
        statistics, features: as for `Router`.
        documents: held-out ones of each domain, as token ids.
        among: rules to try; all that the statistics allow when empty.
        wanted: the aims of calibration; prompts of all its lengths count alike.

    Raises:
        TalkootError: as for `Router` and for calibration.
    """
    wanted = wanted or Wanted()
    tried = list(among) or [rule for rule in rules if features.table is not None or rule in ("bigram", "naive-bayes")]
    routers = {rule: Router.fit(statistics, features, rule) for rule in tried}
    found = {rule: accuracy(router, documents, wanted) for rule, router in routers.items()}
    best = max(tried, key=lambda rule: found[rule])
    return routers[best].calibrated(documents, wanted), found


def accuracy(router: Router, documents: Mapping[str, Sequence[Sequence[int]]], wanted: Wanted) -> float:
    """Share of prompts whose best score is their own domain's; each domain and length counts alike."""
    shares: list[float] = []
    for length in wanted.lengths:
        for label, name in enumerate(router.names):
            prompts = draw_prompts(documents.get(name, ()), length, wanted.prompts, wanted.seed)
            right = [int(router.scored(prompt).argmax()) == label for prompt in prompts]
            shares += [sum(right) / len(right)] if right else []
    return float(torch.tensor(shares, dtype=torch.float64).mean()) if shares else 0.0
