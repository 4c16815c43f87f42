"""When iterations end and stages are lost: the published medium model's costs, rehearsed without tensors.

Half a billion parameters in six stages of four blocks, embedding and head apart, on seven of the published cities'
links; a processor's speed is such that an undisturbed iteration takes the published 91.3 s. Stages die by the clock,
each at a constant rate of so many percent per hour. What a death costs is what the shipping lead and peers make of it,
plus the seconds that detection and a new process take; only the arms that need no peers are computed on paper.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from talkoot.model.config import ModelConfig
from talkoot.plan.networks import named_network
from talkoot.plan.profile import to_network
from talkoot.run.records import Gone
from talkoot.train.compute import stage_flops
from talkoot.train.lead import Lead
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Model, Recipe, Recovery, Swarm, Train
from talkoot.train.rehearse import Rehearsal, rehearse
from talkoot.world.links import Link, Network

ITERATION_S = 91.3  # published
START_S = 30.0  # published: from a loss until the newcomer computes
RELAYS = 6
CITIES = 1 + RELAYS
MEDIUM = ModelConfig(
    vocab_size=50257,
    width=1024,
    layers=24,
    heads=16,
    kv_heads=16,
    head_dim=64,
    hidden=4096,
    max_positions=1024,
)
SNAPSHOT_EVERY = 50  # where a ladder ends with one: for when a keeper and its charge die before it is replaced
APART_S = 2 * ITERATION_S  # neighbours that die closer together are one double loss, which a blend must refuse


def medium_recipe(steps: int, *, ladder: tuple[str, ...], planner: str = "straight", **recovery: Any) -> Recipe:
    """The medium model's run, its peers at full speed until :func:`calibrated` says how slow they are."""
    profile = named_network("gcp12", CITIES)
    names = [node.name for node in profile.nodes]
    links = to_network(profile, names).links
    beside = {f"lead->{name}": links.get(f"{names[0]}->{name}", profile.local) for name in names}
    return Recipe(
        name="medium",
        model=Model(depth=MEDIUM.layers, context=MEDIUM.max_positions),
        train=Train(
            steps=steps,
            microbatches=4,
            microbatch_size=16,
            planner=planner,
            checkpoint_every=SNAPSHOT_EVERY if "checkpoint" in ladder else 0,
            evaluate_every=0,
            evaluate_batches=0,
            patience_s=1e6,
        ),
        recovery=Recovery(ladder=ladder, watchdog_s=1e5, **recovery),
        swarm=Swarm(
            layout="ring", groups=(1,) * CITIES, cut=(0, *(MEDIUM.layers // RELAYS,) * RELAYS), names=tuple(names)
        ),
        network=Network(default=Link(), links={**links, **beside}),
    )


@cache
def peer_flops() -> float:
    """Of every peer, so that an undisturbed iteration without any redundancy takes :data:`ITERATION_S`."""
    plain = medium_recipe(3, ladder=("checkpoint",))

    def seconds(flops: float) -> float:
        return rehearse(_at(plain, flops), MEDIUM).step_seconds

    low, high = 1e11, 1e16
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > ITERATION_S else (low, middle)
    return math.sqrt(low * high)


def _at(recipe: Recipe, flops: float) -> Recipe:
    return msgspec.structs.replace(recipe, swarm=msgspec.structs.replace(recipe.swarm, flops=flops))


def calibrated(steps: int, *, ladder: tuple[str, ...], planner: str = "straight", **recovery: Any) -> Recipe:
    """The medium model's run on peers of the calibrated speed."""
    return _at(medium_recipe(steps, ladder=ladder, planner=planner, **recovery), peer_flops())


def forward_s() -> float:
    """Seconds that a relay computes forward in an iteration."""
    recipe = calibrated(1, ladder=("checkpoint",))
    one, _ = stage_flops(MEDIUM, *cut_stages(MEDIUM, recipe)[1], recipe)
    return recipe.train.microbatches * one / recipe.swarm.flops


class Death(msgspec.Struct, frozen=True):
    """When a stage is lost, in seconds of the run."""

    seconds: float
    stage: int


def deaths(seed: int, hourly: float, hours: float) -> tuple[list[Death], int]:
    """Deaths of the relay stages in the order of time, and how many were left out.

    Left out is who would die within :data:`APART_S` of a neighbour, as in the published runs: a blend refuses that.

    Args:
        hourly: chance that a stage dies within an hour.
    """
    chance = random.Random(f"deaths {seed} {hourly}")
    rate = -math.log1p(-hourly) / 3600
    found: list[Death] = []
    for stage in range(1, CITIES):
        now = chance.expovariate(rate)
        while now < 3600 * hours:
            found.append(Death(now, stage))
            now += chance.expovariate(rate)
    kept: list[Death] = []
    for death in sorted(found, key=lambda death: death.seconds):
        if all(death.seconds - d.seconds > APART_S or abs(d.stage - death.stage) != 1 for d in kept[-CITIES:]):
            kept.append(death)
    return kept, len(found) - len(kept)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A rehearsed run: seconds at which each step was committed, and which stages were lost after how many steps."""

    commits: tuple[float, ...]
    lost: dict[int, tuple[int, ...]]

    def seconds_at(self, steps: float) -> float:
        """Seconds until so many steps are done; between two of them in proportion; infinite beyond the last."""
        if steps > len(self.commits):
            return math.inf
        whole = int(steps)
        before = self.commits[whole - 1] if whole else 0.0
        return before if whole == steps else before + (steps - whole) * (self.commits[whole] - before)

    def losses_before(self, steps: float) -> int:
        """Stages lost in so many steps."""
        return sum(len(stages) for step, stages in self.lost.items() if step < steps)


def history(recipe: Recipe, struck: Sequence[Death]) -> History:
    """Rehearse a run in which these stages die, through the world's own means.

    The simulated world starts a process in no time, so that the clock is put forward by :data:`START_S` at each loss.
    """
    names, begun = list(recipe.swarm.peers), list[bool]()

    async def strike(lead: Lead) -> None:
        for turn, death in enumerate(struck):
            await lead.world.sleep(max(0.0, death.seconds - START_S * turn - lead.world.now()))
            with suppress(KeyError):  # it is just being started again
                lead.world.disturb(names[death.stage], "kill")

    def at_commit(lead: Lead, step: int) -> None:
        if not begun:
            begun.append(True)
            lead.world.spawn(strike(lead), "strike")

    return _history(rehearse(recipe, MEDIUM, at_commit=at_commit), names)


def _history(found: Rehearsal, names: Sequence[str]) -> History:
    commits: dict[int, float] = {}  # the last one of each step counts: others were rolled back
    lost: dict[int, tuple[int, ...]] = {}
    late = 0.0
    for entry in found.entries:
        receipt = entry.receipt
        if receipt.op == "train.commit":
            commits[receipt.step] = receipt.ended + late
        elif receipt.op == "peer.lost":
            late += START_S
            lost[receipt.step] = (*lost.get(receipt.step, ()), names.index(receipt.read(Gone).name))
    first = commits[0] - ITERATION_S  # coming together is no part of it
    return History(commits=tuple(commits[step] - first for step in sorted(commits)), lost=lost)


def mean_iteration_s(recipe: Recipe) -> float:
    """Of an undisturbed run, without its first two."""
    commits = history(recipe, ()).commits
    return (commits[-1] - commits[1]) / (len(commits) - 2)


def on_paper(
    steps: float,
    struck: Sequence[Death],
    pause_s: Callable[[int], float],
    iteration_s: float,
    *,
    period: int = 1,
    save_s: float = 0.0,
    lag_s: float = 0.0,
) -> float:
    """Seconds of ``steps`` iterations where a loss throws all back to the newest snapshot, then costs a pause.

    Args:
        struck: who dies when; nothing more is lost by who dies while all wait.
        pause_s: by stage.
        iteration_s: of every iteration.
        period: between snapshots; 1 and no lag: nothing but the iteration under way is lost.
        save_s: for which all stand still at each snapshot; lag_s: after which it can be used.
    """
    begun, kept = 0.0, 0.0
    round_s = period * iteration_s + save_s
    for death in struck:
        if begun + (steps - kept) * round_s / period <= death.seconds:
            break
        kept += period * max(0, math.floor((death.seconds - begun - lag_s) / round_s))
        begun = max(begun, death.seconds) + pause_s(death.stage)
    return begun + (steps - kept) * round_s / period


def tuned_period(cost: Callable[[int], float], guess: float) -> int:
    """The period of a small grid around a guess that costs least."""
    grid = sorted({max(1, round(guess * share)) for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)})
    return min(grid, key=cost)
