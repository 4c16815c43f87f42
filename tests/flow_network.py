"""Peers that route flows over a network that loses, repeats and reorders messages; and a survey of many of them.

``python tests/flow_network.py --seeds 50`` prints how far routes are from the central optima.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import cache

from talkoot.plan.flow import FlowNode, Settings, flows
from talkoot.plan.flow_bounds import FlowProblem, min_cost, min_largest_lane
from talkoot.plan.flow_messages import Card, Link, Outgoing
from talkoot.plan.flow_moves import astray_here
from talkoot.plan.networks import named_network

ACTIVATION_BYTES = 16 * 2**20


@cache
def hop_s(one: str, other: str) -> float:
    """An activation's way between two of the twelve cities."""
    profile = named_network("gcp12")
    link = profile.local if one == other else profile.links.get(f"{one}->{other}", profile.links.get(f"{other}->{one}"))
    assert link is not None
    return link.latency_s + ACTIVATION_BYTES / link.bytes_per_s


def draw(seed: int, origins: int = 1, relays: int = 6, stages: int = 6, limit: str = "relays") -> FlowProblem:
    """Relays of 1 to 3 places in random cities; ``limit``: whether relays or origins are what limits the flow."""
    chance = random.Random(seed)
    ring = [tuple(f"d{k}" for k in range(origins))]
    ring += [tuple(f"r{stage}.{k}" for k in range(relays)) for stage in range(1, stages + 1)]
    cities = sorted({node.location for node in named_network("gcp12").nodes})
    where, work_s, slots = {}, {}, {}
    for peer in (peer for stage in ring for peer in stage):
        where[peer], work_s[peer], slots[peer] = chance.choice(cities), chance.uniform(0.1, 0.6), chance.randint(1, 3)
    fits = min(sum(slots[peer] for peer in stage) for stage in ring[1:])
    total = fits + 4 if limit == "relays" else max(origins, int(fits * 0.7))
    for k, origin in enumerate(ring[0]):
        slots[origin] = total // origins + (k < total % origins)
    costs: dict[str, dict[str, float]] = {}
    for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
        for one in here:
            for other in there:
                cost = (work_s[one] + work_s[other]) / 2 + hop_s(where[one], where[other])
                costs.setdefault(one, {})[other] = costs.setdefault(other, {})[one] = cost
    return FlowProblem(stages=tuple(ring), slots=slots, costs=costs)


class LossyNetwork:
    """A heap of events: ticks of every node, and messages under way.

    Args:
        knows: chance that a peer knows another one of the neighbouring stages from the start.
    """

    def __init__(
        self,
        problem: FlowProblem,
        seed: int = 0,
        settings: Settings | None = None,
        *,
        loss: float = 0.05,
        repeat: float = 0.05,
        delay_s: tuple[float, float] = (0.01, 0.4),
        knows: float = 1.0,
    ) -> None:
        self.problem, self.loss, self.repeat, self.delay_s = problem, loss, repeat, delay_s
        self.settings = settings or Settings()
        self.chance = random.Random(seed)
        self.now, self.changed_at, self.count = 0.0, 0.0, 0
        self.sent: Counter[str] = Counter()
        self.sent_until_change = 0
        self.events: list[tuple[float, int, tuple]] = []
        self.stage = {peer: stage for stage, peers in enumerate(problem.stages) for peer in peers}
        self.nodes = {
            peer: FlowNode(
                Card(peer, stage),
                len(problem.stages),
                problem.slots[peer],
                chance=random.Random(f"{seed} {peer}"),
                settings=self.settings,
            )
            for peer, stage in self.stage.items()
        }
        for peer, node in self.nodes.items():
            near = {node.stage, node.before, node.after}
            for other in self.nodes:
                if self.stage[other] in near and (self.chance.random() < knows or self._next_in_line(peer, other)):
                    self.meet(peer, other)
            self.at(self.chance.random() * self.settings.period_s, peer)

    def _next_in_line(self, peer: str, other: str) -> bool:
        """A thread through all peers, so that everybody can be introduced to everybody."""
        line = list(self.stage)
        return abs(line.index(peer) - line.index(other)) == 1 or self.stage[peer] * self.stage[other] == 0

    def meet(self, peer: str, other: str) -> None:
        self.nodes[peer].met(other, self.stage[other], self.problem.costs[peer].get(other, 0.0))

    def at(self, when: float, *event) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, event))

    def send(self, sender: str, out: Outgoing) -> None:
        for to, message in out:
            self.sent[type(message).__name__] += 1
            for _ in range(2 if self.chance.random() < self.repeat else 1):
                if self.chance.random() >= self.loss:
                    self.at(self.now + self.chance.uniform(*self.delay_s), to, sender, message)

    def run(self, until: float, each: Callable[[], None] | None = None) -> None:
        """Play on; ``each`` is called after every event."""
        while self.events and self.events[0][0] <= until:
            self.now, _, (peer, *mail) = heapq.heappop(self.events)
            node = self.nodes.get(peer)
            if node is None:
                continue
            changed = node.changed
            if mail:
                out = node.receive(*mail, self.now)
            else:
                out = node.tick(self.now)
                self.at(self.now + self.settings.period_s, peer)
                for card in node.strangers:
                    if card.peer in self.nodes:
                        self.meet(peer, card.peer)
            if node.changed != changed:
                self.changed_at, self.sent_until_change = self.now, self.sent.total()
            self.send(peer, out)
            if each is not None:
                each()
        self.now = max(self.now, until)

    def settle(self, limit_s: float = 2000.0) -> bool:
        """Play until nobody has anything left to try; False if that does not come to pass."""
        while self.now < limit_s:
            self.run(self.now + 5.0)
            if all(node.settled for node in self.nodes.values()) and self.now - self.changed_at > 10:
                return True
        return False

    def lose(self, peer: str) -> None:
        """A peer vanishes, and all others notice."""
        del self.nodes[peer]
        for node in self.nodes.values():
            self.send(node.me, node.forget(peer, self.now))
        stages = tuple(tuple(other for other in stage if other != peer) for stage in self.problem.stages)
        self.problem = FlowProblem(stages=stages, slots=self.problem.slots, costs=self.problem.costs)

    def lanes(self) -> list[tuple[str, ...]]:
        return flows(node.holding() for node in self.nodes.values())

    def costs(self) -> list[float]:
        return [self.problem.cost_of(lane) for lane in self.lanes()]

    def one_sided(self) -> list[str]:
        """Links whose two ends do not hold the same copy."""
        ends: dict[str, list[tuple[bool, str, Link]]] = {}
        for node in self.nodes.values():
            for _, up, link in node.links():
                ends.setdefault(link.name, []).append((up, node.me, link))
        wrong = []
        for name, held in ends.items():
            links = [link for _, _, link in held]
            mutual = sorted(up for up, _, _ in held) == [False, True] and links[0] == links[1]
            if not mutual or any(link.end(up).peer != holder for up, holder, link in held):
                wrong.append(name)
        return wrong

    def overfull(self, settled: bool = True) -> list[str]:
        """Peers that hold more than they can, or lanes that start at one data node and end at another."""
        return [
            node.me
            for node in self.nodes.values()
            if len(node.places) != self.problem.slots[node.me] or (settled and any(map(astray_here, node.places)))
        ]


def greedy(problem: FlowProblem, seed: int) -> list[float]:
    """Costs of lanes built backwards, every relay in random order taking the cheapest way home; nothing improved."""
    chance = random.Random(seed)
    ways = [(0.0, (origin,)) for origin in problem.stages[0] for _ in range(problem.slots[origin])]
    for stage in problem.stages[:0:-1]:
        places = [peer for peer in stage for _ in range(problem.slots[peer])]
        chance.shuffle(places)
        longer = []
        for peer in places[: len(ways)]:
            best = min(ways, key=lambda way: way[0] + problem.costs[peer][way[1][0]])
            ways.remove(best)
            longer.append((best[0] + problem.costs[peer][best[1][0]], (peer, *best[1])))
        ways = longer
    whole = sorted(cost + problem.costs[lane[-1]][lane[0]] for cost, lane in ways)
    return whole[: sum(problem.slots[origin] for origin in problem.stages[0])]


def survey(seeds: range, settings: list[Settings], limit_s: float) -> None:
    """Print, by kind of problem and settings, how routes compare with the optima."""
    rows: dict[tuple, list[tuple]] = {}
    for seed in seeds:
        for origins in (1, 2):
            for limit in ("relays", "origins"):
                problem = draw(seed, origins, limit=limit)
                best, largest = min_cost(problem), min_largest_lane(problem, time_limit_s=20.0).lower_s
                costs = greedy(problem, seed)
                shown = (sum(costs) / best.cost_s, max(costs) / largest, 0.0, 0, 0, len(costs) == best.lanes)
                rows.setdefault(("greedy", "", origins, limit), []).append(shown)
                for setting in settings:
                    network = LossyNetwork(problem, seed, setting)
                    fine = network.settle(limit_s)
                    costs = network.costs()
                    fine = fine and not network.one_sided() and len(costs) == best.lanes
                    ratios = (sum(costs) / best.cost_s, max(costs, default=0.0) / largest)
                    counts = (network.changed_at, network.sent_until_change, network.sent.total())
                    key = (setting.objective, f"heat {setting.heat}", origins, limit)
                    rows.setdefault(key, []).append((*ratios, *counts, fine))
                    if not fine or max(ratios[setting.objective == "max"], 1.0) > 1.15:
                        print("look at", seed, key, [*ratios, len(costs), best.lanes, fine], flush=True)
        if (seed + 1) % 5 == 0:
            print(f"\nseeds {seeds.start} to {seed}", flush=True)
            report(dict(rows))
    report(rows)


def report(rows: dict[tuple, list[tuple]]) -> None:
    """One line for every kind, and one for all kinds together."""
    for key in sorted({key[:2] for key in rows}):
        rows[*key, "all", ""] = [row for other, found in rows.items() if other[:2] == key for row in found]
    for key, found in sorted(rows.items(), key=str):
        total, largest, seconds, until, sent, fine = zip(*found, strict=True)
        print(
            *key,
            f"| sum {statistics.mean(total):.4f} (max {max(total):.3f}) | largest {statistics.mean(largest):.4f} "
            f"(max {max(largest):.3f}) | settled after {statistics.mean(seconds):.0f} s, {statistics.mean(until):.0f} "
            f"messages, {statistics.mean(sent):.0f} in all | maximum flow {sum(fine)}/{len(fine)}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--heat", type=float, nargs="*", default=[Settings().heat, 0.0])
    parser.add_argument("--objective", nargs="*", default=["max", "sum"])
    given = parser.parse_args()
    started = time.process_time()
    survey(
        range(given.first, given.first + given.seeds),
        [Settings(objective=objective, heat=heat) for objective in given.objective for heat in given.heat],
        4000.0,
    )
    print(f"{time.process_time() - started:.0f} s of processor time")
