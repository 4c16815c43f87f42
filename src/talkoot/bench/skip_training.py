"""Training with a third of the stages skipped, against the full pipeline, at equal simulated time on unlike machines.

Seconds are those of the published 20-node network, for the best plan that we find of each kind. All arms start from
the same weights, read the same text at the same learning rate, and each ends its own schedule with its last step. The
skipping arm visits four of six stages, drawn anew for every step, neighbours sometimes swapped; every tenth step
visits all and costs a full iteration. As its iterations are shorter, it takes more steps in the same time. The third
arm, the full pipeline for as many steps, pays more than twice the time: it shows what skipping costs per step, and what
becomes of a fully trained model when half of it is gone.

A depth's loss is the mean over every choice of dead stages (the first never is); its perplexity is the exponential of
that mean. So "half the model" stands for all ten choices of two stages out of five.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_layer_orders import Arm, Setting, Trained, train
from talkoot.plan.problem import Rules
from talkoot.plan.published import GROUPS, MICROBATCHES, RULES, published_problem
from talkoot.plan.search import make_plan

CLAIM = "Skipping a third of the stages trains better in the same time, and the model survives the loss of half of them"
MOST_HALF, LEAST_CONTROL = 1.07, 2.0
HALF = 3  # of six stages

SKIP = Arm(name="skip 33 %", visits=4, full_every=10, swaps=True)
FULL = Arm(name="full pipeline, same time", visits=6)
SAME_STEPS = Arm(name="full pipeline, same steps", visits=6)


@cache
def iteration_seconds(full: bool) -> float:
    """Seconds of one iteration of 30 microbatches on the published 20 nodes, by the best plan that we find for each."""
    rules = Rules(visits=len(GROUPS), max_swap=0) if full else RULES
    return make_plan(published_problem(), GROUPS, rules, MICROBATCHES, seed=0).seconds


def measure(options: Options) -> Outcome:
    """Train the three arms for each seed."""
    steps, setting = (300, Setting(held_out_batches=1, points=6)) if options.quick else (2700, Setting())
    seeds = range(1 if options.quick else options.seeds)
    seconds = sum(iteration_seconds(SKIP.is_full(step, setting.stages)) for step in range(steps))
    lengths = {SKIP: steps, FULL: int(seconds // iteration_seconds(True)), SAME_STEPS: steps}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the figures do not depend on the machine's number of cores
    try:
        found = {
            arm.name: [train(setting, arm, length, seed, iteration_seconds) for seed in seeds]
            for arm, length in lengths.items()
        }
    finally:
        torch.set_num_threads(threads)
    return Outcome(
        name="skip-training",
        claim=CLAIM,
        world=f"{setting.stages} one-block stages of width {setting.width}; time simulated on the published network",
        unit="held-out loss, nats per byte",
        rows=tuple(rows(found)),
        bars=tuple(bars(found)[:2] if options.quick else bars(found)),  # the others need well-trained models
        notes=tuple(notes(found, lengths)),
        extras={"skip-training-curve.svg": curves(found)},
    )


def rows(found: dict[str, list[Trained]]) -> list[Row]:
    """Each arm's loss with the whole model, at its best depth, and with half the model."""
    return [
        Row(name=f"{name}: {what}", values=tuple(value(one) for one in runs), note=f"{runs[0].seconds:,.0f} s")
        for name, runs in found.items()
        for what, value in (
            ("all stages", lambda one: one.full),
            ("best depth", lambda one: one.best),
            ("half the stages", lambda one: one.by_depth[HALF]),
        )
    ]


def bars(found: dict[str, list[Trained]]) -> list[Bar]:
    """The requirements; the worst seed decides each."""
    gap = max(a.full - b.full for a, b in zip(found[SKIP.name], found[FULL.name], strict=True))
    best = max(a.best - b.best for a, b in zip(found[SKIP.name], found[FULL.name], strict=True))
    half = max(one.perplexity_ratio(HALF) for one in found[SKIP.name])
    control = min(one.perplexity_ratio(HALF) for one in found[SAME_STEPS.name])
    return [
        Bar(text="loss with all stages, skipping - full at the same time < 0", measured=gap, holds=gap < 0),
        Bar(text="loss at the best depth, skipping - full at the same time < 0", measured=best, holds=best < 0),
        Bar(
            text=f"skipping: perplexity with half the stages / at its best depth <= {MOST_HALF}",
            measured=half,
            holds=half <= MOST_HALF,
        ),
        Bar(
            text=f"full pipeline, same steps: that ratio >= {LEAST_CONTROL}",
            measured=control,
            holds=control >= LEAST_CONTROL,
        ),
    ]


def notes(found: dict[str, list[Trained]], lengths: dict[Arm, int]) -> list[str]:
    """What the bars leave out: lengths, the cost at equal steps, every depth."""
    skip, full = found[SKIP.name], found[SAME_STEPS.name]
    whole = [a.full - b.full for a, b in zip(skip, full, strict=True)]
    best = [a.best - b.best for a, b in zip(skip, full, strict=True)]
    return [
        "the worst seed decides each bar; each arm's schedule ends with its own last step",
        f"an iteration takes {iteration_seconds(False):.1f} s skipping and {iteration_seconds(True):.1f} s in full; "
        + ", ".join(f"{arm.name}: {length} steps" for arm, length in lengths.items()),
        f"the cost at equal steps: skipping loses {_span(whole)} nats with all stages and {_span(best)} at the best "
        f"depth, in {skip[0].seconds / full[0].seconds:.2f} of the time",
        *(
            f"{name}: half / best perplexity "
            + ", ".join(f"{one.perplexity_ratio(HALF):.3f}" for one in runs)
            + "; loss by number of stages "
            + ", ".join(f"{depth}: {sum(one.by_depth[depth] for one in runs) / len(runs):.3f}" for depth in depths)
            for name, runs in found.items()
            for depths in (sorted(runs[0].by_depth, reverse=True),)
        ),
    ]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):+.3f} .. {max(values):+.3f}"


def curves(found: dict[str, list[Trained]]) -> str:
    """Loss of the whole model against simulated hours: one line per arm and seed."""
    lines = {name: [[(x / 3600, y) for x, y in one.curve] for one in runs] for name, runs in found.items()}
    return chart("Held-out loss of the whole model, nats per byte", "simulated hours", lines)
