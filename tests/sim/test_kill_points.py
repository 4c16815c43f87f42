"""Kills at random points, hundreds of them: idle, in every phase, after the commit, inside recovery, one or several.

What is killed and when follows from the seed. Each run must end with a gap-free sequence of committed steps in which
each microbatch was counted once per stage, and no peer may have applied a step twice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
import pytest
from test_train_kit import simulate, tiny

from talkoot.core.fold import Entry
from talkoot.model.config import ModelConfig
from talkoot.run.records import Gone
from talkoot.train.compute import BlankStage
from talkoot.train.recipe import Recipe
from talkoot.train.records import Recovered, Worked
from talkoot.train.rehearse import rehearse
from talkoot.train.verify import examine
from talkoot.world.sim.simulation import Simulation

SEEDS, PER_TEST = 500, 50
RUNGS = ["shadow", "journal", "replay"]
CONFIG = ModelConfig(vocab_size=64, width=32, layers=4, heads=1, kv_heads=1, head_dim=32, hidden=64)


def recipe_of(seed: int) -> Recipe:
    chance = random.Random(seed)
    stages, replicas = chance.choice([(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (5, 1)])
    base = tiny(stages, replicas, steps=4, microbatches=4, checkpoint_every=2, planner="straight")
    ladder = ("replica", chance.choice(RUNGS), "checkpoint")
    model = msgspec.structs.replace(base.model, load=None)
    recovery = msgspec.structs.replace(base.recovery, ladder=ladder, refresh_every=2)
    return msgspec.structs.replace(base, seed=seed, model=model, recovery=recovery)


def kills(recipe: Recipe, seconds: float, seed: int) -> Callable[[Simulation], None]:
    """One to three kills at random times of an undisturbed run, some of them closely one after the other."""
    chance = random.Random(-seed - 1)
    names = sorted(recipe.swarm.peers)
    when = chance.uniform(0, seconds)

    def plan(simulation: Simulation) -> None:
        at = when
        for _ in range(chance.choice([1, 1, 2, 3])):
            simulation.loop.call_at(at, kill, simulation, chance.choice(names))
            at += chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, seconds)])  # the second: in recovery

    def kill(simulation: Simulation, name: str) -> None:
        with suppress(KeyError):  # not started yet
            simulation.kill(simulation.of(name))

    return plan


@cache
def undisturbed_seconds(seed: int) -> float:
    return rehearse(recipe_of(seed), CONFIG).seconds


def check_log(entries: list[Entry], recipe: Recipe) -> None:
    findings = examine(entries)
    assert findings.faults == ()
    assert findings.steps == recipe.train.steps
    by_id = {entry.id: entry.receipt for entry in entries}
    commits: dict[int, Entry] = {}
    for entry in entries:
        if entry.receipt.op == "train.rollback":
            commits = {step: commit for step, commit in commits.items() if step < entry.receipt.step}
        if entry.receipt.op == "train.commit":
            assert entry.receipt.step == len(commits), "a step is missing, or there twice"
            commits[entry.receipt.step] = entry
    counted: Counter[tuple[int, int, int]] = Counter()
    for step, commit in commits.items():
        for work in (by_id[parent].read(Worked) for parent in commit.receipt.parents):
            counted.update((step, work.stage, microbatch) for microbatch in work.microbatches)
    stages, microbatches = recipe.swarm.num_stages, recipe.train.microbatches
    once = {(s, g, m) for s in range(len(commits)) for g in range(stages) for m in range(microbatches)}
    assert counted == dict.fromkeys(once, 1)


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_wherever_peers_are_killed_each_step_is_committed_once_and_nobody_applies_it_twice(first, monkeypatch):
    applied: list[tuple[int, int]] = []
    real_begin, real_apply = BlankStage.begin, BlankStage.apply

    def begin(self: BlankStage, step: int, *rest: object) -> None:
        self.at = step
        real_begin(self, step, *rest)

    def apply(self: BlankStage, *rest: object) -> None:
        applied.append((id(self), self.at))
        real_apply(self, *rest)

    monkeypatch.setattr(BlankStage, "begin", begin)
    monkeypatch.setattr(BlankStage, "apply", apply)
    lost = recovered = 0
    for seed in range(first, first + PER_TEST):
        recipe = recipe_of(seed)
        seconds = undisturbed_seconds(seed)
        applied.clear()
        run = rehearse(recipe, CONFIG, started=kills(recipe, seconds, seed))
        assert run.result.finished, seed
        check_log(run.entries, recipe)
        lost += sum(entry.receipt.op == "peer.lost" for entry in run.entries)
        recovered += sum(entry.receipt.op == "train.recover" for entry in run.entries)
        rolled_back = any(entry.receipt.op == "train.rollback" for entry in run.entries)
        most = max(Counter(applied).values())
        assert most == 1 or rolled_back, f"seed {seed}: a stage applied one step {most} times"
    assert lost > PER_TEST / 2, "the kills strike"
    assert recovered > PER_TEST / 4


@pytest.mark.parametrize("seed", range(48))
def test_with_real_tensors_the_state_is_to_the_bit_that_of_a_run_without_kills(seed, tmp_path: Path):
    recipe = recipe_of(seed)
    recipe = msgspec.structs.replace(recipe, seed=3, model=tiny().model)  # two blocks: up to four stages
    if recipe.swarm.stages > 4:
        recipe = msgspec.structs.replace(recipe, swarm=msgspec.structs.replace(recipe.swarm, stages=4))
    clean = reference(recipe.swarm.stages, recipe.swarm.replicas)
    run = simulate(recipe, tmp_path, started=lambda lead, simulation: kills(recipe, clean[1], seed)(simulation))
    assert run.result.state_hash == clean[0]
    check_log(run.entries, recipe)


@cache
def reference(stages: int, replicas: int) -> tuple[str, float]:
    run = simulate(tiny(stages, replicas, steps=4, microbatches=4))
    return run.result.state_hash, run.entries[-1].receipt.ended


def test_the_seeds_do_what_they_are_for():
    """Losses in recovery, several in one run, every rung."""
    rungs: Counter[str] = Counter()
    several = 0
    for seed in range(80):
        recipe = recipe_of(seed)
        run = rehearse(recipe, CONFIG, started=kills(recipe, undisturbed_seconds(seed), seed))
        rungs.update(e.receipt.read(Recovered).rung for e in run.entries if e.receipt.op == "train.recover")
        several += len([e for e in run.entries if e.receipt.op == "peer.lost" and e.receipt.read(Gone).name]) > 1
    assert {"replica", "shadow", "journal", "replay", "checkpoint"} <= {
        rung for key in rungs for rung in key.split("+")
    }
    assert several > 15
