"""Straight pipelines: every microbatch visits every stage in order, one forward, one backward in turn (1F1B).

Within a stage, microbatches are shared out in contiguous blocks in proportion to the peers' speeds. The order is
one forward, one backward (PipeDream-flush; Narayanan et al., 2021, "Memory-Efficient Pipeline-Parallel DNN
Training"): a peer at distance d from the last stage starts with d forwards, then alternates, so it never holds more
than d + 1 activations. All peers follow one global order of microbatches, which rules out cyclic waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from talkoot.core.ids import PeerId
from talkoot.plan.steps import Hop, Path, Seat, StepPlan, Work, planners


def share(count: int, weights: Sequence[float]) -> list[int]:
    """Split ``count`` items in proportion to ``weights`` (largest remainder; ties to the earlier)."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for index in by_remainder[: count - sum(parts)]:
        parts[index] += 1
    return parts


def one_forward_one_backward(microbatches: Sequence[int], distance: int) -> tuple[Work, ...]:
    """The 1F1B order of ``microbatches`` for a peer ``distance`` stages before the last."""
    warm_up = min(distance, len(microbatches))
    order = [Work("forward", microbatch) for microbatch in microbatches[:warm_up]]
    for index, microbatch in enumerate(microbatches):
        if index + warm_up < len(microbatches):
            order.append(Work("forward", microbatches[index + warm_up]))
        order.append(Work("backward", microbatch))
    return tuple(order)


@planners.register("straight")
def straight(seats: Sequence[Seat], num_stages: int, num_microbatches: int) -> StepPlan:
    """See the module's text; implements :class:`talkoot.plan.steps.Planner`."""
    servers: list[list[PeerId]] = []  # servers[stage][microbatch]
    for stage in range(num_stages):
        # Fast peers first in every stage, so that fast meets fast along a path.
        present = sorted((seat for seat in seats if seat.stage == stage), key=lambda seat: (-seat.speed, seat.peer))
        if not present:
            raise ValueError(f"nobody holds stage {stage}")
        counts = share(num_microbatches, [seat.speed for seat in present])
        servers.append([seat.peer for seat, count in zip(present, counts, strict=True) for _ in range(count)])
    paths = tuple(
        Path(microbatch, tuple(Hop(stage, servers[stage][microbatch]) for stage in range(num_stages)))
        for microbatch in range(num_microbatches)
    )
    # Interleave the pipelines: the k-th microbatch of each origin comes before the (k+1)-th of any.
    origins = servers[0]
    turn = {m: origins[:m].count(origins[m]) for m in range(num_microbatches)}
    ranked = sorted(range(num_microbatches), key=lambda m: (turn[m], m))
    orders: dict[str, tuple[Work, ...]] = {}
    for stage in range(num_stages):
        for peer in dict.fromkeys(servers[stage]):
            mine = [m for m in ranked if servers[stage][m] == peer]
            orders[peer] = one_forward_one_backward(mine, num_stages - 1 - stage)
    return StepPlan(paths, orders)
