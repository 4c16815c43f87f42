"""What the critique bench measures: one base, three ways to learn from the same number of its own rollouts.

The base is warm-started on additions in which carries are often forgotten, so that it knows the form; a share of the
demonstrations has a right trace in the context slot, which teaches it to copy from there, and that makes it a teacher
of itself. The slice to learn is hard: every column carries. All arms draw problems and tokens from the same addresses.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import islice
from multiprocessing import get_context
from statistics import fmean

import msgspec
import torch
from torch import Tensor

from talkoot.model.config import ModelConfig
from talkoot.model.tokenizer import Tokenizer
from talkoot.tune.completion import PromptRef, Sampling, seeds_of
from talkoot.tune.corrections import Correction
from talkoot.tune.distil.critics import CriticSettings, open_critic
from talkoot.tune.distil.learner import DistilLearner
from talkoot.tune.distil.lessons import prepare
from talkoot.tune.distil.localise import Localisation, localise
from talkoot.tune.distil.settings import Distillation
from talkoot.tune.evaluate import evaluate
from talkoot.tune.objective.learner import Learner
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.objective.settings import Optimizer
from talkoot.tune.objective.switches import make_objective
from talkoot.tune.policies.native import NativePolicy
from talkoot.tune.tasks.addition import Addition, Habits
from talkoot.tune.tasks.splits import HELD_OUT, TRAIN
from talkoot.tune.tasks.task import Item
from talkoot.tune.tasks.traces import columns, parse, worked
from talkoot.tune.warm import warm_start


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is the same for all arms.

    Attributes:
        swapped: share of the demonstrated steps with their operands in the other order: a rollout then goes another way
            than the worked solution, although both are right.
        warm_steps, warm_batch, warm_rate: of the warm start.
        rate: of AdamW, for all arms.
        batch: rollouts of an update, for all arms.
        group: rollouts of one problem, where rewards are compared.
        marks: numbers of rollouts after which a policy is evaluated.
        blamed: batches of the base's rollouts in which the blame is located.
        problems: held-out problems of an evaluation (all, where there are fewer), ``samples`` answers each.
    """

    swapped: float = 0.2
    warm_steps: int = 700
    warm_batch: int = 128
    warm_rate: float = 3e-3
    rate: float = 1e-4
    batch: int = 32
    group: int = 8
    marks: tuple[int, ...] = (320, 640, 1280)
    blamed: int = 8
    problems: int = 256
    samples: int = 12


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One way to learn. ``critic`` none: from the reward alone, in groups; else from hints, each rollout by itself.
    ``one_order``: worked solutions are the task's own, all in one order, instead of by authors of different taste."""

    name: str
    critic: str
    divergence: str = "reverse"
    one_order: bool = False


BINARY = Condition(name="binary reward", critic="none")
REFERENCE = Condition(name="reference solution", critic="reference")
ONE_ORDER = Condition(name="reference in one order", critic="reference", one_order=True)
ALIGNED = Condition(name="step-aligned critique", critic="arithmetic")
FORWARD = (
    Condition(name="reference solution, forward", critic="reference", divergence="forward"),
    Condition(name="step-aligned critique, forward", critic="arithmetic", divergence="forward"),
)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out measures after so many rollouts: Avg@n, Pass@n, Maj@n and greedy accuracy."""

    rollouts: int
    avg: float
    passed: float
    majority: float
    greedy: float


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy orders the operands of its steps, where that makes a difference; None where there is none such.

    Attributes:
        swapped: share of the steps whose operands stand in the other order than in the problem.
        right_plain, right_swapped: share of the steps in either order that are right.
    """

    swapped: float | None
    right_plain: float | None
    right_swapped: float | None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One arm with one seed.

    Attributes:
        swapped: of the demonstrations that its base learned from.
        localisation: of the base's rollouts, before anything is learned.
        before, after: how the base and the learned policy order their operands.
        cpu_s: of learning and its evaluations, one thread.
    """

    condition: str
    swapped: float
    seed: int
    curve: tuple[Point, ...]
    localisation: Localisation
    before: Manner
    after: Manner
    cpu_s: float


Learn = Callable[[list[Item], list[ScoredGroup]], object]


def tasks() -> tuple[Addition, Addition]:
    """All of the additions, and the slice where every column carries."""
    return Addition(2), Addition(2, hard=True)


def fresh_policy(seed: int) -> NativePolicy:
    """An untrained model of 0.24 million parameters over the task's characters."""
    tokenizer = Tokenizer.characters(Addition.alphabet)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        width=96,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=24,
        hidden=256,
        max_positions=96,
        bos_id=tokenizer.bos_id,
        eos_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
    )
    return NativePolicy.fresh(config, tokenizer, seed)


@cache
def base(setting: Setting, seed: int) -> Mapping[str, Tensor]:
    """Weights of the warm-started model with this seed; computed once per process."""
    everything, _ = tasks()
    policy = fresh_policy(seed)
    shown = islice(
        everything.demonstrations(seed, Habits(swapped=setting.swapped)), setting.warm_steps * setting.warm_batch
    )
    warm_start(policy, shown, setting.warm_steps, setting.warm_batch, setting.warm_rate, seed)
    return policy.state()


def policy_of(weights: Mapping[str, Tensor]) -> NativePolicy:
    """A policy of its own with these weights."""
    policy = fresh_policy(0)
    policy.load_state(dict(weights))
    return policy


def examine(setting: Setting, policy: NativePolicy, rollouts: int, seed: int) -> Point:
    """Evaluate on the held-out problems of the hard slice."""
    _, hard = tasks()
    sampling = Sampling(max_new_tokens=hard.max_new_tokens)
    found = evaluate(
        policy, hard, HELD_OUT, problems=setting.problems, samples=setting.samples, sampling=sampling, seed=seed
    )
    return Point(rollouts=rollouts, avg=found.avg, passed=found.passed, majority=found.majority, greedy=found.greedy)


def collect(
    setting: Setting, policy: NativePolicy, number: int, group: int, seed: int, one_order: bool = False
) -> tuple[list[Item], list[ScoredGroup]]:
    """The rollouts of one update: ``batch`` in groups of ``group``, on problems drawn by (seed, number)."""
    _, hard = tasks()
    rng = random.Random(f"{seed}/{number}")
    refs = [
        PromptRef(hard.digest(), hard.index(TRAIN, rng.randrange(hard.size(TRAIN))))
        for _ in range(setting.batch // group)
    ]
    items = [hard.item(ref.index) for ref in refs]
    if not one_order:
        items = [_solved_by_somebody(setting, item) for item in items]
    prompts = [policy.prompt_ids(item.prompt) for item in items]
    # A problem that is drawn twice is answered anew: its draws are numbered by their place in the batch.
    seeds = [seeds_of(seed, number, ref, range(place * group, (place + 1) * group)) for place, ref in enumerate(refs)]
    answers = policy.generate(prompts, seeds, Sampling(max_new_tokens=hard.max_new_tokens))
    groups = []
    for item, prompt, completions in zip(items, prompts, answers, strict=True):
        samples = []
        for one in completions:
            earned = hard.reward(item, policy.coder.decode(one.ids), one.finish == "stop")
            samples.append(Sample(one.ids, earned.value, one.finish, one.logp, sum(one.logp)))
        groups.append(ScoredGroup(tuple(prompt), tuple(samples), "own", True))
    return items, groups


def _solved_by_somebody(setting: Setting, item: Item) -> Item:
    """The problem with a worked solution by an author with the demonstrators' taste: a problem's solution is always the
    same, but a rollout may order its operands otherwise. Were all solutions in one order, they would teach a single
    notation, of which there is half as much to learn, and the arms would differ in more than in their feedback."""
    taste = random.Random(item.prompt)
    swapped = [taste.random() < setting.swapped for _ in columns(item.prompt)]
    return msgspec.structs.replace(item, solution=worked(item.prompt, swapped))


def learn(setting: Setting, condition: Condition, weights: Mapping[str, Tensor], seed: int) -> Trial:
    """One arm: from the base, ``marks[-1]`` rollouts long."""
    began = time.process_time()
    policy = policy_of(weights)
    located = blame(setting, condition, policy, seed)
    update = _rewarded(setting, policy) if condition.critic == "none" else _hinted(setting, condition, policy)
    group = setting.group if condition.critic == "none" else 1
    curve, rounds = [examine(setting, policy, 0, seed)], setting.marks[-1] // setting.batch
    before = manner(setting, policy, rounds, seed)
    for number in range(rounds):
        update(*collect(setting, policy, number, group, seed, condition.one_order))
        rollouts = (number + 1) * setting.batch
        if rollouts in setting.marks:
            curve.append(examine(setting, policy, rollouts, seed))
    return Trial(
        condition=condition.name,
        swapped=setting.swapped,
        seed=seed,
        curve=tuple(curve),
        localisation=located,
        before=before,
        after=manner(setting, policy, rounds, seed),
        cpu_s=time.process_time() - began,
    )


def blame(setting: Setting, condition: Condition, policy: NativePolicy, seed: int) -> Localisation:
    """Where the critic's hints put the blame in the base's rollouts; nothing is learned."""
    _, hard = tasks()
    critic = open_critic(CriticSettings(kind=condition.critic))
    lessons = [
        lesson
        for number in range(setting.blamed)
        for lesson in prepare(
            hard, policy, critic, *collect(setting, policy, number, 1, seed, condition.one_order)
        ).lessons
    ]
    found = DistilLearner(policy, Distillation(), Optimizer()).measure(lessons)
    return localise(found, [lesson.wrong for lesson in lessons])


def manner(setting: Setting, policy: NativePolicy, first: int, seed: int) -> Manner:
    """How a policy writes the steps of ``blamed`` batches, numbered from ``first``; nothing is learned."""
    steps: dict[bool, list[bool]] = {False: [], True: []}  # by order: right or not
    for number in range(first, first + setting.blamed):
        items, groups = collect(setting, policy, number, 1, seed)
        for item, group in zip(items, groups, strict=True):
            written = parse(policy.coder.decode(group.samples[0].ids)).steps
            for column, step in zip(columns(item.prompt), written, strict=False):
                for swapped, known in steps.items():
                    form = column.step(swapped)
                    if column.upper != column.lower and step.text[:3] == form[:3]:
                        known.append(step.text == form)
    plain, other = steps[False], steps[True]
    return Manner(
        swapped=len(other) / len(plain + other) if plain + other else None,
        right_plain=fmean(plain) if plain else None,
        right_swapped=fmean(other) if other else None,
    )


def _rewarded(setting: Setting, policy: NativePolicy) -> Learn:
    """GRPO with its presets."""
    _, hard = tasks()
    objective = make_objective({"algorithm": "grpo"}, hard.max_new_tokens)
    learner = Learner(policy, objective, Correction(rule="none"), Optimizer(learning_rate=setting.rate))
    return lambda items, groups: learner.update(groups)


def _hinted(setting: Setting, condition: Condition, policy: NativePolicy) -> Learn:
    """Self-distillation with the condition's critic."""
    _, hard = tasks()
    critic = open_critic(CriticSettings(kind=condition.critic))
    settings = Distillation(divergence=condition.divergence)
    learner = DistilLearner(policy, settings, Optimizer(learning_rate=setting.rate))
    return lambda items, groups: learner.update(prepare(hard, policy, critic, items, groups).lessons)


def learn_all(
    plan: Iterable[tuple[Setting, Sequence[Condition]]], seeds: Sequence[int]
) -> dict[tuple[float, str], list[Trial]]:
    """Every condition of each setting with every seed: trials by the demonstrations' swapped share and condition.

    Each setting and seed has its own base, and a process of its own; as many at once as there are cores.
    """
    work = [(setting, tuple(conditions), seed) for setting, conditions in plan for seed in seeds]
    found: dict[tuple[float, str], list[Trial]] = {}
    with ProcessPoolExecutor(min(len(work), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for trial in (one for trials in pool.map(_of_seed, work) for one in trials):
            found.setdefault((trial.swapped, trial.condition), []).append(trial)
    return found


def _of_seed(task: tuple[Setting, tuple[Condition, ...], int]) -> list[Trial]:
    torch.set_num_threads(1)
    setting, conditions, seed = task
    return [learn(setting, condition, base(setting, seed), seed) for condition in conditions]
