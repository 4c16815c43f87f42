"""Answers that a pattern describes. The pattern must fit the whole answer.

Python's matcher can take exponential time. Patterns that cannot (two quantifiers at most, none behind a group, no
reference back: at worst quadratic in a bounded text) are matched here; all others in the sandbox, with its limit on
processor time.
"""

from __future__ import annotations

import re

from talkoot.tune.rewards.answer import answer_in
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import comparisons, outcome
from talkoot.tune.rewards.sandbox import Limits, run_program

MAX_PATTERN = 500
_LIMITS = Limits(cpu_s=1)


class Pattern:
    """A match of the whole answer."""

    def check(self, answer: str) -> None:
        if not 0 < len(answer) <= MAX_PATTERN:
            raise ValueError(f"a pattern has 1 to {MAX_PATTERN} characters")
        try:
            re.compile(answer)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{answer[:40]!r} is no pattern: {error}") from error

    def extract(self, completion: str) -> str:
        return answer_in(completion)

    def reward(self, answer: str, given: str) -> RewardResult:
        if quick(answer):
            return outcome(re.fullmatch(answer, given) is not None)
        ran = run_program(f"import re\nprint(bool(re.fullmatch({answer!r}, {given!r})))", _LIMITS)
        return RewardResult(0.0, ran.reason) if ran.reason != "ran" else outcome(ran.output == "True\n")


def quick(pattern: str) -> bool:
    """Whether a pattern is sure to be matched in little time."""
    quantifiers = len(re.findall(r"[*+?{]", pattern))
    return quantifiers <= 2 and not re.search(r"\)[*+?{]|\\[1-9gk]", pattern)


comparisons.register("regex")(Pattern())
