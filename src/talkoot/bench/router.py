"""Prompt routing on eight real domains: does a router that only counts send held-out prompts to the right expert?

All rules see the same counts. The published one (arXiv 2606.06098: linear scores of single tokens, the surest vote)
stands beside naive Bayes, beside nearest neighbours among sentence embeddings, and beside ours: a hashed language model
of pairs per domain. Its confidence is calibrated on validation prompts, and what its language models find strange is
taken for unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_router import (
    PROMPT,
    Setting,
    Trial,
    area_under_curve,
    calibration_error,
    federated,
    fit_seconds,
    routing_seconds,
    split_of,
    tokenizer_of,
    try_once,
)
from talkoot.bench.peer_router_rivals import MODEL, model_folder, neighbours_accuracy, routed_score
from talkoot.blend.router import Router
from talkoot.blend.statistics import Features, count
from talkoot.core.keys import Key

CLAIM = "A router fitted from counts alone sends held-out prompts to the right expert, and knows what it does not know"
RIGHT, SCORE, ERROR, UNKNOWN = 97.0, 98.4, 0.05, 0.9
FIT_S, ROUTE_S = 2.0, 1e-3
PEERS = (1, 3, 7)
QUICK = Setting(
    domains=("python", "kjv", "postgres", "anarchism", "hol-light"),
    late=(),
    megabytes=2.5,
    general_megabytes=0.8,
    prompts=200,
    neighbours=0,
    steps=(40, 60),
)


def measure(options: Options) -> Outcome:
    """All rules; ``quick``: five domains, less text, no sentence model, one seed."""
    setting = QUICK if options.quick else Setting()
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the figures do not depend on the machine's number of cores
    try:
        trials = [try_once(setting, seed) for seed in seeds]
        exact = {peers: federated(setting, peers, seeds[0]) for peers in PEERS}
        near, scores = _neighbours(setting, seeds[0]), _scores(setting, seeds[0], trials[0].chosen)
        route_s, fit_s = routing_seconds(setting), fit_seconds(setting)
    finally:
        torch.set_num_threads(threads)
    return Outcome(
        name="router",
        claim=CLAIM,
        world=f"{len(setting.domains)} corpora, {setting.megabytes} MB of each; held-out documents",
        unit=f"% of {PROMPT}-token prompts to the right expert",
        rows=tuple(rows(trials, near)),
        bars=tuple(bars(trials, scores, exact, route_s, fit_s)),
        notes=tuple(notes(setting, trials, scores, route_s, fit_s)),
    )


def _neighbours(setting: Setting, seed: int) -> float | None:
    folder = model_folder()
    if not setting.neighbours or folder is None:
        return None
    splits = {name: split_of(setting, name, seed) for name in setting.domains}
    return neighbours_accuracy(setting, splits, folder, seed)


def _scores(setting: Setting, seed: int, chosen: str) -> dict[str, float]:
    splits = {name: split_of(setting, name, seed) for name in setting.domains}
    features = Features.random(tokenizer_of(setting), seed=seed)
    counted = {name: count(name, split.train, features, Key.derived("bench")) for name, split in splits.items()}
    routers = {rule: Router.fit(counted, features, rule) for rule in {chosen, "votes", "naive-bayes"}}
    return routed_score(setting, splits, routers, seed)


def rows(trials: Sequence[Trial], near: float | None) -> list[Row]:
    """Every rule, the best first, then the baselines."""
    found = [
        Row(name=rule, values=tuple(one.accuracy[rule][PROMPT] for one in trials), note=_note(trials, rule))
        for rule in trials[0].accuracy
    ]
    found.sort(key=lambda row: -row.median)
    wide = Row(
        name="votes, one-hot",
        values=tuple(one.wide_votes for one in trials),
        note="the published rule with features as wide as the vocabulary",
    )
    others = [Row(name="oracle", values=(100.0,))]
    if near is not None:
        others.insert(0, Row(name="nearest neighbours", values=(near,), note=f"5 nearest by cosine, {MODEL}"))
    return [*found, wide, *others]


def _note(trials: Sequence[Trial], rule: str) -> str:
    lengths = trials[0].accuracy[rule]
    by_length = ", ".join(f"{n} tokens {fmean(t.accuracy[rule][n] for t in trials):.1f}" for n in lengths)
    return by_length + ("; chosen on validation prompts" if all(one.chosen == rule for one in trials) else "")


def bars(
    trials: Sequence[Trial], scores: dict[str, float], exact: dict[int, bool], route_s: float, fit_s: dict[str, float]
) -> list[Bar]:
    """The requirements; the worst seed decides each."""
    right = min(one.accuracy[one.chosen][PROMPT] for one in trials)
    error = max(calibration_error(one.decisions) for one in trials)
    unknown = min(separation(one) for one in trials)
    score = scores[trials[0].chosen]
    agree = sum(exact.values())
    traceless = sum(one.later[1] for one in trials)
    return [
        Bar(text=f"chosen rule, % of prompts right >= {RIGHT}", measured=right, holds=right >= RIGHT),
        Bar(text=f"its normalised score >= {SCORE}", measured=score, holds=score >= SCORE),
        Bar(text=f"its expected calibration error <= {ERROR}", measured=error, holds=error <= ERROR),
        Bar(text=f"unknown domains, area under the curve >= {UNKNOWN}", measured=unknown, holds=unknown >= UNKNOWN),
        Bar(text=f"routing 1,000 tokens on one core, s < {ROUTE_S}", measured=route_s, holds=route_s < ROUTE_S),
        Bar(
            text=f"fitting at width 2,048 on one core, s < {FIT_S}",
            measured=max(fit_s.values()),
            holds=max(fit_s.values()) < FIT_S,
        ),
        Bar(
            text=f"{', '.join(map(str, exact))} shuffled peers give one peer's router, bit for bit",
            measured=agree,
            holds=agree == len(exact),
        ),
        Bar(
            text="domains added and removed leave no trace, of all seeds",
            measured=traceless,
            holds=traceless == len(trials),
        ),
    ]


def separation(trial: Trial) -> float:
    """Area under the curve of familiarity: known domains' prompts against all probes'."""
    known = [decision.familiarity for _, decision in trial.decisions]
    return area_under_curve(known, [one.familiarity for found in trial.strangers.values() for one in found])


def notes(
    setting: Setting, trials: Sequence[Trial], scores: dict[str, float], route_s: float, fit_s: dict[str, float]
) -> list[str]:
    """What the bars leave out."""
    decisions = [pair for one in trials for pair in one.decisions]
    answered = [(name, one) for name, one in decisions if one.known]
    wrong = sum(one.expert != name for name, one in answered)
    passed = {name: fmean(d.known for t in trials for d in t.strangers[name]) for name in setting.probes}
    by_probe = {
        name: fmean(
            area_under_curve([d.familiarity for _, d in t.decisions], [d.familiarity for d in t.strangers[name]])
            for t in trials
        )
        for name in setting.probes
    }
    by_domain = {
        name: fmean(one.expert == domain for domain, one in decisions if domain == name) for name in setting.domains
    }
    later = [one.later[0] for one in trials]
    return [
        "the worst seed decides each bar; nearest neighbours among sentence embeddings are left out with --quick, and "
        f"where {MODEL.replace('_', '-')} is not installed",
        "right to each domain: " + ", ".join(f"{name} {100 * share:.1f}" for name, share in by_domain.items()),
        f"abstention: {100 * len(answered) / len(decisions):.1f} % of known domains' prompts are answered, "
        f"{100 * wrong / len(decisions):.2f} % of all go to a wrong expert (asked for: at most 2); answered of probes: "
        + ", ".join(f"{name} {100 * share:.1f} %" for name, share in passed.items()),
        "area under the curve by probe: " + ", ".join(f"{name} {area:.3f}" for name, area in by_probe.items()),
        "normalised score: " + ", ".join(f"{name} {score:.1f}" for name, score in scores.items()),
        *([] if math.isnan(later[0]) else [f"with {', '.join(setting.late)} added: {fmean(later):.1f} % right"]),
        f"routing {1e6 * route_s:.0f} us; fitting at width 2,048: "
        + ", ".join(f"{rule} {s:.2f} s" for rule, s in fit_s.items())
        + "; "
        + ", ".join(f"{what} {fmean(one.seconds[what] for one in trials):.2f} s" for what in trials[0].seconds),
    ]
