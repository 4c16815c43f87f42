"""What users may set for an update, checked where it is read; nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from talkoot.run.section import Section


class Optimizer(Section, frozen=True, kw_only=True):
    """AdamW (Loshchilov and Hutter, 2019) with a clip of the global gradient norm.

    Attributes:
        learning_rate: peak; after the warm-up it is constant.
        warmup: steps over which the rate climbs linearly.
        beta1, beta2, epsilon, weight_decay: AdamW's; decay applies to matrices only.
        clip: limit of the global gradient norm; 0 = none.
    """

    learning_rate: float = 1e-4
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"
        yield "warmup", self.warmup >= 0, "at least 0"
        yield "beta1", 0 <= self.beta1 < 1, "from 0 to below 1"
        yield "beta2", 0 <= self.beta2 < 1, "from 0 to below 1"
        yield "epsilon", 0 < self.epsilon < math.inf, "a finite number above 0"
        yield "weight_decay", 0 <= self.weight_decay < math.inf, "a finite number from 0"
        yield "clip", 0 <= self.clip < math.inf, "a finite number from 0 (0 = no clipping)"


class Update(Section, frozen=True, kw_only=True):
    """How a round's completions are used.

    Attributes:
        updates_per_round: optimizer steps; from 2 on the log-probabilities when the round began stay fixed and the
            clip acts.
        minibatches: each step takes every so-many-th completion, in turn; 1 = every step takes all.
        microbatch_tokens: computed at once, prompts and padding included; 0 = as many as keep the logits to 128 MiB.
        temperature: at which completions are sampled: log-probabilities are compared there. 0 counts as 1.
    """

    updates_per_round: int = 1
    minibatches: int = 1
    microbatch_tokens: int = 0
    temperature: float = 1.0

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "updates_per_round", self.updates_per_round >= 1, "at least 1"
        fits = 1 <= self.minibatches <= self.updates_per_round
        yield "minibatches", fits, f"from 1 to updates_per_round ({self.updates_per_round})"
        yield "microbatch_tokens", self.microbatch_tokens >= 0, "at least 0 (0 = by the vocabulary's size)"
        yield "temperature", 0 <= self.temperature < math.inf, "a finite number from 0"
