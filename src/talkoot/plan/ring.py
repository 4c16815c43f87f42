"""Shortest rings through the groups of a pipeline, and cheapest matchings between groups; many at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

EXACT_GROUPS = 10  # up to which rings are exact; beyond, they are nearest-neighbour rings improved by reversals
EXACT_ROWS = 10  # up to which matchings are found by subsets of rows, many at once; beyond, one at a time


def ring_lengths(between: Floats, sizes: Sequence[int]) -> Floats:
    """Lengths of the shortest rings in which each position is taken by a group of its size, and 0 by group 0.

    Exact up to 10 groups (Held and Karp, 1962), else improved by reversals until none helps (2-opt).

    Args:
        between: (count, groups, groups), symmetric: from group to group.
        sizes: of the groups, and of the positions.
    """
    if len(sizes) > EXACT_GROUPS:
        return _length(between, _improved(between, sizes))
    return (_ends(between, sizes)[-1] + between[:, 1:, 0]).min(1)


def ring_order(between: Floats, sizes: Sequence[int]) -> list[int]:
    """Groups in the order of the ring that :func:`ring_lengths` measures; ``between`` is (groups, groups)."""
    if len(sizes) > EXACT_GROUPS:
        return _improved(between[None], sizes)[0].tolist()
    ends = _ends(between[None], sizes)[:, 0]
    left, behind, order = len(ends) - 1, 0, list[int]()
    while left:
        behind = int((ends[left] + between[1:, behind]).argmin()) + 1
        order.insert(0, behind)
        left -= 1 << (behind - 1)
    return [0, *order]


def _ends(between: Floats, sizes: Sequence[int]) -> Floats:
    """(sets, count, groups - 1): the shortest way from group 0 through a set of others that ends in each of them."""
    others = len(sizes) - 1
    steps = between[:, 1:, 1:]
    ends = np.full((1 << others, len(between), others), np.inf)
    for chosen in range((1 << others) - 1):
        position = chosen.bit_count() + 1
        further = [g for g in range(others) if not chosen >> g & 1 and sizes[g + 1] == sizes[position]]
        ways = (ends[chosen][:, :, None] + steps).min(1) if chosen else between[:, 0, 1:]
        for group in further:
            ends[chosen | 1 << group, :, group] = ways[:, group]
    return ends


def _improved(between: Floats, sizes: Sequence[int]) -> Ints:
    """(count, groups): rings built from the nearest group left, then improved."""
    count, groups = len(between), len(sizes)
    rows = np.arange(count)
    orders, left = np.zeros((count, groups), np.intp), np.ones((count, groups), bool)
    left[:, 0] = False
    for position in range(1, groups):
        fits = left & (np.array(sizes) == sizes[position])
        orders[:, position] = np.where(fits, between[rows, orders[:, position - 1]], np.inf).argmin(1)
        left[rows, orders[:, position]] = False
    reversals = [
        [*range(first), *range(last, first - 1, -1), *range(last + 1, groups)]
        for first, last in combinations(range(1, groups), 2)
    ]
    moves = np.array([m for m in reversals if all(sizes[a] == sizes[b] for a, b in enumerate(m))], np.intp)
    lengths = _length(between, orders)
    while len(moves):
        options = np.stack([_length(between, orders[:, move]) for move in moves], 1)
        best = options.argmin(1)
        better = options[rows, best] < lengths - 1e-9
        if not better.any():
            break
        lengths = np.where(better, options[rows, best], lengths)
        orders = np.where(better[:, None], orders[rows[:, None], moves[best]], orders)
    return orders


def _length(between: Floats, orders: Ints) -> Floats:
    return between[np.arange(len(between))[:, None], orders, np.roll(orders, -1, 1)].sum(1)


def bottleneck(costs: Floats) -> Floats:
    """The largest cost of the matching, of every row to a column of its own, in which that is smallest.

    By Hall's theorem a matching within a threshold exists when every k rows reach k columns within it. So the answer
    is the largest, over sets of rows, of the k-th smallest of what columns cost from the nearest row of the set.

    Args:
        costs: (..., rows, columns), at least as many columns as rows.
    """
    *outer, rows, columns = costs.shape
    if rows > EXACT_ROWS:
        flat = costs.reshape(-1, rows, columns)
        return np.array([_bottleneck_by_thresholds(matrix) for matrix in flat]).reshape(outer)
    nearest = np.full((*outer, 1 << rows, columns), np.inf)
    for row in range(rows):
        half = 1 << row
        nearest[..., half : 2 * half, :] = np.minimum(nearest[..., :half, :], costs[..., row : row + 1, :])
    nearest.sort(-1)
    sets = range(1, 1 << rows)
    return nearest[..., list(sets), [chosen.bit_count() - 1 for chosen in sets]].max(-1)


def _bottleneck_by_thresholds(costs: Floats) -> float:
    """The same for one matrix of any size: the lowest threshold within which all rows are matched, by bisection."""
    values = np.unique(costs)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _matchable([np.flatnonzero(row <= values[middle]).tolist() for row in costs]):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def _matchable(reach: list[list[int]]) -> bool:
    """Whether every row gets a column of its own among those it reaches (augmenting paths; Kuhn, 1955)."""
    owner: dict[int, int] = {}

    def augment(row: int, tried: set[int]) -> bool:
        for column in reach[row]:
            if column not in tried:
                tried.add(column)
                if column not in owner or augment(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(augment(row, set()) for row in range(len(reach)))
