"""Critics: what a self-teacher is told about a rollout. One protocol, one registry.

A critic reads a problem, a completion and what it earned, and writes a text. The policy that wrote the completion sees
that text in its context, and how its opinion of each of its own tokens changes is what it learns from. So the text
works by being copied: what it repeats of a rollout is praised, what it says instead marks the first mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec

from talkoot.core.registry import Registry
from talkoot.run.section import Section
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.tasks.task import Item

_TRIED = 4  # so many failures side by side, and the rest of a round is not tried


class CriticSettings(Section, frozen=True, kw_only=True):
    """Which critic, and where it is asked; what is not about a language model is ignored by the others.

    Attributes:
        kind: its name: ``none``, ``outcome``, ``reference``, ``arithmetic``, ``openai``.
        base_url: of an OpenAI-compatible server, with its version (``http://127.0.0.1:8000/v1``).
        model: name of the model there.
        key_variable: environment variable with the key; empty or unset = none is sent.
        timeout_s: for one answer.
        max_tokens: of one answer.
        parallel: requests at the same time.
    """

    KEY = "critic"

    kind: str = "none"
    base_url: str = ""
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    max_tokens: int = 2048
    parallel: int = 4

    def rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "timeout_s", 0 < self.timeout_s < math.inf, "a finite number above 0"
        yield "max_tokens", self.max_tokens >= 1, "at least 1"
        yield "parallel", 1 <= self.parallel <= 64, "from 1 to 64"


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """What a critic says about one rollout.

    Attributes:
        context: what the self-teacher gets to see; empty if there is nothing to learn from this rollout.
        case: what was done, counted per round: ``reproduced``, ``inserted``, ``finished``, ``corrected``, ...
        skip: why there is no context.
        failed: the critic itself failed, which says nothing about the rollout.
    """

    context: str = ""
    case: str = ""
    skip: str = ""
    failed: bool = False


class Rollout(NamedTuple):
    """A completion's text with its problem and its reward (whose reason says whether it was cut off)."""

    item: Item
    completion: str
    reward: RewardResult


class Critic(Protocol):
    """Attributes: ``parallel``: how many rollouts may be judged at the same time (1: it computes)."""

    parallel: int

    def __call__(self, rollout: Rollout) -> Feedback:
        """Feedback on one rollout; never an error because of what the rollout says."""
        ...


critics: Registry[Callable[[CriticSettings], Critic]] = Registry("critic")


class Rule:
    """A critic that computes its feedback from the rollout alone.

    Args:
        judge: a pure function.
    """

    parallel = 1

    def __init__(self, judge: Callable[[Rollout], Feedback]) -> None:
        self._judge = judge

    def __call__(self, rollout: Rollout) -> Feedback:
        return self._judge(rollout)


def open_critic(settings: CriticSettings) -> Critic:
    """The critic of this kind.

    Raises:
        TalkootError: there is no such kind, or it lacks a setting.
    """
    return critics[settings.kind](settings)


def advise(critic: Critic, rollouts: Sequence[Rollout]) -> list[Feedback]:
    """Feedback on each rollout, in their order. Where a critic fails several times side by side (its server is gone),
    the rest is skipped, so that a round is late by a few timeouts at most."""
    if critic.parallel == 1:
        return [critic(rollout) for rollout in rollouts]
    found: list[Feedback] = []
    chunk = max(critic.parallel, _TRIED)
    with ThreadPoolExecutor(critic.parallel) as pool:
        for start in range(0, len(rollouts), chunk):
            answers = list(pool.map(critic, rollouts[start : start + chunk]))
            found += answers
            if all(answer.failed for answer in answers):
                break
    return found + [Feedback(skip="critic not asked", failed=True)] * (len(rollouts) - len(found))
