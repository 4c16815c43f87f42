"""What a placement costs in communication, for many placements at once.

The fitness of DT-FM (Yuan et al., 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments",
arXiv 2206.01288): data-parallel plus pipeline-parallel traffic. The latter is a shortest tour over the stages, from one
to the next at the cost of the best matching of their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np

from talkoot.plan.problem import Matrix, Problem
from talkoot.plan.ring import Floats, Ints, bottleneck, ring_lengths, ring_order


class Costs(NamedTuple):
    """Of placements, each (count,).

    Attributes:
        cost: DP + 2 PP in seconds.
        mean: the mean over groups of what DP is the maximum of.
        heaviest: the group where that maximum is.
    """

    cost: Floats
    mean: Floats
    heaviest: Ints


class PlacementCost:
    """Prices placements of a problem's nodes into groups of given sizes.

    Links count in the mean of both directions, as whatever goes one way comes back the other way. With l = latency
    and host overhead, t = the time of the whole gradient on the link (both follow from ``share_s``, ``hop_s`` and
    ``busy_s``, as ``l = hop_s - busy_s``), and h = ``hop_s``, the cost of a placement in seconds is DP + 2 PP:

    - DP = the largest over groups P and their nodes i of the sum over j in P of ``2 (l_ij + t_ij / |P|)``;
    - PP = the shortest ring through all groups in which position s is taken by a group of size ``sizes[s]``, and
      position 0 by the first group; from group to group it costs the largest h of the matching in which that is
      smallest (the nodes of the larger group that are left over cost nothing).

    A *placement* is an array of nodes: first those of the first group, then those of the second...

    Args:
        problem: the costs.
        sizes: of the groups; more than one.
    """

    def __init__(self, problem: Problem, sizes: Sequence[int]) -> None:
        hop, busy, share = (_both_ways(matrix) for matrix in (problem.hop_s, problem.busy_s, problem.share_s))
        self.sizes = tuple(sizes)
        self._hop, self._latency = hop, hop - busy
        self._gradient = share - self._latency
        ends = [0, *accumulate(sizes)]
        places = [list(range(first, last)) for first, last in pairwise(ends)]
        self._by_size: list[tuple[int, list[int], Ints]] = []
        for size in sorted(set(sizes)):
            groups = [group for group, other in enumerate(sizes) if other == size]
            self._by_size.append((size, groups, np.array([places[group] for group in groups], np.intp)))
        # Pairs of groups with equal shapes are matched together; the smaller group is the first of its pair.
        shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for pair in combinations(range(len(sizes)), 2):
            small, large = sorted(pair, key=lambda group: sizes[group])
            shapes.setdefault((sizes[small], sizes[large]), []).append((small, large))
        self._pairs: list[tuple[Ints, Ints, Ints, Ints]] = []
        for pairs in shapes.values():
            rows, columns = (np.array([places[pair[side]] for pair in pairs], np.intp) for side in (0, 1))
            small, large = np.array(pairs, np.intp).T
            self._pairs.append((small, large, rows[:, :, None], columns[:, None, :]))

    def costs(self, placements: Ints, below: Floats | None = None) -> Costs:
        """What a search wants to know of placements, (count, nodes); groups of a size may be in any order.

        Args:
            below: (count,); a cost that DP alone shows to exceed this is not worked out, and infinite.
        """
        inside = self._inside(placements)
        cost = inside.max(1)
        if below is not None:
            cost[cost > below] = np.inf
        rest = np.flatnonzero(np.isfinite(cost))
        cost[rest] += 2 * ring_lengths(self._between(placements[rest]), self.sizes)
        return Costs(cost, inside.mean(1), inside.argmax(1))

    def gradient_s(self, one: int, other: int) -> float:
        """Seconds that the whole gradient takes from node to node."""
        return float(self._latency[one, other] + self._gradient[one, other])

    def cost(self, placement: Ints) -> float:
        """The same of one placement, its groups left in their order."""
        ring, around = self._between(placement[None])[0], np.arange(len(self.sizes))
        return float(self._inside(placement[None]).max() + 2 * ring[around, np.roll(around, -1)].sum())

    def order(self, placement: Ints) -> list[int]:
        """Groups in the order of the shortest ring, the first one first."""
        return ring_order(self._between(placement[None])[0], self.sizes)

    def _inside(self, placements: Ints) -> Floats:
        """(count, groups): what the all-reduce of each group costs its most burdened node."""
        inside = np.empty((len(placements), len(self.sizes)))
        for size, groups, places in self._by_size:
            nodes = placements[:, places]  # (count, groups, size)
            pairs = nodes[..., :, None], nodes[..., None, :]
            links = 2 * (self._latency[pairs] + self._gradient[pairs] / size)
            inside[:, groups] = links.sum(-1).max(-1)
        return inside

    def _between(self, placements: Ints) -> Floats:
        """(count, groups, groups): cost from group to group."""
        groups = len(self.sizes)
        ring = np.zeros((len(placements), groups, groups))
        for small, large, rows, columns in self._pairs:
            found = bottleneck(self._hop[placements[:, rows], placements[:, columns]])
            ring[:, small, large] = ring[:, large, small] = found
        return ring


def _both_ways(matrix: Matrix) -> Floats:
    one_way = np.array(matrix, np.float64)
    return (one_way + one_way.T) / 2
