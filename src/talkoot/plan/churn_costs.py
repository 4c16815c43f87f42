"""Formulas of training under losses: how often to save, what rolling back leaves, and how long a run takes at least.

With the published case they were checked against (CheckFree; Blagoev et al., 2025, arXiv 2506.15461: 500 million
parameters in six stages of whole decoder blocks), whose tables need them to be read: its baseline of checkpoints does
not follow from its rates, and most of what its method costs is there without any loss.
"""

from __future__ import annotations

import math

import msgspec


def young_daly(cost_iterations: float, failures_per_iteration: float) -> float:
    """Iterations between checkpoints that lose least (Young, 1974; Daly, 2006).

    Args:
        cost_iterations: of one checkpoint, in iterations; failures_per_iteration: of the whole swarm.
    """
    if cost_iterations < 0 or failures_per_iteration <= 0:
        raise ValueError("a checkpoint costs at least nothing, and without failures none is needed")
    return math.sqrt(2 * cost_iterations / failures_per_iteration)


def kept_share(period: float, failures_per_iteration: float) -> float:
    """Share of the iterations done that stand where each failure throws back to the newest checkpoint.

    Checkpoints are due by the clock, after every ``period`` iterations done, repeated ones too. Where they are due
    after so many steps of progress, as here, it is fk / (exp(fk) - 1): less when failures are frequent.
    """
    missed = failures_per_iteration * period
    return 1.0 if missed == 0 else -math.expm1(-missed) / missed


def expected_hours(
    iterations: float,
    iteration_s: float,
    failures_per_iteration: float = 0.0,
    *,
    pause_s: float = 0.0,
    overhead: float = 0.0,
    lost_iterations: float = 0.0,
) -> float:
    """Hours until ``iterations`` undisturbed ones' worth of training is done.

    Args:
        pause_s: of each failure, until all compute again; half an iteration under way comes on top.
        overhead: of every iteration, as a share.
        lost_iterations: that each failure sets training back; ValueError when they are more than are done meanwhile.
    """
    progress = 1 - failures_per_iteration * lost_iterations
    if progress <= 0:
        raise ValueError("failures take more than is done between them: the run never ends")
    done = iterations / progress
    failures = failures_per_iteration * iterations
    return (done * iteration_s * (1 + overhead) + failures * (pause_s + iteration_s / 2)) / 3600


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Of the published medium model, to a validation loss of 2.85, by failure rate.

    Attributes:
        hourly: chance that a stage fails within an hour; ``per_iteration``: of each stage, as in their code.
        iteration_s: without redundant computing; ``checkpoint``, ``redundant``, ``blended``, ``swapped``: hours.
    """

    hourly: float
    per_iteration: float
    iteration_s: float
    checkpoint: float
    redundant: float
    blended: float
    swapped: float

    @property
    def failures(self) -> float:
        """Of the whole swarm, per iteration."""
        return STAGES * self.per_iteration


STAGES = 6
ITERATIONS = 10_000  # that exact training takes, from redundant computing's hours
ITERATION_S, REDUNDANT_S = 91.32, 151.04
PUBLISHED = tuple(
    Published(
        hourly=hourly,
        per_iteration=rate,
        iteration_s=iteration_s,
        checkpoint=checkpoint,
        redundant=419.6,
        blended=blended,
        swapped=swapped,
    )
    for hourly, rate, iteration_s, checkpoint, blended, swapped in (
        (0.05, 9e-4, 91.32, 558.2, 367.8, 355.1),
        (0.10, 2e-3, 91.32, 621.7, 405.9, 367.8),
        (0.16, 4e-3, 92.12, 634.4, 563.0, 460.6),
    )
)


def bound_hours(case: Published, *, pause_s: float = 40.0, overhead: float = 0.0) -> float:
    """What any exact recovery takes at least."""
    return expected_hours(ITERATIONS, ITERATION_S, case.failures, pause_s=pause_s, overhead=overhead)


def rollback_iterations(case: Published, period: float) -> float:
    """Iterations that checkpointing every ``period`` takes, by the published rate."""
    return ITERATIONS / kept_share(period, case.failures)


def swap_fit(one: Published, other: Published) -> tuple[float, float]:
    """Iterations without a failure, and lost per failure, that explain the swapped schedule's hours at two rates.

    Solves ``hours * 3600 / iteration_s = n / (1 - c f)`` for n and c.
    """
    a, b = (case.swapped * 3600 / case.iteration_s for case in (one, other))
    lost = (b - a) / (b * other.failures - a * one.failures)
    return a * (1 - lost * one.failures), lost
