"""What the router bench measures: every rule on real domains, held-out documents, with what the best one promises.

Documents are split by content, statistics see training text alone, rules are chosen and calibrated on validation
prompts, and everything printed is from test prompts: pieces of 64 tokens, each document alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import msgspec
import torch
from torch import Tensor

from talkoot.blend.router import Decision, Router, Wanted, choose, rules
from talkoot.blend.router.calibration import draw_prompts
from talkoot.blend.router.router import collect
from talkoot.blend.router.votes import votes
from talkoot.blend.statistics import Features, Statistics, count, merge
from talkoot.blend.train.texts import sample
from talkoot.core.keys import Key
from talkoot.data import read_documents
from talkoot.data.split import split_documents
from talkoot.model.tokenizer import Tokenizer

Ids = Sequence[int]
PROMPT = 64  # tokens
ROUTED = 1000  # tokens of the prompt that is timed
WIDE = 2048  # of the fit that is timed
BINS = 15


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is the same for all seeds.

    Attributes:
        domains: that experts are for.
        probes: that nobody is for.
        late: domains that are added to a fitted router, and removed again; each is near one that is there.
        general: text that the tokenizer, and what experts begin as, are trained on.
        megabytes: of each corpus, documents cut to ``longest`` characters; ``general_megabytes`` of each general one.
        held_out: share of documents for validation, and for test.
        prompts: per domain for every measurement.
        neighbours: prompts per domain that the nearest-neighbour baseline knows; 0 = left out.
        steps: of an expert's training, and of what it begins as; 0 = no experts.
    """

    domains: tuple[str, ...] = (
        "python",
        "hol-light",
        "kjv",
        "postgres",
        "anarchism",
        "manpages-de",
        "licences",
        "wordnet",
    )
    probes: tuple[str, ...] = ("manpages-ja", "c-headers", "perl-manual")
    late: tuple[str, ...] = ("go", "shakespeare-plays")
    general: tuple[str, ...] = ("perl-manual", "elisp", "gcide")
    megabytes: float = 4.0
    general_megabytes: float = 2.0
    longest: int = 20_000
    held_out: float = 0.1
    prompts: int = 400
    neighbours: int = 100
    steps: tuple[int, int] = (160, 200)


@dataclass(frozen=True)
class Split:
    """One domain's documents as token ids."""

    train: list[Ids]
    validation: list[Ids]
    test: list[Ids]


@dataclass(frozen=True)
class Trial:
    """One seed.

    Attributes:
        accuracy: of each rule at each prompt length, on test prompts.
        chosen: the rule that validation prompts chose.
        decisions: of the chosen, calibrated router on the domains' test prompts, with their domains.
        strangers: its decisions on prompts of each probe.
        wide_votes: accuracy of the published rule with one-hot features, as wide as the vocabulary.
        later: accuracy with the late domains added (nan without any), and whether removing them left no trace.
        seconds: CPU-seconds of counting, fitting, calibrating.
    """

    accuracy: dict[str, dict[int, float]]
    chosen: str
    decisions: list[tuple[str, Decision]]
    strangers: dict[str, list[Decision]]
    wide_votes: float
    later: tuple[float, bool]
    seconds: dict[str, float]


@cache
def corpus(name: str, megabytes: float, longest: int) -> tuple[str, ...]:
    """A sample of a corpus, the same for every seed."""
    cut = (document[:longest] for document in read_documents(f"corpus:{name}"))
    return tuple(sample(cut, megabytes))


@cache
def tokenizer_of(setting: Setting) -> Tokenizer:
    """Byte pairs, 2,048 tokens, of general text."""
    texts = (text for name in setting.general for text in corpus(name, setting.general_megabytes, setting.longest))
    return Tokenizer.train(texts, 2048)


@cache
def encoded(setting: Setting, name: str) -> dict[str, Ids]:
    """Every document of a sample with its ids."""
    texts = corpus(name, setting.megabytes, setting.longest)
    ids = tokenizer_of(setting).encode_batch(list(texts))
    return {text: torch.tensor(one, dtype=torch.int64) for text, one in zip(texts, ids, strict=True)}  # type: ignore[misc]


def split_of(setting: Setting, name: str, seed: int) -> Split:
    """A domain's sides."""
    ids = encoded(setting, name)
    sides = split_documents(ids, seed=seed, validation=setting.held_out, test=setting.held_out)
    return Split(*([ids[text] for text in side] for side in sides))


def try_once(setting: Setting, seed: int) -> Trial:
    """Count, choose, calibrate, and try."""
    splits = {name: split_of(setting, name, seed) for name in setting.domains}
    features = Features.random(tokenizer_of(setting), seed=seed)
    started = time.process_time()
    statistics = {name: counted(name, split.train, features) for name, split in splits.items()}
    seconds = {"counting": time.process_time() - started}
    held_out = {name: split.validation for name, split in splits.items()}
    router, _ = choose(statistics, features, held_out, wanted=Wanted(seed=seed))
    started = time.process_time()
    router = Router.fit(statistics, features, router.rule)
    seconds["fitting"] = time.process_time() - started
    started = time.process_time()
    router = router.calibrated(held_out, Wanted(seed=seed))
    seconds["calibrating"] = time.process_time() - started
    fitted = {rule: Router.fit(statistics, features, rule) for rule in rules}
    lengths = Wanted().lengths
    tests = {length: test_prompts(setting, splits, length, seed) for length in lengths}
    accuracy = {rule: {length: share_right(one, tests[length]) for length in lengths} for rule, one in fitted.items()}
    strangers = {
        name: [router.route(prompt) for prompt in prompts_of(setting, split_of(setting, name, seed).test, PROMPT, seed)]
        for name in setting.probes
    }
    return Trial(
        accuracy=accuracy,
        chosen=router.rule,
        decisions=[(name, router.route(prompt)) for name, prompt in tests[PROMPT]],
        strangers=strangers,
        wide_votes=wide_votes(statistics, features, tests[PROMPT]),
        later=added_and_removed(setting, router, splits, seed),
        seconds=seconds,
    )


def counted(name: str, documents: Sequence[Ids], features: Features, peer: int = 0) -> Statistics:
    """What a domain's owner sends."""
    return count(name, documents, features, Key.derived("bench", peer))


def prompts_of(setting: Setting, documents: Sequence[Ids], length: int, seed: int) -> list[Tensor]:
    """Test prompts of one domain; never those that calibration drew, for the documents are others."""
    return draw_prompts(documents, length, setting.prompts, seed)


def test_prompts(setting: Setting, splits: Mapping[str, Split], length: int, seed: int) -> list[tuple[str, Tensor]]:
    """Of all domains, each with its domain's name."""
    return [(name, one) for name, split in splits.items() for one in prompts_of(setting, split.test, length, seed)]


def share_right(router: Router, prompts: Sequence[tuple[str, Tensor]]) -> float:
    """Accuracy in percent."""
    names = router.names
    right = sum(names[int(router.measure(prompt)[0].argmax())] == name for name, prompt in prompts)
    return 100 * right / len(prompts)


def wide_votes(
    statistics: Mapping[str, Statistics], features: Features, prompts: Sequence[tuple[str, Tensor]]
) -> float:
    """Accuracy of the published rule where its features are as good as they get: one number per token."""
    narrow = collect(statistics, features)
    score = votes(replace(narrow, features=Features.one_hot(features.tokenizer, buckets=features.buckets), grams={}))
    right = sum(narrow.names[int(score(prompt).argmax())] == name for name, prompt in prompts)
    return 100 * right / len(prompts)


def added_and_removed(setting: Setting, router: Router, splits: Mapping[str, Split], seed: int) -> tuple[float, bool]:
    """Accuracy with the late domains, and whether the router without them is the one that never had them."""
    more, all_splits = router, dict(splits)
    for name in setting.late:
        all_splits[name] = split_of(setting, name, seed)
        more = more.adding(name, counted(name, all_splits[name].train, router.features))
    if not setting.late:
        return float("nan"), True
    prompts = test_prompts(setting, all_splits, PROMPT, seed)
    less = more
    for name in setting.late:
        less = less.without(name)
    same = less.version == router.version and all(less.route(one) == router.route(one) for _, one in prompts[::20])
    return share_right(more, prompts), same


def federated(setting: Setting, peers: int, seed: int, documents: int = 60) -> bool:
    """Whether shuffled peers' sums give the router of one peer, bit for bit, by every rule."""
    chance, features = random.Random(seed), Features.random(tokenizer_of(setting), seed=seed)
    whole: dict[str, Statistics] = {}
    together: dict[str, Statistics] = {}
    for name in setting.domains:
        texts = split_of(setting, name, seed).train[:documents]
        whole[name] = counted(name, texts, features)
        chance.shuffle(texts)
        parts = [counted(name, texts[peer::peers], features, peer) for peer in range(peers)]
        chance.shuffle(parts)
        together[name] = merge(parts)
    return all(
        Router.fit(whole, features, rule).version == Router.fit(together, features, rule).version for rule in rules
    )


def routing_seconds(setting: Setting, seed: int = 0, repeats: int = 100) -> float:
    """CPU-seconds on one core to route one prompt of a thousand tokens, by the default rule; the median."""
    features = Features.random(tokenizer_of(setting))
    splits = {name: split_of(setting, name, seed) for name in setting.domains}
    router = Router.fit({name: counted(name, one.train[:50], features) for name, one in splits.items()}, features)
    prompts = draw_prompts(splits[setting.domains[0]].train, ROUTED, repeats, seed)
    return median(_timed(lambda prompt=prompt: router.route(prompt)) for prompt in prompts)


def fit_seconds(setting: Setting, seed: int = 0, documents: int = 8) -> dict[str, float]:
    """CPU-seconds on one core to fit the linear rules to features of width 2,048, without the counting."""
    features = Features.random(tokenizer_of(setting), WIDE)
    splits = {name: split_of(setting, name, seed) for name in setting.domains}
    statistics = {name: counted(name, one.train[:documents], features) for name, one in splits.items()}
    return {
        rule: _timed(lambda rule=rule: Router.fit(statistics, features, rule)) for rule in ("chunk", "votes", "bigram")
    }


def _timed(call) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def calibration_error(decisions: Sequence[tuple[str, Decision]]) -> float:
    """Expected calibration error with bins of equal width (Guo et al., arXiv 1706.04599)."""
    confidence = torch.tensor([decision.confidence for _, decision in decisions], dtype=torch.float64)
    right = torch.tensor([decision.expert == name for name, decision in decisions], dtype=torch.float64)
    bins = (confidence * BINS).ceil().clamp(1, BINS)
    error = 0.0
    for one in bins.unique():
        here = bins == one
        error += float(here.double().mean() * (right[here].mean() - confidence[here].mean()).abs())
    return error


def area_under_curve(known: Sequence[float], unknown: Sequence[float]) -> float:
    """Chance that a known prompt has the larger value (Mann and Whitney 1947); ties count half."""
    first, second = torch.tensor(known, dtype=torch.float64), torch.tensor(unknown, dtype=torch.float64).sort().values
    below = torch.searchsorted(second, first) + torch.searchsorted(second, first, right=True)
    return float(below.double().mean()) / 2 / len(second)


def normalised_score(owners: Sequence[int], choices: Sequence[int], log_probs: Tensor) -> float:
    """100 x perplexity of the own expert / perplexity of the chosen one; the mean over domains.

    Args:
        owners: domain of each of the P texts.
        choices: expert that each was routed to.
        log_probs: mean log-probability per token that each expert gives each text, (P, D), in nats.
    """
    own = log_probs[torch.arange(len(owners)), torch.tensor(owners)].double()
    chosen = log_probs[torch.arange(len(owners)), torch.tensor(choices)].double()
    domains = torch.tensor(owners)
    scores = [100 * (chosen[domains == one].mean() - own[domains == one].mean()).exp() for one in domains.unique()]
    return float(torch.stack(scores).mean())
