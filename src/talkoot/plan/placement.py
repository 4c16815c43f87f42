"""Which machine holds which stage: a genetic search, sizes of groups, and a check of what users write themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from talkoot.core.errors import TalkootError, nearest
from talkoot.plan.placement_cost import PlacementCost
from talkoot.plan.problem import Problem
from talkoot.plan.ring import Ints

Groups = tuple[tuple[int, ...], ...]

POPULATION = 96
GENERATION = 32  # offspring that are bred and refined together
CUTS = 5  # of the crossover
REFINEMENTS = 12  # moves that each offspring tries
COOLING = 3  # generations after which the mean counts half


def group_sizes(num_nodes: int, num_stages: int, visits: int) -> tuple[int, ...]:
    """How many nodes hold each stage, stage 0 first.

    When microbatches visit r of S stages, every origin keeps as many relays busy as there are when
    ``|P_0| (r - 1) = (S - 1) |P_s|``, that is with ``num_nodes / r`` origins. Where that does not come out even, the
    nearest number of origins is taken (of two, the smaller one; every stage keeps a node), and the others are shared
    out evenly, with one more for the earlier stages.

    Raises:
        TalkootError: more stages than nodes, or ``visits`` not in 1 to ``num_stages``.
    """
    if not 1 <= num_stages <= num_nodes:
        why = f"there are {num_stages} stages and {num_nodes} nodes, and every stage needs a node of its own"
        raise _bad("stages", why, f"ask for 1 to {num_nodes} stages" if num_nodes else "add nodes")
    if not 1 <= visits <= num_stages:
        why = f"microbatches cannot visit {visits} of {num_stages} stages: that skip ratio is unreachable"
        raise _bad("visits", why, f"ask for 1 to {num_stages} visits; {num_stages} skips nothing")
    if num_stages == 1:
        return (num_nodes,)
    nearest_half_down = -((visits - 2 * num_nodes) // (2 * visits))
    origins = min(max(1, nearest_half_down), num_nodes - (num_stages - 1))
    share, more = divmod(num_nodes - origins, num_stages - 1)
    return (origins, *(share + (stage < more) for stage in range(num_stages - 1)))


def check_placement(problem: Problem, groups: Sequence[Sequence[int | str]]) -> Groups:
    """A placement that a user wrote, as indices.

    Args:
        groups: nodes of each stage by index or name; nodes may be left out.

    Raises:
        TalkootError: another number of stages, a stage without node, an unknown node, or one in two places.
    """
    known = {name: index for index, name in enumerate(problem.names)}
    if len(groups) != problem.num_stages:
        why = f"it places {len(groups)} stages, the model has {problem.num_stages}"
        if problem.num_stages > len(known):
            why += f", which is more than the {len(known)} nodes there are"
        raise _bad("the placement", why, f"write {problem.num_stages} groups, those of stage 0 first")
    stage_of: dict[int, int] = {}
    for stage, group in enumerate(groups):
        if not group:
            raise _bad(f"stage {stage} of the placement", "no node holds it", "give it at least one node")
        for name in group:
            node = known.get(name, -1) if isinstance(name, str) else name
            if not 0 <= node < len(known):
                hint = nearest(name, known) if isinstance(name, str) else f"they are numbered 0 to {len(known) - 1}"
                raise _bad(f"stage {stage} of the placement", f"there is no node {name!r}; {hint}", "correct it")
            if node in stage_of:
                why = f"node {problem.names[node]} ({node}) is in stages {stage_of[node]} and {stage}"
                raise _bad(f"stage {stage} of the placement", why, "leave it in one of them, once")
            stage_of[node] = stage
    return tuple(tuple(known[n] if isinstance(n, str) else n for n in group) for group in groups)


def place(
    problem: Problem,
    sizes: Sequence[int],
    *,
    seed: int,
    effort: int = 3000,
    budget_s: float | None = None,
    origins: Sequence[int] | None = None,
) -> Groups:
    """Nodes of each stage, so that little time goes into communication (see :class:`PlacementCost`).

    A genetic search as in DT-FM (Yuan et al., 2022, arXiv 2206.01288): offspring take each node's group from one
    parent or the other, alternating at five points; groups of a wrong size are repaired; cyclic exchanges between
    groups refine them; the best of parents and offspring live on. Larger ``effort`` is never worse.

    Args:
        sizes: nodes per stage, all nodes together; see :func:`group_sizes`.
        seed: the same answer for the same seed, unless ``budget_s`` cuts the search short.
        effort: number of offspring, rounded up to whole generations of 32.
        budget_s: seconds of wall time after which the best so far is returned.
        origins: nodes of stage 0, where they are given.

    Raises:
        TalkootError: sizes or origins that do not fit the problem.
    """
    _check_sizes(problem, sizes, origins)
    if len(sizes) == 1:
        return (tuple(range(sizes[0])),)
    search = _Search(PlacementCost(problem, sizes), random.Random(f"placement {seed}"), origins)
    deadline = None if budget_s is None else time.monotonic() + budget_s
    for _ in range(0, effort, GENERATION):
        if search.kinds < 2 or (deadline is not None and time.monotonic() >= deadline):
            break
        search.evolve()
    return search.best()


def placement_cost(problem: Problem, groups: Sequence[Sequence[int]]) -> float:
    """DP + 2 PP of a placement in seconds, stages in the order given; nodes left out cost nothing."""
    nodes = np.array([node for group in groups for node in group], np.intp)
    return PlacementCost(problem, [len(group) for group in groups]).cost(nodes)


class _Candidate(NamedTuple):
    """A plan and what is known about it; see :class:`~talkoot.plan.placement_cost.Costs`."""

    cost: float
    mean: float
    heaviest: int
    plan: list[int]


class _Search:
    """The genetic search; a *plan* is the group of every node.

    DP is a maximum and gives no direction as long as the worst group stays the same. So candidates are compared by
    cost plus a weight times the mean of what DP is the maximum of, and the weight falls from 1 towards 0.
    """

    def __init__(self, cost: PlacementCost, chance: random.Random, origins: Sequence[int] | None) -> None:
        self._cost, self._chance, self._sizes = cost, chance, cost.sizes
        self._free = [node for node in range(sum(cost.sizes)) if node not in (origins or ())]  # those that may move
        labels = [group for group, size in enumerate(cost.sizes) for _ in range(size) if group or not origins]
        self.kinds = len(set(labels))  # groups among which nodes may move
        self._generation = 0
        self._population: list[_Candidate] = []
        self._survive(self._priced([self._clustered(labels) for _ in range(POPULATION)]))
        self._best = min(self._population)

    def best(self) -> Groups:
        """The best placement so far, its stages in the order of the shortest ring."""
        placement = self._placements([self._best.plan])[0]
        ends = [0, *accumulate(self._sizes)]
        groups = [tuple(sorted(placement[ends[g] : ends[g + 1]].tolist())) for g in range(len(self._sizes))]
        return tuple(groups[group] for group in self._cost.order(placement))

    def evolve(self) -> None:
        """One generation."""
        self._generation += 1
        parents = [candidate.plan for candidate in self._population]
        brood = self._priced(
            [self._cross(self._chance.choice(parents), self._chance.choice(parents)) for _ in range(GENERATION)]
        )
        for _ in range(REFINEMENTS):
            moved = [self._exchange(candidate) for candidate in brood]
            scores = [self._score(candidate) for candidate in brood]
            for index, candidate in enumerate(self._priced(moved, scores)):
                if self._score(candidate) < scores[index]:
                    brood[index] = candidate
        self._best = min(self._best, *brood)
        self._survive(brood)

    def _score(self, candidate: _Candidate) -> float:
        return candidate.cost + candidate.mean * COOLING / (COOLING + self._generation)

    def _clustered(self, labels: list[int]) -> list[int]:
        """A first plan: random nodes begin the groups, and others join the nearest. ``labels``: one per free place."""
        room = {group: labels.count(group) for group in labels}
        starts = dict(zip(room, self._chance.sample(self._free, len(room)), strict=True))
        near = sorted(
            (self._cost.gradient_s(start, node) * self._chance.uniform(0.5, 1), node, group)
            for group, start in starts.items()
            for node in self._free
        )
        plan = {node: 0 for node in range(sum(self._sizes)) if node not in self._free}
        for _, node, group in near:
            if node not in plan and room[group]:
                plan[node] = group
                room[group] -= 1
        return [plan[node] for node in sorted(plan)]

    def _placements(self, plans: list[list[int]]) -> Ints:
        return np.argsort(np.array(plans), axis=1, kind="stable")

    def _priced(self, plans: list[list[int]], below: list[float] | None = None) -> list[_Candidate]:
        found = self._cost.costs(self._placements(plans), None if below is None else np.array(below))
        return [_Candidate(*row) for row in zip(*(column.tolist() for column in found), plans, strict=True)]

    def _survive(self, brood: list[_Candidate]) -> None:
        """Let the best of the population and its brood live on, each partition once."""
        best: dict[tuple[int, ...], _Candidate] = {}
        for candidate in sorted([*self._population, *brood], key=self._score):
            names = {0: 0}  # groups by their first node, as all but the first are interchangeable
            best.setdefault(tuple(names.setdefault(group, len(names)) for group in candidate.plan), candidate)
        self._population = list(best.values())[:POPULATION]

    def _cross(self, one: list[int], other: list[int]) -> list[int]:
        """Groups from one parent and from the other in turn; then groups of a wrong size are repaired."""
        other = self._renamed(other, one)
        cuts = sorted(self._chance.randrange(len(one) + 1) for _ in range(CUTS))
        child = list(one)
        for first, last in zip(cuts[::2], [*cuts[1::2], len(one)], strict=True):
            child[first:last] = other[first:last]
        members: list[list[int]] = [[] for _ in self._sizes]
        for node in self._free:
            members[child[node]].append(node)
        room = [group for group, size in enumerate(self._sizes) for _ in range(size - len(members[group]))]
        if len(self._free) < len(child):  # given origins fill the first group
            room = [group for group in room if group]
        surplus: list[int] = []
        for group, size in enumerate(self._sizes):
            if (more := len(members[group]) - size) > 0:
                surplus += self._chance.sample(members[group], more)
        self._chance.shuffle(room)
        for node, group in zip(surplus, room, strict=True):
            child[node] = group
        return child

    def _renamed(self, plan: list[int], like: list[int]) -> list[int]:
        """The same partition, each group under the name of a group of ``like`` with which it shares many nodes."""
        shared: dict[tuple[int, int], int] = {}
        for mine, theirs in zip(plan, like, strict=True):
            shared[mine, theirs] = shared.get((mine, theirs), 0) + 1
        names, taken = {0: 0}, {0}
        for mine, theirs in sorted(shared, key=lambda pair: (-shared[pair], pair)):
            if mine not in names and theirs not in taken and self._sizes[mine] == self._sizes[theirs]:
                names[mine] = theirs
                taken.add(theirs)
        for mine, size in enumerate(self._sizes):
            if mine not in names:
                free = (group for group, other in enumerate(self._sizes) if group not in taken and other == size)
                names[mine] = next(free)
                taken.add(names[mine])
        return [names[group] for group in plan]

    def _exchange(self, candidate: _Candidate) -> list[int]:
        """Two or three nodes of different groups, each put in the next one's place; often one of the heaviest group."""
        chance, plan = self._chance, candidate.plan
        length = min(chance.choice((2, 2, 3)), self.kinds)
        nodes: dict[int, int] = {}
        inside = [node for node in self._free if plan[node] == candidate.heaviest]
        if inside and chance.random() < 0.5:
            nodes[candidate.heaviest] = chance.choice(inside)
        while len(nodes) < length:
            node = chance.choice(self._free)
            nodes.setdefault(plan[node], node)
        moved = list(plan)
        groups = list(nodes)
        for node, other in zip(nodes.values(), groups[1:] + groups[:1], strict=True):
            moved[node] = other
        return moved


def _check_sizes(problem: Problem, sizes: Sequence[int], origins: Sequence[int] | None) -> None:
    nodes, stages = len(problem.names), problem.num_stages
    if stages > nodes:
        raise _bad("stages", f"there are {stages} stages and {nodes} nodes", f"ask for at most {nodes} stages")
    if len(sizes) != stages or sum(sizes) != nodes or min(sizes) < 1:
        why = f"{list(sizes)} does not share out {nodes} nodes over {stages} stages, at least one to each"
        raise _bad("sizes", why, f"write {stages} sizes that add up to {nodes}")
    if origins is not None and (
        len(set(origins)) != len(origins) or len(origins) != sizes[0] or not set(origins) <= set(range(nodes))
    ):
        why = f"{list(origins)}: {sizes[0]} different nodes, of 0 to {nodes - 1}, hold stage 0"
        raise _bad("origins", why, f"name {sizes[0]} nodes, or leave the choice to the planner")


def _bad(where: str, why: str, next: str) -> TalkootError:
    return TalkootError("the nodes cannot be placed", where=where, why=why, next=next)
