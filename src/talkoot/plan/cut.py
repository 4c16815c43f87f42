"""Cutting a list of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence

from talkoot.core.errors import TalkootError


def cut_layers(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Contiguous ranges ``[first, last)`` that minimise the most expensive stage.

    Exact, by dynamic programming in O(stages x layers^2); ties go to the earliest cut.

    Args:
        costs: cost of each layer, in any unit.
        num_stages: ranges wanted, each with at least one layer.

    Raises:
        TalkootError: more stages than layers.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise TalkootError(
            "a model cannot be cut into that many stages",
            where="swarm.stages",
            why=f"{num_stages} stages were asked for, the model has {count} layers (embedding and head included)",
            next=f"set swarm.stages to at most {count}, or make the model deeper",
        )
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    best = [ends[:]]  # best[k][i]: smallest worst stage when layers [0, i) form k + 1 stages
    choice: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, num_stages):
        row, cuts = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(stage, end):
                worst = max(best[stage - 1][start], ends[end] - ends[start])
                if worst < row[end]:
                    row[end], cuts[end] = worst, start
        best.append(row)
        choice.append(cuts)
    ranges: list[tuple[int, int]] = []
    end = count
    for stage in range(num_stages - 1, -1, -1):
        start = choice[stage][end]
        ranges.append((start, end))
        end = start
    return ranges[::-1]
