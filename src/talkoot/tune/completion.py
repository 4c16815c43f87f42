"""Completions as tokens: what a generator made, under which settings, with which log-probability each.

Token in, token out: ids are never decoded and encoded again on their way to a learner, the end token is one of them,
and masks come from lengths, so that no pad token is ever taken for text or text for padding. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest

Finish = Literal["stop", "length"]  # its end token, or the limit: then it was cut off
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn.

    Attributes:
        max_new_tokens: a completion is cut off there; the end token counts.
        temperature: 0 takes the likeliest token.
        top_k: keep so many of the likeliest; 0 = all.
        top_p: keep the likeliest up to this probability together.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, fits, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number from 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 = all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fits:
                raise TalkootError(
                    "completions cannot be sampled like this",
                    where=f"rollout.{name}",
                    why=f"it is {getattr(self, name)}, it must be {rule}",
                    next="correct this value and run the same command again",
                )


class PromptRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a prompt comes from: everybody rebuilds prompt and answer from this, and believes nobody's.

    Attributes:
        task: digest of the task's definition (:meth:`talkoot.tune.tasks.task.Task.digest`).
        index: which of its items.
    """

    task: str
    index: Index


class Completion(msgspec.Struct, frozen=True):
    """One answer of a policy.

    Attributes:
        ids: its tokens, the end token included where it stopped by itself.
        logp: of each token the natural logarithm of its probability under the *generator*, over the full vocabulary at
            the sampling temperature (at temperature 0: at 1), before top-k and top-p cut anything off.
        kept: of each token the natural logarithm of the probability that top-k and top-p left (0 where they cut
            nothing): ``logp - kept`` is what the token was really drawn with. Empty where nothing was cut.
        finish: ``stop`` or ``length``.
    """

    ids: tuple[int, ...]
    logp: tuple[float, ...]
    finish: Finish
    kept: tuple[float, ...] = ()

    def check(self, vocab_size: int, limit: int) -> None:
        """Refuse what no honest generator makes.

        Raises:
            ValueError: no token, more than ``limit``, an id outside the vocabulary, log-probabilities missing, of
                another number than the tokens, not finite or above 0.
        """
        if not 1 <= len(self.ids) <= limit:
            raise ValueError(f"a completion of {len(self.ids)} tokens where 1 to {limit} are allowed")
        if len(self.logp) != len(self.ids) or len(self.kept) not in (0, len(self.ids)):
            raise ValueError(f"{len(self.logp)} log-probabilities for {len(self.ids)} tokens")
        if min(self.ids) < 0 or max(self.ids) >= vocab_size:
            raise ValueError(f"a token outside the vocabulary of {vocab_size}")
        # A rounding error above 0 is honest.
        if not all(-math.inf < value <= 1e-3 for value in (*self.logp, *self.kept)):
            raise ValueError("a log-probability that is not finite, or above 0")


class Group(msgspec.Struct, frozen=True):
    """Completions of one prompt by one generator, and which samples of the prompt they are.

    ``samples``: numbers of the draws; each sequence's randomness follows from (run, round, prompt, sample) alone.
    """

    prompt: PromptRef
    samples: tuple[int, ...]
    completions: tuple[Completion, ...]


def sequence_seed(run_seed: int, round_number: int, prompt: PromptRef, sample: int) -> int:
    """Seed of one sequence's draws: a function of its address, whatever batch it is generated in; 64 bits."""
    text = f"{run_seed}/{round_number}/{prompt.task}/{prompt.index}/{sample}"
    return int(digest(text.encode(), "sequence")[:16], 16)


def seeds_of(run_seed: int, round_number: int, prompt: PromptRef, samples: Sequence[int]) -> list[int]:
    """:func:`sequence_seed` of several samples."""
    return [sequence_seed(run_seed, round_number, prompt, sample) for sample in samples]
