"""What a search for routes may do: the permitted orders of stages, slots, even skipping and quotas of one problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from random import Random
from typing import Literal, TypeAlias

from talkoot.core.errors import TalkootError
from talkoot.plan.playback import Player
from talkoot.plan.problem import Lane, Problem, Rules

Quotas: TypeAlias = Literal["equal", "free"]
Lanes: TypeAlias = list[Lane]

# More sets of stages than this are sampled, not listed.
LISTED_SETS = 2000


class Space:
    """One problem with its placement and rules, and what a search asks of them again and again.

    Args:
        problem: costs in seconds.
        groups: nodes of each stage; ``groups[0]`` are the origins.
        rules: which paths are permitted.
        num_microbatches: of one iteration.
        quotas: "equal": every origin sends as many microbatches as any other (or one more where they do not divide);
            "free": as many as suits the iteration.

    Raises:
        TalkootError: naming a constraint that no routes can meet.
    """

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[Sequence[int]],
        rules: Rules,
        num_microbatches: int,
        quotas: Quotas = "equal",
    ) -> None:
        self.problem, self.rules = problem, rules
        self.quotas: Quotas = quotas
        self.groups = tuple(tuple(group) for group in groups)
        self.num_microbatches = num_microbatches
        self.stage_of = {node: stage for stage, group in enumerate(self.groups) for node in group}
        self.origins = self.groups[0] if self.groups else ()
        self.forward_s = {node: problem.forward_s(node, 0) for node in self.origins}
        self.player = Player(problem, self.groups)
        self._orders: dict[frozenset[int], tuple[tuple[int, ...], ...]] = {}
        self.cheap_paths: dict[int, list[tuple[int, ...]]] = {}  # these two are filled by `paths`
        self.ahead_s: dict[int, list[dict[int, float]]] = {}
        self._rtt_s: dict[tuple[int, tuple[int, ...]], float] = {}
        self._best_order: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}
        total = num_microbatches * (rules.visits - 1)
        self.tolerance = 1 if problem.num_stages > 1 and total % (problem.num_stages - 1) else 0
        self._check()
        self.stage_sets = self._permitted_sets()

    def rtt_s(self, origin: int, relays: tuple[int, ...]) -> float:
        """Seconds from a microbatch's launch to its last backward when it never waits."""
        key = (origin, relays)
        seconds = self._rtt_s.get(key)
        if seconds is None:
            course = self.player.course(Lane(origin, relays, 1))
            seconds = self._rtt_s[key] = sum(course.seconds) + sum(course.hops)
        return seconds

    def best_order(self, origin: int, relays: Sequence[int]) -> tuple[int, ...]:
        """The permitted order of visiting these relays that takes least; there must be one."""
        key = (origin, frozenset(relays))
        best = self._best_order.get(key)
        if best is None:
            best = min(self.visiting_orders(relays), key=lambda order: (self.rtt_s(origin, order), order))
            self._best_order[key] = best
        return best

    def orders(self, stages: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Every permitted order of visiting these stages, the stages in order first where that is permitted."""
        orders = self._orders.get(stages)
        if orders is None:
            orders = self._orders[stages] = tuple(_walks((), stages, 0, 0, 0, self.rules))
        return orders

    def visiting_orders(self, relays: Sequence[int]) -> list[tuple[int, ...]]:
        """Every permitted order of visiting these relays, which stand in distinct stages."""
        at = {self.stage_of[node]: node for node in relays}
        return [tuple(at[stage] for stage in order) for order in self.orders(frozenset(at))]

    def load(self, lanes: Sequence[Lane]) -> tuple[list[int], list[int]]:
        """(lanes on each node, microbatches that visit each stage but the first)."""
        used, visits = [0] * len(self.problem.names), [0] * len(self.groups)
        for lane in lanes:
            used[lane.origin] += 1
            for node in lane.relays:
                used[node] += 1
                visits[self.stage_of[node]] += lane.count
        return used, visits[1:]

    def even(self, visits: Sequence[int]) -> bool:
        """Whether skipping is even: ``visits`` of the stages but the first, as `load` counts them."""
        return not visits or max(visits) - min(visits) <= self.tolerance

    def spare(self, used: Sequence[int], stage: int) -> list[int]:
        """Nodes of a stage that have a slot left."""
        return [node for node in self.groups[stage] if used[node] < self.problem.slots[node]]

    def floor_s(self, lanes: Sequence[Lane]) -> float:
        """What no iteration over these lanes undercuts: the slowest lane, its launch included, were it alone."""
        return max(self.lane_ends_s(lanes))

    def lane_ends_s(self, lanes: Sequence[Lane]) -> list[float]:
        """When each lane's last microbatch is back if nobody ever waits for others on the way."""
        launched = dict.fromkeys(self.origins, 0)
        ends: list[float] = []
        for lane in lanes:
            before = launched[lane.origin]
            launched[lane.origin] = before + 1
            ends.append(before * self.forward_s[lane.origin] + lane.count * self.rtt_s(lane.origin, lane.relays))
        return ends

    def some_sets(self, chance: Random) -> Sequence[frozenset[int]]:
        """Permitted sets of stages: all of them, or a sample where they are very many."""
        if self.stage_sets:
            return self.stage_sets
        stages, size = range(1, len(self.groups)), self.rules.visits - 1
        drawn = (frozenset(chance.sample(stages, size)) for _ in range(LISTED_SETS))
        return sorted({some for some in drawn if self.orders(some)}, key=sorted)

    def _permitted_sets(self) -> tuple[frozenset[int], ...]:
        stages, size = range(1, len(self.groups)), self.rules.visits - 1
        if comb(len(stages), size) > LISTED_SETS:
            return ()
        sets = tuple(frozenset(some) for some in combinations(stages, size) if self.orders(frozenset(some)))
        missed = sorted(set(stages) - set().union(*sets))
        if missed:
            raise TalkootError(
                f"no permitted path reaches stage {missed[-1]}, so skipping cannot be even",
                where="rules",
                why=f"paths visit {self.rules.visits} of {len(self.groups)} stages and no hop advances by more than "
                f"{self.rules.max_advance}",
                next="visit more stages, raise max_advance, or cut the model into fewer stages",
            )
        return sets

    def _check(self) -> None:
        problem, rules = self.problem, self.rules
        stages, nodes = problem.num_stages, len(problem.names)
        placed = [node for group in self.groups for node in group]
        if nodes < stages:
            raise _refusal(f"{stages} stages need at least {stages} nodes", f"there are {nodes} nodes", "stages")
        if len(self.groups) != stages or not all(self.groups):
            raise _refusal(f"every one of the {stages} stages needs a node", f"groups: {self.groups}", "groups")
        if len(set(placed)) != len(placed) or not all(0 <= node < nodes for node in placed):
            raise _refusal("a node is placed twice, or not known", f"groups: {self.groups}, {nodes} nodes", "groups")
        if not (2 if stages > 1 else 1) <= rules.visits <= stages:
            raise _refusal(
                f"a path cannot visit {rules.visits} stages", f"it visits at least 2 and at most {stages}", "visits"
            )
        if self.num_microbatches < 1:
            raise _refusal("an iteration needs microbatches", f"{self.num_microbatches} were asked for", "microbatches")
        for stage, group in enumerate(self.groups):
            if not any(problem.slots[node] > 0 for node in group):
                raise _refusal(
                    f"no node of stage {stage} can hold a microbatch",
                    f"the slots of its nodes are {[problem.slots[node] for node in group]}",
                    "slots",
                )


def _refusal(what: str, why: str, where: str) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=f"change {where}, or the machines")


def _walks(
    done: tuple[int, ...], left: frozenset[int], frontier: int, swaps: int, swap_sum: int, rules: Rules
) -> Iterator[tuple[int, ...]]:
    """Permitted ways on from a partial order; ``frontier`` is the furthest stage reached."""
    if not left:
        yield done
    for stage in sorted(left):
        behind = max(frontier - stage, 0)
        if stage - frontier > rules.max_advance:
            return
        if behind and (behind > rules.max_swap or swaps >= rules.max_swaps or swap_sum + behind > rules.max_swap_sum):
            continue
        following = (max(frontier, stage), swaps + (behind > 0), swap_sum + behind)
        yield from _walks((*done, stage), left - {stage}, *following, rules)
