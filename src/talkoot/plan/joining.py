"""Where newcomers go, and who takes over for the lost: decisions about one stage, from a few figures.

A swarm trains F microbatches per iteration, along lanes of one-way cost C through S stages, with a slowest all-reduce
of a seconds; so a microbatch costs (2 C + a) / F. A newcomer is worth admitting where it lowers that estimate
(Blagoev et al., 2025, "Go With The Flow", arXiv 2509.21221). Admitting them one at a time fails where several stages
are equally short of places: no single newcomer raises the flow. So candidates are placed together: for every flow in
reach, the cheapest cover of what each stage lacks, by dynamic programming over sets of candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import msgspec

MAX_TOGETHER = 10  # candidates placed at once; more are placed in turns


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm as the lead knows it.

    Attributes:
        wanted: microbatches that the data nodes would send per iteration.
        capacity: places of each relay stage; ``capacity[k]`` belongs to stage k + 1.
        lane_s: one-way cost of the slowest lane, C.
        share_s: the slowest stage's all-reduce, a.
    """

    wanted: int
    capacity: tuple[int, ...]
    lane_s: float
    share_s: float = 0.0

    @property
    def flow(self) -> int:
        """Microbatches per iteration, F."""
        return min(self.wanted, *self.capacity)

    @property
    def microbatch_s(self) -> float:
        """Estimated seconds of an iteration per microbatch."""
        return (2 * self.lane_s + self.share_s) / self.flow if self.flow else float("inf")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A newcomer.

    Attributes:
        slots: microbatches that it can hold.
        hop_s: ``hop_s[k]``: what a hop to or from it would typically cost in stage k + 1.
        share_s: how long the all-reduce of a stage with it takes.
    """

    name: str
    slots: int
    hop_s: tuple[float, ...]
    share_s: float = 0.0


def after(swarm: Swarm, placed: Sequence[tuple[Candidate, int]]) -> Swarm:
    """The estimate of the swarm with candidates in stages (from 1 on).

    The slowest lane pays, in each stage that gets newcomers, for the worst of them where it is worse than the mean
    of the hops so far.
    """
    capacity, mean_s = list(swarm.capacity), swarm.lane_s / (len(swarm.capacity) + 1)
    worst = dict.fromkeys((stage for _, stage in placed), mean_s)
    for candidate, stage in placed:
        capacity[stage - 1] += candidate.slots
        worst[stage] = max(worst[stage], candidate.hop_s[stage - 1])
    return Swarm(
        wanted=swarm.wanted,
        capacity=tuple(capacity),
        lane_s=swarm.lane_s + sum(2 * (hop_s - mean_s) for hop_s in worst.values()),
        share_s=max([swarm.share_s, *(candidate.share_s for candidate, _ in placed)]),
    )


def choose_stage(swarm: Swarm, candidate: Candidate) -> int | None:
    """The stage for one newcomer; None = it helps nowhere and stays idle."""
    return choose_stages(swarm, [candidate]).get(candidate.name)


def choose_stages(swarm: Swarm, candidates: Sequence[Candidate]) -> dict[str, int]:
    """Stages (from 1 on) for newcomers, by name; those left out stay idle.

    Up to :data:`MAX_TOGETHER` candidates are placed optimally for the estimate of :func:`after`; of more, the next
    ones are considered given the first.

    Raises:
        ValueError: a candidate does not say what a hop costs in every stage.
    """
    chosen: dict[str, int] = {}
    for candidate in candidates:
        if len(candidate.hop_s) != len(swarm.capacity):
            raise ValueError(f"{candidate.name} gives {len(candidate.hop_s)} hops for {len(swarm.capacity)} stages")
    for start in range(0, len(candidates), MAX_TOGETHER):
        placed = _place_together(swarm, candidates[start : start + MAX_TOGETHER])
        swarm = after(swarm, placed)
        chosen |= {candidate.name: stage for candidate, stage in placed}
    return chosen


def _place_together(swarm: Swarm, candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
    best: tuple[float, list[tuple[Candidate, int]]] = (swarm.microbatch_s, [])
    spare = sum(candidate.slots for candidate in candidates)
    for flow in range(swarm.flow + 1, min(swarm.wanted, min(swarm.capacity) + spare) + 1):
        lacks = {at + 1: flow - held for at, held in enumerate(swarm.capacity) if held < flow}
        if sum(lacks.values()) > spare:
            break
        for share_s in sorted({swarm.share_s, *(c.share_s for c in candidates if c.share_s > swarm.share_s)}):
            usable = [candidate for candidate in candidates if candidate.share_s <= share_s]
            placed = _cheapest_cover(swarm, usable, lacks)
            if placed is not None:
                estimate = after(swarm, placed).microbatch_s
                best = min(best, (estimate, placed), key=lambda found: found[0])
    return best[1]


def _cheapest_cover(
    swarm: Swarm, candidates: Sequence[Candidate], lacks: Mapping[int, int]
) -> list[tuple[Candidate, int]] | None:
    """The cheapest disjoint sets of candidates that give each stage what it lacks."""
    mean_s = swarm.lane_s / (len(swarm.capacity) + 1)
    found: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}  # by set of candidates used
    for stage, lack in lacks.items():
        covers = [
            (sum(1 << at for at in group), max(0.0, *(candidates[at].hop_s[stage - 1] - mean_s for at in group)), group)
            for size in range(1, len(candidates) + 1)
            for group in combinations(range(len(candidates)), size)
            if (total := sum(candidates[at].slots for at in group)) >= lack
            and all(total - candidates[at].slots < lack for at in group)  # nobody in vain
        ]
        longer: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for used, (cost, placed) in found.items():
            for mask, more, group in covers:
                if not used & mask and cost + more < longer.get(used | mask, (float("inf"),))[0]:
                    longer[used | mask] = (cost + more, placed + [(at, stage) for at in group])
        found = longer
    if not found:
        return None
    _, placed = min(found.values(), key=lambda entry: entry[0])
    return [(candidates[at], stage) for at, stage in placed]


def typical_hop_s(before: Collection[float], beyond: Collection[float]) -> float:
    """What a hop of a newcomer would typically cost: mean of the cheaper half of its links to either side."""
    halves = [sorted(hops)[: (len(hops) + 1) // 2] for hops in (before, beyond)]
    return sum(sum(half) / len(half) for half in halves) / 2


def next_hop(
    costs: Mapping[str, Mapping[str, float]],
    previous: str,
    following: str,
    *,
    load: Mapping[str, int],
    slots: Mapping[str, int],
    work_s: Mapping[str, float],
    exclude: Collection[str] = (),
) -> str:
    """Who takes over a microbatch between two peers when the one that had it is lost.

    The peer with a free slot for which way there, way on and waiting for what it holds already take the least; if
    nobody has a free slot, the least loaded one.

    Args:
        costs: ``costs[i][j]``: seconds of a hop; a peer that either end cannot reach is passed over.
        load: microbatches that each peer holds (0 if absent).
        slots: by candidate: who holds the stage, and how much each can hold.
        work_s: what a microbatch takes each of them.
        exclude: lost or distrusted.

    Raises:
        ValueError: nobody is left.
    """
    detours = {
        peer: costs[previous][peer] + costs[peer][following]
        for peer in slots
        if peer not in exclude and peer in costs.get(previous, {}) and following in costs.get(peer, {})
    }
    if not detours:
        raise ValueError(f"nobody is left between {previous} and {following}")
    held = {peer: load.get(peer, 0) for peer in detours}
    free = [peer for peer in detours if held[peer] < slots[peer]]
    if free:
        return min(free, key=lambda peer: (detours[peer] + held[peer] * work_s[peer], peer))
    return min(detours, key=lambda peer: (held[peer], detours[peer], peer))
