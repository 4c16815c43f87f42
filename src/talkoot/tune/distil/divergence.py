"""How far a student's next-token distribution is from its teacher's, position by position.

Self-distillation lets a policy answer, and asks the same network, which now also sees a hint, how it would have gone on
at every position. A divergence turns the two distributions into one loss per position of the student's own rollout, so
that each token is praised or blamed for itself, where a group advantage is the same for all.

The distributions come as *buckets*: the teacher's K likeliest tokens and one bucket for all the others together, or,
for a small vocabulary, all tokens and no such bucket; then everything here is exact. A new divergence is one
registration.

This module needs no torch to be imported: recipes look names up here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from talkoot.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = -100.0
"""Least log-probability (nats) that is told apart: a token that one side excludes costs much, but not without end."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the teacher says at N positions, without a gradient.

    Attributes:
        logp: log-probabilities of the buckets, (N, K + 1), or (N, vocabulary) where there is no tail.
        top: ids of the first K buckets, (N, K) int64; None = bucket j is token j.
        token_logp: of the token that the student chose, (N,); exact whatever K is.
    """

    logp: Tensor
    top: Tensor | None
    token_logp: Tensor


@dataclass(frozen=True, slots=True)
class Student:
    """The same positions as the student sees them, differentiable: in its teacher's buckets."""

    logp: Tensor
    token_logp: Tensor


def teacher_of(logits: Tensor, ids: Tensor, top_k: int, temperature: float = 1.0) -> Teacher:
    """The teacher's part, small enough to keep: N x (K + 1) numbers instead of N x vocabulary.

    Args:
        logits: (N, vocabulary).
        ids: the student's tokens, (N,) int64.
        top_k: so many of the teacher's likeliest tokens keep a bucket of their own; 0, or the vocabulary's size or more
            = all of them.
        temperature: logits are divided by it, as they were when the rollout was sampled.
    """
    logp = _log_probs(logits.detach(), temperature)
    chosen = logp.gather(-1, ids[:, None])[:, 0]
    if not 0 < top_k < logp.shape[-1]:
        return Teacher(logp, None, chosen)
    kept, top = logp.topk(top_k, dim=-1)
    return Teacher(_with_tail(logp, kept, top), top, chosen)


def student_of(logits: Tensor, ids: Tensor, teacher: Teacher, temperature: float = 1.0) -> Student:
    """The student's distributions in the buckets of its teacher; arguments as in :func:`teacher_of`."""
    logp = _log_probs(logits, temperature)
    chosen = logp.gather(-1, ids[:, None])[:, 0]
    if teacher.top is None:
        return Student(logp, chosen)
    return Student(_with_tail(logp, logp.gather(-1, teacher.top), teacher.top), chosen)


def advantages(student: Student, teacher: Teacher) -> Tensor:
    """Per token ``log pi(y_t | x, c, y_<t) - log pi_theta(y_t | x, y_<t)``, (N,), nats, without a gradient: above 0 the
    teacher, which sees the hint c, likes the token better than the student does."""
    return teacher.token_logp - student.token_logp.detach()


class Divergence(Protocol):
    """One loss per position from the student's and the teacher's distributions.

    ``beta`` is the weight of the teacher in a mixture; most have none and ignore it.
    """

    def __call__(self, student: Student, teacher: Teacher, beta: float) -> Tensor:
        """Loss of each position, (N,), nats, differentiable in the student's logits."""
        ...


divergences: Registry[Divergence] = Registry("divergence")


@divergences.register("forward")
def forward(student: Student, teacher: Teacher, beta: float) -> Tensor:
    """``KL(teacher || student)``; gradient in the student's logits: ``p_s - p_t``. Covers all that the teacher might
    say (OPSD's choice, arXiv 2601.18734)."""
    return (teacher.logp.exp() * (teacher.logp - student.logp)).sum(-1)


@divergences.register("reverse")
def reverse(student: Student, teacher: Teacher, beta: float) -> Tensor:
    """``KL(student || teacher)``; gradient ``p_s (log(p_s / p_t) - KL)``. Gives up what the teacher finds unlikely, and
    in expectation over the student's tokens is what ``pg`` estimates (arXiv 2606.11173, its formula)."""
    return (student.logp.exp() * (student.logp - teacher.logp)).sum(-1)


@divergences.register("jsd")
def jsd(student: Student, teacher: Teacher, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence (arXiv 2306.13649): ``beta KL(t || m) + (1 - beta) KL(s || m)`` with the
    mixture ``m = beta t + (1 - beta) s``, 0 < beta < 1; at most ln 2 nats at 0.5, however unlike the two are."""
    mixture = (teacher.logp + math.log(beta)).logaddexp(student.logp + math.log1p(-beta))
    ours = student.logp.exp() * (student.logp - mixture)
    theirs = teacher.logp.exp() * (teacher.logp - mixture)
    return (beta * theirs + (1 - beta) * ours).sum(-1)


@divergences.register("pg")
def pg(student: Student, teacher: Teacher, beta: float) -> Tensor:
    """Policy-gradient form: ``-A_t log pi_theta(y_t)`` with A_t of :func:`advantages`. It looks at the sampled token
    alone, needs no buckets, and its gradient is the reverse divergence's in expectation (arXiv 2606.11173)."""
    return policy_gradient(student, advantages(student, teacher))


def policy_gradient(student: Student, advantage: Tensor) -> Tensor:
    """``-advantage * log pi_theta(y_t)`` per token, (N,): a GRPO step with an advantage of each token's own."""
    return -advantage * student.token_logp


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return (wide / temperature).log_softmax(-1).clamp_min(FLOOR)


def _with_tail(logp: Tensor, kept: Tensor, top: Tensor) -> Tensor:
    """The kept buckets and, last, the log of everything else's probability. Summing the others loses nothing where
    ``log(1 - sum of kept)`` would lose all digits."""
    import torch

    others = logp.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([kept, others], dim=-1)
