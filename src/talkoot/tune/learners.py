"""Two ways to learn from a round behind one face: from rewards (:mod:`~talkoot.tune.objective.learner`), or from a
critic's words (:mod:`~talkoot.tune.distil.learner`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor

from talkoot.tune.completion import Sampling
from talkoot.tune.distil.critics import open_critic
from talkoot.tune.distil.learner import DistilLearner
from talkoot.tune.distil.lessons import check_critic, prepare
from talkoot.tune.objective.learner import NOTHING, Learner
from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.policies.policy import Policy
from talkoot.tune.recipe import TuneRecipe
from talkoot.tune.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update did, as plain numbers for the receipt.

    Attributes:
        moved: optimizer steps that were applied.
        reason: why nothing moved, with what was most often in the way; empty where something did.
        numbers, counts: facts by name; what was not measured is left out.
    """

    moved: int
    reason: str
    numbers: dict[str, float]
    counts: dict[str, int]


class AnyLearner(Protocol):
    """What the tuner needs of either."""

    refills: bool  # whether prompts that teach nothing are to be replaced
    own_only: bool  # whether others' completions are of no use to it

    def check(self) -> None:
        """Refuse, by TalkootError, what could never learn anything."""
        ...

    def update(self, groups: Sequence[ScoredGroup]) -> Outcome: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None: ...


def open_learner(recipe: TuneRecipe, task: Task, policy: Policy, sampling: Sampling) -> AnyLearner:
    """The learner that a recipe asks for."""
    if recipe.critic.kind == "none":
        return RewardLearner(recipe, policy, sampling)
    return CriticLearner(recipe, task, policy, sampling)


class RewardLearner:
    """The GRPO family."""

    own_only = False

    def __init__(self, recipe: TuneRecipe, policy: Policy, sampling: Sampling) -> None:
        objective = recipe.made_objective(sampling.max_new_tokens)
        update = msgspec.structs.replace(recipe.update, temperature=sampling.temperature)
        self.refills = objective.dynamic_sampling
        self._learner = Learner(policy, objective, recipe.correction, recipe.optimizer, update)

    def check(self) -> None:
        pass

    def update(self, groups: Sequence[ScoredGroup]) -> Outcome:
        facts = self._learner.update(groups)
        numbers, counts = _split(msgspec.to_builtins(facts))
        return Outcome(facts.steps - facts.steps_skipped, _why(facts.reason, facts.skipped), numbers, counts)

    def state(self) -> dict[str, Tensor]:
        return self._learner.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._learner.load_state(tensors)


class CriticLearner:
    """Self-distillation from a critic's feedback. Others' completions count like one's own, because at each position
    two whole distributions are compared, whoever wrote the tokens before it; the form that looks at the sampled token
    alone leaves them out."""

    refills = False

    def __init__(self, recipe: TuneRecipe, task: Task, policy: Policy, sampling: Sampling) -> None:
        self._task, self._policy = task, policy
        self._critic = open_critic(recipe.critic)
        self.own_only = recipe.distillation.own_only
        update = msgspec.structs.replace(recipe.update, temperature=sampling.temperature)
        self._learner = DistilLearner(policy, recipe.distillation, recipe.optimizer, update)

    def check(self) -> None:
        check_critic(self._task, self._policy, self._critic)

    def update(self, groups: Sequence[ScoredGroup]) -> Outcome:
        items = [self._task.item(group.index) for group in groups]
        made = prepare(self._task, self._policy, self._critic, items, groups, own_only=self.own_only)
        facts = self._learner.update(made.lessons)
        numbers, counts = _split(msgspec.to_builtins(facts))
        counts |= {f"feedback {case}": number for case, number in made.cases.items()}
        counts |= {f"skipped {reason}": number for reason, number in made.skipped.items()}
        return Outcome(facts.steps, _why(facts.reason, made.skipped), numbers, counts)

    def state(self) -> dict[str, Tensor]:
        return self._learner.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._learner.load_state(tensors)


def _why(reason: str, skipped: Mapping[str, int]) -> str:
    """Where nothing was left to learn from, with what most of it was skipped for."""
    if reason != NOTHING or not skipped:
        return reason
    return f"{reason}: {max(sorted(skipped), key=lambda name: skipped[name])}"


def _split(facts: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, float], dict[str, int]]:
    """Numbers and counts of nested facts, under flat names."""
    numbers: dict[str, float] = {}
    counts: dict[str, int] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = _split(value, f"{name} ")
            numbers |= inner[0]
            counts |= inner[1]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            counts[name] = value
        elif isinstance(value, float) and math.isfinite(value):
            numbers[name] = value
    return numbers, counts
