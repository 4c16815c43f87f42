"""What mixing costs: bytes of every message, and an outlook on a run by replicas that mix after rounds of inner steps.

Per replica and exchange of a vector of P numbers of b bytes: a swap sends P b, the least by which two can form their
mean; rings, trees and direct exchanges send 2 P b (N - 1) / N, the least for all of them (Patarasuk and Yuan, 2009); a
gathering sends P b (N - 1), which only pays for messages that are a small part of the vector.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import numpy as np

from talkoot.plan.exchange import How, Waiting, hop_seconds, sync_on, waiting
from talkoot.plan.spread import MARGIN, best_pull, contraction, largest_pull, predicted_ratio
from talkoot.world.links import Network

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK = 256  # numbers under one scale of int8
CHUNK = 4096  # numbers among which sparse chooses
LEVEL_BYTES = 4  # that a block's scale, or a chunk's magnitudes take
WORD_BITS = 14  # of a number that sparse keeps: 12 of index, 2 of value
MOST_ROUNDS = 200  # that are simulated; later ones are like these
USUAL_STEP_SPREAD = 0.5  # of step times' logarithm, where machines are shared; as published simulations take it


def message_bytes(wire: str, count: int, density: float) -> int:
    """Bytes of a vector of ``count`` numbers on its way.

    Args:
        wire: ``float32``, ``bfloat16``; ``int8`` with a scale for each block of 256; or ``sparse``: of each chunk of
            4,096, the share ``density`` (at least one number) in 14 bits each, and 4 bytes more.

    Raises:
        ValueError: there is no such wire.
    """
    if wire in NUMBER_BYTES:
        return NUMBER_BYTES[wire] * count
    if wire == "int8":
        return count + LEVEL_BYTES * -(-count // BLOCK)
    if wire != "sparse":
        raise ValueError(f"nothing travels as {wire!r}")
    whole, rest = divmod(count, CHUNK)
    return whole * _chunk_bytes(CHUNK, density) + (_chunk_bytes(rest, density) if rest else 0)


def _chunk_bytes(length: int, density: float) -> int:
    return LEVEL_BYTES + -(-WORD_BITS * max(1, round(density * length)) // 8)


def sent_bytes(how: How, replicas: int, nbytes: float) -> float:
    """What a replica sends in one exchange of messages of ``nbytes``, on average over all (an odd one out is alone)."""
    if how == "none":
        return 0.0
    if how == "pair":
        return nbytes * (replicas // 2 * 2) / replicas
    if how == "gather":
        return nbytes * (replicas - 1)
    return 2 * nbytes * (replicas - 1) / replicas


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """A run by replicas that mix after rounds.

    Attributes:
        speeds: of each replica by name, 1 = the fastest.
        network: between them.
        step_s: of one inner step at speed 1.
        inner_steps: of a replica of speed 1 per round; slower ones take fewer where ``balance`` is on.
        how: whose messages are averaged, and on which way.
        wires: of each vector of a message; see :func:`message_bytes`, also for ``density``.
        values: parameters of the model.
        fragments: parts in which a message travels, at different times of a round; waits for them add up.
        overlap: inner steps that go on while a message travels.
        law, momentum, outer_rate, pull: see :mod:`talkoot.plan.spread`; without a law replicas cannot drift apart.
        rounds: in the run; after the first ones, waits are a little longer.
        seed: of what is simulated.
    """

    speeds: dict[str, float]
    network: Network
    step_s: float
    inner_steps: int
    balance: bool = False
    how: How
    wires: tuple[str, ...]
    values: int
    density: float
    fragments: int = 1
    overlap: int = 0
    law: str = ""
    momentum: float = 0.0
    outer_rate: float = 1.0
    pull: float = 0.0
    rounds: int = 100
    seed: int = 0


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How far replicas drift apart; the spread is bounded below ``largest_pull`` and least at ``best_pull``.

    Attributes:
        law: of their motion.
        ratio: lasting variance of the weights between replicas over that of their progress; None = it has no bound.
        contraction: factor per round on the variance that is already there.
        pull, largest_pull, best_pull: the chosen one, the limit, and the one with the least ratio.
    """

    law: str
    ratio: float | None
    contraction: float
    pull: float
    largest_pull: float
    best_pull: float

    @property
    def near_the_limit(self) -> bool:
        """Whether less than a tenth of the limit is left."""
        return self.pull > MARGIN * self.largest_pull


class MixingOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What to expect of a run by replicas that mix after rounds.

    Attributes:
        how, replicas: as asked for.
        sent_bytes_per_round, sent_bytes_per_inner_step: of each replica, on average.
        ddp_sent_bytes_per_step: what agreeing on every step's gradient would take instead, in float32.
        exchange_s: of one exchange on these links, latency and bandwidth, once everybody is ready.
        ring_s: what the same message takes along a ring of all; None where it goes that way already.
        round_s: what a round takes in all, waits included. Simulated.
        idle: share of the time in which each replica waits, by name, if each of its steps takes as long. Simulated.
        idle_share: mean of that.
        uneven_idle_share: the same if step times are log-normal, their logarithms' deviation 0.5. Simulated.
        spread: None where all replicas start every round from the same weights, or never mix.
    """

    how: How
    replicas: int
    sent_bytes_per_round: float
    sent_bytes_per_inner_step: float
    ddp_sent_bytes_per_step: float
    exchange_s: float
    ring_s: float | None
    round_s: float
    idle: dict[str, float]
    idle_share: float
    uneven_idle_share: float
    spread: Spread | None


def outlook(mixture: Mixture) -> MixingOutlook:
    """Everything that can be said before such a run."""
    names, speeds = list(mixture.speeds), list(mixture.speeds.values())
    nbytes = sum(message_bytes(wire, mixture.values, mixture.density) for wire in mixture.wires)
    sent = sent_bytes(mixture.how, len(names), nbytes)
    part = nbytes / mixture.fragments
    exchange_s = sync_on(mixture.network, names, part, mixture.how)
    hop_s = (
        hop_seconds(mixture.network, names, part) if mixture.how == "pair" else np.full((len(names),) * 2, exchange_s)
    )
    late = hop_s / mixture.step_s - mixture.overlap / np.array(speeds)
    late = np.where(late > 0, mixture.fragments * late, late)

    def wait(step_spread: float) -> Waiting:
        return waiting(
            speeds,
            mixture.inner_steps,
            mixture.how,
            hop_steps=late,
            step_spread=step_spread,
            balance=mixture.balance,
            rounds=min(mixture.rounds, MOST_ROUNDS),
            seed=mixture.seed,
        )

    even = wait(0.0)
    return MixingOutlook(
        how=mixture.how,
        replicas=len(names),
        sent_bytes_per_round=sent,
        sent_bytes_per_inner_step=sent / mixture.inner_steps,
        ddp_sent_bytes_per_step=sent_bytes("direct", len(names), message_bytes("float32", mixture.values, 1.0)),
        exchange_s=exchange_s,
        ring_s=None if mixture.how == "ring" else sync_on(mixture.network, names, part, "ring"),
        round_s=even.round_steps * mixture.step_s,
        idle=dict(zip(names, even.idle, strict=True)),
        idle_share=even.idle_share,
        uneven_idle_share=wait(USUAL_STEP_SPREAD).idle_share,
        spread=_spread(mixture),
    )


def _spread(mixture: Mixture) -> Spread | None:
    if not mixture.law:
        return None
    replicas, law, momentum = len(mixture.speeds), mixture.law, mixture.momentum
    ratio = predicted_ratio(law, momentum, mixture.outer_rate, mixture.pull, replicas=replicas)
    return Spread(
        law=law,
        ratio=ratio if math.isfinite(ratio) else None,
        contraction=contraction(law, momentum, mixture.pull, replicas=replicas),
        pull=mixture.pull,
        largest_pull=largest_pull(law, momentum),
        best_pull=best_pull(law, momentum),
    )


def way(partners: str, collective: str, *, gather: bool) -> How:
    """How a rule's messages travel.

    Args:
        partners, gather: the rule's attributes; see :class:`~talkoot.train.mixing.rule.RoundRule`.
        collective: the recipe's choice, which counts for groups of all.

    Raises:
        ValueError: there is no such way.
    """
    chosen = ("gather" if gather else collective) if partners == "all" else partners
    for known in get_args(How):
        if known == chosen:
            return known
    raise ValueError(f"no message travels by {chosen!r}")
