"""Gates in closed form from everybody's statistics: one small linear system per block, or one table of logarithms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from talkoot.blend.mixture.counting import layer_name
from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.model import Mixture
from talkoot.blend.mixture.names import TABLES
from talkoot.blend.solve import ridge
from talkoot.blend.statistics import Gram, Histogram, Statistics
from talkoot.core.errors import TalkootError


@torch.no_grad()
def fit_gates(
    mixture: Mixture,
    statistics: Mapping[str, Statistics],
    *,
    strength: float = 1e-2,
    balanced: bool = False,
    paper: bool = False,
) -> dict[str, float]:
    """Set all gates of a mixture, in place.

    A gate on tokens is what was counted. A gate on states is ridge regression of the domain's label on the states,
    ``W = (A + s I)^-1 B``. Both are sums over domains in the order of the experts, so that adding an expert and
    removing it again gives what was there before.

    Args:
        mixture: its config says which gates, and whether they have an intercept.
        statistics: of each expert's domain, by the expert's name.
        strength: of the ridge; see :func:`talkoot.blend.solve.ridge`.
        balanced: every domain counts alike, however many tokens it has.
        paper: every column is divided by its norm, as "DUME" (arXiv 2603.29765) does.

    Returns:
        Condition number of each block's system, by the block's name.

    Raises:
        TalkootError: an expert has no statistics, or they are of other features.
    """
    config, method = mixture.config, gates[mixture.config.gate]
    _check(mixture, statistics)
    if method.reads_tokens:
        counted = [one for one in (statistics[name].histogram for name in config.experts) if one is not None]
        unigrams = torch.stack([one.unigrams for one in counted], 1)
        bigrams = torch.stack([_folded(one, method.buckets) for one in counted], 1)
        for name, values in method.fit(unigrams, bigrams).items():
            mixture.tensors()[TABLES + name].copy_(values)
    found: dict[str, float] = {}
    for index, layer in enumerate(mixture.mixtures, 1):
        if layer.gate is None:
            continue
        name = layer_name(index)
        grams = {expert: statistics[expert].grams[name] for expert in config.experts}
        fit = ridge(grams, strength=strength, intercept=config.bias, balanced=balanced, paper=paper)
        weights = fit.weights
        if paper:  # bias included, though only the weights are measured
            weights = weights / weights[: config.width].norm(dim=0)
        layer.gate.weight.copy_(weights[: config.width].T)
        if config.bias:
            layer.gate.bias.copy_(weights[-1])
        found[name] = fit.condition
    return found


def randomise_gates(mixture: Mixture, seed: int) -> None:
    """Gates on states as a mixture has them before any training, as a baseline: normal, of deviation 0.02."""
    fresh = Mixture(mixture.config, seed=seed).gate_tensors()
    with torch.no_grad():
        for name, value in mixture.gate_tensors().items():
            value.copy_(fresh[name])


def _check(mixture: Mixture, statistics: Mapping[str, Statistics]) -> None:
    config, method = mixture.config, gates[mixture.config.gate]
    missing = [name for name in config.experts if name not in statistics]
    if missing:
        raise _bad(missing[0], "there are none of its domain", "count them on its text")
    features = {statistics[name].provenance.features for name in config.experts}
    if len(features) > 1:
        raise _bad("statistics", "they are of unlike features (gate, tokenizer or trunk)", "count them with the same")
    for name in config.experts:
        part = statistics[name]
        blocks = [layer_name(index) for index in range(1, config.layers + 1)] if method.reads_states else []
        grams: list[Gram | None] = [part.grams.get(block) for block in blocks]
        if any(gram is None or gram.width != config.width for gram in grams):
            raise _bad(name, f"they lack a block's sums of width {config.width}", f"count for gate {config.gate!r}")
        counted = part.histogram
        if method.reads_tokens and not _serves(counted, config.vocab_size, method.buckets):
            words = f"counts of {config.vocab_size} tokens" + (" and of pairs" if method.buckets else "")
            raise _bad(name, f"they lack {words}", f"count for gate {config.gate!r}")


def _serves(histogram: Histogram | None, vocabulary: int, buckets: int) -> bool:
    if histogram is None or histogram.vocabulary != vocabulary:
        return False
    return not buckets or (histogram.buckets >= buckets and histogram.buckets % buckets == 0)


def _folded(histogram: Histogram, buckets: int) -> Tensor:
    """Counts of pairs in so many buckets: a hash modulo a multiple says what it is modulo the number itself."""
    return histogram.bigrams.view(-1, buckets).sum(0) if buckets else histogram.bigrams[:0]


def _bad(where: str, why: str, next: str) -> TalkootError:
    return TalkootError("the gates cannot be fitted from these statistics", where=where, why=why, next=next)
