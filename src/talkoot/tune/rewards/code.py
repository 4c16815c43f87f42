"""Programs: what a program prints must be the answer. It runs, in the sandbox; nobody is asked what it would do."""

from __future__ import annotations

import re

from talkoot.tune.rewards.answer import MAX_ANSWER
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import comparisons
from talkoot.tune.rewards.sandbox import Limits, run_program

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Program:
    """The printed text, line by line; spaces at the ends of lines and empty lines at the end do not count.

    Reasons beside ``right`` and ``wrong output`` are those of the sandbox: ``timeout``, ``memory``, ``processes``,
    ``network``, ``write``, ``output``, ``import``, ``error``, ``system call``, ``killed``, ``too long``.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def check(self, answer: str) -> None:
        if not 0 < len(_printed(answer)) <= MAX_ANSWER:
            raise ValueError(f"what a program is to print has 1 to {MAX_ANSWER} characters")

    def extract(self, completion: str) -> str:
        """The last fenced block of a completion; without one, all of it."""
        blocks = _FENCE.findall(completion)
        return blocks[-1].strip() if blocks else completion.strip()

    def reward(self, answer: str, given: str) -> RewardResult:
        ran = run_program(given, self.limits)
        if ran.reason != "ran":
            return RewardResult(0.0, ran.reason)
        if _printed(ran.output) == _printed(answer):
            return RewardResult(1.0, "right")
        return RewardResult(0.0, "wrong output")


def _printed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


comparisons.register("code")(Program())
