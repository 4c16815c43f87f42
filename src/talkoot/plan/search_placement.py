"""Placement and routes refined together: nodes change places as long as the predicted iteration gets shorter."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from random import Random
from time import monotonic

from talkoot.plan.problem import Lane, Problem, Rules
from talkoot.plan.routes_anneal import COLD, blind_score
from talkoot.plan.routes_first import first_lanes
from talkoot.plan.routes_moves import CHEAP_MOVES
from talkoot.plan.routes_space import Lanes, Quotas, Space

HOT = 0.03
# How often two nodes change places, of all changes that are tried.
PLACES = 0.4

Groups = tuple[tuple[int, ...], ...]


def improve_placement(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    seed: int,
    quotas: Quotas = "equal",
    effort: int = 12_000,
    budget_s: float | None = None,
    keep_origins: bool = False,
    all_reduce_every: float = 1.0,
) -> Groups:
    """Groups of the same sizes over which the iteration and the all-reduce after it are shorter, as predicted.

    Simulated annealing of groups and lanes at once. The prediction is the slowest lane were it alone, or the busiest
    node, plus the most burdened node's all-reduce; where two nodes change places, they change lanes as well.

    Args:
        problem: costs in seconds.
        groups: where to start.
        rules: which paths are permitted.
        num_microbatches: of one iteration.
        seed: the same answer for the same seed, unless ``budget_s`` cuts the search short.
        quotas: as for `find_routes`.
        effort: number of predictions.
        budget_s: seconds of wall time after which the best so far is returned.
        keep_origins: the nodes of stage 0 stay there.
        all_reduce_every: iterations between two all-reduces. Few: neighbours share a stage, and paths are long. Many,
            or infinity: the placement suits the paths alone.

    Raises:
        TalkootError: a constraint that cannot be met.
    """
    start_s = monotonic()
    deadline_s = float("inf") if budget_s is None else start_s + budget_s
    chance = Random(f"places {seed}")
    space = Space(problem, groups, rules, num_microbatches, quotas)
    lanes = first_lanes(space, chance)

    def predicted_s(space: Space, lanes: Lanes) -> float:
        return alone_s(space, lanes) + all_reduce_s(problem, space.groups) / all_reduce_every

    value = start_value = predicted_s(space, lanes)
    best, best_value = space.groups, value
    for step in range(effort):
        if (now_s := monotonic()) >= deadline_s:
            break
        spent = max(step / effort, (now_s - start_s) / (deadline_s - start_s))
        limit = value - start_value * HOT * (COLD / HOT) ** spent * log(1.0 - chance.random())
        changed = _changed(space, lanes, chance, keep_origins)
        if changed is None or (new_value := predicted_s(*changed)) > limit:
            continue
        (space, lanes), value = changed, new_value
        if value < best_value:
            best, best_value = space.groups, value
    return tuple(tuple(sorted(group)) for group in best)


def _changed(space: Space, lanes: Lanes, chance: Random, keep_origins: bool) -> tuple[Space, Lanes] | None:
    if chance.random() < PLACES:
        return exchanged(space, lanes, chance, keep_origins)
    new = chance.choice(CHEAP_MOVES)(space, lanes, *space.load(lanes), chance)
    return (space, new) if new else None


def alone_s(space: Space, lanes: Lanes) -> float:
    """Seconds of an iteration in which nobody waits, or of its busiest node."""
    problem, busy_s = space.problem, [0.0] * len(space.problem.names)
    for lane in lanes:
        busy_s[lane.origin] += lane.count * problem.loss_s(lane.origin)
        for node in (lane.origin, *lane.relays):
            stage = space.stage_of[node]
            busy_s[node] += lane.count * (problem.forward_s(node, stage) + problem.backward_s(node, stage))
    return max(blind_score(space)(lanes), *busy_s)


def all_reduce_s(problem: Problem, groups: Sequence[Sequence[int]]) -> float:
    """The most burdened node's all-reduce, priced as in DT-FM (Yuan et al., 2022, arXiv 2206.01288).

    A node exchanges a part of the gradient with every other one of its group, twice.
    """

    def exchange_s(one: int, other: int, size: int) -> float:
        latency_s = problem.hop_s[one][other] - problem.busy_s[one][other]
        return 2 * (latency_s + (problem.share_s[one][other] - latency_s) / size)

    return max(sum(exchange_s(one, other, len(group)) for other in group) for group in groups for one in group)


def exchanged(space: Space, lanes: Lanes, chance: Random, keep_origins: bool) -> tuple[Space, Lanes] | None:
    """Two nodes of different stages change places and lanes; None where slots do not permit it."""
    first = 1 if keep_origins else 0
    if len(space.groups) - first < 2:
        return None
    a, b = chance.sample(range(first, len(space.groups)), 2)
    one, two = chance.choice(space.groups[a]), chance.choice(space.groups[b])
    used, slots = space.load(lanes)[0], space.problem.slots
    if used[one] > slots[two] or used[two] > slots[one]:
        return None
    other = {one: two, two: one}
    groups = [[other.get(node, node) for node in group] for group in space.groups]
    swapped = [
        Lane(other.get(lane.origin, lane.origin), tuple(other.get(node, node) for node in lane.relays), lane.count)
        for lane in lanes
    ]
    return Space(space.problem, groups, space.rules, space.num_microbatches, space.quotas), swapped
