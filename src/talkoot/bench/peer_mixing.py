"""Replicas of a tiny model, trained on real text in virtual time by the shipping engine: the workhorse of a bench."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import msgspec

from talkoot.core.fold import Entry, State
from talkoot.model.config import ModelConfig
from talkoot.plan.exchange import sync_on
from talkoot.plan.networks import named_network
from talkoot.plan.profile import to_network
from talkoot.run.records import Start
from talkoot.train.compute import stage_flops
from talkoot.train.recipe import Data, Mixing, Model, Recipe, Swarm, Train
from talkoot.train.records import Evaluated, Worked
from talkoot.train.rounds.records import Averaged, Rounded
from talkoot.train.run import run_simulated

FLOPS = 1e10  # what one core of the machine that this was written on makes of so small a model
BATCH = 4  # sequences of each replica in each inner step
INNER = 25
CONTEXT = 48
RATE = 4e-3
LATE = 0.25  # from this share of all rounds on, the replicas' spread counts as settled


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to mix.

    Attributes:
        name: how it is called in tables.
        mixing: keys of the recipe's section.
        rate: factor on the learning rate.
        note: remark.
    """

    name: str
    mixing: Mapping[str, object]
    rate: float = 1.0
    note: str = ""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for how long: a network by name, replicas dealt over its cities, steps."""

    network: str
    replicas: int
    steps: int
    depth: int = 1


class Point(msgspec.Struct, frozen=True):
    """A moment of a run: inner steps, seconds without evaluations, bytes sent per replica, held-out loss."""

    step: int
    seconds: float
    sent_bytes: float
    loss: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        curve: mean held-out loss of the replicas after each round.
        averaged, best: of the mean model, and of the best replica, at the end.
        slow, progress: after the first quarter of the run, the variance over replicas of a slow weight and of its
            outer gradient.
        round_bytes: sent per replica and :data:`INNER` steps.
        parameters: of the model.
        idle, alone: shares of time waiting and of rounds without a partner.
        seconds: of the whole run, evaluations apart.
    """

    curve: tuple[Point, ...]
    averaged: float | None = None
    best: float | None = None
    slow: float = 0.0
    progress: float = 0.0
    round_bytes: float = 0.0
    parameters: int = 0
    idle: float = 0.0
    alone: float = 0.0

    @property
    def loss(self) -> float:
        """Mean held-out loss of the replicas at the end."""
        return self.curve[-1].loss

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.curve[-1].seconds

    @property
    def spread(self) -> float:
        """Variance of slow weights over that of outer gradients."""
        return self.slow / self.progress if self.progress else 0.0

    def reaches(self, loss: float) -> Point:
        """Where the curve first comes down to ``loss``, interpolated; its end when it never does."""
        before = None
        for point in self.curve:
            if point.loss <= loss:
                if before is None:
                    return point
                part = (before.loss - loss) / (before.loss - point.loss)
                steps = before.step + part * (point.step - before.step)
                seconds = before.seconds + part * (point.seconds - before.seconds)
                return msgspec.structs.replace(point, step=round(steps), seconds=seconds, loss=loss)
            before = point
        return self.curve[-1]


def recipe_of(arm: Arm, place: Place, seed: int) -> Recipe:
    """The run as a user would write it; on the links alone, without what other software adds to each message."""
    profile = msgspec.structs.replace(named_network(place.network, place.replicas), hop_overhead_s=0.0)
    names = tuple(node.name for node in profile.nodes)
    return Recipe(
        name="mixing",
        seed=seed,
        data=Data(tokenizer="bytes"),
        model=Model(depth=place.depth, context=CONTEXT, device="cpu"),
        train=Train(
            steps=place.steps,
            microbatches=place.replicas,
            microbatch_size=BATCH,
            learning_rate=RATE * arm.rate,
            evaluate_every=INNER,
            evaluate_batches=32,
            checkpoint_every=0,
        ),
        mixing=msgspec.convert({"inner_steps": INNER, **arm.mixing}, Mixing),
        swarm=Swarm(stages=1, replicas=place.replicas, names=names, flops=FLOPS),
        network=to_network(profile, names),
    )


def train(arm: Arm, place: Place, seed: int) -> Trial:
    """Run it, and read its log."""
    recipe, entries = recipe_of(arm, place, seed), []

    def observe(entry: Entry, state: State) -> None:
        entries.append(entry)

    with tempfile.TemporaryDirectory() as folder:
        run_simulated(recipe, Path(folder) / "run", observe)
    start = entries[0].receipt.read(Start)
    if recipe.mixing.rule == "ddp":
        trial = _by_steps(entries, place)
    else:
        trial = _by_rounds(entries, place, _evaluation_s(recipe, msgspec.convert(start.config, ModelConfig), entries))
    return msgspec.structs.replace(trial, parameters=start.parameters)


def _evaluation_s(recipe: Recipe, config: ModelConfig, entries: Sequence[Entry]) -> float:
    """What a replica's evaluation takes."""
    forward, _ = stage_flops(config, 0, config.layer_count, recipe)
    tokens = next(e.receipt.read(Evaluated).tokens for e in entries if e.receipt.op == "train.evaluate")
    return forward * tokens / BATCH / CONTEXT / FLOPS


def _begin(entries: Sequence[Entry]) -> float:
    """When the last of the replicas was ready."""
    return max(e.receipt.ended for e in entries if e.receipt.op == "peer.seat")


def _by_steps(entries: Sequence[Entry], place: Place) -> Trial:
    """Each evaluation stands between two steps, and its time is taken off."""
    begin, paused, sent, last = _begin(entries), 0.0, 0, 0.0
    curve: list[Point] = []
    for entry in entries:
        receipt = entry.receipt
        match receipt.op:
            case "train.step":
                sent += receipt.read(Worked).sent_bytes
            case "train.commit":
                last = receipt.ended
            case "train.evaluate":
                paused += receipt.ended - last
                seconds = receipt.ended - begin - paused
                curve.append(Point(receipt.step, seconds, sent / place.replicas, receipt.read(Evaluated).loss))
    return Trial(curve=tuple(curve), round_bytes=sent / place.replicas / place.steps * INNER)


def _by_rounds(entries: Sequence[Entry], place: Place, evaluation_s: float) -> Trial:
    """What each replica signed for its rounds; some end with an evaluation."""
    begin = _begin(entries)
    reports = [(e.receipt, e.receipt.read(Rounded)) for e in entries if e.receipt.op == "train.round"]
    rounds = sorted({receipt.step for receipt, _ in reports})
    curve: list[Point] = []
    sent, evaluations = 0.0, 0
    for step in rounds:
        here = [(receipt, facts) for receipt, facts in reports if receipt.step == step]
        sent += sum(facts.sent_bytes for _, facts in here) / place.replicas
        losses = [facts.held_out for _, facts in here if facts.held_out is not None]
        if not losses:
            continue
        evaluations += 1
        end = fmean(receipt.ended for receipt, _ in here) - begin - evaluations * evaluation_s
        curve.append(Point(step + here[0][1].steps, end, sent, fmean(losses)))
    late = [facts for receipt, facts in reports if receipt.step >= LATE * place.steps and facts.apart is not None]
    whole = next((e.receipt.read(Averaged) for e in entries if e.receipt.op == "train.average"), None)
    wait, busy = (sum(getattr(facts, name) for _, facts in reports) for name in ("wait_s", "busy_s"))
    return Trial(
        curve=tuple(curve),
        averaged=whole.held_out if whole else None,
        best=whole.best if whole else None,
        slow=fmean(f.apart or 0.0 for f in late) / 2 if late else 0.0,
        progress=fmean(f.progress or 0.0 for f in late) / 2 if late else 0.0,
        round_bytes=sent * INNER / place.steps,
        idle=wait / (wait + busy - evaluations * place.replicas * evaluation_s),
        alone=fmean(not facts.partners for _, facts in reports),
    )


def ring_s(place: Place, parameters: int) -> float:
    """What an all-reduce of all float32 parameters along a ring takes there, by the links."""
    recipe = recipe_of(Arm(name="", mixing={}), place, 0)
    return sync_on(recipe.network, recipe.swarm.names, 4.0 * parameters, "ring")


def _task(task: tuple[Arm, Place, int]) -> Trial:
    import torch

    torch.set_num_threads(1)
    return train(*task)


def train_all(tasks: Iterable[tuple[Arm, Place, int]]) -> list[Trial]:
    """Many runs, as many at once as there are cores; each is the same whatever runs beside it."""
    tasks = list(tasks)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(_task, tasks))
