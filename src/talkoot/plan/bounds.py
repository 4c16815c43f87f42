"""What no plan can beat: a lower bound on one iteration, whatever the paths, their order and their mixture.

A linear program over all permitted paths, with a variable for how many microbatches take each, minimises the time T
under what any execution obeys:

* *work*: no node computes longer than T: a relay (1 + backward ratio) forwards per visit, an origin its loss too;
* *slots*: activations held, from the start of a forward to the end of its backward and never shorter than alone, fit
  into T times the slots: of each origin, and of each other stage together (Little's law);
* the origins' quotas, and even skipping.

Beside it, *waves*: of the microbatches in one slot of an origin, each begins when the one before is back, and the
k-th slot cannot start before k forwards of the origin. So T is at least the M-th smallest of k * forward + c * shortest
round trip, over the slots k and c = 1, 2, ... (of one origin with quota M, or of all together where quotas are free).

There are too many paths to list (5 origins with 5 stages of 3: thousands; 7 with 7 of 5: millions), so columns are
generated: given the rows' prices, the cheapest path of each origin comes from dynamic programming over (stages visited,
node). Every such round also proves a bound of its own (Lagrange), and the best of these is returned: it is valid
however the solver rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import highspy
import msgspec
import numpy as np
from numpy.typing import NDArray

from talkoot.plan.problem import Problem, Rules

Array = NDArray[np.float64]
Quotas = Literal["equal", "free"]

ROUNDS = 200
TOLERANCE = 1e-6
MOST_STATES = 4000  # beyond these, slots of the other stages are left out, so that fewer states need be told apart


class Bound(msgspec.Struct, frozen=True):
    """No iteration takes less than ``seconds``; ``binding`` says in words what it is that takes this long."""

    seconds: float
    binding: str


def skipping_cut(num_stages: int, visits: int) -> tuple[float, float]:
    """Which share of a full pipeline's time skipping saves at best, as (bound by compute, bound by latency).

    With phi = (visits - 1) / (num_stages - 1), the share of the relays' work that remains, it is 1 - phi where relays
    are always busy. Where they wait for the network, it is 1 - phi * visits / num_stages: the round trips get shorter,
    and the slots of all origins are in flight instead of those of one stage, whose size is phi times theirs. Holds
    for groups with origins * (visits - 1) = (num_stages - 1) * relays per stage, one speed and like links.
    """
    phi = (visits - 1) / (num_stages - 1)
    return 1 - phi, 1 - phi * visits / num_stages


def lower_bound(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    rules: Rules,
    num_microbatches: int,
    *,
    quotas: Quotas = "equal",
) -> Bound:
    """Seconds below which no iteration can be.

    Args:
        problem: costs.
        groups: nodes of each stage.
        rules: permitted paths.
        num_microbatches: of the iteration.
        quotas: "equal": each origin starts equally many (or numbers that differ by 1); "free": as many as it likes.

    Raises:
        ValueError: no path obeys the rules.
    """
    network = _Network(problem, groups, rules)
    if num_microbatches <= 0:
        return Bound(0.0, "nothing to do")
    program = _Program(network, num_microbatches, quotas)
    return max(_waves(network, program), program.solve(), key=lambda bound: bound.seconds)


def _waves(network: _Network, program: _Program) -> Bound:
    """The bound by round trips that follow each other in an origin's slots. Whole microbatches, unlike the program."""
    problem = network.problem
    trips = {path.origin: path.price for path in reversed(network.cheapest(network.lone_prices()))}
    returns: list[tuple[float, int]] = []
    found = Bound(0.0, "nothing")
    for place, trip in trips.items():
        node = int(network.groups[0][place])
        own: list[float] = []
        for slot in range(problem.slots[node]):
            first = slot * problem.forward_s(node, 0)
            own += [first + lap * trip for lap in range(1, program.most // problem.slots[node] + 2)]
        own.sort()
        if program.least and own[program.least - 1] > found.seconds:
            words = f"{problem.names[node]}: {program.least} microbatches in {problem.slots[node]} slots"
            found = Bound(own[program.least - 1], f"{words}, each {trip:.2f} s there and back at least")
        returns += [(seconds, node) for seconds in own[: program.most]]
    seconds, node = sorted(returns)[program.total - 1]
    if seconds > found.seconds:
        found = Bound(seconds, f"round trips in the slots of all origins; the last one at {problem.names[node]}")
    return found


class _State(NamedTuple):
    """Stages visited so far (bits), the last of them, and the swaps used up: (how many, their distances added)."""

    mask: int
    last: int
    swaps: int
    swap_sum: int


def _next_stages(state: _State, num_stages: int, rules: Rules) -> list[_State]:
    """All states one permitted visit further; the frontier is the furthest stage visited."""
    frontier = max(state.mask.bit_length() - 1, 0)
    found: list[_State] = []
    for stage in range(max(1, frontier - rules.max_swap), min(num_stages, frontier + rules.max_advance + 1)):
        if state.mask >> stage & 1:
            continue
        distance = max(frontier - stage, 0)
        swaps, total = state.swaps + (distance > 0), state.swap_sum + distance
        if swaps <= rules.max_swaps and total <= rules.max_swap_sum:
            found.append(_State(state.mask | 1 << stage, stage, swaps, total))
    return found


# For each state: price of the cheapest way there, by origin and node; which predecessor; who holds it (`cheapest`).
Table = dict[_State, tuple[Array, NDArray[np.intp], Array]]


class _Prices(NamedTuple):
    """What the rows charge: per second of a node's work; per second in a slot of an origin (by its place in the
    group) and of a stage; per visit of a stage."""

    work: Array
    origin: Array
    stage: Array
    visit: Array


class _Path(NamedTuple):
    """A priced path: place of its origin in the group, relays, and the price."""

    origin: int
    relays: tuple[int, ...]
    price: float


class _Network:
    """Permitted paths as layers of states, and their costs as arrays.

    ``layers[i]`` maps a state of i relays to the keys of its predecessors. Where states are told apart by all stages
    visited they are too many for deep models; then only those within reach of a swap are kept (``whole`` is False).
    """

    def __init__(self, problem: Problem, groups: Sequence[Sequence[int]], rules: Rules) -> None:
        self.problem, self.rules = problem, rules
        self.groups = [np.array(group, dtype=np.intp) for group in groups]
        self.stage_of = {node: stage for stage, group in enumerate(groups) for node in group}
        hop = np.array(problem.hop_s)
        self.there_and_back: Array = hop + hop.T
        self.work: Array = np.zeros(len(problem.names))  # seconds of one visit
        for node, stage in self.stage_of.items():
            self.work[node] = problem.forward_s(node, stage) + problem.backward_s(node, stage)
        self.loss: Array = np.array([problem.loss_s(node) for node in groups[0]])
        layers = self._layers(whole=True)
        self.whole = layers is not None
        self.layers = layers if layers is not None else self._layers(whole=False) or []
        if not self.layers or not self.layers[-1]:
            raise ValueError(f"no path of {rules.visits} stages out of {len(groups)} obeys the rules")

    def _layers(self, *, whole: bool) -> list[dict[_State, list[_State]]] | None:
        stages = len(self.groups)
        layers: list[dict[_State, list[_State]]] = [{_State(0, 0, 0, 0): []}]
        for left in reversed(range(self.rules.visits - 1)):
            layer: dict[_State, list[_State]] = {}
            for state in layers[-1]:
                for reached in _next_stages(state, stages, self.rules):
                    frontier = reached.mask.bit_length() - 1
                    first = max(frontier - self.rules.max_swap, 1)  # of the stages that may still be visited
                    near = reached.mask >> first
                    if stages - first - near.bit_count() < left:
                        continue
                    key = reached if whole else reached._replace(mask=near << first)
                    layer.setdefault(key, []).append(state)
            layers.append(layer)
            if whole and sum(map(len, layers)) > MOST_STATES:
                return None
        return layers

    def cheapest(self, prices: _Prices) -> list[_Path]:
        """The cheapest path of each origin, for each way to end; sorted by price within an origin.

        A second at the i-th place of a path is charged by all who hold the microbatch then: the origin and the
        stages visited so far. That sum, ``held``, depends on the state only.
        """
        groups, trips = self.groups, self.there_and_back
        home = np.arange(len(groups[0]))
        start = np.full((len(home), len(home)), np.inf)
        start[home, home] = self.work[groups[0]] * (prices.origin + prices.work[groups[0]])
        start[home, home] += self.loss * prices.work[groups[0]]
        tables: list[Table] = []
        for state in self.layers[0]:
            tables.append({state: (start, np.zeros_like(start, dtype=np.intp), prices.origin)})
        for layer in self.layers[1:]:
            before: Table = tables[-1]
            here: Table = {}
            for state, parents in layer.items():
                group = groups[state.last]
                options: list[Array] = []
                held = prices.origin
                for parent in parents:
                    cost, _, held = before[parent]
                    links = trips[np.ix_(groups[parent.last], group)]
                    options.append(cost[:, :, None] + held[:, None, None] * links)
                stacked = np.concatenate(options, axis=1)
                held = held + prices.stage[state.last]
                visit = self.work[group] * (held[:, None] + prices.work[group]) + prices.visit[state.last]
                here[state] = (stacked.min(axis=1) + visit, stacked.argmin(axis=1), held)
            tables.append(here)
        found: list[_Path] = []
        for state, (cost, _, held) in tables[-1].items():
            last = groups[state.last]
            total = cost + held[:, None] * (trips[np.ix_(last, groups[0])].T + self.loss[:, None])
            for origin, place in enumerate(total.argmin(axis=1)):
                relays = self._trace(tables, state, origin, int(place))
                found.append(_Path(origin, relays, float(total[origin, place])))
        return sorted(found, key=lambda path: (path.origin, path.price))

    def _trace(self, tables: list[Table], state: _State, origin: int, place: int) -> tuple[int, ...]:
        relays: list[int] = []
        for index in range(len(tables) - 1, 0, -1):
            relays.append(int(self.groups[state.last][place]))
            choice = int(tables[index][state][1][origin, place])
            for parent in self.layers[index][state]:
                size = len(self.groups[parent.last])
                if choice < size:
                    state, place = parent, choice
                    break
                choice -= size
        return tuple(reversed(relays))

    def lone_prices(self) -> _Prices:
        """Prices under which a path costs its round trip in seconds."""
        zeros = np.zeros(len(self.groups))
        return _Prices(np.zeros(len(self.work)), np.ones(len(self.groups[0])), zeros, zeros)


class _Solver(highspy.Highs):
    """Without the callbacks: switching them on prints a banner to standard output."""

    def enableCallbacks(self) -> None:
        """Do not."""


class _Program:
    """The linear program over the paths found so far.

    Rows: work of each placed node, slots of each origin, slots of each other stage, visits of each other stage,
    quota of each origin, all microbatches. Columns: T, two penalties per row of visits, then the paths.
    """

    def __init__(self, network: _Network, total: int, quotas: Quotas) -> None:
        self.network, self.total = network, total
        groups, problem = network.groups, network.problem
        origins, stages = len(groups[0]), len(groups)
        self.least, self.most = (total // origins, -(-total // origins)) if quotas == "equal" else (0, total)
        visits = total * (network.rules.visits - 1)
        even = (visits // max(stages - 1, 1), -(-visits // max(stages - 1, 1)))
        self.nodes = list(network.stage_of)
        self.row_of = {node: row for row, node in enumerate(self.nodes)}
        slots = [problem.slots[node] for node in self.nodes[:origins]]
        slots += [
            sum(problem.slots[node] for node, at in network.stage_of.items() if at == stage)
            for stage in range(1, stages)
        ]
        self.weights: Array = np.array(
            [1] * len(self.nodes) + slots, dtype=np.float64
        )  # of T in the rows that bound it
        self.limits = [even] * (stages - 1) + [(self.least, self.most)] * origins + [(total, total)]
        self.solver = _Solver()
        self.solver.setOptionValue("output_flag", False)
        self.solver.addVar(0.0, highspy.kHighsInf)
        self.solver.changeColCost(0, 1.0)
        for row, weight in enumerate(self.weights):
            limit = highspy.kHighsInf if not network.whole and row >= len(self.nodes) + origins else 0.0
            self.solver.addRow(-highspy.kHighsInf, limit, 1, np.array([0]), np.array([-weight]))
        for low, high in self.limits:
            self.solver.addRow(low, high, 0, np.array([], dtype=np.int32), np.array([]))
        self.first_visit = len(self.weights)
        self.known: set[tuple[int, tuple[int, ...]]] = set()

    def solve(self) -> Bound:
        """Generate columns until the best proven bound meets the optimum over the paths found."""
        network = self.network
        paths = network.cheapest(network.lone_prices())
        penalty = 100.0 * max(path.price for path in paths)
        for row in range(len(network.groups) - 1):
            for sign in (-1.0, 1.0):
                self._column(penalty, {self.first_visit + row: sign})
        best = Bound(0.0, "nothing")
        for _ in range(ROUNDS):
            new = [path for path in paths if (path.origin, path.relays) not in self.known]
            if not new:
                break
            for path in new:
                self.known.add((path.origin, path.relays))
                self._column(0.0, self._rows(path))
            self.solver.run()
            duals: Array = -np.array(self.solver.getSolution().row_dual)
            optimum = self.solver.getInfo().objective_function_value
            prices, binding = self._prices(duals)
            paths = network.cheapest(prices)
            proven = self._proven(paths, prices)
            if proven > best.seconds:
                best = Bound(proven, binding)
            if optimum - best.seconds <= TOLERANCE * optimum:
                break
            charge = duals[self.first_visit + len(network.groups) - 1 :]
            paths = [path for path in paths if path.price + charge[path.origin] + charge[-1] < 0.0]
        return best

    def _column(self, cost: float, rows: dict[int, float]) -> None:
        inf, values = highspy.kHighsInf, list(rows.values())
        self.solver.addCol(cost, 0.0, inf, len(rows), np.array(list(rows), dtype=np.int32), np.array(values))

    def _rows(self, path: _Path) -> dict[int, float]:
        """A path's coefficients."""
        network, origins = self.network, self.network.groups[0]
        rows: dict[int, float] = {}
        after = origin = int(origins[path.origin])
        held = float(network.loss[path.origin])
        for node in reversed(path.relays):
            held += float(network.there_and_back[node, after] + network.work[node])
            stage, after = network.stage_of[node], node
            rows[self.row_of[node]] = float(network.work[node])
            rows[len(self.nodes) + len(origins) - 1 + stage] = held
            rows[self.first_visit + stage - 1] = 1.0
        rows[self.row_of[origin]] = float(network.work[origin] + network.loss[path.origin])
        held += float(network.there_and_back[origin, after] + network.work[origin])
        rows[len(self.nodes) + path.origin] = held
        rows[self.first_visit + len(network.groups) - 1 + path.origin] = 1.0
        rows[self.first_visit + len(self.limits) - 1] = 1.0
        return rows

    def _prices(self, duals: Array) -> tuple[_Prices, str]:
        """What the rows charge, scaled so that a second of T costs exactly 1, and the row that charges most."""
        network = self.network
        groups, names = network.groups, network.problem.names
        charged = np.maximum(duals[: self.first_visit], 0.0)
        scale = float(charged @ self.weights) or 1.0
        charged = charged / scale
        work = np.zeros(len(network.work))
        work[self.nodes] = charged[: len(self.nodes)]
        slots = charged[len(self.nodes) :]
        stage = np.concatenate([[0.0], slots[len(groups[0]) :]])
        visit = np.concatenate([[0.0], duals[self.first_visit : self.first_visit + len(groups) - 1] / scale])
        top = int(np.argmax(charged * self.weights)) if charged.any() else 0
        share = charged[top] * self.weights[top]
        if top < len(self.nodes):
            words = f"work of {names[self.nodes[top]]}"
        elif top < len(self.nodes) + len(groups[0]):
            words = f"slots of origin {names[int(groups[0][top - len(self.nodes)])]}"
        else:
            words = f"slots of stage {top - len(self.nodes) - len(groups[0]) + 1}"
        words += "" if share > 0.99 else f" ({share:.0%} of the bound, other rows the rest)"
        return _Prices(work, slots[: len(groups[0])], stage, visit), words

    def _proven(self, paths: list[_Path], prices: _Prices) -> float:
        """The Lagrangian bound: all microbatches on their cheapest paths, quotas kept, less what the rows allow."""
        cheapest = {path.origin: path.price for path in reversed(paths)}
        spare, total = self.total - self.least * len(cheapest), 0.0
        for price in sorted(cheapest.values()):
            extra = min(spare, self.most - self.least)
            total += (self.least + extra) * price
            spare -= extra
        for price, (low, high) in zip(prices.visit[1:], self.limits, strict=False):
            total -= price * (high if price > 0 else low)
        return float(total)
