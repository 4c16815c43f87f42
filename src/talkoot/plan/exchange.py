"""How long replicas take to exchange messages, and how long they wait for each other: simulated, with seeds.

Two kinds of noise are published for this (NoLoCo, arXiv 2506.10911, section 5 and appendix): message latencies and step
times are log-normal. On a network whose links are known, the same exchanges are timed without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from talkoot.world.links import Link, Network

How: TypeAlias = Literal["pair", "ring", "tree", "direct", "gather", "none"]
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Hop: TypeAlias = Callable[[Ints, Ints], Floats]  # seconds of a message from each of these to each of those

MOST_HOPS = 4_000_000  # that rings are simulated for; they take N^2 messages, and vary little when N is large


class SyncTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long exchanges take when all messages' latencies are log-normal, in median latencies. Simulated.

    Attributes:
        median: of one exchange, by its way: ``pair`` (a swap), ``ring``, ``tree`` (binomial, as replicas form their
            mean along one), and ``binary tree`` (each with two below).
        over_pair: the mean of each, as a multiple of the swap's.
    """

    median: Mapping[str, float]
    over_pair: Mapping[str, float]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas spend their time. Simulated.

    Attributes:
        idle: share of its time in which each replica waits.
        round_steps: what a round takes in all, in steps of speed 1.
    """

    idle: tuple[float, ...]
    round_steps: float

    @property
    def idle_share(self) -> float:
        """Mean over replicas."""
        return sum(self.idle) / len(self.idle)


def sync_times(replicas: int, spread: float, *, trials: int = 200, seed: int = 0) -> SyncTimes:
    """Times of a swap and of all-reduces among replicas whose messages take exp(spread z), z standard normal.

    Args:
        replicas: at least 2.
        spread: standard deviation of the latency's logarithm.
        trials: exchanges of each kind, fewer of rings among many.

    Raises:
        ValueError: fewer than 2 replicas.
    """
    if replicas < 2:
        raise ValueError(f"{replicas} replicas have nobody to exchange anything with")
    chance = np.random.default_rng(seed)
    few = max(1, min(trials, MOST_HOPS // (2 * replicas * (replicas - 1))))

    def hop(count: int) -> Hop:
        return lambda source, target: np.exp(spread * chance.standard_normal((len(source), count)))

    swaps = np.exp(spread * chance.standard_normal((2, replicas // 2 * trials))).max(0)
    times = {
        "pair": swaps,
        "ring": _around(replicas, hop(few)),
        "tree": _up_and_down(binomial_tree(replicas), hop(trials)),
        "binary tree": _up_and_down([(node - 1) // 2 for node in range(replicas)], hop(trials)),
    }
    return SyncTimes(
        median={way: float(np.median(seconds)) for way, seconds in times.items()},
        over_pair={way: float(seconds.mean() / swaps.mean()) for way, seconds in times.items()},
    )


def sync_on(network: Network, names: Sequence[str], nbytes: float, how: How) -> float:
    """Seconds of one exchange of ``nbytes`` each on known links, once everybody is ready.

    A pair's is the mean over all pairs that chance may draw. Messages on different links do not slow each other down,
    as in the simulated world. A ring and a direct exchange send slices of an N-th of the message.
    """
    count = len(names)
    if how == "none" or count < 2:
        return 0.0
    slices = count if how in ("ring", "direct") else 1
    seconds = hop_seconds(network, names, nbytes / slices)

    def hop(source: Ints, target: Ints) -> Floats:
        return seconds[source, target][:, None]

    if how == "ring":
        return float(_around(count, hop)[0])
    if how == "tree":
        return float(_up_and_down(binomial_tree(count), hop)[0])
    others = ~np.eye(count, dtype=bool)
    if how == "pair":
        return float(np.maximum(seconds, seconds.T)[others].mean())
    arrives = np.where(others, seconds, 0.0).max(0)
    return float(arrives.max() if how == "gather" else (arrives[:, None] + np.where(others, seconds, 0.0)).max())


def hop_seconds(network: Network, names: Sequence[str], nbytes: float) -> Floats:
    """What a message takes from each (row) to each, on average: half the jitter, a round trip for each loss."""

    def seconds(link: Link) -> float:
        lost = link.loss / (1 - link.loss)
        return link.latency_s * (1 + 2 * lost) + link.jitter_s / 2 + nbytes / link.bytes_per_s

    return np.array([[seconds(network.link(a, b)) for b in names] for a in names])


def binomial_tree(count: int) -> list[int]:
    """Whom each of ``count`` nodes reports to: its number without the lowest bit; the root, 0, to itself."""
    return [node & (node - 1) for node in range(count)]


def lasting_speeds(replicas: int, spread: float, *, seed: int = 0) -> list[float]:
    """Speeds of replicas that differ for good: log-normal, the fastest 1.

    Args:
        spread: standard deviation of the speed's logarithm.
    """
    speeds = np.exp(spread * np.random.default_rng(seed).standard_normal(replicas))
    return [float(speed) for speed in speeds / speeds.max()]


def balanced_steps(inner_steps: int, speed: float) -> int:
    """Inner steps of a replica of that speed in rounds that take it as long as a replica of speed 1."""
    return max(1, round(inner_steps * speed))


def waiting(
    speeds: Sequence[float],
    inner_steps: int,
    how: How,
    *,
    hop_steps: float | Floats = 0.0,
    step_spread: float = 0.0,
    balance: bool = False,
    rounds: int = 100,
    seed: int = 0,
) -> Waiting:
    """How long replicas wait after each round: for a random partner, or for all. Simulated.

    Args:
        speeds: of each replica, 1 = the fastest.
        inner_steps: of a replica of speed 1 per round.
        how: ``pair``: a round begins when the message of a random partner is there; ``none``: at once; else, when that
            of all is.
        hop_steps: how much later than it was sent that is, in steps of speed 1; (N, N) from each to each, for pairs;
            less than 0 where a replica goes on for longer than a message takes.
        step_spread: standard deviation of the logarithm of every step's time; 0 = all steps take as long.
        balance: slower replicas take fewer steps, see :func:`balanced_steps`.
    """
    chance, count = np.random.default_rng(seed), len(speeds)
    hops: Floats = np.broadcast_to(hop_steps, (count, count))
    step_s: Floats = 1 / np.array(speeds, np.float64)
    counts = [balanced_steps(inner_steps, speed) if balance else inner_steps for speed in speeds]
    steps: Ints = np.array(counts, np.intp)
    taken: NDArray[np.bool_] = np.less(np.arange(max(counts))[:, None], steps)
    clock: Floats = np.zeros(count)
    busy: Floats = np.zeros(count)
    for _ in range(rounds):
        lasts: Floats = steps * step_s
        if step_spread:
            noise: Floats = np.exp(step_spread * chance.standard_normal(taken.shape) - step_spread**2 / 2)
            lasts = (noise * taken).sum(0) * step_s
        busy += lasts
        clock += lasts
        if how == "pair":
            one, other = chance.permutation(count)[: count // 2 * 2].reshape(2, -1)
            sent = clock.copy()
            clock[other] = np.maximum(sent[other], sent[one] + hops[one, other])
            clock[one] = np.maximum(sent[one], sent[other] + hops[other, one])
        elif how != "none":
            clock = np.maximum(clock, clock.max() + hops.max())
    idle = tuple(float(share) for share in 1 - busy / clock)
    return Waiting(idle=idle, round_steps=float(clock.max()) / rounds)


def _around(count: int, hop: Hop) -> Floats:
    """(trials,): reduce-scatter and all-gather along a ring, until the last has everything."""
    nodes = np.arange(count)
    before = np.roll(nodes, 1)
    ready: Floats = np.zeros((count, 1))
    for _ in range(2 * (count - 1)):
        ready = np.maximum(ready, ready[before] + hop(before, nodes))
    return ready.max(0)


def _up_and_down(parents: Sequence[int], hop: Hop) -> Floats:
    """(trials,): sums up a tree, then down, until the last has it; parents have lower numbers than their children."""
    child, parent = np.arange(1, len(parents)), np.array(parents[1:], np.intp)
    up, down = hop(child, parent), hop(parent, child)
    ready = np.zeros((len(parents), up.shape[1]))
    for node in reversed(range(1, len(parents))):
        ready[parents[node]] = np.maximum(ready[parents[node]], ready[node] + up[node - 1])
    for node in range(1, len(parents)):
        ready[node] = ready[parents[node]] + down[node - 1]
    return ready.max(0)
