"""Ensembles of domain experts at equal compute: is it better to give harder domains more steps, or larger models?

arXiv 2502.19385 found unlike experts better in 20 of 21 domains at 12-layer models and 400 steps of 688,128 tokens.
Here every allocation spends the same operations to within a hundredth, on five real domains; difficulty is estimated
from a short trial. Each domain's perplexity is that of the whole ensemble (posterior over experts, uniform prior) on
held-out documents; three further domains that nobody trained on are looked at, too.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_experts import (
    GENERAL,
    Floats,
    Setting,
    Trial,
    difference_to_bayes,
    largest_regret,
    mixed,
    perplexity,
    try_all,
)
from talkoot.blend.ensemble.posterior import Prior
from talkoot.blend.ensemble.priors import priors
from talkoot.plan.experts import TOLERANCE

CLAIM = "Ensembles of unlike experts cost exactly what equal ones do; what harder domains gain, easier ones pay"
EQUAL = "homogeneous"
Score = Callable[[Trial, str], float]
BAYES, ROUNDING = 1e-10, 1e-9  # nats
WINDOWS = 4  # per domain, worked out in sixty digits


def measure(options: Options) -> Outcome:
    """All allocations; ``quick``: three domains, three allocations, small models, one seed."""
    setting = Setting()
    if options.quick:
        setting = Setting(
            domains=("kjv", "postgres", "python"),
            others=("anarchism",),
            general=("perl-manual",),
            megabytes=0.6,
            experts={"steps": 80, "horizon": 100, "trial_steps": 8, "batch": 4},
            model={"width": 48, "layers": 2, "hidden": 192, "context": 128, "tokenizer": "bpe:1024"},
            general_steps=60,
            allocations=(EQUAL, "steps", "sizes"),
            windows=12,
        )
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    with tempfile.TemporaryDirectory() as folder:
        trials = try_all(setting, seeds, Path(folder))
    return Outcome(
        name="experts",
        claim=CLAIM,
        world=f"{len(setting.domains)} corpora, {sum(trial.cpu_s for trial in trials):,.0f} CPU-seconds of training",
        unit="geometric mean of the domains' held-out perplexities under the ensemble",
        rows=tuple(rows(setting, trials)),
        bars=tuple(bars(setting, trials)),
        notes=tuple(notes(setting, trials)),
        extras={"experts-domains.json": json.dumps(table(setting, trials), indent=1) + "\n"},
    )


def heard(trial: Trial, allocation: str, domain: str) -> list[Floats]:
    """What each expert of an allocation gives a domain's text."""
    return [trial.log_probs[domain, model] for model in trial.plans[allocation].models.values()]


def uniform(experts: int) -> Prior:
    """Every expert alike."""
    return priors["uniform"](experts, np.empty((0, experts)))


def ensemble(trial: Trial, allocation: str, domain: str) -> float:
    """Perplexity of a domain under the posterior ensemble."""
    found = heard(trial, allocation, domain)
    return perplexity(mixed(found, uniform(len(found))))


def table(setting: Setting, trials: Sequence[Trial]) -> dict[str, dict[str, list[float]]]:
    """Perplexities by allocation and domain, one per seed."""
    names = (*setting.domains, *setting.others)
    return {one: {d: [ensemble(trial, one, d) for trial in trials] for d in names} for one in setting.allocations}


def geometric(values: Sequence[float]) -> float:
    """Their geometric mean."""
    return math.exp(fmean(map(math.log, values)))


def rows(setting: Setting, trials: Sequence[Trial]) -> Iterator[Row]:
    """Every allocation, then other ways to use the equal experts."""
    for one in setting.allocations:
        unseen = [geometric([ensemble(t, one, d) for d in setting.others]) for t in trials]
        yield Row(
            name=one,
            values=tuple(geometric([ensemble(t, one, d) for d in setting.domains]) for t in trials),
            note=f"domains that nobody trained on: {fmean(unseen):.1f}",
        )
    for name, value in _others(setting):
        yield Row(
            name=f"{EQUAL}: {name}",
            values=tuple(geometric([value(t, d) for d in setting.domains]) for t in trials),
        )


def _others(setting: Setting) -> list[tuple[str, Score]]:
    def single(trial: Trial, domain: str) -> float:
        models = trial.plans[EQUAL].models.values()
        best = min(models, key=lambda m: geometric([perplexity(trial.log_probs[d, m]) for d in setting.domains]))
        return perplexity(trial.log_probs[domain, best])

    def by(rule: str) -> Score:
        def score(trial: Trial, domain: str) -> float:
            models = list(trial.plans[EQUAL].models.values())
            held = np.concatenate(
                [np.stack([trial.validation[d, m].sum(axis=1) for m in models], axis=1) for d in setting.domains]
            )
            shuffled = np.random.default_rng(trial.seed).permutation(held)
            return perplexity(mixed(heard(trial, EQUAL, domain), priors[rule](len(models), shuffled)))

        return score

    return [
        ("each domain's own expert", lambda t, d: perplexity(t.log_probs[d, t.plans[EQUAL].models[d]])),
        ("cached prior", by("cached")),
        ("average of probabilities", by("simple")),
        ("best single expert", single),
        ("the general model", lambda t, d: perplexity(t.log_probs[d, GENERAL])),
    ]


def bars(setting: Setting, trials: Sequence[Trial]) -> Iterator[Bar]:
    """What must hold; who wins is reported, not required."""
    names = (*setting.domains, *setting.others)
    apart = regret = 0.0
    for trial in trials:
        for domain in names:
            found = heard(trial, EQUAL, domain)
            prior = uniform(len(found))
            mixture = mixed(found, prior)
            apart = max(apart, difference_to_bayes(found, mixture, prior, range(min(WINDOWS, len(mixture)))))
            regret = max(regret, largest_regret(found, mixture, prior))
    yield Bar(text=f"posterior - Bayes' mixture in sixty digits <= {BAYES}, nats", measured=apart, holds=apart <= BAYES)
    text = "code length beyond best expert's - log prior, worst of all windows, <= 0 (nats, but for rounding)"
    yield Bar(text=text, measured=regret, holds=regret <= ROUNDING)
    off = max(abs(plan.flops / trial.budget - 1) for trial in trials for plan in trial.plans.values())
    yield Bar(
        text=f"difference in training compute between any two plans' budgets <= {TOLERANCE}",
        measured=off,
        holds=off <= TOLERANCE,
    )


def notes(setting: Setting, trials: Sequence[Trial]) -> Iterator[str]:
    """Per domain, each allocation against the homogeneous one: change in per cent with its spread, won or lost."""
    found = table(setting, trials)
    for one in setting.allocations:
        if one == EQUAL:
            continue
        won = 0
        told = []
        for domain in (*setting.domains, *setting.others):
            change = [100 * (b / a - 1) for a, b in zip(found[EQUAL][domain], found[one][domain], strict=True)]
            won += fmean(change) < 0
            spread = f" +- {stdev(change):.1f}" if len(change) > 1 else ""
            word = "won" if all(c < 0 for c in change) else "lost" if all(c > 0 for c in change) else "undecided"
            told.append(f"{domain} {fmean(change):+.1f}{spread} ({word})")
        yield f"{one} against {EQUAL}, % of perplexity: {', '.join(told)}; better in {won} of {len(told)}"
    for trial in trials:
        plan = {one: [f"{a.size} {a.steps}" for a in trial.plans[one].plan] for one in setting.allocations}
        classes = ", ".join(
            f"{d} {trial.classes[d]} ({c.start:.2f} - {c.slope:.2f} log(1 + t))" for d, c in trial.curves.items()
        )
        yield f"seed {trial.seed}: {classes}; " + "; ".join(f"{one}: {', '.join(p)}" for one, p in plan.items())
    yield "published (12 layers, 92 to 135 million parameters): unlike experts best in 20 of 21 domains"
