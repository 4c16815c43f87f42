"""Routes that the peers negotiate, and repair within the step, against routing by the sender's own view, under churn.

The shipping lead and peers in virtual time, without tensors: two data peers and sixteen unlike relays in twelve cities
(see :mod:`talkoot.bench.peer_churn`), relays crashing at random moments. All contenders have the same machines and the
same crashes: who, in which iteration, and at which fraction of the contender's own undisturbed iteration. A crashed
relay is started again at once and works again from the next step on. The last living relay of a stage is spared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

import msgspec

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_churn import GROUPS, Contender, Iteration, Size, draw, run
from talkoot.serve.timeline import timeline_html

CLAIM = "Negotiated routes that mend themselves outrun routing by each sender's own view, whoever crashes"
RATES = (0.0, 0.1, 0.2)
DRAWS, ITERATIONS = 25, 6
LEAST_CUT = {"weighted": 0.20, "greedy": 0.45}
MOST_WASTE = 0.2

OURS = Contender(name="negotiated, repair", planner="flow", repair="repair")
RESTART = Contender(name="negotiated, restart", planner="flow", repair="restart")
WEIGHTED = Contender(name="weighted, redo", planner="weighted", repair="redo")
GREEDY = Contender(name="greedy, redo", planner="greedy", repair="redo")
STRAIGHT = Contender(name="straight, redo", planner="straight", repair="redo")
CONTENDERS = (OURS, RESTART, WEIGHTED, GREEDY, STRAIGHT)
NOTES = {
    OURS.name: "published: 45 % less time and 30 % more throughput than SWARM",
    RESTART.name: "the same routes; a crash repeats the whole step",
    WEIGHTED.name: "SWARM, interleaved weighted round-robin",
    GREEDY.name: "SWARM, each to the peer that answers soonest, whatever its load",
    STRAIGHT.name: "fixed pipelines, 1F1B",
}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One contender on one draw at one rate: means over the iterations, in seconds; see ``Iteration``."""

    seconds: float
    mixing_s: float
    useful_s: float
    died_s: float
    repeated_s: float
    reopened_s: float
    crashes: float

    @property
    def wasted_s(self) -> float:
        """Computed in vain for microbatches under way: repeated by the living, and the lost stages' forwards."""
        return self.repeated_s + self.reopened_s


Trials = dict[tuple[str, float], list[Trial]]


def measure(options: Options) -> Outcome:
    """All contenders on all draws."""
    draws = range(3 if options.quick else max(DRAWS, options.seeds))
    size = Size()
    found: Trials = {(one.name, rate): [] for one in CONTENDERS for rate in RATES}
    extras: dict[str, str] = {}
    for seed in draws:
        machines = draw(seed, 3 if options.quick else ITERATIONS)
        undisturbed: dict[str, list[Iteration]] = {}  # by planner, as nothing has to be repaired
        for contender in CONTENDERS:
            if contender.planner not in undisturbed:
                undisturbed[contender.planner] = run(machines, size, contender)
            calm = undisturbed[contender.planner]
            length = fmean(one.seconds for one in calm)
            for rate in RATES:
                iterations = run(machines, size, contender, rate=rate, undisturbed_s=length) if rate else calm
                found[contender.name, rate].append(trial(iterations))
                if seed == 0 and rate == RATES[-1] and contender in (OURS, WEIGHTED):
                    name = f"churn-{contender.planner}.html"
                    extras[name] = timeline(contender, machines.names, iterations)
    return Outcome(
        name="churn",
        claim=CLAIM,
        world=f"simulated, {sum(GROUPS[1:])} relays of {len(draws)} draws, without tensors",
        unit="seconds per iteration",
        rows=tuple(rows(found)),
        bars=tuple(bars(found)),
        notes=tuple(notes(found)),
        extras=extras,
    )


def trial(iterations: Sequence[Iteration]) -> Trial:
    """Means over iterations."""
    kept = [field for field in Trial.__struct_fields__ if field != "crashes"]
    seconds = {field: fmean(getattr(one, field) for one in iterations) for field in kept}
    return Trial(**seconds, crashes=fmean(len(one.lost) for one in iterations))


def rows(found: Trials) -> Iterator[Row]:
    """Seconds per iteration of each contender at each rate."""
    for rate in RATES:
        for contender in CONTENDERS:
            values = tuple(one.seconds for one in found[contender.name, rate])
            yield Row(name=f"{contender.name}, {rate:.0%} crashes", values=values, note=NOTES[contender.name])


def cut(found: Trials, other: Contender, rate: float, *, without_mixing: bool = False) -> float:
    """How much less time ours takes: the median over draws, each of which both had."""

    def seconds(one: Trial) -> float:
        return one.seconds - one.mixing_s * without_mixing

    pairs = zip(found[OURS.name, rate], found[other.name, rate], strict=True)
    return median(1 - seconds(ours) / seconds(theirs) for ours, theirs in pairs)


def means(trials: Sequence[Trial]) -> Trial:
    """Over draws."""
    fields = Trial.__struct_fields__
    return Trial(**{field: fmean(getattr(one, field) for one in trials) for field in fields})


def bars(found: Trials) -> Iterator[Bar]:
    """The requirements."""
    for other in (WEIGHTED, GREEDY):
        least = LEAST_CUT[other.planner]
        for rate in RATES:
            measured = cut(found, other, rate)
            text = f"{rate:.0%} crashes: time cut against {other.planner} >= {least:.0%}"
            yield Bar(text=text, measured=measured, holds=measured >= least)
    for rate in RATES[1:]:
        ours, theirs = (means(found[one.name, rate]).wasted_s for one in (OURS, WEIGHTED))
        text = f"{rate:.0%} crashes: computed in vain for microbatches under way, of that of weighted, <= {MOST_WASTE}"
        yield Bar(text=text, measured=ours / theirs, holds=ours <= MOST_WASTE * theirs)


def notes(found: Trials) -> Iterator[str]:
    """What the bars leave out."""
    yield (
        "median over draws of the mean iteration; cuts are medians of each draw's own; crashes: the chance "
        "of each relay in each iteration"
    )
    for other in (WEIGHTED, GREEDY, STRAIGHT, RESTART):
        cuts = ", ".join(
            f"{cut(found, other, rate):.0%} ({cut(found, other, rate, without_mixing=True):.0%})" for rate in RATES
        )
        yield f"time cut against {other.name}, and without the gradients' mixing, by rate: {cuts}"
    for rate in RATES[1:]:
        for contender in CONTENDERS:
            one = means(found[contender.name, rate])
            yield (
                f"{contender.name}, {rate:.0%}: {one.crashes:.2f} crashes per iteration; beside {one.useful_s:.1f} s "
                f"of useful work the living repeated {one.repeated_s:.2f} s, {one.died_s:.2f} s died with the lost "
                f"and others did {one.reopened_s:.2f} s of forwards again for microbatches under way"
            )
        ours, theirs = means(found[OURS.name, rate]), means(found[WEIGHTED.name, rate])
        yield (
            f"computed in vain at {rate:.0%}, ours / weighted: {ours.wasted_s / theirs.wasted_s:.2f} as in the bar, "
            f"{ours.repeated_s / theirs.repeated_s:.2f} by the living alone, "
            f"{(ours.repeated_s + ours.died_s) / (theirs.repeated_s + theirs.died_s):.2f} with all that died"
        )
    yield (
        "what died with a lost peer is all that it had computed in the iteration, its finished microbatches too: its "
        "partial sums are gone, and as every microbatch counts exactly once, others compute it again, with any method"
    )
    yield "states cost nothing to copy here: a relay that comes back is seated for some messages"


def timeline(contender: Contender, names: Sequence[str], iterations: Sequence[Iteration]) -> str:
    """The iteration in which most was lost."""
    worst = max(iterations, key=lambda one: (len(one.lost), one.died_s))
    ends = [sum(GROUPS[: stage + 1]) for stage in range(len(GROUPS))]
    groups = [range(end - size, end) for end, size in zip(ends, GROUPS, strict=True)]
    facts = [f"lost: {', '.join(worst.lost) or 'nobody'}", f"{worst.seconds:.1f} s with mixing"]
    return timeline_html(f"Churn: {contender.name}", names, worst.spans, groups, facts)
