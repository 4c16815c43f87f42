"""Ways to choose experts, by name."""

from talkoot.blend.mixture.gates import bigram, mean, naive_bayes, text, token
from talkoot.blend.mixture.gates.gate import Gate, gates

__all__ = ["Gate", "bigram", "gates", "mean", "naive_bayes", "text", "token"]
