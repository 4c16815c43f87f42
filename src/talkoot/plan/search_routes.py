"""Routes for a placement: conflict-based search, an integer program over cheap paths, then annealing of what they find.

No part is needed for a valid answer, each is there for what it is good at: the program for the mixture of paths and
counts, conflict-based search for who waits for whom, annealing for the two together, judged by the played iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from time import monotonic

from talkoot.plan.conflicts import search_conflicts
from talkoot.plan.problem import Problem, Routes, Rules
from talkoot.plan.routes_anneal import Score, anneal, blind_score, played_score
from talkoot.plan.routes_first import first_lanes
from talkoot.plan.routes_program import cheapest_lanes
from talkoot.plan.routes_space import Lanes, Quotas, Space

EFFORT = 16_000
# Annealing goes in rounds of so many evaluations: the first few each from the start, the others from the best.
ROUND, FRESH_ROUNDS = 1_500, 5
BLIND_EFFORT, CONFLICTS = 2_000, 300


def find_routes(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    seed: int,
    effort: int = EFFORT,
    budget_s: float | None = None,
    quotas: Quotas = "equal",
    contention: bool = False,
    collisions: bool = True,
) -> Routes:
    """Valid routes whose played iteration is short.

    Args:
        problem: costs in seconds.
        groups: nodes of each stage; ``groups[0]`` are the origins.
        rules: which paths are permitted.
        num_microbatches: of one iteration, over all origins.
        seed: the same answer for the same seed, unless ``budget_s`` cuts the search short.
        effort: how often an iteration is played at most; with less than a round of them, the program is left out.
        budget_s: seconds of wall time after which the best so far is returned.
        quotas: "equal": every origin sends as many microbatches as any other (or one more where they do not divide);
            "free": as many as suits the iteration.
        contention: network cards send and receive one transfer at a time.
        collisions: whether it counts who waits for whom. Otherwise the answer is the first plan of conflict-based
            search whose paths, each the cheapest by itself, fit the stages and the slots.

    Raises:
        TalkootError: a constraint that cannot be met.
    """
    deadline_s = float("inf") if budget_s is None else monotonic() + budget_s
    space = Space(problem, groups, rules, num_microbatches, quotas)
    chance = Random(f"routes {seed}")
    score = played_score(space, contention)
    first = first_lanes(space, chance)
    agreed = search_conflicts(
        space, chance, score, effort=min(CONFLICTS, effort), collisions=collisions, deadline_s=deadline_s
    )
    if agreed is not None and not collisions:
        return Routes(groups=space.groups, lanes=tuple(agreed))
    blind_s = blind_score(space)
    blind = [anneal(space, first, blind_s, chance, effort=min(BLIND_EFFORT, effort), deadline_s=deadline_s)[1]]
    if effort >= ROUND:
        blind = cheapest_lanes(space, blind[0], deadline_s=deadline_s)
    if not collisions:
        return Routes(groups=space.groups, lanes=tuple(blind[0]))
    starts = [lanes for lanes in (*blind, agreed) if lanes is not None]
    best = _annealed(space, starts, score, chance, effort, deadline_s)
    return Routes(groups=space.groups, lanes=tuple(best))


def _annealed(space: Space, starts: list[Lanes], score: Score, chance: Random, effort: int, deadline_s: float) -> Lanes:
    """The best that rounds of annealing make of several starts."""
    ranked = sorted((score(lanes), index, lanes) for index, lanes in enumerate(starts))
    best_s, _, best = ranked[0]
    for number, spent in enumerate(range(0, effort, ROUND)):
        if monotonic() >= deadline_s:
            break
        start = ranked[number % len(ranked)][2] if number < FRESH_ROUNDS else best
        left = min(ROUND, effort - spent)
        found_s, found = anneal(space, start, score, chance, effort=left, deadline_s=deadline_s)
        if found_s < best_s:
            best_s, best = found_s, found
    return best
