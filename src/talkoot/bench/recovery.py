"""Lost stages: brought back by what others keep, blended, rolled back to a checkpoint, or computed twice.

Time is that of the published medium model (half a billion parameters, six relay stages, 91.3 s per iteration) on
published links, in rehearsals of the shipping lead and peers in which stages die by the clock. Trajectories are a small
model's, really trained: an exact arm's is that of the undisturbed run, which is checked by equal hashes; an approximate
arm's goes through the very history that was rehearsed. All arms read the same text from the same weights at the same
constant rate, and what counts is the time to a common held-out loss, evaluated with the stages in order. The published
arms are CheckFree and CheckFree+ (Blagoev et al., 2025, arXiv 2506.15461), with Adam's moments reset and the learning
rate of a blended stage raised by a tenth as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_lost_stages import Setting, Trained
from talkoot.bench.peer_recovery_arms import (
    AS_PUBLISHED,
    HOURS,
    PROBES,
    STREAM,
    Bench,
    Measured,
    Size,
    checkpointed,
    losses_per_iteration,
    redundant,
    replayed,
)
from talkoot.bench.peer_recovery_checks import exact_rungs, same_trajectory
from talkoot.bench.peer_recovery_times import START_S, calibrated, deaths, mean_iteration_s
from talkoot.plan.churn_costs import ITERATIONS, PUBLISHED, Published, expected_hours
from talkoot.train.recipe import Recovery

CLAIM = "A lost stage comes back exactly for a few percent of the time; blending its neighbours costs more"
STEADY, AGAINST_SWAPPED = 1.05, 0.8
SHADOW, BLEND, SWAPPED = "shadow", "blend (CheckFree)", "blend, swapped ends (CheckFree+)"
COPY_SHARE, EDGE_SHARE = 0.75, 0.5
QUICK = Size(target_step=60, steps=140, rates=(0.16,), seeds=(0,), merges=(), kept_moments=False)


def measure(options: Options) -> Outcome:
    """Train, rehearse, compare."""
    size = QUICK if options.quick else Size(seeds=tuple(range(options.seeds)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the figures do not depend on the machine's number of cores
    try:
        checks = _checks(Setting(), quick=options.quick)
        bench = Bench(size, Setting())
        found = [one for rate in size.rates for seed in size.seeds for one in _arms(bench, rate, seed)]
        found += [one for seed in size.seeds for one in _merges(bench, max(size.rates), seed)]
    finally:
        torch.set_num_threads(threads)
    return Outcome(
        name="recovery",
        claim=CLAIM,
        world="medium model's costs, rehearsed in virtual time; a small model trained",
        unit=f"time to held-out loss {bench.target:.3f}; the undisturbed run of the same seed = 1",
        rows=tuple(_rows(found)),
        bars=tuple(_bars(bench, checks, found, quick=options.quick)),
        notes=tuple(_notes(bench, found)),
        extras={"recovery-curve.svg": curves(_drawn(found, max(size.rates), size.seeds[0]), bench.target)},
    )


def _arms(bench: Bench, rate: float, seed: int) -> Iterator[Measured]:
    """Every arm on one trace."""
    yield bench.exact(SHADOW, rate, seed, ladder=("shadow", "checkpoint"), stream=STREAM)
    yield bench.exact("shadow, float32", rate, seed, ladder=("shadow", "checkpoint"))
    yield bench.exact("journal", rate, seed, ladder=("journal", "checkpoint"), stream=STREAM)
    yield bench.paper("replay", rate, seed, replayed(bench))
    for name, background in (("checkpoints, tuned", False), ("checkpoints in the background", True)):
        seconds, period = checkpointed(bench, rate, background=background)
        yield bench.paper(f"{name}, every {period}", rate, seed, seconds)
    yield bench.paper("redundant computing", rate, seed, redundant(_mean_s("shadow", stream=STREAM)))
    yield bench.approximate(BLEND, rate, seed, ladder=("blend",), **AS_PUBLISHED)
    guarded = {"ladder": ("shadow", "blend"), "guarded": (0,), "stream": STREAM}
    yield bench.approximate(SWAPPED, rate, seed, planner="swapped", **guarded, **AS_PUBLISHED)


def _merges(bench: Bench, rate: float, seed: int) -> Iterator[Measured]:
    """Other ways to make a stage of its neighbours, in the history of :data:`BLEND`."""
    for merge in bench.size.merges:
        yield bench.approximate(f"blend, {merge}", rate, seed, ladder=("blend",), merge=merge, **AS_PUBLISHED)
    if bench.size.kept_moments:
        yield bench.approximate("blend, moments kept, no bump", rate, seed, ladder=("blend",), bump=1.0)


def _checks(setting: Setting, *, quick: bool) -> dict[str, bool]:
    """What holds with real tensors in the simulated world."""
    ladders = [("shadow",)] if quick else [("shadow",), ("journal",), ("replay",)]
    found = exact_rungs(setting, ladders, ["float32"] if quick else ["float32", STREAM])
    for swapped in (False, True):
        recovery = Recovery(ladder=("blend",), moments="reset", bump=1.1)
        words = "swapped" if swapped else "in order"
        found[f"trainer and swarm, blend, {words}"] = same_trajectory(setting, recovery, swapped=swapped)
    return found


def _published(arm: str, rate: float) -> str:
    case = next((one for one in PUBLISHED if one.hourly == rate), None)
    hours = None if case is None else _published_hours(arm, case)
    return "" if hours is None else f"; published {hours:.1f} h = {hours / expected_hours(ITERATIONS, 91.32):.2f}"


def _published_hours(arm: str, case: Published) -> float | None:
    named = {BLEND: case.blended, SWAPPED: case.swapped, "redundant computing": case.redundant}
    return case.checkpoint if arm.startswith("checkpoints, tuned") else named.get(arm)


def _rows(found: Sequence[Measured]) -> Iterator[Row]:
    for (rate, arm), runs in _groups(found):
        finite = [one for one in runs if math.isfinite(one.seconds)]
        missing = f"; {len(runs) - len(finite)} of {len(runs)} never arrived" if len(finite) < len(runs) else ""
        if not finite:
            continue
        note = f"{_middle([one.seconds / 3600 for one in finite]):.2f} h, {sum(one.lost for one in finite)} stages lost"
        name = f"{arm}, {rate:.0%}/h"
        yield Row(name=name, values=tuple(one.ratio for one in finite), note=note + missing + _published(arm, rate))


def _groups(found: Sequence[Measured]) -> list[tuple[tuple[float, str], list[Measured]]]:
    """By rate and arm, in the order of rates and of first appearance."""
    groups: dict[tuple[float, str], list[Measured]] = {}
    for one in found:
        groups.setdefault((one.rate, one.arm), []).append(one)
    return sorted(groups.items(), key=lambda item: item[0][0])


def _middle(values: Sequence[float]) -> float:
    return Row(name="", values=tuple(values)).median if values else math.nan


def _of(found: Sequence[Measured], arm: str, rate: float | None = None) -> list[Measured]:
    return [one for one in found if one.arm == arm and rate in (None, one.rate)]


def probed(runs: Iterable[Trained], merge: str, *, edge: bool) -> list[float]:
    """Rises of the loss at the end of runs, had a stage at the ends, or one between, been lost and merged so."""
    found = [run.probes[merge] for run in runs]
    return [jump for jumps in found for at, jump in enumerate(jumps) if (at in (0, len(jumps) - 1)) == edge]


def _jumps(runs: Sequence[Measured], *, edge: bool) -> list[float]:
    ends = {1, Setting().relays}
    return [jump for one in runs for stage, jump in one.jumps if (stage in ends) == edge]


def _bars(bench: Bench, checks: dict[str, bool], found: Sequence[Measured], *, quick: bool) -> Iterator[Bar]:
    failed = [name for name, holds in checks.items() if not holds]
    text = f"{len(checks)} equalities of real runs: hashes after exact recovery, losses of trainer and swarm"
    words = f"{text} (not: {'; '.join(failed)})" if failed else text
    yield Bar(text=words, measured=len(checks) - len(failed), holds=not failed)
    yield _at_most("iteration with shadow / without", steady_share(), STEADY)
    hours, theirs = shadow_hours(found, PUBLISHED[0].hourly), PUBLISHED[0].swapped
    text = f"shadow, {ITERATIONS:,} iterations at 5 %/h: {hours:.0f} h / CheckFree+'s published {theirs} h"
    yield _at_most(text, hours / theirs, AGAINST_SWAPPED)
    if quick:
        return  # too few losses for what follows
    inner = [_mean(probed(bench.plain.values(), merge, edge=False)) for merge in ("norm", "copy")]
    yield _at_most("inner stages: jump of the loss by a blend / by a copy", inner[0] / inner[1], COPY_SHARE)
    edges = [_mean(probed(runs.values(), "norm", edge=True)) for runs in (bench.swapped, bench.plain)]
    yield _at_most("edge stages: jump with swapped ends / without", edges[0] / edges[1], EDGE_SHARE)


def _at_most(text: str, measured: float, most: float) -> Bar:
    return Bar(text=f"{text} <= {most}", measured=measured, holds=measured <= most)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@cache
def _mean_s(*ladder: str, **recovery: Any) -> float:
    return mean_iteration_s(calibrated(8, ladder=ladder, **recovery))


def steady_share() -> float:
    """Seconds of an undisturbed iteration with every stage shadowed, relative to one with nothing kept."""
    return _mean_s("shadow", stream=STREAM) / _mean_s("checkpoint")


def shadow_hours(found: Sequence[Measured], rate: float) -> float:
    """Of the published number of iterations with a shadow, at so many stage deaths per hour.

    What a loss takes is the rehearsed runs' mean.
    """
    iteration_s = _mean_s("shadow", stream=STREAM)
    runs = _of(found, SHADOW)
    lost = sum(one.lost for one in runs)
    pause_s = math.fsum(one.seconds - one.steps * iteration_s for one in runs) / max(lost, 1)
    failures = losses_per_iteration(rate, iteration_s)
    return expected_hours(ITERATIONS, iteration_s, failures, pause_s=pause_s - iteration_s / 2)


def _notes(bench: Bench, found: Sequence[Measured]) -> Iterator[str]:
    """Steps, what a loss cost, jumps, and what the comparison takes for granted."""
    size, target = bench.size, bench.target
    plain = [run.steps_to(target) for run in bench.plain.values()]
    yield f"undisturbed: {_span(plain)} steps of {bench.iteration_s:.1f} s"
    for name, runs in (("gradients rounded to bfloat16", bench.rounded), ("swapped ends, nothing lost", bench.swapped)):
        taxes = [run.steps_to(target) - bench.plain[seed].steps_to(target) for seed, run in runs.items()]
        yield f"{name}: {_span(taxes, '+')} steps; {_middle(taxes) / _middle(plain):+.1%}"
    seconds = {name: _mean_s("blend", planner=name) for name in ("straight", "swapped")}
    yield f"an iteration takes {seconds['straight']:.1f} s in order, {seconds['swapped']:.1f} s with swapped ends"
    for name, trained in (("in order", bench.plain), ("with swapped ends", bench.swapped)):
        jumps = ", ".join(
            f"{merge} {_mean(probed(trained.values(), merge, edge=False)):.3f} and "
            f"{_mean(probed(trained.values(), merge, edge=True)):.3f}"
            for merge in PROBES
        )
        yield f"trained {name}, the loss at the target jumps when an inner stage and when an edge is lost: {jumps}"
    for (rate, arm), runs in _groups(found):
        if runs[0].jumps or runs[0].steps != runs[0].usual:
            lost = sum(one.lost for one in runs)
            cost = math.fsum(one.steps - one.usual for one in runs) / max(lost, 1)
            inner, edges = (_jumps(runs, edge=edge) for edge in (False, True))
            yield (
                f"{arm}, {rate:.0%}/h: {cost:.1f} steps per lost stage ({lost} lost); loss jumps by {_mean(inner):.4f} "
                f"at inner stages (at most {max(inner, default=math.nan):.3f}), {_mean(edges):.3f} at edges"
            )
    spared = [deaths(seed, rate, HOURS)[1] for rate in size.rates for seed in size.seeds]
    yield (
        f"relays die, the data peer does not, as there; {sum(spared)} deaths within two iterations of a neighbour's "
        f"were left out of {len(spared)} traces of {HOURS:.0f} h; each loss costs {START_S:.0f} s before all else"
    )
    yield (
        "on paper: replay, checkpoints (period chosen on other traces), redundant computing (half of the redundant "
        "forward hidden, its copy kept up to date as a shadow is); the others are rehearsed"
    )


def _span(values: Sequence[float], sign: str = "") -> str:
    return f"{_middle(values):{sign}.0f} ({min(values):{sign}.0f} .. {max(values):{sign}.0f})"


def _drawn(found: Sequence[Measured], rate: float, seed: int) -> list[Measured]:
    """One trace's runs of the arms that a plot can still tell apart."""
    names = (SHADOW, "redundant computing", BLEND, SWAPPED, "blend, random")
    return [
        one
        for one in found
        if (one.rate, one.seed) == (rate, seed) and (one.arm in names or one.arm.startswith("checkpoints, tuned"))
    ]


def curves(found: Sequence[Measured], target: float) -> str:
    """Held-out loss against hours, one line per arm; each line ends where its arm has reached the target."""
    arms = dict.fromkeys(one.arm for one in found)
    lines = {arm: [one.curve for one in _of(found, arm)] for arm in arms}
    return chart("Held-out loss while stages are lost, one trace", "hours", lines, top=target + 1.0)
