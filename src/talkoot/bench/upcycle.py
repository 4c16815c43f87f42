"""One mixture from five dense experts without training: how much of each expert's quality it keeps, by gate.

Score: per domain 100 x perplexity of its own dense expert / perplexity of the method, on held-out documents; a mean
over domains. Experts that trained only their feed-forward layers share the seed's trunk; those that trained everything
get the mean of theirs ("DUME", arXiv 2603.29765), and lose what no gate can repair. Every token is scored but for
``prompt``, where the router has seen the first 64 and those after them are scored, of the own expert too.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_upcycle import Arm, Scores, Setting, Trial, try_all

CLAIM = "Dense experts become one mixture of experts without training, and it keeps nearly all that they knew"
OURS = "bigram"
# Where states part the 256 tokens of a window, five experts' weights are read for what one's were: shown, not required.
UNBOUND = ("token, one window", "mean, one window")
PAPER, LEAST, OF_ORACLE, COST, EXACT = 91.0, 97.6, 94.0, 1.25, 1e-5
BASELINES = ("weight average", "random gates", "trained from random gates", "best single expert", "seed")
WORDS = {
    "own": "each domain's own dense expert",
    "paper": "the paper's gate: single states, ridge, columns of norm 1",
    "token": "gate on single states, ridge",
    "mean": "gate on the running mean of states, ridge",
    "naive-bayes": "gate by naive Bayes on the tokens so far",
    "bigram": "ours: gate by the domains' bigram models on the tokens so far",
    "prompt": "one expert per text, by naive Bayes on its first 64 tokens",
    "oracle": "one expert per text, the right one",
    "oracle, pinned trunk": "the right one, over the seed's trunk",
    "closed form, two experts": "gate on single states, ridge; two experts per token",
    "trained from random gates": "random gates, trained; two experts per token (BTX)",
    "trained from closed form": "closed-form gates, trained; two experts per token",
}


def measure(options: Options) -> Outcome:
    """All fusions; ``quick``: three domains, a smaller model, one seed; then the shares are shown and not required."""
    setting = Setting()
    if options.quick:
        setting = Setting(
            domains=("kjv", "postgres", "python"),
            general=("perl-manual",),
            megabytes=0.6,
            model={"width": 48, "layers": 2, "hidden": 192, "context": 128, "tokenizer": "bpe:1024"},
            general_steps=300,
            steps=100,
            tune_steps=30,
            windows=24,
            counted=128,
        )
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    with tempfile.TemporaryDirectory() as folder:
        trials = try_all(setting, seeds, Path(folder))
    return outcome(setting, trials, options.quick)


def outcome(setting: Setting, trials: Sequence[Trial], quick: bool) -> Outcome:
    """Rows, bars and notes of finished trials."""
    return Outcome(
        name="upcycle",
        claim=CLAIM,
        world=f"{len(setting.domains)} corpora, {sum(trial.cpu_s for trial in trials):,.0f} CPU-seconds in all",
        unit="100 x perplexity of the domain's own dense expert / perplexity, mean over domains",
        rows=tuple(rows(setting, trials)),
        bars=tuple(bars(setting, trials, quick)),
        notes=tuple(notes(setting, trials)),
        extras={"upcycle-domains.json": json.dumps(table(setting, trials), indent=1) + "\n"},
    )


def perplexity(scores: Scores, domain: str, first: int = 0) -> float:
    """Of the tokens from ``first`` on."""
    return math.exp(-float(scores[domain][:, first:].mean(dtype=float)))


def shares(setting: Setting, arm: Arm, method: str, first: int | None = None) -> dict[str, float]:
    """Score by domain; from the method's first scored token, or ``first``."""
    if first is None:
        first = setting.prompt if method == "prompt" else 0
    found, own = arm.scores[method], arm.scores["own"]
    return {name: 100 * perplexity(own, name, first) / perplexity(found, name, first) for name in setting.domains}


def score(setting: Setting, arm: Arm, method: str, first: int | None = None) -> float:
    """Mean over domains."""
    if method == "best single expert":
        return max(score(setting, arm, f"expert {name}", first) for name in setting.domains)
    return fmean(shares(setting, arm, method, first).values())


def table(setting: Setting, trials: Sequence[Trial]) -> dict[str, object]:
    """Everything by arm, method and domain, one value per seed."""
    return {
        trained: {
            method: {
                name: [shares(setting, trial.arms[trained], method)[name] for trial in trials]
                for name in setting.domains
            }
            for method in trials[0].arms[trained].scores
        }
        for trained in trials[0].arms
    }


def rows(setting: Setting, trials: Sequence[Trial]) -> Iterator[Row]:
    """Every method, for experts that trained only their feed-forward layers, then for those that trained all."""
    for trained, words in (("mlp", "MLP-only"), ("all", "all weights")):
        arms = [trial.arms[trained] for trial in trials]
        for method in [name for name in arms[0].scores if not name.startswith("expert ") and name != "own"]:
            accuracy = [arm.accuracy[method] for arm in arms if method in arm.accuracy]
            right = f"; {100 * fmean(accuracy):.0f} % of choices right" if accuracy else ""
            yield Row(
                name=f"{words}: {method}",
                values=tuple(score(setting, arm, method) for arm in arms),
                note=WORDS.get(method, "") + right,
            )
        yield Row(
            name=f"{words}: best single expert",
            values=tuple(score(setting, arm, "best single expert") for arm in arms),
        )
    for name in trials[0].arms["mlp"].cost:
        yield Row(name=f"cost: {name}", values=tuple(trial.arms["mlp"].cost[name] for trial in trials))


def bars(setting: Setting, trials: Sequence[Trial], quick: bool) -> Iterator[Bar]:
    """The worst seed counts."""
    arms, full = [trial.arms["mlp"] for trial in trials], [trial.arms["all"] for trial in trials]
    apart = max(arm.difference for arm in arms)
    text = f"forced experts - dense experts, logits, MLP-only on the pinned trunk <= {EXACT}"
    yield Bar(text=text, measured=apart, holds=apart <= EXACT and all(arm.exact for arm in arms))
    cost = max(value for arm in arms for name, value in arm.cost.items() if name not in UNBOUND)
    if not quick:
        text = f"CPU-seconds, mixture / dense expert <= {COST} (batch of windows, one token; one window: {OURS})"
        yield Bar(text=text, measured=cost, holds=cost <= COST)
    for method, least in () if quick else (("paper", PAPER), (OURS, LEAST)):
        worst = min(score(setting, arm, method) for arm in arms)
        yield Bar(text=f"{WORDS[method]} >= {least}", measured=worst, holds=worst >= least)
    for method in BASELINES:
        ahead = min(score(setting, arm, OURS) - score(setting, arm, method) for arm in arms)
        yield Bar(text=f"{OURS} - {method} > 0", measured=ahead, holds=ahead > 0)
    kept = min(100 * score(setting, arm, OURS) / score(setting, arm, "oracle") for arm in full)
    if not quick:
        text = f"all weights: {OURS} / its oracle >= {OF_ORACLE} %"
        yield Bar(text=text, measured=kept, holds=kept >= OF_ORACLE)


def notes(setting: Setting, trials: Sequence[Trial]) -> Iterator[str]:
    """What the rows do not show."""
    own = {
        trained: ", ".join(
            f"{name} {fmean(perplexity(trial.arms[trained].scores['own'], name) for trial in trials):.1f}"
            for name in setting.domains
        )
        for trained in trials[0].arms
    }
    yield f"perplexity of the dense experts: MLP-only {own['mlp']}; all weights {own['all']}"
    price = [100 - score(setting, trial.arms["all"], "oracle") for trial in trials]
    pinned = [100 - score(setting, trial.arms["all"], "oracle, pinned trunk") for trial in trials]
    yield (
        f"the trunk's price for experts that trained all weights: {fmean(price):.1f} points with the mean trunk, "
        f"{fmean(pinned):.1f} with the seed's; MLP-only experts pay 0, to the bit"
    )
    late = {
        m: fmean(score(setting, t.arms["mlp"], m, setting.prompt) for t in trials) for m in (OURS, "mean", "prompt")
    }
    found = ", ".join(f"{name} {value:.1f}" for name, value in late.items())
    yield f"on tokens after the first {setting.prompt} alone: {found}"
    merged = ", ".join(
        f"{name} {fmean(perplexity(t.arms['mlp'].scores[OURS], name) for t in trials):.1f} and "
        f"{fmean(perplexity(t.arms['all'].scores[OURS], name) for t in trials):.1f}"
        for name in setting.domains
    )
    yield f"perplexity of the mixtures ({OURS}), MLP-only and all weights: {merged}"
    yield "published (115 million parameters, five M2D2 domains): up to 97.6 % of the dense experts kept"
