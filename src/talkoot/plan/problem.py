"""What a route planner works on, and what it answers: numbers and node indices, nothing else.

A *node* is a machine, by index. Stage 0 is held by *origins*: they hold data, embedding, first layers, head and loss.
Every microbatch starts at an origin, visits *relays* of distinct other stages, comes back to its origin for the loss,
and goes the same way back as a gradient (a ring; Blagoev et al., 2025, "SkipPipe", arXiv 2502.19913).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

Matrix = tuple[tuple[float, ...], ...]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one training iteration, in seconds.

    Attributes:
        names: of the nodes; every other per-node field has the same order.
        hop_s: ``hop_s[i][j]``: one microbatch's activation (or its gradient) from i to j, host overhead included;
            0 on the diagonal.
        busy_s: ``busy_s[i][j]``: how long that transfer occupies the sender's and the receiver's network card; used
            only where contention is modelled.
        share_s: ``share_s[i][j]``: one stage's whole gradient from i to j (for the all-reduce inside a stage).
        layer_s: compute of one layer's forward for one microbatch, by node.
        stage_layers: how many layers' worth of work there is in each stage.
        slots: microbatches whose activations a node can hold at once.
        backward_ratio, loss_ratio: backward of a stage, and head with loss and its gradient at the origin, relative
            to one forward of the stage.
    """

    names: tuple[str, ...]
    hop_s: Matrix
    busy_s: Matrix
    share_s: Matrix
    layer_s: tuple[float, ...]
    stage_layers: tuple[float, ...]
    slots: tuple[int, ...]
    backward_ratio: float = 1.5
    loss_ratio: float = 0.25

    @property
    def num_stages(self) -> int:
        """Stages of the whole model, stage 0 included."""
        return len(self.stage_layers)

    def forward_s(self, node: int, stage: int) -> float:
        """Seconds of one forward of ``stage`` on ``node``."""
        return self.layer_s[node] * self.stage_layers[stage]

    def backward_s(self, node: int, stage: int) -> float:
        """Seconds of one backward."""
        return self.backward_ratio * self.forward_s(node, stage)

    def loss_s(self, node: int) -> float:
        """Seconds of head, loss and their gradient at an origin."""
        return self.loss_ratio * self.forward_s(node, 0)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Which paths are permitted.

    Attributes:
        visits: stages that each microbatch visits, stage 0 included; the number of stages = no skipping.
        max_advance: the furthest that one hop may go beyond the furthest stage reached so far.
        max_swap: the furthest that a visit may lie behind the furthest stage reached; 0 = stages in order only.
        max_swaps, max_swap_sum: swaps per path, and their distances added.
    """

    visits: int
    max_advance: int = 4
    max_swap: int = 1
    max_swaps: int = 2
    max_swap_sum: int = 2


class Lane(msgspec.Struct, frozen=True):
    """A place for one microbatch in flight: an origin, the relays that it uses, and how many microbatches it carries.

    A lane launches its next microbatch when the one before has come back and its gradient is applied at the origin.
    As no node is on more lanes than it has slots, a free slot is always there when a microbatch arrives, and nobody
    ever waits in a circle.

    Attributes:
        origin: node of stage 0.
        relays: nodes in the order of visiting.
        count: microbatches of an iteration that take this lane, one after another.
    """

    origin: int
    relays: tuple[int, ...]
    count: int


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """An answer.

    Attributes:
        groups: nodes of each stage; ``groups[0]`` are the origins.
        lanes: in launch order per origin; an origin's k-th lane starts k forwards after its first.
    """

    groups: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an iteration."""
        return sum(lane.count for lane in self.lanes)

    def stage_of(self) -> dict[int, int]:
        """The stage of each placed node."""
        return {node: stage for stage, group in enumerate(self.groups) for node in group}

    def turns(self) -> Iterator[tuple[int, int, int]]:
        """(microbatch, lane, turn) for every microbatch: numbered turn by turn, lane by lane within a turn."""
        number = 0
        for turn in range(max((lane.count for lane in self.lanes), default=0)):
            for index, lane in enumerate(self.lanes):
                if turn < lane.count:
                    yield number, index, turn
                    number += 1


def violations(problem: Problem, routes: Routes, rules: Rules) -> list[str]:
    """Every hard constraint that ``routes`` breaks, in words; empty = valid.

    Fixed ends, distinct stages, exactly ``rules.visits`` of them, limited advance and swaps, slots, and even
    skipping: each stage but the first is visited by equally many microbatches (or, where the total does not divide,
    by numbers that differ by at most 1).
    """
    stage_of = routes.stage_of()
    found: list[str] = []
    if len(stage_of) != sum(map(len, routes.groups)):
        found.append("a node is placed in two stages")
    if len(routes.groups) != problem.num_stages or not all(routes.groups):
        found.append(f"every one of the {problem.num_stages} stages needs a node")
    lanes_of = dict.fromkeys(stage_of, 0)
    visits = [0] * problem.num_stages
    for index, lane in enumerate(routes.lanes):
        unplaced = [node for node in (lane.origin, *lane.relays) if node not in stage_of]
        if unplaced:
            found.append(f"lane {index} visits nodes {unplaced}, which hold nothing")
            continue
        if stage_of[lane.origin] != 0:
            found.append(f"lane {index} starts at {problem.names[lane.origin]}, which is no origin")
        if lane.count < 0:
            found.append(f"lane {index} carries {lane.count} microbatches")
        stages = [stage_of[node] for node in lane.relays]
        found += [f"lane {index}: {text}" for text in path_violations(stages, rules)]
        for node in (lane.origin, *lane.relays):
            lanes_of[node] += 1 if lane.count else 0
        for stage in stages:
            visits[stage] += lane.count
    for node, count in lanes_of.items():
        if count > problem.slots[node]:
            found.append(f"{problem.names[node]} is on {count} lanes and has {problem.slots[node]} slots")
    if len(visits) > 1:
        spread = max(visits[1:]) - min(visits[1:])
        even = routes.num_microbatches * (rules.visits - 1) % (problem.num_stages - 1) == 0
        if spread > (0 if even else 1):
            found.append(f"stages are visited unevenly: {visits[1:]}")
    return found


def path_violations(stages: list[int], rules: Rules) -> list[str]:
    """What is wrong with one path, given the stages of its relays in order."""
    found: list[str] = []
    if len(stages) != rules.visits - 1:
        found.append(f"visits {len(stages) + 1} stages instead of {rules.visits}")
    if 0 in stages or len(set(stages)) != len(stages):
        found.append(f"visits stages {stages}: each but the origin's once at most")
    frontier = 0
    swaps: list[int] = []
    for stage in stages:
        if stage > frontier:
            if stage - frontier > rules.max_advance:
                found.append(f"jumps from stage {frontier} to {stage}, more than {rules.max_advance}")
            frontier = stage
        else:
            swaps.append(frontier - stage)
    if swaps and (max(swaps) > rules.max_swap or len(swaps) > rules.max_swaps or sum(swaps) > rules.max_swap_sum):
        found.append(f"swaps stages too far or too often: {stages}")
    return found
