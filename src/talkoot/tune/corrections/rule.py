"""What to do with completions that another policy made: protocol, knobs and registry. Nothing here imports torch.

A correction sees how much likelier the learner finds each completion than its generator did, and answers with a weight
for each token, and with advantages. It never sees the weights, and no gradient flows through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry
from talkoot.run.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Correction(Section, frozen=True, kw_only=True):
    """How completions of other policies are corrected for.

    Attributes:
        rule: by name.
        cap: C, the largest weight (``tis``, ``ftis``), or where tokens are dropped (``mis``).
        gamma: divergence from the learner above which a completion with a negative advantage is dropped, in nats: per
            completion with ``kl_reduce = sum`` (50 at some 200 tokens is a quarter nat per token), else per token.
        kl_estimator: ``naive`` = the size of log generator - log learner; ``nonnegative`` = rho log rho - rho + 1
            with rho = learner / generator (log rho within +-20), which estimates KL(learner, generator) from the
            generator's draws.
        kl_reduce: over a completion's tokens.
        is_level: weights per token, or one per completion (rho = the product over its tokens).
        delta: ``opsm``'s own limit, in nats per token.
    """

    rule: str = "ftis"
    cap: float = 2.0
    gamma: float = 50.0
    kl_estimator: Literal["naive", "nonnegative"] = "naive"
    kl_reduce: Literal["sum", "mean"] = "sum"
    is_level: Literal["token", "sequence"] = "token"
    delta: float = 0.5

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "cap", 0 < self.cap < math.inf, "a finite number above 0"
        yield "gamma", 0 <= self.gamma < math.inf, "a finite number from 0"
        yield "delta", 0 <= self.delta < math.inf, "a finite number from 0"


@dataclass(frozen=True)
class Evidence:
    """Of R completions with N tokens together; no gradients.

    Attributes:
        log_ratio: log rho = log learner - log generator of each token, (N,); 0 where the generator's tokens are unlike.
        total: the same of each completion, (R,).
        unlike: completions whose generator has another tokenizer: they have a ``total`` only, (R,) bool.
        lengths: (R,) int64, in the learner's tokens.
        rows: which completion a token belongs to, (N,) int64.
        advantages: (R,).
    """

    log_ratio: Tensor
    total: Tensor
    unlike: Tensor
    lengths: Tensor
    rows: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Corrected:
    """A correction's answer.

    Attributes:
        weight: of each token, (N,).
        advantages: (R,).
        clip_to: whose log-probabilities the clipped ratio is against: the learner's own when the update began, or the
            generator's.
        dropped: completions that it set to zero, (R,) bool. They still count in group statistics and denominators.
    """

    weight: Tensor
    advantages: Tensor
    clip_to: Literal["learner", "generator"]
    dropped: Tensor


class CorrectionRule(Protocol):
    """A pure function of what is known about completions."""

    def __call__(self, knobs: Correction, evidence: Evidence) -> Corrected: ...


# A smaller weight counts as 0. Its gradient would be lost among others', and denormal numbers in the backward pass
# made an update 26 times slower (completions at a log-ratio near -80).
NEGLIGIBLE = 1e-8

corrections: Registry[CorrectionRule] = Registry("correction")


def untouched(evidence: Evidence) -> Corrected:
    """Weight 1, and nothing dropped."""
    return Corrected(
        weight=evidence.log_ratio.new_ones(evidence.log_ratio.shape),
        advantages=evidence.advantages,
        clip_to="learner",
        dropped=evidence.unlike.new_zeros(evidence.unlike.shape),
    )


def importance(knobs: Correction, evidence: Evidence) -> Tensor:
    """rho of each token, or of its whole completion, (N,).

    Raises:
        TalkootError: per token, where a generator has another tokenizer.
    """
    if knobs.is_level == "token":
        refuse_unlike(evidence)
        ratio = bounded(evidence.log_ratio).exp()
    else:
        ratio = bounded(evidence.total).exp()[evidence.rows]
    return ratio.masked_fill(ratio < NEGLIGIBLE, 0.0)


def refuse_unlike(evidence: Evidence) -> None:
    """TalkootError where a generator has another tokenizer: its tokens are not the learner's."""
    if bool(evidence.unlike.any()):
        raise TalkootError(
            "completions of a policy with another tokenizer have no ratio per token",
            where="correction.rule, correction.is_level",
            why="its tokens are not the learner's: only the probability of a whole text can be compared",
            next='with tis, mis or ftis set correction.is_level = "sequence"; or take "filter", "opsm" or "none"',
        )


def bounded(log_ratio: Tensor) -> Tensor:
    """Within what can be exponentiated in float32, far beyond any cap."""
    return log_ratio.clamp(-80, 80)


def drop(evidence: Evidence, corrected: Corrected, far: Tensor) -> Corrected:
    """``corrected`` with the advantages of completions that are ``far`` (R,) and negative set to zero."""
    dropped = far & (evidence.advantages < 0)
    return replace(corrected, advantages=corrected.advantages.masked_fill(dropped, 0.0), dropped=dropped)


def divergences(evidence: Evidence, reduce: Literal["sum", "mean"]) -> dict[str, Tensor]:
    """Both estimates of every completion's divergence, (R,): ``naive``, with its sign, and ``nonnegative``.

    Of unlike tokens only the whole text's ratio is known: there the estimator is applied to that.
    """
    safe = evidence.log_ratio.clamp(-20, 20)
    zeros = evidence.total.new_zeros(evidence.total.shape)
    tokens = zeros.index_add(0, evidence.rows, _nonnegative(safe))
    both = {
        "naive": -evidence.total,
        "nonnegative": tokens.where(~evidence.unlike, _nonnegative(evidence.total.clamp(-20, 20))),
    }
    return both if reduce == "sum" else {name: value / evidence.lengths for name, value in both.items()}


def _nonnegative(log_ratio: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    return ratio * log_ratio - ratio + 1
