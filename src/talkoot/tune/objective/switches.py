"""The switches of the GRPO family. An algorithm is a preset of them; a recipe overrides single ones. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from talkoot.core.plain import build
from talkoot.core.registry import Registry
from talkoot.run.section import Section

Aggregation = Literal["seq_mean", "token_mean", "const", "seq_sum"]
Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group_std", "batch_std", "none"]
Level = Literal["token", "sequence"]
Overlong = Literal["none", "mask", "soft"]


class Objective(Section, frozen=True, kw_only=True):
    """What an update maximises, per token: ``surrogate(ratio, advantage) - kl_beta * KL``, added up with fixed weights.

    Write ``A`` for a completion's advantage, ``R`` for the ratio of a token's probability to the one it had when the
    update began, ``a`` for a completion's tokens, and let sums run over all completions that count.

    Attributes:
        algorithm: the preset that these values started from.
        surrogate: what is made of ratio and advantage, by name (:mod:`talkoot.tune.objective.surrogate`).
        loss_agg: weight of a token: ``seq_mean`` 1 / (completions * len(a)), ``token_mean`` 1 / (all tokens),
            ``const`` 1 / (completions * max_length), ``seq_sum`` 1 / completions.
        baseline: what a reward is compared with: the mean of its group, the mean of the *others* in its group, nothing.
        adv_scale: what the difference is divided by: the population deviation of the group, of the batch, nothing.
        clip_low, clip_high: R is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: for A < 0 the surrogate is at least ``dual_clip * A`` (Ye et al., 2020); 0 = off.
        kl_beta, kl_estimator: weight and form of the divergence from the initial policy (:mod:`~.kl`); 0 = none.
        overlong: completions that were cut off: as any other, out of the loss (``mask``), or with a length penalty on
            the reward (``soft``), 0 up to ``max_length - overlong_buffer`` tokens, then linear to -1 at ``max_length``.
        max_length: longest completion, in tokens.
        overlong_buffer: in tokens.
        ratio_level: R of each token, or of the completion, ``exp(mean of log R)``, for all its tokens.
        dynamic_sampling: groups with equal rewards are no part of the batch at all, their divergence included.
    """

    algorithm: str = "grpo"
    surrogate: str = "clip"
    loss_agg: Aggregation = "seq_mean"
    baseline: Baseline = "group_mean"
    adv_scale: Scale = "group_std"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    overlong: Overlong = "none"
    max_length: int = 64
    overlong_buffer: int = 12
    ratio_level: Level = "token"
    dynamic_sampling: bool = False

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "clip_low", 0 <= self.clip_low <= 1, "from 0 to 1 (1 = no lower clip)"
        yield "clip_high", 0 <= self.clip_high < math.inf, "a finite number from 0"
        yield "dual_clip", self.dual_clip == 0 or 1 < self.dual_clip < math.inf, "0 (off), or a finite number above 1"
        yield "kl_beta", 0 <= self.kl_beta < math.inf, "a finite number from 0"
        yield "max_length", self.max_length >= 1, "at least 1"
        long = self.overlong != "soft" or self.max_length > 1
        yield "overlong", long, "none or mask where completions have one token (rollout.max_new_tokens)"
        room = 0 < self.overlong_buffer < self.max_length or self.overlong != "soft"
        yield "overlong_buffer", room, f"above 0 and below max_length ({self.max_length})"


class Algorithm(msgspec.Struct, frozen=True):
    """A preset: what it sets differently from :class:`Objective`'s defaults, which are GRPO's."""

    switches: dict[str, Any]


algorithms: Registry[Algorithm] = Registry("algorithm")


def make_objective(tree: Mapping[str, Any], max_length: int) -> Objective:
    """A recipe's table ``objective`` as settings: the algorithm it names (``grpo``), with single switches overridden.

    Args:
        tree: keys and values of the recipe's table.
        max_length: limit of a completion, in tokens, where the table names none.

    Raises:
        TalkootError: there is no such algorithm or surrogate, an unknown key, a value of a wrong type or out of range.
    """
    from talkoot.tune.objective import algorithms as presets  # registers them
    from talkoot.tune.objective.surrogate import surrogates

    name = tree.get("algorithm", "grpo")
    preset = presets.algorithms[name].switches if isinstance(name, str) else {}
    lengths = {"max_length": max_length, **{key: tree[key] for key in ("max_length",) if key in tree}}
    length = lengths["max_length"]
    buffer = max(1, length // 5) if isinstance(length, int) else 1  # DAPO's share: 4,096 of 20,480 tokens
    values = {"algorithm": name, "overlong_buffer": buffer, **lengths, **preset, **tree}
    made = build(values, Objective, what="the policy cannot be updated like this", where="the recipe's objective")
    surrogates[made.surrogate]
    return made
