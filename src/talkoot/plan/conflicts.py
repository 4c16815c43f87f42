"""Conflict-based search: every lane plans alone, and where lanes get in each other's way, one of them must yield.

The high level of SkipPipe's scheduler (Blagoev et al., 2025, arXiv 2502.19913; Sharon et al., 2015, for the method),
best first on the slowest lane:

1. every lane takes the path that brings it home earliest;
2. where a stage is visited more often than even skipping permits, some lanes must avoid it, those first that are fast;
3. where a node is on more lanes than it has slots, likewise;
4. where two lanes need a node at the same time, one of them waits there, and may prefer another path.

The iteration is played for each plan that passes 2 and 3, and the best is kept. Counts of microbatches per lane weigh
in everywhere, and stages, slots and lanes may be of any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random
from time import monotonic

import msgspec

from talkoot.plan.paths import Interval, Trip, Visit, trips
from talkoot.plan.problem import Lane
from talkoot.plan.quotas import lane_counts
from talkoot.plan.routes_anneal import Score
from talkoot.plan.routes_first import most_lanes, rebalance
from talkoot.plan.routes_space import Lanes, Space

STAGE_BRANCHES, NODE_BRANCHES = 3, 2
# Plans further than this above the best are not followed; enough is so many plans without any collision.
PRUNE, ENOUGH = 1.15, 8
REPAIR_STEPS = 50

Waits = dict[int, tuple[Interval, ...]]


class Agent(msgspec.Struct, frozen=True):
    """A lane that plans: where and when it starts, what it carries, what it must not do, and its trip so far."""

    origin: int
    start_s: float
    count: int
    closed: frozenset[int] = frozenset()
    waits: Waits = {}
    trip: Trip = Trip((), (), 0.0)

    @property
    def seconds(self) -> float:
        """How long it takes to carry its microbatches one after another."""
        return self.count * (self.trip.finish_s - self.start_s)


Agents = tuple[Agent, ...]


def planned(space: Space, agent: Agent) -> Agent | None:
    """The agent with its best trip; None if it has none left."""
    trip = next(trips(space, agent.origin, start_s=agent.start_s, reserved=agent.waits, closed=agent.closed), None)
    return trip and msgspec.structs.replace(agent, trip=trip)


def search_conflicts(
    space: Space,
    chance: Random,
    score: Score,
    *,
    effort: int,
    collisions: bool = True,
    deadline_s: float = float("inf"),
) -> Lanes | None:
    """The best lanes found, or None if the search met no valid ones.

    Args:
        space: the problem.
        chance: decides between equals where lanes are dealt to origins.
        score: what to minimise, in seconds.
        effort: how many plans are looked at.
        collisions: whether step 4 is taken; otherwise the first plan that passes 2 and 3 is the answer.
        deadline_s: monotonic time at which the search ends early.
    """
    first = _free_plan(space, chance)
    queue: list[tuple[float, int, Agents]] = []
    if first:
        queue.append((0.0, 0, first))
    best: Lanes | None = None
    best_s, number, clear = float("inf"), 0, 0
    for _ in range(effort):
        if not queue or clear >= ENOUGH or monotonic() >= deadline_s:
            break
        least_s, _, agents = heappop(queue)
        if least_s > best_s * PRUNE:
            break
        children = _overloads(space, agents)
        if children is None:
            lanes = [Lane(agent.origin, agent.trip.relays, agent.count) for agent in agents]
            lanes = rebalance(space, lanes, chance, REPAIR_STEPS)
            if lanes is not None:
                seconds = score(lanes)
                if seconds < best_s:
                    best, best_s = lanes, seconds
                if not collisions:
                    break
            children = _collisions(agents)
            if children is None:
                clear += 1
                continue
        for child in children:
            pairs = zip(child, agents, strict=True)
            replanned = [old if agent is old else planned(space, agent) for agent, old in pairs]
            whole = tuple(agent for agent in replanned if agent is not None)
            if len(whole) == len(agents):
                number += 1
                slowest_s = max(agent.seconds for agent in whole)
                heappush(queue, (slowest_s * (1 + _overload_share(space, whole)), -number, whole))
    return best


def _free_plan(space: Space, chance: Random) -> Agents | None:
    launched = dict.fromkeys(space.origins, 0)
    agents: list[Agent] = []
    for origin, count in lane_counts(space, chance, most_lanes(space)):
        agent = planned(space, Agent(origin, launched[origin] * space.forward_s[origin], count))
        if agent is None:
            return None
        launched[origin] += 1
        agents.append(agent)
    return tuple(agents)


def _overload_share(space: Space, agents: Agents) -> float:
    """Which share of all visits exceeds what stages and nodes permit; it keeps the search from starting over."""
    most = -(-space.num_microbatches * (space.rules.visits - 1) // max(len(space.groups) - 1, 1))
    used, visits = space.load([Lane(agent.origin, agent.trip.relays, agent.count) for agent in agents])
    surplus = sum(max(number - most, 0) for number in visits) / max(sum(visits), 1)
    crowded = sum(max(number - slots, 0) for number, slots in zip(used, space.problem.slots, strict=True))
    return surplus + crowded / max(sum(used), 1)


def _overloads(space: Space, agents: Agents) -> Iterator[Agents] | None:
    """Ways to relieve the first overloaded stage or node; None if there is none."""
    most = -(-space.num_microbatches * (space.rules.visits - 1) // max(len(space.groups) - 1, 1))
    for group in space.groups[1:]:
        inside = set(group)
        on = [index for index, agent in enumerate(agents) if inside & set(agent.trip.relays)]
        surplus = sum(agents[index].count for index in on) - most
        if surplus > 0:
            weights = {index: agents[index].count for index in on}
            return _relieved(space, agents, weights, surplus, inside, STAGE_BRANCHES)
    for node, stage in space.stage_of.items():
        on = [index for index, agent in enumerate(agents) if stage and node in agent.trip.relays]
        surplus = len(on) - space.problem.slots[node]
        if surplus > 0:
            return _relieved(space, agents, dict.fromkeys(on, 1), surplus, {node}, NODE_BRANCHES)
    return None


def _relieved(
    space: Space, agents: Agents, weights: dict[int, int], surplus: int, closed: set[int], branches: int
) -> Iterator[Agents]:
    """Close nodes to a smallest set of agents that weighs ``surplus``; fast ones have time to spare and go first."""
    movable = [
        index
        for index in sorted(weights, key=lambda index: (agents[index].seconds, index))
        if sum(not set(group) <= agents[index].closed | closed for group in space.groups[1:]) >= space.rules.visits - 1
    ]
    for skipped in range(branches):
        chosen: list[int] = []
        for index in movable[skipped:]:
            if sum(weights[other] for other in chosen) >= surplus:
                break
            chosen.append(index)
        if sum(weights[other] for other in chosen) >= surplus:
            yield tuple(
                msgspec.structs.replace(agent, closed=agent.closed | closed) if index in chosen else agent
                for index, agent in enumerate(agents)
            )


def _collisions(agents: Agents) -> Iterator[Agents] | None:
    """Ways to avoid the first collision of the slowest agent that has one; None if nobody collides.

    Two backwards may overlap. If one is a backward, who comes first keeps the node. Of two forwards the faster agent's
    waits, or the slower agent's, unless that is among the slowest quarter.
    """
    by_pace = sorted(range(len(agents)), key=lambda index: (-agents[index].seconds, index))
    for rank, p in enumerate(by_pace):
        for q in by_pace[rank + 1 :]:
            for one in agents[p].trip.visits:
                for two in agents[q].trip.visits:
                    if one.node != two.node or (one.backward and two.backward):
                        continue
                    if one.start_s < two.end_s and two.start_s < one.end_s:
                        if one.backward or two.backward:
                            yielding = [(q, one)] if one.start_s <= two.start_s else [(p, two)]
                        else:
                            yielding = [(q, one), (p, two)][: 1 if 4 * rank < len(agents) else 2]
                        return (_waiting(agents, index, visit) for index, visit in yielding)
    return None


def _waiting(agents: Agents, index: int, visit: Visit) -> Agents:
    """One agent keeps off a node while another one's visit lasts."""
    agent = agents[index]
    taken = tuple(sorted((*agent.waits.get(visit.node, ()), (visit.start_s, visit.end_s))))
    waiting = msgspec.structs.replace(agent, waits={**agent.waits, visit.node: taken})
    return (*agents[:index], waiting, *agents[index + 1 :])
