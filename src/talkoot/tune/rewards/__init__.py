"""Rewards: what a completion earned, computed by whoever receives it."""

from talkoot.tune.rewards import code, exact, numeric, regex
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import Comparison, comparisons

__all__ = ["Comparison", "RewardResult", "code", "comparisons", "exact", "numeric", "regex"]
