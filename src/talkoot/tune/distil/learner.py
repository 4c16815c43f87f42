"""The update of self-distillation: the policy moves towards what it would have said, had it seen the hint.

The teacher is the same network at its initial weights (a LoRA adapter switched off) with the hint in its prompt; it has
no gradient, and it does not move, so a policy cannot drag its own teacher along (arXiv 2606.11173, 2601.18734).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from talkoot.tune.distil.divergence import (
    Student,
    Teacher,
    advantages,
    divergences,
    policy_gradient,
    student_of,
    teacher_of,
)
from talkoot.tune.distil.lessons import Lesson
from talkoot.tune.distil.localise import Localisation, localise
from talkoot.tune.distil.settings import Distillation
from talkoot.tune.objective.batch import microbatches
from talkoot.tune.objective.facts import finite
from talkoot.tune.objective.learner import NOTHING
from talkoot.tune.objective.optimiser import PolicyOptimizer, StepFacts
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.policies.policy import Policy


class DistilFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an update did. Every number is finite, or None.

    Attributes:
        reason: why the weights did not move; empty if they did.
        steps, steps_skipped: optimizer steps, and those that a gradient without a finite norm forbade.
        loss: mean over the tokens of the first step, nats.
        grad_norm, learning_rate: of the last step; the norm before clipping.
        lessons, tokens: how many rollouts and completion tokens were learned from.
        advantage: mean over all tokens of what the teacher's log-probability is above the student's, nats.
        advantage_size: mean of its absolute value.
        localisation: whether the blame falls where the mistake is.
    """

    reason: str
    steps: int
    steps_skipped: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    lessons: int
    tokens: int
    advantage: float | None
    advantage_size: float | None
    localisation: Localisation


class _Step(NamedTuple):
    """One optimizer step: what it did, its loss, and of each lesson the tokens' advantages and the first wrong one."""

    facts: StepFacts
    loss: float
    advantages: list[list[float]]
    wrong: list[int | None]


class DistilLearner:
    """Teaches a policy with lessons.

    Args:
        policy: its initial weights are kept from here on.
        settings: divergence and limits.
        optimizer: AdamW's settings.
        update: steps per round, how much is computed at once, and the temperature at which student and teacher are
            compared: that of the rollouts.

    Attributes:
        optimizer: counts its steps.
    """

    def __init__(
        self, policy: Policy, settings: Distillation, optimizer: Optimizer, update: Update | None = None
    ) -> None:
        policy.keep_initial()
        self._policy, self._settings, self._update = policy, settings, update or Update()
        self._temperature = self._update.temperature or 1.0
        self.optimizer = PolicyOptimizer(policy.parameters(), optimizer)

    def update(self, lessons: Sequence[Lesson]) -> DistilFacts:
        """Learn from these lessons. Of a step's tokens each counts the same, however it is cut into microbatches.

        Without lessons nothing moves, and the facts say so.
        """
        parts, steps = self._update.minibatches, []
        for number in range(self._update.updates_per_round):
            chosen = lessons[number % parts :: parts]
            if chosen:
                steps.append(self._step(chosen))
        return _facts(steps, once=parts)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's; weights, and the initial ones, are in the policy's state."""
        return self.optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` gave; after it, updates give the same bits as without the interruption."""
        self.optimizer.load_state(tensors)

    def measure(self, lessons: Sequence[Lesson]) -> list[list[float]]:
        """Advantages of all tokens, nats, lesson by lesson; nothing moves."""
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for numbers in self._microbatches(lessons):
                part = [lessons[number] for number in numbers]
                student, teacher, _ = self._compare(part)
                rows = advantages(student, teacher).split([len(lesson.ids) for lesson in part])
                found.update(zip(numbers, (row.tolist() for row in rows), strict=True))
        return [found[number] for number in range(len(lessons))]

    def _losses(self, part: Sequence[Lesson]) -> tuple[Tensor, Tensor]:
        """Loss (differentiable) and advantage of each token, (N,) both."""
        student, teacher, blended = self._compare(part)
        advantage = advantages(student, teacher)
        share = self._settings.blend
        if share:
            return policy_gradient(student, share * blended + (1 - share) * advantage), advantage
        return divergences[self._settings.divergence](student, teacher, self._settings.beta), advantage

    def _compare(self, part: Sequence[Lesson]) -> tuple[Student, Teacher, Tensor]:
        """Both sides of each token, and the advantage of its rollout's reward."""
        completions = [lesson.ids for lesson in part]
        with torch.no_grad(), self._policy.frozen():
            logits = self._policy.completion_logits([lesson.hinted for lesson in part], completions)
            ids = torch.tensor([token for row in completions for token in row], device=logits.device)
            teacher = teacher_of(logits, ids, self._settings.top_k, self._temperature)
        del logits
        logits = self._policy.completion_logits([lesson.prompt for lesson in part], completions)
        student = student_of(logits, ids, teacher, self._temperature)
        rewards = torch.tensor([lesson.advantage for lesson in part], device=logits.device)
        lengths = torch.tensor([len(row) for row in completions], device=logits.device)
        return student, teacher, rewards.repeat_interleave(lengths)

    def _microbatches(self, lessons: Sequence[Lesson]) -> list[list[int]]:
        widths = {
            number: max(len(lesson.hinted), len(lesson.prompt)) + len(lesson.ids)
            for number, lesson in enumerate(lessons)
        }
        return microbatches(widths, self._policy.coder.vocab_size, self._update.microbatch_tokens)

    def _step(self, lessons: Sequence[Lesson]) -> _Step:
        """One optimizer step."""
        total = sum(len(lesson.ids) for lesson in lessons)
        loss, found = 0.0, dict[int, list[float]]()
        self.optimizer.clear()
        for numbers in self._microbatches(lessons):
            part = [lessons[number] for number in numbers]
            losses, advantage = self._losses(part)
            (losses.sum() / total).backward()
            loss += float(losses.detach().double().sum()) / total
            rows = advantage.split([len(lesson.ids) for lesson in part])
            found.update(zip(numbers, (row.tolist() for row in rows), strict=True))
        ordered = [found[number] for number in range(len(lessons))]
        return _Step(self.optimizer.step(), loss, ordered, [lesson.wrong for lesson in lessons])


def _facts(steps: Sequence[_Step], once: int) -> DistilFacts:
    """What steps did; the first ``once`` of them saw each lesson once, as it was before."""
    rows = [row for step in steps[:once] for row in step.advantages]
    flat = [value for row in rows for value in row]
    known = bool(flat) and all(map(math.isfinite, flat))
    wrong = [at if known else None for step in steps[:once] for at in step.wrong]
    last = steps[-1].facts if steps else None
    applied = sum(step.facts.applied for step in steps)
    return DistilFacts(
        reason="" if applied else (last.reason if last else NOTHING),
        steps=applied,
        steps_skipped=len(steps) - applied,
        loss=finite(steps[0].loss) if steps else None,
        grad_norm=last.grad_norm if last else None,
        learning_rate=last.learning_rate if last else None,
        lessons=len(rows),
        tokens=len(flat),
        advantage=math.fsum(flat) / len(flat) if known else None,
        advantage_size=math.fsum(map(abs, flat)) / len(flat) if known else None,
        localisation=localise(rows, wrong),
    )
