"""What our routes are measured against: other ways to run the same model on the same nodes, as good as they get.

All answer with `Routes`, which are then played like ours: a node takes backwards before forwards, so that a straight
pipeline runs one forward, one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from talkoot.plan.problem import Lane, Problem, Routes, Rules
from talkoot.plan.quotas import share_evenly
from talkoot.plan.routes_first import first_lanes
from talkoot.plan.routes_space import Quotas, Space
from talkoot.plan.search_routes import EFFORT, find_routes


def straight(problem: Problem, groups: Sequence[Sequence[int]], num_microbatches: int) -> Routes:
    """Full pipelines over nodes matched stage to stage, as in DT-FM (Yuan et al., 2022, arXiv 2206.01288).

    From each stage to the next goes the matching whose slowest link is fastest; nodes that it leaves over are idle.
    Every pipeline fills its slots, and all carry equally many microbatches (or one more where they do not divide).

    Raises:
        TalkootError: groups that do not fit the problem, or a stage without a slot.
    """
    Space(problem, groups, Rules(visits=problem.num_stages), num_microbatches)  # refuses what cannot be
    pipelines = [(origin,) for origin in groups[0]]
    for group in groups[1:]:
        heads = [pipeline[-1] for pipeline in pipelines]
        partner = bottleneck_matching(problem, heads, group)
        pipelines = [(*pipeline, partner[pipeline[-1]]) for pipeline in pipelines if pipeline[-1] in partner]
    pipelines = [pipeline for pipeline in pipelines if min(problem.slots[node] for node in pipeline) > 0]
    lanes = [
        Lane(pipeline[0], pipeline[1:], count)
        for pipeline, share in zip(pipelines, share_evenly(num_microbatches, len(pipelines)), strict=True)
        for count in share_evenly(share, min(problem.slots[node] for node in pipeline))
        if count
    ]
    return Routes(groups=tuple(map(tuple, groups)), lanes=tuple(lanes))


def naive_skipping(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    seed: int,
    quotas: Quotas = "equal",
) -> Routes:
    """Random paths that skip evenly, stages in order, within the slots; no link or speed is looked at.

    Raises:
        TalkootError: a constraint that cannot be met.
    """
    space = Space(problem, groups, rules, num_microbatches, quotas)
    lanes = first_lanes(space, Random(f"naive {seed}"), swaps=False)
    return Routes(groups=space.groups, lanes=tuple(lanes))


def cost_aware(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    seed: int,
    quotas: Quotas = "equal",
    effort: int = EFFORT,
) -> Routes:
    """Paths that are each as cheap as stages and slots permit, whoever waits for whom: no collision is avoided.

    Raises:
        TalkootError: a constraint that cannot be met.
    """
    return find_routes(
        problem, groups, rules, num_microbatches, seed=seed, quotas=quotas, effort=effort, collisions=False
    )


def bottleneck_matching(problem: Problem, left: Sequence[int], right: Sequence[int]) -> dict[int, int]:
    """As many pairs as possible (left to right) so that the slowest link, there and back, is as fast as possible."""

    def link_s(one: int, other: int) -> float:
        return problem.hop_s[one][other] + problem.hop_s[other][one]

    limits = sorted({link_s(one, other) for one in left for other in right})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        pairs = _matching({one: [two for two in right if link_s(one, two) <= limits[middle]] for one in left})
        low, high = (low, middle) if len(pairs) == min(len(left), len(right)) else (middle + 1, high)
    # Nearest first, so that of all matchings with that slowest link a good one is met.
    return _matching(
        {
            one: sorted((two for two in right if link_s(one, two) <= limits[low]), key=lambda two: link_s(one, two))
            for one in left
        }
    )


def _matching(choices: dict[int, list[int]]) -> dict[int, int]:
    """A largest matching, by augmenting paths."""
    taken: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for two in choices[one]:
            if two not in seen:
                seen.add(two)
                if two not in taken or place(taken[two], seen):
                    taken[two] = one
                    return True
        return False

    for one in choices:
        place(one, set())
    return {one: two for two, one in taken.items()}
