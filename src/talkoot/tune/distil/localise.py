"""Does feedback blame the token where a rollout went wrong, and leave those before it alone? Always logged.

A hint that is aligned to a rollout gives a sharply negative advantage at the first wrong token and nothing on the
correct tokens before it. One that is not spreads its blame (arXiv 2606.11173); accuracy shows that much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from talkoot.tune.completion import Finish
from talkoot.tune.policies.policy import TextCoder

BLAMED = -0.1
"""Advantage in nats below which a correct token counts as blamed."""


class Localisation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a batch's feedback puts the blame; None where there is no such token.

    Attributes:
        rollouts: in which a first wrong token is known.
        first_wrong: mean advantage there, nats; the lower, the better.
        prefix: mean advantage of all correct tokens before it; near 0 is good.
        prefix_blamed: share of them with an advantage below ``BLAMED``.
    """

    rollouts: int
    first_wrong: float | None
    prefix: float | None
    prefix_blamed: float | None


def localise(advantages: Sequence[Sequence[float]], wrong: Sequence[int | None]) -> Localisation:
    """The statistic of a batch.

    Args:
        advantages: of each rollout's tokens, nats.
        wrong: of each rollout the first wrong token; None = nothing wrong, or unknown: it is left out.
    """
    first, before = [], []
    for row, at in zip(advantages, wrong, strict=True):
        if at is not None:
            first.append(row[at])
            before += row[:at]
    return Localisation(
        rollouts=len(first),
        first_wrong=fmean(first) if first else None,
        prefix=fmean(before) if before else None,
        prefix_blamed=fmean(value < BLAMED for value in before) if before else None,
    )


def wrong_token(coder: TextCoder, ids: Sequence[int], finish: Finish, at: int | None) -> int | None:
    """The token that holds a completion's first wrong character.

    Args:
        ids: of the completion, its end token included.
        at: which character of the decoded text; its length or more = the text should have gone on: then the end token
            is wrong, and of a text that was cut off nothing is.
    """
    if at is None:
        return None
    low, high = 0, len(ids)  # the first token by whose end the text is longer than `at`
    while low < high:
        middle = (low + high) // 2
        if len(coder.decode(ids[: middle + 1])) > at:
            high = middle
        else:
            low = middle + 1
    if low < len(ids):
        return low
    return len(ids) - 1 if finish == "stop" else None
