"""Second moments of rows of numbers, as a sum that peers can add up: what a linear classifier needs to know of data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MAX_WIDTH = 8192  # 8,193^2 doubles: half a gigabyte
PSD_TOLERANCE = 1e-10  # of the trace; sums of doubles are wrong by some 1e-13 of it
MAX_RMS = 1e4  # of one number; a larger one would drown what everybody else counted


class Gram:
    """``A = sum of x~ x~^T`` over rows ``x~ = [x; 1]``, in float64.

    The last column of ``A`` is the sum of the rows, its last entry how many there were; so one matrix holds all
    that ridge regression on one-hot labels needs of a class. Sums of integers below 2^53 are exact, whatever their
    order; of other numbers they are correct to some 1e-15 of the trace.

    Args:
        width: numbers per row, without the 1.
        matrix: the sum so far, (width + 1, width + 1) float64; of it the upper triangle counts.

    Raises:
        ValueError: the width or the matrix's shape or type cannot be.
    """

    def __init__(self, width: int, matrix: Tensor | None = None) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"a Gram matrix has a width from 1 to {MAX_WIDTH}, not {width}")
        if matrix is None:
            matrix = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        if tuple(matrix.shape) != (width + 1, width + 1) or matrix.dtype != torch.float64:
            raise ValueError(f"expected ({width + 1}, {width + 1}) float64, got {tuple(matrix.shape)} {matrix.dtype}")
        self.width, self._sum = width, matrix

    def add(self, rows: Tensor) -> None:
        """Count rows, (n, width) of any number type.

        Raises:
            ValueError: another width, or a number that is not finite; nothing was counted then.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(f"rows of shape (n, {self.width}) are counted here, not {tuple(rows.shape)}")
        wide = rows.detach().to("cpu", torch.float64)
        if not bool(torch.isfinite(wide).all()):
            raise ValueError("a row holds a number that is not finite")
        h = self.width
        self._sum[:h, :h].addmm_(wide.T, wide)
        self._sum[:h, h] += wide.sum(0)
        self._sum[h, h] += len(wide)

    @property
    def matrix(self) -> Tensor:
        """The sum, (width + 1, width + 1), symmetric to the bit; a copy."""
        return _mirrored(self._sum)

    @property
    def total(self) -> Tensor:
        """Sum of the rows and, last, how many; (width + 1,)."""
        return self._sum[:, -1].clone()

    @property
    def count(self) -> int:
        """How many rows were counted."""
        return round(float(self._sum[-1, -1]))

    @property
    def rms(self) -> float:
        """Root mean square of the counted numbers."""
        return math.sqrt(max(0.0, float(self._sum.diagonal()[:-1].sum())) / max(1, self.count) / self.width)

    def __add__(self, other: Gram) -> Gram:
        if other.width != self.width:
            raise ValueError(f"Gram matrices of widths {self.width} and {other.width} do not add up")
        return Gram(self.width, self._sum + other._sum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gram) and self.width == other.width and torch.equal(self.matrix, other.matrix)

    __hash__ = None  # type: ignore[assignment]

    def packed(self) -> Tensor:
        """The upper triangle row by row, ((width + 1)(width + 2) / 2,)."""
        return self._sum[tuple(torch.triu_indices(self.width + 1, self.width + 1))]

    @classmethod
    def unpacked(cls, width: int, numbers: Tensor) -> Gram:
        """The matrix that :meth:`packed` gave."""
        gram = cls(width)
        gram._sum[tuple(torch.triu_indices(width + 1, width + 1))] = numbers
        return gram

    def check(self) -> None:
        """Whether this can be a sum of outer products at all.

        Raises:
            ValueError: not finite, not a count, too large, or not positive semi-definite.
        """
        whole = self.matrix
        if not bool(torch.isfinite(whole).all()):
            raise ValueError("it holds numbers that are not finite")
        count = float(whole[-1, -1])
        if count < 1 or count != math.floor(count) or count >= 2**53:
            raise ValueError(f"its last entry says how many rows were counted, and {count:g} is no such number")
        diagonal = whole.diagonal()[:-1]
        if float(diagonal.min()) < 0:
            raise ValueError("a sum of squares on its diagonal is negative")
        if self.rms > MAX_RMS:
            raise ValueError(f"its trace is too large: numbers of {self.rms:.3g} on average, {MAX_RMS:.3g} is the most")
        whole.diagonal().add_(PSD_TOLERANCE * whole.trace())
        if int(torch.linalg.cholesky_ex(whole).info):
            raise ValueError("it is not positive semi-definite, and every sum of outer products is")

    def blurred(self, scale: float, chance: torch.Generator) -> Gram:
        """With Gaussian noise; still positive semi-definite, the count unchanged.

        Args:
            scale: standard deviation of the noise on each entry of ``A``, as a multiple of the mean square of a
                counted number: some rows' worth.
            chance: where the noise comes from.
        """
        h, whole, count = self.width, self.matrix, self.count
        unit = scale * float(whole.diagonal()[:-1].mean()) / max(count, 1)
        noise = torch.randn(h + 1, h + 1, generator=chance, dtype=torch.float64) * unit
        total = whole[:h, h] + noise[:h, h]
        # The part of A that is not the means': noise must not make it negative somewhere, so that is cut off.
        spread = whole[:h, :h] - torch.outer(whole[:h, h], whole[:h, h]) / count + _mirrored(noise[:h, :h])
        values, vectors = torch.linalg.eigh(spread)
        whole[:h, :h] = _mirrored((vectors * values.clamp(min=0)) @ vectors.T + torch.outer(total, total) / count)
        whole[:h, h] = total
        return Gram(h, whole)


def weighted_sum(parts: Iterable[tuple[Gram, float]]) -> Tensor:
    """``sum of weight * A`` over matrices of one width, in their order; symmetric to the bit."""
    total = torch.zeros((), dtype=torch.float64)
    for gram, weight in parts:
        total = torch.add(total, gram._sum, alpha=weight)
    return _mirrored(total)


def _mirrored(square: Tensor) -> Tensor:
    return torch.triu(square) + torch.triu(square, 1).T
