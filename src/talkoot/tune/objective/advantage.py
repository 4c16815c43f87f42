"""Rewards to advantages, per completion, in float64. Nothing here is ever NaN: what cannot be compared is zero, by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.objective.switches import Objective

EPSILON = 1e-4  # added to a deviation

ALONE, EQUAL, CUT_OFF = "one completion", "equal rewards", "cut off"


@dataclass(frozen=True)
class Advantages:
    """Of a batch of R completions, group after group.

    Attributes:
        values: (R,) float64, finite.
        counted: which are part of the loss, (R,) bool.
        skipped: why, and how many groups (for ``cut off``: completions) teach nothing.
    """

    values: Tensor
    counted: Tensor
    skipped: dict[str, int]


def shaped_rewards(objective: Objective, group: ScoredGroup) -> Tensor:
    """Rewards with the length penalty of ``overlong = soft`` (DAPO, Yu et al., 2025, arXiv:2503.14476), (G,)
    float64."""
    rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
    if objective.overlong != "soft":
        return rewards
    lengths = torch.tensor([len(sample.ids) for sample in group.samples], dtype=torch.float64)
    free = objective.max_length - objective.overlong_buffer
    return rewards + ((free - lengths) / objective.overlong_buffer).clamp(-1, 0)


def advantages(objective: Objective, groups: Sequence[ScoredGroup]) -> Advantages:
    """``(r - baseline) / (sigma + 1e-4)``, with sigma the population deviation.

    A group of one has nothing to be compared with, and one of equal rewards prefers nothing: both are zero.

    Raises:
        ValueError: a group without completions, or a reward that is not finite.
    """
    shaped = [shaped_rewards(objective, group) for group in groups]
    for group, rewards in zip(groups, shaped, strict=True):
        if not len(rewards) or not bool(rewards.isfinite().all()):
            raise ValueError(f"a group of {group.peer} has no completion, or a reward that is not finite")
    skipped: dict[str, int] = {}
    batch = torch.cat(shaped) if shaped else torch.zeros(0, dtype=torch.float64)
    spread = batch.std(correction=0) if len(batch) else batch.sum()
    values, counted = [], []
    for group, rewards in zip(groups, shaped, strict=True):
        value, reason = _of_group(objective, rewards, spread)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        values.append(value)
        keep = torch.full((len(rewards),), not (reason and objective.dynamic_sampling))
        if objective.overlong == "mask":
            keep &= torch.tensor([sample.finish == "stop" for sample in group.samples])
        counted.append(keep)
    if objective.overlong == "mask":
        cut = sum(sample.finish == "length" for group in groups for sample in group.samples)
        skipped |= {CUT_OFF: cut} if cut else {}
    if not values:
        return Advantages(batch, torch.zeros(0, dtype=torch.bool), skipped)
    return Advantages(torch.cat(values), torch.cat(counted), skipped)


def _of_group(objective: Objective, rewards: Tensor, spread: Tensor) -> tuple[Tensor, str]:
    """The group's advantages, and why they are zero (empty: they are not, or nothing compares them)."""
    size, scaled = len(rewards), objective.adv_scale != "none"
    compared = objective.baseline != "none" or objective.adv_scale == "group_std"
    if compared and size == 1:
        return torch.zeros_like(rewards), ALONE
    # Asked of the rewards, not of sigma: the mean of equal numbers is often not quite that number.
    if compared and bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards), EQUAL
    if scaled and not compared and not float(spread):
        return torch.zeros_like(rewards), EQUAL
    centred = (
        rewards
        - {
            "group_mean": rewards.mean(),
            "leave_one_out": (rewards.sum() - rewards) / max(1, size - 1),
            "none": torch.zeros_like(rewards),
        }[objective.baseline]
    )
    if not scaled:
        return centred, ""
    return centred / ((rewards.std(correction=0) if objective.adv_scale == "group_std" else spread) + EPSILON), ""
