"""Which stage peers that come later should hold, from what the lead knows of the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from talkoot.plan.joining import Candidate, Swarm, choose_stages, typical_hop_s
from talkoot.plan.steps import Seat, View


def stages_for(newcomers: Sequence[Seat], view: View) -> dict[str, int]:
    """Stages by name; who is left out helps nowhere as things are, and waits.

    Where relays are limited by their slots, newcomers go where they let more microbatches be under way at once
    (:mod:`talkoot.plan.joining`). Otherwise each goes to the stage that has most to compute for each of its peers.
    """
    if view.ring and all(seat.slots for seat in (*view.seats, *newcomers)):
        return _by_slots(newcomers, view)
    chosen: dict[str, int] = {}
    speeds = [sum(seat.speed for seat in view.seats if seat.stage == stage) for stage in range(view.num_stages)]
    for seat in newcomers:
        work = [(view.stage_s[stage] if view.stage_s else 1.0) for stage in range(view.num_stages)]
        stage = max(range(view.num_stages), key=lambda s: (work[s] / speeds[s] if speeds[s] else float("inf"), -s))
        chosen[seat.name] = stage
        speeds[stage] += seat.speed
    return chosen


def _by_slots(newcomers: Sequence[Seat], view: View) -> dict[str, int]:
    stages = range(1, view.num_stages)
    if not stages:
        return {}
    groups = [[seat for seat in view.seats if seat.stage == stage] for stage in range(view.num_stages)]
    hops = [
        mean(view.hop_s(a, b) + 1.5 * view.forward_s(b) for a in groups[stage] for b in groups[stage - 1])
        for stage in stages
        if groups[stage] and groups[stage - 1]
    ]
    swarm = Swarm(
        wanted=min(view.num_microbatches, sum(seat.slots for seat in groups[0])),
        capacity=tuple(sum(seat.slots for seat in groups[stage]) for stage in stages),
        lane_s=sum(hops) * view.num_stages / max(1, view.num_stages - 1),
    )

    def hop_s(seat: Seat, stage: int) -> float:
        before = [view.hop_s(other, seat) for other in groups[stage - 1]]
        beyond = [view.hop_s(seat, other) for other in groups[(stage + 1) % view.num_stages]]
        work = 1.5 * (view.stage_s[stage] if view.stage_s else 1.0) / seat.speed
        return typical_hop_s(before, beyond) + work if before and beyond else work

    candidates = [
        Candidate(name=seat.name, slots=seat.slots, hop_s=tuple(hop_s(seat, stage) for stage in stages))
        for seat in newcomers
    ]
    return choose_stages(swarm, candidates)
