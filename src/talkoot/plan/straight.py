"""Straight pipelines: every microbatch visits every stage in order, one forward, one backward in turn (1F1B).

Within a stage, microbatches are shared out in contiguous blocks in proportion to the peers' speeds. The order is
one forward, one backward (PipeDream-flush; Narayanan et al., 2021, "Memory-Efficient Pipeline-Parallel DNN
Training"): a peer at distance d from the last stage starts with d + 1 forwards, then alternates, so it never holds
more than d + 1 activations. Where stages have unlike numbers or speeds of peers, that pattern alone may wait in a
circle: a forward for a backward that waits for this very forward. The orders are therefore those of one execution,
played through on peers of the given speeds, in which nobody ever waits for work while it has other work to do.
Such an execution cannot get stuck (the last stage can always go back at once, so the one before it always gets rid
of what it holds, and so on to the first), and what was executed once can be executed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from talkoot.core.ids import PeerId
from talkoot.plan.steps import Hop, Path, Phase, StepPlan, View, Work, pace, planners


def share(count: int, weights: Sequence[float]) -> list[int]:
    """Split ``count`` items in proportion to ``weights`` (largest remainder; ties to the earlier)."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for index in by_remainder[: count - sum(parts)]:
        parts[index] += 1
    return parts


def one_forward_one_backward(
    servers: Sequence[Sequence[PeerId]], speeds: Mapping[PeerId, float], rank: Sequence[int]
) -> dict[str, tuple[Work, ...]]:
    """Every peer's 1F1B order.

    Args:
        servers: ``servers[stage][microbatch]``, the paths.
        speeds: by peer; a forward takes 1 / speed, a backward twice that.
        rank: which microbatch goes first where several could.
    """
    last = len(servers) - 1
    stage_of = {peer: stage for stage, peers in enumerate(servers) for peer in peers}
    ready: dict[str, dict[str, list[tuple[int, int]]]] = {peer: {"forward": [], "backward": []} for peer in stage_of}
    orders: dict[str, list[Work]] = {peer: [] for peer in stage_of}
    held = dict.fromkeys(stage_of, 0)
    working: list[tuple[float, PeerId, Phase, int]] = []  # a heap: who ends what when
    for microbatch, peer in enumerate(servers[0]):
        heappush(ready[peer]["forward"], (rank[microbatch], microbatch))

    def start(peer: PeerId, now: float) -> None:
        waiting = ready[peer]
        phase: Phase = "forward" if waiting["forward"] and held[peer] <= last - stage_of[peer] else "backward"
        if waiting[phase]:
            _, microbatch = heappop(waiting[phase])
            orders[peer].append(Work(phase, microbatch))
            held[peer] += 1 if phase == "forward" else -1
            heappush(working, (now + (1 if phase == "forward" else 2) / speeds[peer], peer, phase, microbatch))

    idle = set(stage_of)
    now = 0.0
    while True:
        for peer in sorted(idle):
            start(peer, now)
        if not working:
            return {peer: tuple(order) for peer, order in orders.items()}
        now = working[0][0]
        idle = stage_of.keys() - {peer for _, peer, _, _ in working}
        while working and working[0][0] == now:
            _, name, phase, microbatch = heappop(working)
            idle.add(name)
            stage = stage_of[name]
            if phase == "forward" and stage < last:
                heappush(ready[servers[stage + 1][microbatch]]["forward"], (rank[microbatch], microbatch))
            elif phase == "forward":
                heappush(ready[name]["backward"], (rank[microbatch], microbatch))
            elif stage:
                heappush(ready[servers[stage - 1][microbatch]]["backward"], (rank[microbatch], microbatch))


@planners.register("straight")
def straight(view: View) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`."""
    return lay_out(in_blocks(view), view)


def in_blocks(view: View) -> list[list[PeerId]]:
    """By stage and microbatch, who serves it: contiguous blocks in proportion to speeds."""
    servers: list[list[PeerId]] = []
    for stage in range(view.num_stages):
        # Fast peers first in every stage, so that fast meets fast along a path.
        present = sorted(view.holders(stage), key=lambda seat: (-seat.speed, seat.peer))
        counts = share(view.num_microbatches, [seat.speed for seat in present])
        servers.append([seat.peer for seat, part in zip(present, counts, strict=True) for _ in range(part)])
    return servers


def lay_out(servers: list[list[PeerId]], view: View) -> StepPlan:
    """Paths through these servers (by stage and microbatch), and in a line the peers' orders of work.

    In a ring no orders are prescribed: taking what is ready, backward first, is one forward, one backward.
    """
    count, origins = view.num_microbatches, servers[0]
    # Interleave the pipelines: the k-th microbatch of each origin comes before the (k+1)-th of any.
    turn = {m: origins[:m].count(origins[m]) for m in range(count)}
    if view.ring:
        launch = sorted(range(count), key=lambda m: (turn[m], m))
        servers = [[row[m] for m in launch] for row in servers]
        slots = {seat.peer: seat.slots for seat in view.seats}
        waits = pace(dict(enumerate(servers[0])), slots)
        return StepPlan(_paths(servers, waits), ring=True)
    rank = [turn[m] * count + m for m in range(count)]
    orders = one_forward_one_backward(servers, {seat.peer: seat.speed for seat in view.seats}, rank)
    return StepPlan(_paths(servers, {}), orders)


def _paths(servers: Sequence[Sequence[PeerId]], waits: Mapping[int, int]) -> tuple[Path, ...]:
    return tuple(
        Path(m, tuple(Hop(stage, row[m]) for stage, row in enumerate(servers)), waits.get(m))
        for m in range(len(servers[0]))
    )
