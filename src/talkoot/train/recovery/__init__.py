"""The recovery ladder: rungs that say how a swarm gets a lost stage's state back, tried in the recipe's order."""

from talkoot.train.recovery import blend, checkpoint, kept, replay, replica
from talkoot.train.recovery.ladder import Holding, Loss, Rung, Share, Source, Unrecoverable, climb, rungs

__all__ = [
    "Holding",
    "Loss",
    "Rung",
    "Share",
    "Source",
    "Unrecoverable",
    "blend",
    "checkpoint",
    "climb",
    "kept",
    "replay",
    "replica",
    "rungs",
]
