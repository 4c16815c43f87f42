"""Ridge regression of class labels on features, in closed form from each class's Gram matrix (Hoerl and Kennard 1970).

One-hot labels need no rows: of class d, ``A_d = sum of x~ x~^T`` holds the Gram matrix, the sum of the rows and their
number, and the right-hand side of the normal equations is the sum. So classes are added and removed by adding matrices
and solving once. All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from talkoot.blend.statistics.gram import Gram, weighted_sum
from talkoot.core.errors import TalkootError

RAISES = 6  # times that a ridge too small to factor is made tenfold
STRENGTHS = tuple(10.0**power for power in range(-6, 3))
_ITERATIONS, _SETTLED = 40, 1e-3


@dataclass(frozen=True)
class Fit:
    """A linear classifier.

    Attributes:
        weights: one column per class, (width + 1, D) with the intercept last, or (width, D) without; float64.
        names: of the classes, in the columns' order.
        condition: of the matrix that was solved, the ridge included; estimated from below by power iteration.
        strength: the ridge that was used, after raises.
    """

    weights: Tensor
    names: tuple[str, ...]
    condition: float
    strength: float

    def scores(self, rows: Tensor) -> Tensor:
        """Of rows (n, width), for each class: (n, D) float64."""
        wide = rows.double()
        if len(self.weights) == rows.shape[1]:
            return wide @ self.weights
        return wide @ self.weights[:-1] + self.weights[-1]


def ridge(
    grams: Mapping[str, Gram],
    *,
    strength: float = 1e-2,
    intercept: bool = True,
    balanced: bool = False,
    paper: bool = False,
) -> Fit:
    """Least squares on one-hot labels with a penalty on the weights.

    Args:
        grams: of each class, by name, all of one width; the classes' order is the mapping's.
        strength: the penalty lambda, as a multiple of the features' mean square (of ``tr(A) / (n width)``), so that it
            means the same for any number of rows and any scale.
        intercept: False = no constant, for formats that have no place for one.
        balanced: every class counts alike, however many rows it has.
        paper: as "DUME" (arXiv 2603.29765) and "IR3DE" (arXiv 2606.06098) do: lambda is added to the sums as it is, to
            the intercept's entry too.

    Raises:
        TalkootError: fewer than two classes, one without rows, unlike widths, or numbers that are not finite.
    """
    matrix, sides = _system(grams, balanced=balanced and not paper, averaged=not paper)
    penalty = torch.ones(len(matrix), dtype=torch.float64)
    unit = 1.0 if paper else float(matrix.diagonal()[:-1].mean()) or 1.0
    if not intercept:
        matrix, sides, penalty = matrix[:-1, :-1], sides[:-1], penalty[:-1]
    elif not paper:
        penalty[-1] = 0.0
    for _ in range(1 + RAISES):
        ridged = matrix + torch.diag(strength * unit * penalty)
        factor, failed = torch.linalg.cholesky_ex(ridged)
        if not int(failed):
            weights = torch.cholesky_solve(sides, factor)
            return Fit(weights, tuple(grams), _condition(ridged, factor), strength)
        strength = max(10 * strength, 1e-12)
    values, vectors = torch.linalg.eigh(ridged)
    kept = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    weights = vectors[:, kept] @ ((vectors[:, kept].T @ sides) / values[kept, None])
    return Fit(weights, tuple(grams), float(values[-1] / values[kept][0]), strength)


def cross_validated(
    grams: Mapping[str, Gram], *, strengths: Sequence[float] = STRENGTHS, intercept: bool = True, balanced: bool = False
) -> tuple[float, dict[float, float]]:
    """The strength with the least error by generalised cross-validation (Golub, Heath and Wahba 1979).

    One eigendecomposition serves all strengths: with ``A / n = Q L Q^T``, ``W = Q (L + s)^-1 Q^T B``. Rows count as
    independent; tokens of one document are not, so it leans towards small strengths.

    Returns:
        The best strength, and of each its mean squared error over ``(1 - degrees of freedom / n)^2``.
    """
    matrix, sides = _system(grams, balanced=balanced, averaged=True)
    rows, shares = sum(gram.count for gram in grams.values()), sides[-1].clone()
    features, sides, second, fixed = matrix[:-1, :-1], sides[:-1], shares, 0
    unit = float(features.diagonal().mean()) or 1.0
    if intercept:  # it is not penalised, so it drops out of a centred problem
        mean = matrix[:-1, -1]
        features, sides, second = (
            features - torch.outer(mean, mean),
            sides - torch.outer(mean, shares),
            shares * (1 - shares),
        )
        fixed = 1
    values, vectors = torch.linalg.eigh(features)
    values, turned = values.clamp(min=0), vectors.T @ sides
    found: dict[float, float] = {}
    for strength in strengths:
        shrunk = turned / (values + strength * unit)[:, None]
        error = float(second.sum() - 2 * (shrunk * turned).sum() + (values[:, None] * shrunk**2).sum())
        freedom = float((values / (values + strength * unit)).sum()) + fixed
        found[strength] = error / (1 - freedom / rows) ** 2 if freedom < rows else math.inf
    return min(found, key=lambda strength: found[strength]), found


def _system(grams: Mapping[str, Gram], *, balanced: bool, averaged: bool) -> tuple[Tensor, Tensor]:
    """Left and right side, (width + 1, width + 1) and (width + 1, D); per row of data where ``averaged``."""
    widths = {name: gram.width for name, gram in grams.items()}
    if len(grams) < 2:
        why = f"there is {len(grams)}, and a choice needs two"
        raise _refused("a single domain cannot be told from others", ", ".join(grams) or "no domain", why)
    if len(set(widths.values())) > 1:
        raise _refused("the domains' features are unlike", "statistics", f"widths {widths}")
    for name, gram in grams.items():
        if not gram.count:
            raise _refused("a domain is empty", name, "nothing was counted for it")
    shares = {name: 1 / (gram.count * len(grams)) if balanced else 1.0 for name, gram in grams.items()}
    matrix = weighted_sum((gram, shares[name]) for name, gram in grams.items())
    if not bool(torch.isfinite(matrix).all()):
        raise _refused("the statistics are not finite", ", ".join(grams), "a sum of products is NaN or infinite")
    sides = torch.stack([gram.total * shares[name] for name, gram in grams.items()], dim=1)
    rows = float(matrix[-1, -1]) if averaged else 1.0
    return matrix / rows, sides / rows


def _condition(matrix: Tensor, factor: Tensor) -> float:
    """Largest over smallest eigenvalue by power iteration on the matrix and on its inverse; a start without chance."""
    start = torch.linspace(1, 2, len(matrix), dtype=torch.float64)[:, None].sin()
    large = small = start / start.norm()
    bounds = (0.0, 0.0)
    for _ in range(_ITERATIONS):
        large, small = matrix @ large, torch.cholesky_solve(small, factor)
        before, bounds = bounds, (float(large.norm()), float(small.norm()))
        large, small = large / bounds[0], small / bounds[1]
        if math.prod(bounds) < (1 + _SETTLED) * math.prod(before):
            break
    return math.prod(bounds)


def _refused(what: str, where: str, why: str) -> TalkootError:
    next = "give statistics of two domains or more, all counted with the same features"
    return TalkootError(what, where=where, why=why, next=next)
