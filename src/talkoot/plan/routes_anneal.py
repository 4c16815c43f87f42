"""Simulated annealing of lanes (Kirkpatrick et al., 1983) over the moves of `routes_moves`."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from random import Random
from time import monotonic
from typing import TypeAlias

from talkoot.plan.routes_moves import MOVES
from talkoot.plan.routes_space import Lanes, Space

Score: TypeAlias = Callable[[Lanes], float]

# Temperatures, relative to the seconds of the iteration that the search starts from.
HOT, COLD = 0.005, 0.0005
# What the mean lane weighs beside the slowest: little, but a plain maximum gives a search no slope.
TIE, POWER = 0.1, 4


def lanes_mean_s(space: Space, lanes: Lanes) -> float:
    """A mean of the lanes' seconds, were each alone, in which slow ones weigh most."""
    return (sum(end_s**POWER for end_s in space.lane_ends_s(lanes)) / len(lanes)) ** (1 / POWER)


def played_score(space: Space, contention: bool) -> Score:
    """Seconds of the played iteration, plus a little for a mean of the lanes."""
    return lambda lanes: space.player.makespan(lanes, contention=contention) + TIE * lanes_mean_s(space, lanes)


def blind_score(space: Space) -> Score:
    """Seconds of the slowest lane, were each alone: paths are judged one by one, whoever waits for whom."""
    return lambda lanes: space.floor_s(lanes) + TIE * lanes_mean_s(space, lanes)


def anneal(
    space: Space,
    lanes: Lanes,
    score: Score,
    chance: Random,
    *,
    effort: int,
    deadline_s: float = float("inf"),
) -> tuple[float, Lanes]:
    """The best lanes met, with their score.

    Args:
        space: the problem.
        lanes: valid ones to start from.
        score: what to minimise, in seconds; at least `Space.floor_s` of the same lanes.
        chance: the draws.
        effort: how often ``score`` is called at most.
        deadline_s: monotonic time at which the search ends early.
    """
    moves = [move for move, weight in MOVES for _ in range(weight)]
    value = score(lanes)
    best, best_value = lanes, value
    used, visits = space.load(lanes)
    hot, start_s, scored = HOT * value, monotonic(), 1
    draws = 20 * effort
    for draw in range(draws):
        now_s = monotonic()
        if scored >= effort or now_s >= deadline_s:
            break
        spent = max(scored / effort, draw / draws, (now_s - start_s) / (deadline_s - start_s))
        limit = value - hot * (COLD / HOT) ** spent * log(1.0 - chance.random())
        changed = chance.choice(moves)(space, lanes, used, visits, chance)
        if changed is None or space.floor_s(changed) > limit:  # cannot be accepted, whatever it scores
            continue
        scored += 1
        new_value = score(changed)
        if new_value <= limit:
            lanes, value = changed, new_value
            used, visits = space.load(lanes)
            if value < best_value:
                best, best_value = lanes, value
    return best_value, best
