"""Pairs of unlike models that learn additions from each other's completions: what the bench ``unlike`` runs.

Every run is the shipping tuner in virtual time, and every figure is read from its signed log. Bases are warmed once and
exported; arms that are compared start from the same files, answer the same problems with the same seeds, and make the
same number of completions of their own. They differ only in what they do with those of the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from talkoot.core.fold import Entry, State
from talkoot.core.plain import build
from talkoot.tune.evaluate import Evaluation
from talkoot.tune.recipe import TuneRecipe, Warm
from talkoot.tune.records import Updated
from talkoot.tune.run import run_simulated

TASK = "addition:2"
EVALUATIONS = 4  # per run


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A model before it learns from rewards.

    Attributes:
        name: of its folder.
        width: of two blocks: 96 is 0.23 million parameters, 64 is 0.10 million.
        steps: of the warm start, 64 demonstrations each.
        habits: of the demonstrations.
        tokenizer: ``characters`` of the task, or ``bytes``.
    """

    name: str
    width: int = 96
    steps: int = 500
    habits: Mapping[str, Any] = {}
    tokenizer: str = "characters"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of a pair. ``prompts``: groups of its own per round; ``temperature``: of its sampling."""

    base: Base
    prompts: int = 16
    temperature: float = 1.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all arms of a comparison share.

    Attributes:
        name: in tables.
        sides: by the peers' names.
        rounds: one update each.
        rate: of AdamW.
        samples: completions per group.
        problems: of an evaluation, greedy and with 4 samples each.
    """

    name: str
    sides: Mapping[str, Side]
    rounds: int = 40
    rate: float = 1e-4
    samples: int = 12
    problems: int = 256

    @property
    def bases(self) -> tuple[Base, ...]:
        """Without repetition."""
        return tuple({side.base.name: side.base for side in self.sides.values()}.values())


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with completions of the other: nothing (``correction`` is None), or a recipe's correction."""

    name: str
    correction: Mapping[str, Any] | None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Scores after so many rounds: greedy accuracy and Avg@4 on held-out and on shifted problems."""

    round: int
    greedy: float
    avg: float
    shifted: float
    shifted_avg: float


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's run.

    Attributes:
        curve: its scores.
        generated: tokens of its own completions; ``own``, ``external``: groups that it learned from, per round.
        facts: what its updates said of themselves (ratios, divergences, filtered shares), mean over rounds.
        first: the same of the first update, when nobody has learned anything yet.
        rejected: completions and records that were refused.
    """

    curve: tuple[Point, ...]
    generated: int
    own: float
    external: float
    facts: Mapping[str, float]
    first: Mapping[str, float]
    rejected: int

    @property
    def last(self) -> Point:
        """Scores at the end."""
        return self.curve[-1]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a setting, by the peers' names. ``cpu_s``: of one thread, evaluations included."""

    setting: str
    arm: str
    seed: int
    peers: Mapping[str, Told]
    cpu_s: float


def folder_of(base: Base, seed: int, root: Path) -> Path:
    """Where a base is kept."""
    return root / f"{base.name}-{seed}"


def warm(base: Base, seed: int, root: Path) -> float:
    """Make a base and export it; returns CPU-seconds."""
    from talkoot.tune.policies.open import open_policy
    from talkoot.tune.policies.spec import ModelSpec
    from talkoot.tune.tasks import open_task
    from talkoot.tune.warm import warm_start

    started, task = time.process_time(), open_task(TASK, seed)
    spec = ModelSpec(width=base.width, context=64, tokenizer=base.tokenizer, seed=100 * seed + base.width)
    start = Warm(steps=base.steps, batch=64, habits=dict(base.habits))
    policy = open_policy(spec, task.alphabet)
    warm_start(policy, start.texts(task, seed), start.steps, start.batch, start.learning_rate, seed)
    policy.export(str(folder_of(base, seed, root)))
    return time.process_time() - started


def recipe_of(setting: Setting, arm: Arm, seed: int, root: Path) -> TuneRecipe:
    """The run as a user would write it. Alone = everything is exchanged, and nobody learns from it."""
    peers = [
        {
            "name": name,
            "model": {"load": str(folder_of(side.base, seed, root))},
            "rollout": {"prompts": side.prompts, "temperature": side.temperature},
        }
        for name, side in setting.sides.items()
    ]
    tree = {
        "name": "unlike",
        "task": TASK,
        "seed": seed,
        "tune": {
            "rounds": setting.rounds,
            "evaluate_every": max(1, setting.rounds // EVALUATIONS),
            "evaluate_items": setting.problems,
            "checkpoint_every": 0,
        },
        "rollout": {"samples": setting.samples},
        "exchange": {"external": 0} if arm.correction is None else {},
        "correction": dict(arm.correction or {}),
        "optimizer": {"learning_rate": setting.rate},
        "peers": peers,
    }
    return build(tree, TuneRecipe, what="the bench's recipe cannot be used", where=setting.name)


def learn(setting: Setting, arm: Arm, seed: int, root: Path) -> Trial:
    """Run it, and read its log; the bases must be there."""
    started = time.process_time()
    entries: list[Entry] = []
    states: list[State] = []

    def observe(entry: Entry, state: State) -> None:
        entries.append(entry)
        states[:] = [state]

    run_simulated(recipe_of(setting, arm, seed, root), None, observe)
    tuned = states[0]["tune"]
    updates: dict[str, list[Updated]] = {name: [] for name in setting.sides}
    for entry in entries:
        if entry.receipt.op == "tune.update":
            updates[tuned.names[entry.receipt.peer]].append(entry.receipt.read(Updated))
    peers = {
        name: told(found, tuned.peers[name].generated, sum(tuned.peers[name].rejected.values()))
        for name, found in updates.items()
    }
    cpu_s = time.process_time() - started
    return Trial(setting=setting.name, arm=arm.name, seed=seed, peers=peers, cpu_s=cpu_s)


def told(updates: Sequence[Updated], generated: int, rejected: int) -> Told:
    """A peer's receipts as figures."""
    names = sorted({name for update in updates for name in update.learned})
    facts = {name: fmean(u.learned[name] for u in updates if name in u.learned) for name in names}
    curve = [point(u.round + 1, u.evaluations) for u in updates if u.evaluations]
    return Told(
        curve=tuple(curve),
        generated=generated,
        own=fmean(u.counts.get("own_groups", 0) for u in updates),
        external=fmean(u.counts.get("external_groups", 0) for u in updates),
        facts=facts,
        first=dict(updates[0].learned),
        rejected=rejected,
    )


def point(rounds: int, evaluations: Iterable[Evaluation]) -> Point:
    """Scores of both splits as one point."""
    by = {one.split: one for one in evaluations}
    held, shifted = by["held_out"], by["shifted"]
    return Point(round=rounds, greedy=held.greedy, avg=held.avg, shifted=shifted.greedy, shifted_avg=shifted.avg)


def _warm(task: tuple[Base, int, Path]) -> float:
    import torch

    torch.set_num_threads(1)
    return warm(*task)


def _learn(task: tuple[Setting, Arm, int, Path]) -> Trial:
    import torch

    torch.set_num_threads(1)
    return learn(*task)


def learn_all(plan: Sequence[tuple[Setting, Arm, int]], root: Path) -> tuple[list[Trial], float]:
    """Many runs, as many at once as there are cores; each is the same whatever runs beside it.

    Returns:
        The trials in the plan's order, and CPU-seconds that the bases took.
    """
    bases = {(base.name, seed): base for setting, _, seed in plan for base in setting.bases}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        warmed = sum(pool.map(_warm, [(base, seed, root) for (_, seed), base in bases.items()]))
        return list(pool.map(_learn, [(*one, root) for one in plan])), warmed
