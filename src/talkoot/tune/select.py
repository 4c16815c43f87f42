"""Which groups a round learns from: pure decisions, seeded. No torch.

Sharing by sampling (SAPO, arXiv:2509.08721): external groups that teach nothing are discarded first, then everything
left is equally likely. The choice depends on the groups, not on the order in which they arrived.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from talkoot.tune.objective.scored import ScoredGroup


@dataclass(frozen=True)
class Selection:
    """What was chosen.

    Attributes:
        groups: own ones first, then external ones.
        own, external: how many of each.
        discarded: external groups with equal rewards.
        missing: how many fewer groups than were asked for.
    """

    groups: tuple[ScoredGroup, ...]
    own: int
    external: int
    discarded: int
    missing: int


def informative(group: ScoredGroup) -> bool:
    """Whether its rewards differ: only then has any completion a non-zero advantage."""
    return len({sample.reward for sample in group.samples}) > 1


def select(
    own: Sequence[ScoredGroup], external: Sequence[ScoredGroup], num_own: int, num_external: int, seed: str
) -> Selection:
    """Draw ``num_own`` of the own groups and ``num_external`` of the others' informative ones.

    What one side lacks the other makes up for, as far as it can: without peers a node learns from its own groups.

    Args:
        seed: names the draw, such as run, peer and round.

    Raises:
        ValueError: a negative count.
    """
    if num_own < 0 or num_external < 0:
        raise ValueError(f"{num_own} own and {num_external} external groups cannot be drawn")
    useful = [group for group in external if informative(group)]
    mine, theirs = _shuffled(own, f"{seed}/own"), _shuffled(useful, f"{seed}/external")
    lack_own, lack_external = max(0, num_own - len(mine)), max(0, num_external - len(theirs))
    chosen_own = mine[: num_own + lack_external]
    chosen_external = theirs[: num_external + lack_own]
    return Selection(
        groups=(*chosen_own, *chosen_external),
        own=len(chosen_own),
        external=len(chosen_external),
        discarded=len(external) - len(useful),
        missing=num_own + num_external - len(chosen_own) - len(chosen_external),
    )


def _shuffled(groups: Sequence[ScoredGroup], seed: str) -> list[ScoredGroup]:
    ordered = sorted(groups, key=lambda group: (group.peer, group.prompt, tuple(s.ids for s in group.samples)))
    random.Random(seed).shuffle(ordered)
    return ordered


@dataclass(frozen=True)
class Refill:
    """What dynamic sampling decides.

    Attributes:
        groups: informative ones, at most as many as wanted, in the order of their generation.
        generate: how many more prompts to answer now; 0 = go on with what there is.
        dropped: groups with equal rewards.
    """

    groups: tuple[ScoredGroup, ...]
    generate: int
    dropped: int


def refill(groups: Sequence[ScoredGroup], wanted: int, cap: int) -> Refill:
    """Drop groups with equal rewards and say how many more to generate (DAPO, arXiv:2503.14476).

    As many as are missing, over the share that has been informative so far (with one success and one failure more than
    were seen, so that it is never 0), and never beyond the cap: then the round goes on with fewer.

    Args:
        groups: everything generated in this round.
        wanted: informative groups that the round should have.
        cap: groups that a round may generate altogether.
    """
    useful = [group for group in groups if informative(group)]
    missing = max(0, wanted - len(useful))
    share = (len(useful) + 1) / (len(groups) + 2)
    generate = min(math.ceil(missing / share), max(0, cap - len(groups))) if missing else 0
    return Refill(groups=tuple(useful[:wanted]), generate=generate, dropped=len(groups) - len(useful))
