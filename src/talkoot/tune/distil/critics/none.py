"""No critic: nothing is distilled, and a run learns from its rewards alone."""

from __future__ import annotations

from talkoot.tune.distil.critics.critic import Critic, CriticSettings, Feedback, Rule, critics


@critics.register("none")
def none(settings: CriticSettings) -> Critic:
    """Says nothing about any rollout."""
    return Rule(lambda rollout: Feedback(skip="no critic"))
