"""Replicas that mix in pairs, without a barrier, against every rule that they compete with, on links of the globe.

Every run is the shipping engine in virtual time with real replicas of a tiny model on real text. Seconds are those of
the published twelve-city links (without the 0.35 s that the published software adds to each message), and of machines
as fast as one core; evaluations are taken off. The last part has no replicas: what an agreement of all takes against
that of a pair, as messages take log-normal times, for up to 1,024 replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean, median

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_mixing import INNER, Arm, Place, Trial, ring_s, train_all
from talkoot.plan.exchange import sync_times
from talkoot.plan.spread import predicted_ratio

CLAIM = "Replicas that only ever talk to one random other come to the same loss in a fraction of an all-reduce's time"

DDP = Arm(name="ddp", mixing={"rule": "ddp"}, note="every gradient, 8 times the batch; an agreement per step")
NONE = Arm(name="none", mixing={"rule": "none"})
ALL = Arm(
    name="diloco-heavy-ball, ring",
    mixing={"rule": "diloco-heavy-ball", "momentum": 0.5},
    note="noloco's outer optimizer with the mean of all",
)
NESTEROV_ALL = Arm(
    name="diloco, ring",
    mixing={"rule": "diloco", "outer_rate": 0.5},
    note="noloco-nesterov's outer optimizer with the mean of all",
)
SAME_BYTES = Arm(
    name="diloco-heavy-ball, ring, half as often",
    mixing={"rule": "diloco-heavy-ball", "momentum": 0.5, "inner_steps": 2 * INNER},
    note="about the bytes of noloco",
)
PAIRS = Arm(name="noloco", mixing={"rule": "noloco"}, note="as released: momentum 0.5, rate and pull 0.7")
HALF_RATE = Arm(name="noloco, half the rate", mixing={"rule": "noloco"}, rate=0.5)
NO_PULL = Arm(name="noloco, pull 0", mixing={"rule": "noloco", "pull": 0.0})
NESTEROV = Arm(
    name="noloco-nesterov", mixing={"rule": "noloco-nesterov"}, note="ours: momentum 0.9, rate 0.5, pull 0.485"
)
SHORT = Arm(name="noloco, bfloat16", mixing={"rule": "noloco", "wire": "bfloat16"}, note="half the bytes of float32")
SHORTER = Arm(
    name="noloco-literal, int8 + bfloat16",
    mixing={"rule": "noloco-literal", "wire": "bfloat16", "wire_gradient": "int8"},
    note="two vectors",
)
OTHERS = (
    Arm(name="epidemic", mixing={"rule": "epidemic"}, note="plain pair averaging"),
    Arm(name="streaming", mixing={"rule": "streaming"}, note="3 fragments, 5 steps late"),
    Arm(name="sparseloco", mixing={"rule": "sparseloco"}, note="1 number of 64, 2 bits"),
)
LEARNING = (DDP, NONE, ALL, NESTEROV_ALL, SAME_BYTES, PAIRS, HALF_RATE, NO_PULL, NESTEROV, SHORT, SHORTER, *OTHERS)
TIMED = (DDP, ALL, NESTEROV_ALL, PAIRS, NESTEROV)
NETWORK = "gcp12"
AS_GOOD, BETTER, LOSSLESS = 0.01, 0.02, 0.002  # nats
MOST_BYTES, SPREAD = 1.05, 2.0
LEAST_RATIO = {64: 6.0, 1024: 10.0}  # of a tree's time to a pair's, by replicas
SIGMAS = (0.5, 1.0)  # of a message's time's logarithm

AXES = {"steps": "inner steps", "seconds": "simulated seconds", "bytes": "bytes sent per replica"}
Trials = Mapping[tuple[str, int], list[Trial]]  # by arm and number of replicas


def measure(options: Options) -> Outcome:
    """All arms for each seed, at two sizes."""
    steps, seeds = (150, range(1)) if options.quick else (800, range(options.seeds))
    small, large = (4, 6) if options.quick else (8, 16)
    learning = (ALL, PAIRS, NO_PULL) if options.quick else LEARNING
    timed = (DDP, ALL, PAIRS) if options.quick else TIMED
    plan = [(arm, Place(network=NETWORK, replicas=small, steps=steps), seed) for arm in learning for seed in seeds]
    plan += [(arm, Place(network=NETWORK, replicas=large, steps=steps), seed) for arm in timed for seed in seeds]
    found: dict[tuple[str, int], list[Trial]] = {}
    for (arm, place, _), trial in zip(plan, train_all(plan), strict=True):
        found.setdefault((arm.name, place.replicas), []).append(trial)
    first = found[PAIRS.name, small][0]
    return Outcome(
        name="mixing",
        claim=CLAIM,
        world=f"{first.parameters:,} parameters, {steps} steps, rounds of {INNER}; time simulated on {NETWORK}",
        unit="held-out loss, nats per byte",
        rows=tuple(rows(found, {arm.name: arm.note for arm in (*learning, *timed)})),
        bars=tuple(quick_bars(found, small, large) if options.quick else bars(found, small, large)),
        notes=tuple(notes(found, small, large)),
        extras={f"mixing-by-{what}.svg": curves(found, large, what) for what in AXES},
    )


def rows(found: Trials, remarks: Mapping[str, str]) -> Iterator[Row]:
    """Each arm's loss: the mean of its replicas."""
    for (name, replicas), trials in found.items():
        first = trials[0]
        facts = [f"{first.seconds:,.1f} s, {first.round_bytes / 1000:,.0f} kB per {INNER} steps", remarks[name]]
        yield Row(
            name=f"{name}, N = {replicas}",
            values=tuple(trial.loss for trial in trials),
            note="; ".join(filter(None, facts)),
        )


def difference(found: Trials, one: Arm, other: Arm, replicas: int) -> float:
    """Mean over seeds of one arm's loss above the other's."""
    pairs = zip(found[one.name, replicas], found[other.name, replicas], strict=True)
    return fmean(a.loss - b.loss for a, b in pairs)


def time_ratio(found: Trials, one: Arm, other: Arm, replicas: int) -> float:
    """Median over seeds: one arm's time to another's, both to the higher of their two last losses."""
    ratios: list[float] = []
    for a, b in zip(found[one.name, replicas], found[other.name, replicas], strict=True):
        target = max(a.loss, b.loss)
        ratios.append(a.reaches(target).seconds / b.reaches(target).seconds)
    return median(ratios)


def ring_ratio(found: Trials, replicas: int) -> float:
    """As :func:`time_ratio` against ddp, had it no other way than along a ring: its steps, each an all-reduce long."""
    ratios: list[float] = []
    for a, b in zip(found[PAIRS.name, replicas], found[DDP.name, replicas], strict=True):
        target = max(a.loss, b.loss)
        step_s = ring_s(Place(network=NETWORK, replicas=replicas, steps=1), a.parameters)
        ratios.append(a.reaches(target).seconds / (b.reaches(target).step * step_s))
    return median(ratios)


def spread(found: Trials, arm: Arm, replicas: int) -> float:
    """The replicas' variance as a multiple of the formula's, mean over seeds."""
    mixing = arm.mixing
    law = "nesterov" if mixing["rule"] == "noloco-nesterov" else "heavy-ball"
    momentum, rate, pull = (0.9, 0.5, 0.485) if law == "nesterov" else (0.5, 0.7, 0.7)
    predicted = predicted_ratio(law, momentum, rate, pull, replicas=replicas)
    return fmean(trial.spread for trial in found[arm.name, replicas]) / predicted


def at_most(text: str, measured: float, limit: float) -> Bar:
    """A requirement that a figure is not above a limit."""
    return Bar(text=f"{text} <= {limit:.4g}", measured=measured, holds=measured <= limit)


def at_least(text: str, measured: float, limit: float) -> Bar:
    """A requirement that a figure is not below a limit."""
    return Bar(text=f"{text} >= {limit:.4g}", measured=measured, holds=measured >= limit)


def quick_bars(found: Trials, small: int, large: int) -> Iterator[Bar]:
    """What a short run can tell: bytes, time, and agreements of many."""
    yield from _bytes(found, small)
    yield at_most(f"N = {large}: seconds to equal loss, noloco / ring", time_ratio(found, PAIRS, ALL, large), 0.5)
    yield from _latency()


def bars(found: Trials, small: int, large: int) -> Iterator[Bar]:
    """The requirements."""
    yield at_most(f"N = {small}: loss, noloco - its all-reduce twin", difference(found, PAIRS, ALL, small), AS_GOOD)
    twins = difference(found, NESTEROV, NESTEROV_ALL, small)
    yield at_most(f"N = {small}: loss, noloco-nesterov - its all-reduce twin", twins, AS_GOOD)
    often = difference(found, PAIRS, SAME_BYTES, small)
    yield at_most(f"N = {small}: loss, noloco - its all-reduce twin half as often (as published)", often, AS_GOOD)
    yield at_least(f"N = {small}: loss, noloco - noloco-nesterov", difference(found, PAIRS, NESTEROV, small), BETTER)
    yield at_least(f"N = {small}: loss, pull 0 - noloco", difference(found, NO_PULL, PAIRS, small), BETTER)
    for arm in (PAIRS, NESTEROV):
        factor = spread(found, arm, small)
        text = f"N = {small}: spread of {arm.name} / the formula's, or the other way round"
        yield at_most(text, max(factor, 1 / factor), SPREAD)
    deviations = [fmean(t.slow**0.5 for t in found[arm.name, small]) for arm in (PAIRS, HALF_RATE)]
    ratio = deviations[0] / deviations[1]
    yield Bar(text="half the rate divides the deviation by 1.6 .. 2.4", measured=ratio, holds=1.6 <= ratio <= 2.4)
    yield from _bytes(found, small)
    for arm, twin in ((SHORT, PAIRS), (SHORTER, PAIRS)):
        yield at_most(f"N = {small}: loss, {arm.name} - float32", difference(found, arm, twin, small), LOSSLESS)
    yield at_most(f"N = {large}: seconds to equal loss, noloco / ring", time_ratio(found, PAIRS, ALL, large), 1 / 2)
    yield at_most(f"N = {large}: seconds to equal loss, noloco / ddp", time_ratio(found, PAIRS, DDP, large), 1 / 20)
    yield at_most(f"N = {large}: the same, ddp along a ring", ring_ratio(found, large), 1 / 20)
    yield from _latency()


def _bytes(found: Trials, small: int) -> Iterator[Bar]:
    sent = fmean(trial.round_bytes / 4 / trial.parameters for trial in found[PAIRS.name, small])
    yield at_most(f"N = {small}: bytes per replica and round / 4 bytes per parameter, noloco", sent, MOST_BYTES)


def _latency() -> Iterator[Bar]:
    for replicas, limit in LEAST_RATIO.items():
        ratio = min(sync_times(replicas, sigma).over_pair["tree"] for sigma in SIGMAS)
        yield at_least(f"N = {replicas:,}: time of a tree / of a pair", ratio, limit)


def notes(found: Trials, small: int, large: int) -> Iterator[str]:
    """What the bars leave out."""
    for (name, replicas), trials in found.items():
        if not name.startswith("ddp"):
            facts = {
                "averaged": fmean(t.averaged or 0.0 for t in trials),
                "best": fmean(t.best or 0.0 for t in trials),
                "deviation": fmean(t.slow**0.5 for t in trials),
                "spread": fmean(t.spread for t in trials),
                "idle": fmean(t.idle for t in trials),
            }
            yield f"{name}, N = {replicas}: " + ", ".join(f"{key} {value:.4g}" for key, value in facts.items())
    for sigma in SIGMAS:
        for replicas in (16, 64, 256, 1024):
            times = sync_times(replicas, sigma)
            ratios = ", ".join(f"{how} {value:.1f}" for how, value in times.over_pair.items())
            yield f"agreement of {replicas:,} against a pair's, log-normal messages of sigma {sigma}: {ratios}"


def curves(found: Trials, replicas: int, what: str) -> str:
    """Held-out loss of all arms of one size against steps, seconds or bytes."""
    key = {"steps": "step", "seconds": "seconds", "bytes": "sent_bytes"}[what]
    lines = {
        name: [[(getattr(point, key), point.loss) for point in trial.curve] for trial in trials]
        for (name, size), trials in found.items()
        if size == replicas
    }
    return chart(f"Held-out loss, nats per byte, {replicas} replicas", AXES[what], lines, log=what != "steps")
