"""The arms of the recovery bench: who mends how, and the seconds and steps that each needs to the common target.

An exact arm follows the undisturbed run, whatever is lost, so its steps are that run's and only its seconds are its
own. An approximate arm is rehearsed first, which says after how many steps which stage was lost, and is then trained
through that history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec

from talkoot.bench.peer_lost_stages import EVALUATE_EVERY, Setting, Trained, Way, follow
from talkoot.bench.peer_recovery_times import (
    MEDIUM,
    START_S,
    Death,
    calibrated,
    deaths,
    forward_s,
    history,
    mean_iteration_s,
    on_paper,
    tuned_period,
)
from talkoot.plan.churn_costs import young_daly
from talkoot.plan.ladder import Case, Price, keepers, price
from talkoot.train.prospects import recovery_case
from talkoot.train.recipe import Recovery, Train

HOURS = 48.0  # of a trace
TUNING_SEEDS = range(1000, 1020)  # traces on which a period is chosen, none of which is measured
STREAM = "bfloat16"
PROBES = ("norm", "uniform", "copy", "random")
AS_PUBLISHED = {"moments": "reset", "bump": 1.1}


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run: the step whose loss is the target, the most steps, rates per hour, seeds, merges."""

    target_step: int = 350
    steps: int = 640
    rates: tuple[float, ...] = (0.05, 0.10, 0.16)
    seeds: tuple[int, ...] = (0, 1, 2)
    merges: tuple[str, ...] = ("uniform", "copy", "random")
    kept_moments: bool = True

    @property
    def train(self) -> Train:
        """A constant rate, as there: no schedule knows how many steps an arm will need."""
        return Train(steps=self.steps, learning_rate=2e-3, schedule="constant-decay", decay=0.0, warmup=20)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one trace.

    Attributes:
        arm, rate, seed: which.
        steps: to the target; ``usual``: of the undisturbed run of the same seed and the same order of stages.
        seconds: to the target; ``undisturbed_s``: of a run that nothing is done for and nothing happens to.
        lost: stages lost until then.
        jumps: of an approximate arm, (stage, rise of the held-out loss).
        curve: (hours, held-out loss).
    """

    arm: str
    rate: float
    seed: int
    steps: float
    usual: float
    seconds: float
    undisturbed_s: float
    lost: int
    jumps: tuple[tuple[int, float], ...] = ()
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def ratio(self) -> float:
        """Time, with that of the undisturbed run as the unit."""
        return self.seconds / self.undisturbed_s

    @property
    def lost_per_loss(self) -> float:
        """Steps that each loss cost; NaN when there was none."""
        return (self.steps - self.usual) / self.lost if self.lost else math.nan


class Bench:
    """Everything that is trained and rehearsed, once.

    Args:
        size: how much.
        setting: the small model.
    """

    def __init__(self, size: Size, setting: Setting) -> None:
        self.size, self.setting = size, setting
        short = msgspec.structs.replace(size, steps=size.target_step + 3 * EVALUATE_EVERY).train
        self.plain = {seed: follow(setting, short, Way(), seed, {}, probes=PROBES) for seed in size.seeds}
        self.target = max(dict(run.smooth)[size.target_step] for run in self.plain.values())
        train = partial(follow, setting, size.train, target=self.target)
        self.swapped = {seed: train(Way(swapped=True), seed, {}, probes=PROBES) for seed in size.seeds}
        rounded = Way(recovery=Recovery(stream=STREAM))
        self.rounded = {seed: train(rounded, seed, {}) for seed in size.seeds}
        self._train: Callable[..., Trained] = train
        self.iteration_s = mean_iteration_s(calibrated(8, ladder=("checkpoint",)))

    def undisturbed_s(self, seed: int) -> float:
        """Seconds of the run with nothing against losses and without any."""
        return self.plain[seed].steps_to(self.target) * self.iteration_s

    def exact(self, arm: str, rate: float, seed: int, **recovery: Any) -> Measured:
        """An arm that is rehearsed with the shipping peers, and trains as if nothing happened."""
        run = self.rounded[seed] if recovery.get("stream") == STREAM else self.plain[seed]
        steps = run.steps_to(self.target)
        struck, _ = deaths(seed, rate, HOURS)
        found = history(calibrated(math.ceil(steps) + 1, **recovery), struck)
        return self._measured(
            arm, rate, seed, run, found.seconds_at(steps), found.losses_before(steps), found.seconds_at
        )

    def paper(self, arm: str, rate: float, seed: int, seconds: Callable[[float, Sequence[Death]], float]) -> Measured:
        """An exact arm whose seconds are computed on paper, from the steps and the trace."""
        run = self.plain[seed]
        struck, _ = deaths(seed, rate, HOURS)
        taken = seconds(run.steps_to(self.target), struck)
        lost = sum(death.seconds < taken for death in struck)
        return self._measured(arm, rate, seed, run, taken, lost, lambda steps: seconds(steps, struck))

    def approximate(self, arm: str, rate: float, seed: int, planner: str = "straight", **recovery: Any) -> Measured:
        """An arm that is rehearsed, and then trained through what was lost when."""
        struck, _ = deaths(seed, rate, HOURS)
        found = history(calibrated(self.size.steps, planner=planner, **recovery), struck)
        way = Way(swapped=planner == "swapped", recovery=Recovery(**recovery))
        run = self._train(way, seed, found.lost)
        steps = run.steps_to(self.target)
        usual = (self.swapped if way.swapped else self.plain)[seed].steps_to(self.target)
        lost = found.losses_before(steps)
        measured = self._measured(arm, rate, seed, run, found.seconds_at(steps), lost, found.seconds_at)
        return msgspec.structs.replace(measured, usual=usual)

    def _measured(
        self, arm: str, rate: float, seed: int, run: Trained, seconds: float, lost: int, at: Callable[[float], float]
    ) -> Measured:
        steps = run.steps_to(self.target)
        return Measured(
            arm=arm,
            rate=rate,
            seed=seed,
            steps=steps,
            usual=steps,
            seconds=seconds,
            undisturbed_s=self.undisturbed_s(seed),
            lost=lost,
            jumps=run.jumps[:lost],
            curve=tuple((at(step) / 3600, loss) for step, loss in run.curve if step <= steps),
        )


@cache
def medium_case(*ladder: str, stream: str = STREAM, checkpoint_every: int = 0) -> Case:
    """The medium model's swarm, for the cost model."""
    recipe = calibrated(1, ladder=ladder, stream=stream)
    case = recovery_case(recipe, MEDIUM, mean_iteration_s(calibrated(8, ladder=("checkpoint",))), start_s=START_S)
    return msgspec.structs.replace(case, checkpoint_every=checkpoint_every)


def asked(case: Case, rung: str, stage: int) -> Price:
    """What a rung asks for a whole stage; ValueError when it cannot serve."""
    found = price(case, rung, stage, case.holders[stage], keepers(case))
    if not isinstance(found, Price):
        raise ValueError(f"{rung} cannot serve stage {stage}: {found}")
    return found


def losses_per_iteration(rate: float, iteration_s: float) -> float:
    """Of all relays."""
    relays = len(medium_case("checkpoint").holders) - 1
    return relays * -math.log1p(-rate) * iteration_s / 3600


def checkpointed(
    bench: Bench, rate: float, *, background: bool
) -> tuple[Callable[[float, Sequence[Death]], float], int]:
    """Seconds with the best period for a rate, and that period.

    Snapshots go to a store beside the data peer, all stages at once over their own links: the slowest counts. In the
    background, nobody waits for it, but it can be used only when it is there.
    """
    case, iteration_s = medium_case("checkpoint"), bench.iteration_s
    loads = {stage: asked(case, "checkpoint", stage).transfer_s for stage in range(1, case.num_stages)}
    save_s = max(case.transfer_s(names[0], "lead", case.state_bytes(s)) for s, names in enumerate(case.holders))

    def seconds(period: int, steps: float, struck: Sequence[Death]) -> float:
        costs = {"lag_s": save_s} if background else {"save_s": save_s}
        return on_paper(steps, struck, lambda stage: START_S + loads[stage], iteration_s, period=period, **costs)

    least = math.ceil(save_s / iteration_s)  # one must be there before the next one begins
    guess = young_daly(save_s / iteration_s, losses_per_iteration(rate, iteration_s))
    traces = [deaths(seed, rate, HOURS)[0] for seed in TUNING_SEEDS]
    best = tuned_period(
        lambda period: math.fsum(seconds(max(period, least), bench.size.target_step, one) for one in traces),
        1.0 if background else guess,
    )
    return partial(seconds, max(best, least)), max(best, least)


def replayed(bench: Bench, period: int = 50) -> Callable[[float, Sequence[Death]], float]:
    """Seconds where a lost stage is computed again from what its neighbours sent since the newest snapshot."""
    case = medium_case("replay", checkpoint_every=period)
    prices = {stage: asked(case, "replay", stage) for stage in range(1, case.num_stages)}

    def pause_s(stage: int) -> float:
        return START_S + prices[stage].transfer_s + prices[stage].again_s

    return lambda steps, struck: on_paper(steps, struck, pause_s, bench.iteration_s)


def redundant(streamed_s: float) -> Callable[[float, Sequence[Death]], float]:
    """Seconds where every relay also computes its successor's forward, half of it while it would wait anyway.

    The copy is kept up to date by a stream of gradients, which is what ``shadow`` costs; a lost stage's work goes on at
    its predecessor, so that only the iteration under way is lost.
    """
    return lambda steps, struck: on_paper(steps, struck, lambda stage: 0.0, streamed_s + forward_s() / 2)
