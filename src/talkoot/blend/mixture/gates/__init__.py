"""Ways to choose experts, by name."""

from talkoot.blend.mixture.gates import mean, naive_bayes, text, token
from talkoot.blend.mixture.gates.gate import Gate, gates

__all__ = ["Gate", "gates", "mean", "naive_bayes", "text", "token"]
