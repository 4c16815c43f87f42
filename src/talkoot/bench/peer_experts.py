"""What the experts bench measures: ensembles of experts at equal compute on real text, by what each gives every token.

All plans of one seed share their runs: an expert of 150 steps is the 150th step of the run that goes on to 250 (one
schedule for all, as in arXiv 2502.19385), so a model of one size is trained once per domain.
"""

from __future__ import annotations

import decimal
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from talkoot.blend.ensemble.posterior import Prior, mix
from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.train.jobs import Job
from talkoot.blend.train.learner import Learner, from_bytes, held_out_loss, held_out_rows
from talkoot.blend.train.peer import step_flops
from talkoot.blend.train.texts import domain_tokens, general_tokens, prepare_tokenizer
from talkoot.core.plain import build
from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.plan.experts import Assigned, Budget, Curve, allocate, classify, fit_curve

Floats = NDArray[np.float64]
Model = tuple[str, str, int]  # size, domain, steps
OPPOSITE = {"easy": "hard", "medium": "medium", "hard": "easy"}
EXPERTS = {"steps": 160, "horizon": 240, "trial_steps": 24, "warmup": 8}
DIGITS = 60  # of the reference arithmetic


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is the same for all seeds.

    Attributes:
        domains: trained on; ``others``: looked at only.
        general: sources of the text that experts begin with.
        megabytes: of each corpus.
        experts, model: sections of the recipe.
        general_steps: of the model that experts begin as.
        allocations: plans that are compared; ``reversed`` is ``steps`` with easy and hard exchanged.
        windows: of held-out text per domain.
    """

    domains: tuple[str, ...] = ("kjv", "postgres", "anarchism", "python", "hol-light")
    others: tuple[str, ...] = ("wordnet", "go", "licences")
    general: tuple[str, ...] = ("perl-manual", "elisp", "gcide")
    megabytes: float = 2.5
    experts: Mapping[str, object] = msgspec.field(default_factory=lambda: dict(EXPERTS))
    model: Mapping[str, object] = msgspec.field(default_factory=dict)
    general_steps: int = 240
    allocations: tuple[str, ...] = ("homogeneous", "steps", "sizes", "sizes-and-steps", "marginal", "reversed")
    windows: int = 24

    def recipe(self, seed: int) -> BlendRecipe:
        """The recipe that a user would write for this."""
        tree = {
            "seed": seed,
            "model": dict(self.model),
            "general": {
                "sources": [f"corpus:{name}" for name in self.general],
                "steps": self.general_steps,
                "megabytes": self.megabytes,
            },
            "experts": {**self.experts, "evaluate_windows": self.windows},
            "domains": [
                {"name": name, "source": f"corpus:{name}", "megabytes": self.megabytes}
                for name in (*self.domains, *self.others)
            ],
        }
        return build(tree, BlendRecipe, what="the bench's recipe", where="bench experts")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation of one seed: the plan, and how far its compute is off."""

    name: str
    plan: tuple[Assigned, ...]
    flops: float

    @property
    def models(self) -> dict[str, Model]:
        """The expert of each domain."""
        return {one.domain: (one.size, one.domain, one.steps) for one in self.plan}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One seed.

    Attributes:
        plans: by allocation.
        classes: estimated difficulty of each domain; ``curves``: how each is learned.
        log_probs: of each model (and of ``general``) on each domain's test windows, (W, T).
        validation: the same on validation windows, for the experts of the homogeneous plan.
        budget: operations that every plan is to cost.
        cpu_s: seconds of work.
    """

    seed: int
    plans: dict[str, Plan]
    classes: dict[str, str]
    curves: dict[str, Curve]
    log_probs: dict[tuple[str, Model], Floats]
    validation: dict[tuple[str, Model], Floats]
    budget: float
    cpu_s: float


GENERAL: Model = ("medium", "", 0)


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work for another process: a model's run with the steps at which its weights are wanted."""

    setting: Setting
    seed: int
    folder: str
    size: str
    domain: str = ""
    marks: tuple[int, ...] = ()
    start: bytes = b""


class _Made(msgspec.Struct, frozen=True):
    """Weights by number of steps, held-out losses of a trial by number of steps, and seconds."""

    weights: dict[int, bytes]
    losses: dict[int, float]
    cpu_s: float


def try_all(setting: Setting, seeds: Sequence[int], folder: Path) -> list[Trial]:
    """Every seed's trial; on all processors."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [_trial(setting, seed, folder / str(seed), pool) for seed in seeds]


def _trial(setting: Setting, seed: int, folder: Path, pool: ProcessPoolExecutor) -> Trial:
    recipe = setting.recipe(seed)
    folder.mkdir(parents=True, exist_ok=True)
    prepare_tokenizer(recipe, folder)
    configs = _configs(recipe, folder)
    ask = {"setting": setting, "seed": seed, "folder": str(folder)}
    general_tokens(recipe, Tokenizer.load(folder / "tokenizer"), folder)
    sizes = ("small", "medium", "large")
    made = pool.map(_general, [_Work(**ask, size=size) for size in sizes])
    general = dict(zip(sizes, made, strict=True))
    starts = {size: one.weights[0] for size, one in general.items()}
    tries = list(
        pool.map(_try, [_Work(**ask, size="medium", domain=d, start=starts["medium"]) for d in setting.domains])
    )
    curves = {name: fit_curve(sorted(one.losses.items())) for name, one in zip(setting.domains, tries, strict=True)}
    classes = classify(curves, recipe.experts.steps)
    experts, context = recipe.experts, recipe.model.context
    costs = {size: step_flops(config, experts.batch, context) for size, config in configs.items()}
    budget = Budget(domains=classes, step_flops=costs, steps=experts.steps, shift=experts.shift, curves=curves)
    plans = {name: _plan(name, budget) for name in setting.allocations}
    wanted: dict[tuple[str, str], set[int]] = {}
    for plan in plans.values():
        for size, domain, steps in plan.models.values():
            wanted.setdefault((size, domain), set()).add(steps)
    asked = [
        _Work(**ask, size=size, domain=domain, marks=tuple(sorted(marks)), start=starts[size])
        for (size, domain), marks in sorted(wanted.items(), key=lambda pair: -max(pair[1]))
    ]
    runs = list(pool.map(_train, asked))
    weights: dict[Model, bytes] = {GENERAL: starts["medium"]}
    for work, run in zip(asked, runs, strict=True):
        weights |= {(work.size, work.domain, steps): blob for steps, blob in run.weights.items()}
    spent = sum(one.cpu_s for one in (*general.values(), *tries, *runs))
    names = (*setting.domains, *setting.others)
    scores = pool.map(_score, [(ask, model, blob, names, "test") for model, blob in weights.items()])
    equal = plans["homogeneous"].models.values()
    checks = pool.map(_score, [(ask, model, weights[model], setting.domains, "validation") for model in equal])
    return Trial(
        seed=seed,
        plans=plans,
        classes=classes,
        curves=curves,
        log_probs={(d, m): v for m, found in zip(weights, scores, strict=True) for d, v in found.items()},
        validation={(d, m): v for m, found in zip(equal, checks, strict=True) for d, v in found.items()},
        budget=budget.flops,
        cpu_s=spent,
    )


def _plan(name: str, budget: Budget) -> Plan:
    asked = budget
    if name == "reversed":
        opposite = {domain: OPPOSITE[one] for domain, one in budget.domains.items()}
        asked = msgspec.structs.replace(budget, domains=opposite)
    plan = allocate("steps" if name == "reversed" else name, asked)
    return Plan(name=name, plan=plan, flops=sum(one.flops for one in plan))


def _configs(recipe: BlendRecipe, folder: Path) -> dict[str, ModelConfig]:
    tokenizer = Tokenizer.load(folder / "tokenizer")
    return recipe.configs(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id or 0)


def _learner(work: _Work, kind: str) -> tuple[Learner, BlendRecipe, Path, Tokenizer]:
    torch.set_num_threads(1)
    recipe, folder = work.setting.recipe(work.seed), Path(work.folder)
    steps = recipe.general.steps if kind == "general" else recipe.experts.span
    job = Job(name=kind, kind=kind, domain=work.domain, size=work.size, steps=steps)
    config = _configs(recipe, folder)[work.size]
    return Learner(recipe, job, config, work.start), recipe, folder, Tokenizer.load(folder / "tokenizer")


def _general(work: _Work) -> _Made:
    started = time.process_time()
    learner, recipe, folder, tokenizer = _learner(work, "general")
    learner.advance(general_tokens(recipe, tokenizer, folder).tokens, recipe.general.steps)
    return _Made({0: learner.result()}, {}, time.process_time() - started)


def _try(work: _Work) -> _Made:
    started = time.process_time()
    learner, recipe, folder, tokenizer = _learner(work, "trial")
    tokens = domain_tokens(recipe, work.domain, "train", tokenizer, folder).tokens
    held = domain_tokens(recipe, work.domain, "validation", tokenizer, folder).tokens
    steps, losses = recipe.experts.trial_steps, {}
    for until in sorted({0, steps // 4, steps // 2, steps}):
        if until:
            learner.advance(tokens, until)
        losses[until] = held_out_loss(learner.stage, held, recipe.model.context, recipe.experts.evaluate_windows)
    return _Made({}, losses, time.process_time() - started)


def _train(work: _Work) -> _Made:
    started = time.process_time()
    learner, recipe, folder, tokenizer = _learner(work, "expert")
    tokens = domain_tokens(recipe, work.domain, "train", tokenizer, folder).tokens
    found = {}
    for until in work.marks:
        learner.advance(tokens, until)
        found[until] = learner.result()
    return _Made(found, {}, time.process_time() - started)


def _score(asked: tuple[dict[str, object], Model, bytes, Sequence[str], str]) -> dict[str, Floats]:
    """Log-probability that a model gives each token of each domain's windows, (W, T)."""
    ask, model, blob, names, part = asked
    work = _Work(**ask, size=model[0])  # type: ignore[arg-type]
    torch.set_num_threads(1)
    recipe, folder = work.setting.recipe(work.seed), Path(work.folder)
    config, tokenizer = _configs(recipe, folder)[work.size], Tokenizer.load(folder / "tokenizer")
    stage = Stage(config, 0, config.layer_count)
    stage.load(from_bytes(blob)[0])
    length = recipe.model.context
    found = {}
    for name in names:
        tokens = domain_tokens(recipe, name, part, tokenizer, folder).tokens
        rows = held_out_rows(tokens, length, work.setting.windows)
        found[name] = np.concatenate([_log_probs(stage, rows[at : at + 8]) for at in range(0, len(rows), 8)])
    return found


@torch.no_grad()
def _log_probs(stage: Stage, rows: torch.Tensor) -> Floats:
    logits = stage(rows[:, :-1]).double().log_softmax(-1)
    return logits.gather(-1, rows[:, 1:, None])[..., 0].numpy()


def perplexity(log_probs: Floats) -> float:
    """Of all tokens together."""
    return float(np.exp(-log_probs.mean()))


def mixed(heard: Sequence[Floats], prior: Prior) -> Floats:
    """The ensemble's log-probabilities, (W, T), from each expert's: every window is a text of its own."""
    return np.stack([mix(np.stack(one), prior).log_probs for one in zip(*heard, strict=True)])


def largest_regret(heard: Sequence[Floats], ensemble: Floats, prior: Prior) -> float:
    """By how much, in nats, any window's code length exceeds what the bound allows it: at most 0 where it holds."""
    lengths = np.stack([-one.sum(axis=1) for one in heard])  # (K, W)
    allowed = (lengths - prior.log_weights[:, None]).min(axis=0)
    return float((-ensemble.sum(axis=1) - allowed).max())


@cache
def _context() -> decimal.Context:
    return decimal.Context(prec=DIGITS)


def difference_to_bayes(heard: Sequence[Floats], ensemble: Floats, prior: Prior, windows: Iterable[int]) -> float:
    """Largest difference, in nats per token, to Bayes' mixture worked out as it is written, in sixty digits: the
    probability of a text is the sum over experts of prior times product, and a token's the ratio of two of those."""
    context, worst = _context(), 0.0
    for window in windows:
        weights = [context.exp(decimal.Decimal(float(one))) for one in prior.log_weights]
        before = sum(weights, decimal.Decimal(0))
        for place in range(ensemble.shape[1]):
            steps = [context.exp(decimal.Decimal(float(one[window, place]))) for one in heard]
            weights = [context.multiply(w, step) for w, step in zip(weights, steps, strict=True)]
            total = decimal.Decimal(0)
            for weight in weights:
                total = context.add(total, weight)
            wanted = float(context.ln(context.divide(total, before)))
            worst = max(worst, abs(wanted - float(ensemble[window, place])))
            before = total
    return worst
