"""A sum over microbatches whose bits do not depend on who adds what, or when.

Floating-point addition is not associative, so a sum that follows arrival order, replica count or routing changes in
its last bits. Here the additions follow a fixed binary tree over microbatch indices (left block = the largest power
of two below the block's size), whatever order the leaves come in and whoever computes which part: any split of the
work over peers, any crash and re-assignment, gives the same gradient bit for bit. (The same idea as the definite
order of operations in Verde/RepOps, arXiv 2502.19405, applied to data parallelism.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Generic, TypeVar

A = TypeVar("A")

Node = tuple[int, int]  # the half-open range of microbatches below it


def split(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two leaves."""
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


@lru_cache(maxsize=64)
def _parents(count: int) -> dict[Node, tuple[Node, Node, Node]]:
    """For each node of the tree over ``count`` leaves but the root: (parent, left child, right child)."""
    table: dict[Node, tuple[Node, Node, Node]] = {}
    open_nodes = [(0, count)]
    while open_nodes:
        node = open_nodes.pop()
        if node[1] - node[0] > 1:
            left, right = split(node)
            table[left] = table[right] = (node, left, right)
            open_nodes += [left, right]
    return table


class TreeSum(Generic[A]):
    """A partly known sum of ``count`` leaves.

    ``parts`` maps maximal known nodes to their values; when it holds the root alone, the sum is complete.

    Args:
        count: leaves of the tree.
        add: sum of a left and a right value; it may reuse the left one's memory.
        absent: leaves that do not exist after all; a node with one child left has that child's value.
    """

    def __init__(self, count: int, add: Callable[[A, A], A], absent: frozenset[int] = frozenset()) -> None:
        self.count, self._add, self.absent = count, add, absent
        self.parts: dict[Node, A] = {}

    def insert(self, node: Node, value: A) -> None:
        """Add a leaf ``(i, i + 1)`` or an inner node's sum; takes ownership of ``value``.

        Raises:
            ValueError: not a node of this tree, or some of its leaves are already in.
        """
        parents = _parents(self.count)
        if node != (0, self.count) and node not in parents:
            raise ValueError(f"{node} is no node of a tree over {self.count} microbatches")
        if any(known[0] < node[1] and node[0] < known[1] for known in self.parts):
            raise ValueError(f"microbatches {node[0]}..{node[1] - 1} are already counted")
        self.parts[node] = value
        while node in parents:
            parent, left, right = parents[node]
            other = right if node == left else left
            if self._is_absent(other):
                self.parts[parent] = self.parts.pop(node)
            elif other in self.parts:
                self.parts[parent] = self._add(self.parts.pop(left), self.parts.pop(right))
            else:
                return
            node = parent

    def _is_absent(self, node: Node) -> bool:
        return bool(self.absent) and all(leaf in self.absent for leaf in range(*node))

    def __iter__(self) -> Iterator[tuple[Node, A]]:
        return iter(sorted(self.parts.items(), key=lambda item: item[0]))

    @property
    def total(self) -> A:
        """The complete sum; ValueError while leaves are missing."""
        if set(self.parts) != {(0, self.count)}:
            raise ValueError(f"the sum over {self.count} microbatches is incomplete: it has {sorted(self.parts)}")
        return self.parts[0, self.count]
