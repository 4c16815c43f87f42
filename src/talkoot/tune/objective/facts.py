"""What an update tells about itself; collected microbatch by microbatch, before anything is truncated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from talkoot.tune.corrections.rule import Corrected, Correction, Evidence, divergences
from talkoot.tune.objective.scored import ScoredGroup


class UpdateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One update. Every number is finite or None; None = there was nothing to measure.

    Attributes:
        reason: why the weights did not move; empty if they did.
        steps, steps_skipped: optimizer steps, and those among them that moved nothing.
        loss: of the first step: minus the surrogate, plus the divergence term. Under a zero-mean advantage it is near 0
            even while much is learned.
        grad_norm: of the last step, before clipping. learning_rate: of the last step.
        reward_mean, reward_std, own_reward_mean: raw rewards, before any length penalty; of all, and of own groups.
        zero_sigma_share: groups with equal rewards, or of one completion.
        length_mean, truncated_share: of the completions.
        tokens: completion tokens that gradients were computed for, each once.
        own_groups, external_groups: how many came in.
        entropy: mean over those tokens of the policy's entropy, in nats, at the sampling temperature.
        ratio_median, ratio_90, ratio_99, ratio_max, above_cap_share: learner / generator, raw, per token or per
            completion as the correction's ``is_level`` says (completions of unlike tokenizers: per completion only).
        kl_naive, kl_nonnegative: mean over completions of both estimates, reduced as the correction says.
        kl_reference: mean per token of the divergence from the initial policy, where it is part of the loss.
        clipped_share: tokens whose ratio was outside the clip, over all steps.
        filtered_by_peer: share of each generator's completions that the correction dropped.
        skipped: groups (``cut off``: completions) that teach nothing, by reason.
    """

    reason: str
    steps: int
    steps_skipped: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    reward_mean: float | None
    reward_std: float | None
    own_reward_mean: float | None
    zero_sigma_share: float | None
    length_mean: float | None
    truncated_share: float | None
    tokens: int
    own_groups: int
    external_groups: int
    entropy: float | None
    ratio_median: float | None
    ratio_90: float | None
    ratio_99: float | None
    ratio_max: float | None
    above_cap_share: float | None
    kl_naive: float | None
    kl_nonnegative: float | None
    kl_reference: float | None
    clipped_share: float | None
    filtered_by_peer: dict[str, float]
    skipped: dict[str, int]


class Meter:
    """Sums over the microbatches of one update."""

    def __init__(self, knobs: Correction) -> None:
        self._knobs = knobs
        self._ratios: list[Tensor] = []
        self._kl: dict[str, list[Tensor]] = {"naive": [], "nonnegative": []}
        self._peers: dict[str, list[int]] = {}  # dropped, seen
        self._sums: dict[str, tuple[float, int]] = {}
        self.tokens = 0

    @torch.no_grad()
    def see(self, peers: Sequence[str], evidence: Evidence, corrected: Corrected) -> None:
        """Completions that are seen for the first time in this update."""
        token = self._knobs.is_level == "token"
        known = ~evidence.unlike
        ratios = evidence.log_ratio[known[evidence.rows]] if token else evidence.total
        self._ratios.append(ratios.double())
        for name, values in divergences(evidence, self._knobs.kl_reduce).items():
            self._kl[name].append(values.double())
        for peer, dropped in zip(peers, corrected.dropped.tolist(), strict=True):
            counts = self._peers.setdefault(peer, [0, 0])
            counts[0] += dropped
            counts[1] += 1
        self.tokens += len(evidence.rows)

    def add(self, name: str, values: Tensor) -> None:
        """Values of tokens; their mean is told."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(values.detach().double().sum()), count + values.numel())

    def mean(self, name: str) -> float | None:
        """Mean of what was added under this name."""
        total, count = self._sums.get(name, (0.0, 0))
        return finite(total / count) if count else None

    def told(self) -> dict[str, float | dict[str, float] | None]:
        """The fields of :class:`UpdateFacts` that are measured on tokens."""
        logs = torch.cat(self._ratios) if self._ratios else torch.zeros(0)
        names = ("ratio_median", "ratio_90", "ratio_99", "ratio_max")
        places: list[float | None] = [None] * 4
        if len(logs):
            ordered = logs.sort().values
            # The smallest value with at least that share at or below it; torch.quantile stops at 16 million values.
            at = [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99, 1.0)]
            places = [finite(math.exp(min(float(value), 700.0))) for value in at]
        above = finite(float((logs > math.log(self._knobs.cap)).double().mean())) if len(logs) else None
        means = {name: _mean(torch.cat(parts)) if parts else None for name, parts in self._kl.items()}
        return {
            **dict(zip(names, places, strict=True)),
            "above_cap_share": above,
            "kl_naive": means["naive"],
            "kl_nonnegative": means["nonnegative"],
            "entropy": self.mean("entropy"),
            "kl_reference": self.mean("kl_reference"),
            "clipped_share": self.mean("clipped"),
            "filtered_by_peer": {peer: dropped / seen for peer, (dropped, seen) in sorted(self._peers.items())},
        }


def of_groups(groups: Sequence[ScoredGroup], skipped: int) -> dict[str, float | int | None]:
    """The fields of :class:`UpdateFacts` that follow from the groups alone.

    Args:
        skipped: groups whose advantages are all zero.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    own = torch.tensor([s.reward for group in groups if group.own for s in group.samples], dtype=torch.float64)
    return {
        "reward_mean": _mean(rewards),
        "reward_std": finite(float(rewards.std(correction=0))) if samples else None,
        "own_reward_mean": _mean(own),
        "zero_sigma_share": skipped / len(groups) if groups else None,
        "length_mean": sum(len(sample.ids) for sample in samples) / len(samples) if samples else None,
        "truncated_share": sum(sample.finish == "length" for sample in samples) / len(samples) if samples else None,
        "own_groups": sum(group.own for group in groups),
        "external_groups": sum(not group.own for group in groups),
    }


def finite(value: float) -> float | None:
    """The value, or None where it is no finite number."""
    return value if math.isfinite(value) else None


def _mean(values: Tensor) -> float | None:
    return finite(float(values.mean())) if len(values) else None
