"""Critics, one file each."""

from talkoot.tune.distil.critics import arithmetic, none, openai, outcome, reference
from talkoot.tune.distil.critics.critic import (
    Critic,
    CriticSettings,
    Feedback,
    Rollout,
    advise,
    critics,
    open_critic,
)

__all__ = [
    "Critic",
    "CriticSettings",
    "Feedback",
    "Rollout",
    "advise",
    "arithmetic",
    "critics",
    "none",
    "open_critic",
    "openai",
    "outcome",
    "reference",
]
