"""The update of self-distillation: the policy moves towards what it would have said, had it seen the hint.

The teacher is the same network at its initial weights (a LoRA adapter switched off) with the hint in its prompt; it has
no gradient, and it does not move, so a policy cannot drag its own teacher along (arXiv 2606.11173, 2601.18734).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

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
from talkoot.tune.objective.optimiser import PolicyOptimizer
from talkoot.tune.objective.settings import Optimizer
from talkoot.tune.policies.policy import Policy


class DistilFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an update did. Every number is finite, or None.

    Attributes:
        applied: the weights moved.
        reason: why they did not; empty if they did.
        loss: mean over all tokens, nats.
        grad_norm: before clipping.
        learning_rate: of this step.
        lessons, tokens: how many rollouts and completion tokens were learnt from.
        advantage: mean over all tokens of what the teacher's log-probability is above the student's, nats.
        advantage_size: mean of its absolute value.
        localisation: whether the blame falls where the mistake is.
    """

    applied: bool
    reason: str
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    lessons: int
    tokens: int
    advantage: float | None
    advantage_size: float | None
    localisation: Localisation


class DistilLearner:
    """Teaches a policy with lessons.

    Args:
        policy: its initial weights are kept from here on.
        settings: divergence and limits.
        optimizer: rates.
        temperature: at which the rollouts are sampled; student and teacher are compared at it.
    """

    def __init__(self, policy: Policy, settings: Distillation, optimizer: Optimizer, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"distributions cannot be compared at temperature {temperature}")
        policy.keep_initial()
        self._policy, self._settings, self._temperature = policy, settings, temperature
        self.optimizer = PolicyOptimizer(policy.parameters(), settings=optimizer)

    def update(self, lessons: Sequence[Lesson]) -> DistilFacts:
        """One step on all lessons together; each token counts the same, however lessons are cut into microbatches.

        Without lessons nothing moves, and the facts say so.
        """
        total = sum(len(lesson.ids) for lesson in lessons)
        loss, found = 0.0, dict[int, list[float]]()
        self.optimizer.clear()
        for numbers in self._microbatches(lessons):
            part = [lessons[number] for number in numbers]
            losses, advantage = self._losses(part)
            (losses.sum() / total).backward()
            loss += float(losses.detach().double().sum()) / total
            lengths = [len(lesson.ids) for lesson in part]
            found.update(zip(numbers, (row.tolist() for row in advantage.split(lengths)), strict=True))
        return self._step(lessons, loss, [found[number] for number in range(len(lessons))])

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

    def _microbatches(self, lessons: Sequence[Lesson]) -> Iterator[list[int]]:
        """Numbers of the lessons that go together: similar lengths, bounded with their padding."""
        order = sorted(range(len(lessons)), key=lambda number: (_length(lessons[number]), number))
        part: list[int] = []
        for number in order:
            if part and _length(lessons[number]) * (len(part) + 1) > self._settings.microbatch_tokens:
                yield part
                part = []
            part.append(number)
        if part:
            yield part

    def _step(self, lessons: Sequence[Lesson], loss: float, found: Sequence[Sequence[float]]) -> DistilFacts:
        flat = [value for row in found for value in row]
        known = bool(flat) and all(map(math.isfinite, flat))
        wrong = [lesson.wrong if known else None for lesson in lessons]
        step = self.optimizer.step()
        return DistilFacts(
            applied=step.applied,
            reason=step.reason if lessons else "nothing to learn from",
            loss=loss if lessons and math.isfinite(loss) else None,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            lessons=len(lessons),
            tokens=len(flat),
            advantage=math.fsum(flat) / len(flat) if known else None,
            advantage_size=math.fsum(map(abs, flat)) / len(flat) if known else None,
            localisation=localise(found, wrong),
        )


def _length(lesson: Lesson) -> int:
    return max(len(lesson.hinted), len(lesson.prompt)) + len(lesson.ids)
