"""Learning from feedback instead of rewards: does a critique that follows one's own steps teach more than a solution?

All arms start from the same base and learn from the same number of rollouts, on additions where every column carries.
``binary reward``: GRPO in groups of 8. ``reference solution``: a self-teacher sees a worked solution, by an author
whose order of operands varies as the demonstrators' did; ``in one order``: always the task's own. ``step-aligned``: it
sees the rollout's right steps verbatim and the first wrong one corrected. arXiv 2606.11173 published the three on
another model and task. Where the blame falls is measured on the base's rollouts, before anything is learned.

The second world, where half of the demonstrated steps have their operands swapped, asks what a solution in one order
teaches beside the task: a way of writing. There each arm's share of swapped steps is the finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_critique import (
    ALIGNED,
    BINARY,
    FORWARD,
    ONE_ORDER,
    REFERENCE,
    Condition,
    Setting,
    Trial,
    learn_all,
)

CLAIM = "Critiques that follow one's own steps blame the first mistake alone, and teach more than rewards do"
MOST_AT_MISTAKE, MOST_BLAMED = -1.0, 0.10  # nats; share of the right prefix
LOOSE = 0.05  # accuracy by which one short run may mislead
FEW, HALF = 0.2, 0.5  # of the demonstrated steps are swapped
PUBLISHED = (
    "published (Qwen3-1.7B, 30 problems, best checkpoints; Pass, Maj, Avg@12 in %): GRPO 76.7, 26.7, 19.7; reference "
    "86.7, 43.3, 30.6; step-aligned 90.0, 56.7, 35.8"
)
PAIRS = ((ALIGNED, BINARY), (REFERENCE, BINARY), (ALIGNED, REFERENCE), (ALIGNED, ONE_ORDER))

Found = Mapping[tuple[float, str], Sequence[Trial]]  # by the demonstrations' swapped share and condition


def measure(options: Options) -> Outcome:
    """All arms in both worlds for each seed; ``quick``: three of them in one world, a shorter warm start, a quarter
    of the rollouts, one seed."""
    if options.quick:
        setting = Setting(swapped=FEW, warm_steps=300, marks=(320,), problems=48, blamed=4)
        found = learn_all([(setting, (BINARY, REFERENCE, ALIGNED))], [1])
    else:
        setting = Setting(swapped=FEW)
        half = msgspec.structs.replace(setting, swapped=HALF)
        arms = (BINARY, REFERENCE, ONE_ORDER, ALIGNED)
        found = learn_all([(setting, (*arms, *FORWARD)), (half, arms)], range(1, options.seeds + 1))
    trials = [trial for runs in found.values() for trial in runs]
    return Outcome(
        name="critique",
        claim=CLAIM,
        world="2-digit additions where every column carries, 0.23 million parameters, "
        f"{sum(trial.cpu_s for trial in trials):,.0f} CPU-seconds after the warm start",
        unit=f"Avg@{setting.samples} on held-out problems after {setting.marks[-1]:,} rollouts "
        "(share of demonstrated steps with swapped operands)",
        rows=tuple(rows(found)),
        bars=tuple(bars(found, options.quick)),
        notes=tuple(notes(found)),
        extras={
            "critique-trials.json": json.dumps([msgspec.to_builtins(trial) for trial in trials], indent=1) + "\n",
            **{f"critique-curves-{share:g}.svg": curves(found, share, setting.samples) for share in worlds(found)},
        },
    )


def worlds(found: Found) -> list[float]:
    """The swapped shares that were measured."""
    return sorted({share for share, _ in found})


def rows(found: Found) -> Iterator[Row]:
    """Each arm's accuracy at the end; everything else about it in words."""
    for (share, name), trials in found.items():
        last = [trial.curve[-1] for trial in trials]
        facts = [
            f"Pass {fmean(point.passed for point in last):.3f}",
            f"Maj {fmean(point.majority for point in last):.3f}",
            f"greedy {fmean(point.greedy for point in last):.3f}",
            "Avg " + ", ".join(f"{mark}: {score:.3f}" for mark, score in averages(trials)[:-1]),
        ]
        yield Row(name=f"{name} ({share:.0%})", values=tuple(point.avg for point in last), note="; ".join(facts))


def averages(trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """Avg@n after each number of rollouts, mean over seeds."""
    return [
        (points[0].rollouts, fmean(point.avg for point in points))
        for points in zip(*(t.curve for t in trials), strict=True)
    ]


def bars(found: Found, quick: bool) -> Iterator[Bar]:
    """The requirements; the order of the two critics is reported, not required."""
    for share in worlds(found):
        places = [trial.localisation for trial in found[share, ALIGNED.name]]
        at = max(0.0 if one.first_wrong is None else one.first_wrong for one in places)
        blamed = max(1.0 if one.prefix_blamed is None else one.prefix_blamed for one in places)
        yield Bar(
            text=f"{share:.0%} swapped, step-aligned: A at the first wrong token < {MOST_AT_MISTAKE}, worst seed",
            measured=at,
            holds=at < MOST_AT_MISTAKE,
        )
        yield Bar(
            text=f"{share:.0%} swapped, step-aligned: share of the right prefix below -0.1 <= {MOST_BLAMED}",
            measured=blamed,
            holds=blamed <= MOST_BLAMED,
        )
    least = -LOOSE if quick else 0.0
    more = fmean(differences(found, FEW, ALIGNED, BINARY))
    yield Bar(text=f"{FEW:.0%} swapped: step-aligned - binary > {least:g}, mean", measured=more, holds=more > least)


def differences(found: Found, share: float, one: Condition, other: Condition, at: int = -1) -> list[float]:
    """Avg@n of one arm above another's at a mark, seed by seed."""
    pairs = zip(found[share, one.name], found[share, other.name], strict=True)
    return [a.curve[at].avg - b.curve[at].avg for a, b in pairs]


def notes(found: Found) -> Iterator[str]:
    """The order with its noise, where the blame falls, and who writes how."""
    for share in worlds(found):
        arms = {name: trials for (where, name), trials in found.items() if where == share}
        order = sorted(arms, key=lambda name: -averages(arms[name])[-1][1])
        yield f"{share:.0%} swapped, the measured order: {' > '.join(order)}"
        for one, other in PAIRS:
            if one.name in arms and other.name in arms:
                yield f"{share:.0%} swapped, {one.name} - {other.name}: {_compared(found, share, one, other)}"
        for name, trials in arms.items():
            if (blame := _blame(trials)) is not None:
                yield f"{share:.0%} swapped, {name}: {blame}"
            yield f"{share:.0%} swapped, {name}: {_manner(trials)}"
    yield PUBLISHED


def _compared(found: Found, share: float, one: Condition, other: Condition) -> str:
    """Differences in points at each mark, and whether the seeds agree about the last."""
    marks = [point.rollouts for point in found[share, one.name][0].curve]
    told: list[str] = []
    for at, mark in list(enumerate(marks))[1:]:
        apart = [100 * value for value in differences(found, share, one, other, at)]
        told.append(f"{mark}: {fmean(apart):+.1f} ({', '.join(f'{value:+.1f}' for value in apart)})")
    last = differences(found, share, one, other)
    agree = all(value > 0 for value in last) or all(value < 0 for value in last)
    return f"points after {'; '.join(told)}: {'the same sign' if agree else 'not the same sign'} with every seed"


def _blame(trials: Sequence[Trial]) -> str | None:
    places = [trial.localisation for trial in trials]
    first = [one.first_wrong for one in places if one.first_wrong is not None]
    prefix = [one.prefix for one in places if one.prefix is not None]
    blamed = [one.prefix_blamed for one in places if one.prefix_blamed is not None]
    if not (first and prefix and blamed):
        return None
    return (
        f"A at the first wrong token {_range(first, '.2f')}, on the right prefix {_range(prefix, '+.3f')}, "
        f"share of it below -0.1 {_range(blamed, '.3f')}, of {sum(one.rollouts for one in places):,} wrong rollouts"
    )


def _manner(trials: Sequence[Trial]) -> str:
    told: list[str] = []
    for when in ("before", "after"):
        of = [getattr(trial, when) for trial in trials]
        swapped = fmean(one.swapped or 0.0 for one in of)
        plain = [one.right_plain for one in of if one.right_plain is not None]
        other = [one.right_swapped for one in of if one.right_swapped is not None]
        right = [f"{fmean(some):.3f}" if some else "-" for some in (plain, other)]
        told.append(f"{when}, {swapped:.3f} of the steps swapped, {right[0]} of the plain right, {right[1]} of those")
    return "; ".join(told)


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} .. {max(values):{form}}"


def curves(found: Found, share: float, samples: int) -> str:
    """Accuracy against rollouts, all arms of one world."""
    lines = {
        name: [[(point.rollouts, point.avg) for point in trial.curve] for trial in trials]
        for (where, name), trials in found.items()
        if where == share
    }
    return chart(f"Avg@{samples} on held-out problems, {share:.0%} of demonstrated steps swapped", "rollouts", lines)
