"""How big each domain's expert becomes and how long it learns, at equal compute: pure arithmetic on operations.

An ensemble of experts is *homogeneous* where all have one size and one number of steps. It may instead give more steps,
larger models or both to harder domains (HDEE, arXiv 2502.19385). Such variants are comparable only where the operations
of their training add up to the same, so that is what is planned here, to within a hundredth, not by choice of numbers.
A *class* of difficulty is given by a person or estimated from how the seed's loss on a domain stands and falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry

CLASSES = ("easy", "medium", "hard")
TOLERANCE = 0.01  # share by which the operations of two plans may differ and still be called equal
LEAST_STEPS = 1


class Curve(msgspec.Struct, frozen=True):
    """How a model learns a domain: loss after t steps is ``start - slope * log(1 + t)``, in nats per token."""

    start: float
    slope: float

    def at(self, steps: float) -> float:
        """The loss that it predicts."""
        return self.start - self.slope * math.log1p(steps)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to spend, and on what.

    Attributes:
        domains: names, each with its class.
        step_flops: operations of one training step by size (``small``, ``medium``, ``large``).
        steps: of the homogeneous plan, per domain; with the medium size they are the compute to be spent.
        shift: share of the steps that harder classes get more and easier ones less.
        curves: of domains, where they were measured.
    """

    domains: Mapping[str, str]
    step_flops: Mapping[str, float]
    steps: int
    shift: float = 0.25
    curves: Mapping[str, Curve] = {}

    @property
    def flops(self) -> float:
        """Operations of the homogeneous plan."""
        return self.steps * len(self.domains) * self.step_flops["medium"]


class Share(msgspec.Struct, frozen=True):
    """A domain's expert: its size, and its steps."""

    size: str
    steps: float


class Allocation(Protocol):
    """Proposes a share for each domain; only the ratios of steps count, the sum is made equal afterwards."""

    def __call__(self, budget: Budget) -> dict[str, Share]:
        """By domain."""
        ...


#: ways to spread compute over domains by name; the paper's are all but ``marginal``
allocations: Registry[Allocation] = Registry("allocation")

_SIZES: dict[str, str] = dict(zip(CLASSES, ("small", "medium", "large"), strict=True))


def _more(budget: Budget, difficulty: str) -> float:
    return budget.steps * (1 + budget.shift * (CLASSES.index(difficulty) - 1))


@allocations.register("homogeneous")
def _homogeneous(budget: Budget) -> dict[str, Share]:
    return {name: Share("medium", budget.steps) for name in budget.domains}


@allocations.register("steps")
def _steps(budget: Budget) -> dict[str, Share]:
    return {name: Share("medium", _more(budget, one)) for name, one in budget.domains.items()}


@allocations.register("sizes")
def _sizes(budget: Budget) -> dict[str, Share]:
    return {name: Share(_SIZES[one], budget.steps) for name, one in budget.domains.items()}


@allocations.register("sizes-and-steps")
def _both(budget: Budget) -> dict[str, Share]:
    return {name: Share(_SIZES[one], _more(budget, one)) for name, one in budget.domains.items()}


@allocations.register("marginal")
def _marginal(budget: Budget) -> dict[str, Share]:
    """The sum of losses falls fastest where one more operation helps every domain alike: with loss falling as
    ``slope * log(1 + t)`` that is at ``1 + t`` in proportion to the slope. Medium size."""
    missing = [name for name in budget.domains if name not in budget.curves]
    if missing:
        raise TalkootError(
            "this allocation needs to know how each domain is learned",
            where="allocation marginal",
            why=f"there is no curve of {', '.join(missing)}",
            next="let the seed's losses be measured first, or choose another allocation",
        )
    slopes = {name: max(budget.curves[name].slope, 1e-6) for name in budget.domains}
    mean = sum(slopes.values()) / len(slopes)
    return {
        name: Share("medium", max(LEAST_STEPS, (budget.steps + 1) * slope / mean - 1)) for name, slope in slopes.items()
    }


class Assigned(msgspec.Struct, frozen=True):
    """A planned expert; ``flops`` are its training's."""

    domain: str
    size: str
    steps: int
    flops: float


def allocate(name: str, budget: Budget) -> tuple[Assigned, ...]:
    """A plan of the named allocation that costs what the homogeneous one does.

    Raises:
        TalkootError: an unknown name or class, or too few steps to come within a hundredth of the compute.
    """
    _check(budget)
    shares = allocations[name](budget)
    factor = budget.flops / sum(share.steps * budget.step_flops[share.size] for share in shares.values())
    exact = {domain: share.steps * factor for domain, share in shares.items()}
    steps = {domain: max(LEAST_STEPS, math.floor(value)) for domain, value in exact.items()}
    left = budget.flops - sum(steps[one] * budget.step_flops[shares[one].size] for one in steps)
    # The largest remainders are rounded up first, as long as that brings the sum nearer.
    for domain in sorted(exact, key=lambda one: (steps[one] - exact[one], one)):
        cost = budget.step_flops[shares[domain].size]
        if left >= cost / 2:
            steps[domain] += 1
            left -= cost
    plan = tuple(
        Assigned(domain, share.size, steps[domain], steps[domain] * budget.step_flops[share.size])
        for domain, share in shares.items()
    )
    if (off := deviation(plan, budget)) > TOLERANCE:
        raise TalkootError(
            "the plans cannot be made to cost the same",
            where=f"allocation {name}",
            why=f"whole steps leave a difference of {off:.1%}, {TOLERANCE:.0%} is allowed",
            next="plan for more steps per domain, or for smaller ones",
        )
    return plan


def deviation(plan: Sequence[Assigned], budget: Budget) -> float:
    """Share by which a plan's operations differ from the budget's."""
    return abs(sum(one.flops for one in plan) / budget.flops - 1)


def lanes(domains: Mapping[str, str]) -> dict[str, str]:
    """Which expert each domain's continues, where experts come in rounds: the one before it of the same class.

    A domain that is the first of its class begins with the seed and is left out.
    """
    last: dict[str, str] = {}
    parents: dict[str, str] = {}
    for name, difficulty in domains.items():
        if difficulty in last:
            parents[name] = last[difficulty]
        last[difficulty] = name
    return parents


def fit_curve(losses: Sequence[tuple[int, float]]) -> Curve:
    """Least squares of ``start - slope * log(1 + t)`` through (steps, loss) of a short trial.

    Raises:
        ValueError: fewer than two different numbers of steps, or a loss that is not finite.
    """
    if len({steps for steps, _ in losses}) < 2 or not all(math.isfinite(loss) for _, loss in losses):
        raise ValueError("a curve needs finite losses at two numbers of steps")
    xs = [math.log1p(steps) for steps, _ in losses]
    ys = [loss for _, loss in losses]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = -sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    return Curve(y + slope * x, slope)


def classify(curves: Mapping[str, Curve], steps: int) -> dict[str, str]:
    """Classes by the loss that is left after ``steps``: the lowest third is easy, the highest hard.

    The seed's loss alone calls text hard that is merely new and quickly learned, such as one language's code; so
    what counts is where the curve leads.
    """
    order = sorted(curves, key=lambda name: (curves[name].at(steps), name))
    third = len(order) / len(CLASSES)
    ranked = {name: CLASSES[min(int(place / third), len(CLASSES) - 1)] for place, name in enumerate(order)}
    return {name: ranked[name] for name in curves}


def _check(budget: Budget) -> None:
    why = ""
    if not budget.domains:
        why = "there is no domain"
    elif strange := sorted(set(budget.domains.values()) - set(CLASSES)):
        why = f"{strange[0]!r} is no class of difficulty: {', '.join(CLASSES)}"
    elif budget.steps < 1 or not 0 <= budget.shift < 1:
        why = f"{budget.steps} steps with a shift of {budget.shift}: at least 1, and from 0 to below 1"
    elif missing := sorted(set(_SIZES.values()) - set(budget.step_flops)):
        why = f"the cost of a step of the {missing[0]} model is missing"
    elif not all(0 < value < math.inf for value in budget.step_flops.values()):
        why = "a step costs a positive, finite number of operations"
    if why:
        raise TalkootError(
            "experts cannot be planned", where="the budget", why=why, next="correct the recipe's domains and steps"
        )
