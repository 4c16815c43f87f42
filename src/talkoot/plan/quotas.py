"""How many lanes each origin gets, and how many microbatches each lane carries, before paths are chosen."""

from __future__ import annotations

from heapq import heapify, heapreplace
from math import ceil
from random import Random

from talkoot.core.errors import TalkootError
from talkoot.plan.paths import fastest_rtt_s
from talkoot.plan.routes_space import Space


def share_evenly(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` numbers that differ by at most 1, the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def lane_counts(space: Space, chance: Random, most_lanes: int) -> list[tuple[int, int]]:
    """(origin, microbatches) of every lane, at most ``most_lanes`` of them, ties broken by chance.

    With equal quotas every origin's share is given, and lanes go one by one to the origin that needs most seconds.
    With free quotas microbatches go one by one to the lane that would be done with them first.

    Raises:
        TalkootError: equal quotas, but fewer lanes than origins that must send something.
    """
    slots, origins = space.problem.slots, list(space.origins)
    chance.shuffle(origins)
    rtt_s = {origin: fastest_rtt_s(space, origin) for origin in origins}
    origins.sort(key=lambda origin: rtt_s[origin])  # stable: chance decides between equals
    if space.quotas == "free":
        lanes = [(rtt_s[origin], origin) for _ in range(max(slots)) for origin in origins]
        taken = dict.fromkeys(origins, 0)
        ends: list[tuple[float, int, int]] = []
        for index, (seconds, origin) in enumerate(lanes):
            taken[origin] += 1
            if taken[origin] <= slots[origin]:
                ends.append((seconds, index, 0))
        ends = sorted(ends)[:most_lanes]
        heapify(ends)
        for _ in range(space.num_microbatches):
            end, index, count = ends[0]
            heapreplace(ends, (end + lanes[index][0], index, count + 1))
        return sorted((lanes[index][1], count) for _, index, count in ends if count)
    shares = dict(zip(origins, share_evenly(space.num_microbatches, len(origins)), strict=True))
    widths = {origin: 1 if share else 0 for origin, share in shares.items()}
    if sum(widths.values()) > most_lanes or any(widths[origin] > slots[origin] for origin in origins):
        raise TalkootError(
            "there are not enough slots for every origin to send its share",
            where="slots",
            why=f"{len(origins)} origins need a lane each; relays and rules leave room for {most_lanes} in all",
            next='give relays more slots, use fewer origins, or let quotas be "free"',
        )
    while sum(widths.values()) < most_lanes:
        growing = [o for o in origins if widths[o] < min(slots[o], shares[o])]
        if not growing:
            break
        # Whose rounds last longest; a further lane helps those with most microbatches per lane.
        slowest = max(growing, key=lambda o: (ceil(shares[o] / widths[o]) * rtt_s[o], shares[o] / widths[o]))
        widths[slowest] += 1
    return [(o, count) for o in origins if widths[o] for count in share_evenly(shares[o], widths[o])]
