"""Right or wrong, and no more: the weak baseline of feedback, because it points nowhere (arXiv 2606.11173)."""

from __future__ import annotations

from talkoot.tune.distil.critics.critic import Critic, CriticSettings, Feedback, Rollout, Rule, critics


def verdict_of(rollout: Rollout) -> Feedback:
    """The reward's reason in a sentence."""
    if rollout.reward.right:
        return Feedback(context="Your answer is right.", case="right")
    why = "It was cut off before its end." if rollout.reward.reason == "cut off" else "Your answer is wrong."
    return Feedback(context=why, case="wrong")


@critics.register("outcome")
def outcome(settings: CriticSettings) -> Critic:
    """Says how it ended."""
    return Rule(verdict_of)
