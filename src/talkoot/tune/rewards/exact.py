"""The answer, character by character; spaces around and runs of spaces within do not count."""

from __future__ import annotations

from talkoot.tune.rewards.answer import MAX_ANSWER, answer_in
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import comparisons, outcome


class Exact:
    """Equal texts."""

    def check(self, answer: str) -> None:
        if not 0 < len(answer.strip()) <= MAX_ANSWER:
            raise ValueError(f"an exact answer has 1 to {MAX_ANSWER} characters")

    def extract(self, completion: str) -> str:
        return " ".join(answer_in(completion).split())

    def reward(self, answer: str, given: str) -> RewardResult:
        return outcome(given == " ".join(answer.split()))


comparisons.register("exact")(Exact())
