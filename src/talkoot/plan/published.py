"""The published 20-node case of skipping pipelines, as data: its network, placement, paths and iteration times.

From the schedule that the authors of SkipPipe (Blagoev et al., 2025, arXiv 2502.19913; repository gensyn-ai/skippipe,
schedule.json and create_schedule.py) computed for 20 nodes in 12 places: 6 stages, 4 visited (33 % skipped), 3 slots,
0.44 s per forward, 6 microbatches for each of 5 origins. Only figures are taken over. Their link NL-London was 1024
times too slow by a slip of the unit, and is so here, because their times contain it.
"""

from __future__ import annotations

import msgspec

from talkoot.plan.networks import named_network
from talkoot.plan.problem import Lane, Problem, Routes, Rules
from talkoot.plan.profile import to_problem

ACTIVATION_BYTES = 33_554_648
GRADIENT_BYTES = (
    1_346_446_748  # of a larger model: the only one that the repository states; no time below depends on it
)
SLOTS = 3
MICROBATCHES = 30
RULES = Rules(visits=4)

GROUPS = ((0, 3, 4, 10, 11), (15, 8, 14), (1, 9, 6), (16, 12, 13), (5, 18, 7), (17, 2, 19))

# Paths, origin first: one for all slots of an origin where collisions are avoided, one per slot where they are not.
AVOIDING = ((0, 6, 12, 5), (3, 14, 2, 18), (4, 1, 15, 19), (10, 13, 17, 7), (11, 8, 16, 9))
COLLIDING = (
    *((0, 12, 5, 19), (0, 1, 19, 18), (0, 6, 18, 17)),
    *((3, 12, 6, 2), (3, 14, 12, 2), (3, 6, 14, 13)),
    *((4, 15, 13, 7), (4, 15, 5, 17), (4, 15, 13, 7)),
    *((10, 1, 17, 5), (10, 1, 7, 2), (10, 14, 18, 19)),
    *((11, 8, 16, 9), (11, 8, 16, 9), (11, 8, 16, 9)),
)

# Seconds of an iteration by the authors' own simulator. The full pipeline is straight, runs from three of the origins
# only, and carries 27 microbatches where the others carry 30.
REPORTED_S = {"full pipeline": 79.93971963540922, "colliding": 35.43481420147051, "avoiding": 33.31379002209655}


def published_problem(*, unit_error: bool = True) -> Problem:
    """The 20 nodes' costs; without ``unit_error``, NL-London is as fast as the links beside it."""
    profile = named_network("gcp12", 20)
    if unit_error:
        link = profile.link("NL", "London")
        slow = msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s / 1024)
        profile = msgspec.structs.replace(profile, links={**profile.links, "NL->London": slow})
    return to_problem(
        profile, activation_bytes=ACTIVATION_BYTES, gradient_bytes=GRADIENT_BYTES, stage_layers=(4,) * 6, samples=2
    )


def avoiding_routes() -> Routes:
    """Their result: skipping, swapping, collisions avoided."""
    return _routes([path for path in AVOIDING for _ in range(SLOTS)], [2] * 15)


def colliding_routes() -> Routes:
    """Their paths without regard to collisions."""
    return _routes(COLLIDING, [2] * 15)


def full_routes(num_microbatches: int = 27) -> Routes:
    """Their baseline: no skipping; the k-th nodes of all stages form a pipeline, with a lane for each slot.

    Args:
        num_microbatches: a multiple of 3, shared out equally over three pipelines (theirs are 27).
    """
    pipelines = list(zip(*GROUPS, strict=False))  # as many as the smallest stage has nodes
    each, more = divmod(num_microbatches // len(pipelines), SLOTS)
    counts = [each + (slot < more) for _ in pipelines for slot in range(SLOTS)]
    return _routes([path for path in pipelines for _ in range(SLOTS)], counts)


def _routes(paths: list[tuple[int, ...]] | tuple[tuple[int, ...], ...], counts: list[int]) -> Routes:
    lanes = tuple(Lane(path[0], path[1:], count) for path, count in zip(paths, counts, strict=True))
    return Routes(groups=GROUPS, lanes=lanes)
