"""Who answers what in a round: a pure function of the run's seed, the round, and who takes part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

Split = Literal["vertical", "horizontal"]


class Assignment(NamedTuple):
    """A prompt's number in the split ``train``, and which of its samples to draw."""

    number: int
    samples: tuple[int, ...]


def assignments(
    split: Split, seed: int, round_number: int, peers: Sequence[str], name: str, prompts: int, samples: int, size: int
) -> list[Assignment]:
    """What the peer ``name`` answers in a round.

    ``vertical``: prompts of its own choice, every sample of them (its choice does not depend on who else is there).
    ``horizontal``: everybody answers the same prompts, and the samples of each are dealt out in turn.

    Args:
        peers: names of all who take part, in an order that they share.
        prompts: per peer (``vertical``) or per round (``horizontal``).
        samples: per prompt, of all peers together.
        size: of the split that prompts are drawn from.
    """
    if split == "vertical":
        numbers = _draw(f"{seed}/prompts/{name}/{round_number}", prompts, size)
        return [Assignment(number, tuple(range(samples))) for number in numbers]
    slot = list(peers).index(name)
    share = tuple(range(slot, samples, len(peers)))
    numbers = _draw(f"{seed}/prompts/{round_number}", prompts, size)
    return [Assignment(number, share) for number in numbers] if share else []


def refill(seed: int, round_number: int, name: str, attempt: int, prompts: int, size: int) -> list[int]:
    """Numbers of further prompts, where earlier ones taught nothing."""
    return _draw(f"{seed}/refill/{name}/{round_number}/{attempt}", prompts, size)


def _draw(key: str, count: int, size: int) -> list[int]:
    """Different numbers below ``size``, in an order that the key alone fixes."""
    chance = random.Random(key)
    return chance.sample(range(size), min(count, size))
