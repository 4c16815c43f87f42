"""The recovery ladder: rungs that say how a swarm gets a lost stage's state back, tried in the recipe's order."""

from talkoot.train.recovery import checkpoint, replica
from talkoot.train.recovery.ladder import Loss, Rescue, Rung, climb, rungs

__all__ = ["Loss", "Rescue", "Rung", "checkpoint", "climb", "replica", "rungs"]
