"""Which peers keep what is needed to bring another stage back, so that its peers can be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from talkoot.core.ids import PeerId
from talkoot.plan.steps import View


def choose_keepers(
    view: View, need: Mapping[int, int], kept: Collection[tuple[int, PeerId]], sizes: Sequence[float]
) -> list[tuple[int, PeerId]]:
    """(stage, peer) of further keepers: as many for each stage as it needs, as far as there are peers.

    What takes two adjacent stages at once must not take a stage and its keeper, so neighbours keep each other's stages
    only where there is nobody else; and of one stage's keepers no two hold the same stage. Among the choices that are
    left, no peer keeps more than it must, and the longest that a step has to wait for a gradient is as short as can be:
    a bottleneck assignment, solved by augmenting paths under a rising limit (Kuhn, 1955). A later stage has finished
    its backwards earlier, and its gradient travels for as long without anybody waiting.

    Args:
        view: who holds what, and the links.
        need: keepers wanted of each stage.
        kept: (stage, peer) of those there are already.
        sizes: bytes of each stage's gradient.
    """
    chosen: list[tuple[int, PeerId]] = []
    for turn in range(max(need.values(), default=0)):
        stages = [stage for stage in sorted(need) if need[stage] > turn]
        chosen += _one_each(view, stages, [*kept, *chosen], sizes)
    return chosen


def _one_each(
    view: View, stages: Sequence[int], kept: Sequence[tuple[int, PeerId]], sizes: Sequence[float]
) -> list[tuple[int, PeerId]]:
    held = {seat.peer: seat.stage for seat in view.seats}
    load = Counter(peer for _, peer in kept)
    costs: dict[int, dict[PeerId, float]] = {}
    for stage in stages:
        owner = next((seat for seat in view.seats if seat.stage == stage), None)
        taken = {held.get(peer) for other, peer in kept if other == stage} | {stage}
        able = [seat for seat in view.seats if seat.stage not in taken] if owner is not None else []
        away = [seat for seat in able if (seat.stage - stage) % view.num_stages not in (1, view.num_stages - 1)]
        if owner is not None and able:
            links = {seat: view.network.link(owner.name, seat.name) for seat in away or able}
            seconds = {seat: link.latency_s + sizes[stage] / link.bytes_per_s for seat, link in links.items()}
            nearest = sorted(seconds, key=lambda seat: (seconds[seat], seat.name))
            start_s = head_start_s(view, stage)
            costs[stage] = {seat.peer: max(0.0, seconds[seat] - start_s) for seat in nearest}
    limits = sorted({cost for of_stage in costs.values() for cost in of_stage.values()})
    for most in range(1, max(load.values(), default=0) + len(stages) + 1):  # that a peer may keep
        low, high, found = 0, len(limits) - 1, None
        while low <= high:
            middle = (low + high) // 2
            matching = _match(costs, limits[middle], load, most)
            low, high, found = (low, middle - 1, matching) if matching else (middle + 1, high, found)
        if found:
            return sorted(found)
    return []


def head_start_s(view: View, stage: int) -> float:
    """Seconds between a stage's last backward and the first stage's, over their first peers."""
    firsts = [next((seat for seat in view.seats if seat.stage == s), None) for s in range(stage + 1)]
    seats = [seat for seat in firsts if seat is not None]
    backwards = sum(2 * view.forward_s(seat) for seat in seats if seat.stage < stage) if view.stage_s else 0.0
    return backwards + sum(view.hop_s(after, before) for before, after in pairwise(seats))


def _match(
    costs: Mapping[int, Mapping[PeerId, float]], limit: float, load: Mapping[PeerId, int], most: int
) -> list[tuple[int, PeerId]] | None:
    """A peer for each stage within ``limit`` seconds, none keeping more than ``most``; None if there is no such way."""
    given: dict[tuple[PeerId, int], int] = {}  # a peer's n-th place -> stage

    def place(stage: int, seen: set[tuple[PeerId, int]]) -> bool:
        for peer, cost in costs[stage].items():
            for slot in ((peer, n) for n in range(load.get(peer, 0), most)):
                if cost <= limit and slot not in seen:
                    seen.add(slot)
                    if slot not in given or place(given[slot], seen):
                        given[slot] = stage
                        return True
        return False

    if not all(place(stage, set()) for stage in costs):
        return None
    return [(stage, peer) for (peer, _), stage in given.items()]
