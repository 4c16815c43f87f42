"""A ring of unlike machines in many cities that crash: one iteration after another, and what was computed in vain.

Two data peers and sixteen relays in four stages, drawn at random: each machine's city (of the published twelve), each
relay's speed (from half to twice the usual time, log-uniform) and slots (1 to 3). Sizes and times are those of the
published 20-node case: four layers of width 1024 per stage, two sequences of 4096 tokens per microbatch, so 33.5 MB per
hop, and 0.44 s per forward. (Here a backward takes two forwards, there one and a half.)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import msgspec

from talkoot.core.ids import PeerId
from talkoot.model.config import ModelConfig
from talkoot.plan.networks import named_network
from talkoot.plan.playback import Phase, Span
from talkoot.plan.profile import Node, Profile, to_network
from talkoot.run.records import Gone
from talkoot.train.compute import stage_flops
from talkoot.train.lead import Lead
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Model, Recipe, Swarm, Train
from talkoot.train.records import Committed
from talkoot.train.rehearse import Rehearsal, rehearse
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Computed

GROUPS = (2, 4, 4, 4, 4)
PER_ORIGIN = 6  # microbatches of an iteration
LAYER_SAMPLE_S = 0.055  # published: seconds of one layer's forward for one sequence
SPREAD = 2.0  # a machine takes from 1/SPREAD to SPREAD times that


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained: blocks per stage, width, sequences per microbatch and their length."""

    blocks: int = 4
    width: int = 1024
    samples: int = 2
    context: int = 4096

    @property
    def config(self) -> ModelConfig:
        """The model's shape; a small vocabulary, so that the head counts as little as in the published cost model."""
        heads = self.width // 64
        return ModelConfig(
            vocab_size=1024,
            width=self.width,
            layers=self.blocks * len(GROUPS),
            heads=heads,
            kv_heads=heads,
            head_dim=64,
            hidden=self.width * 11 // 4,
            max_positions=self.context,
        )


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A way of routing and of mending, by the recipe's names."""

    name: str
    planner: str
    repair: str


class Crash(msgspec.Struct, frozen=True):
    """A relay's end in an iteration, at a fraction of its undisturbed length."""

    name: str
    fraction: float


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """Machines, and what happens to them.

    Attributes:
        profile: machines and links; data peers first, then relays stage by stage.
        fates: for each iteration and relay two numbers in [0, 1): it crashes when the first is below the rate, at
            the second of the iteration. So those that crash at 10 % also do at 20 %.
    """

    seed: int
    profile: Profile
    fates: tuple[dict[str, tuple[float, float]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all machines."""
        return tuple(node.name for node in self.profile.nodes)

    def crashes(self, rate: float) -> list[list[Crash]]:
        """Who crashes in each iteration; of a stage's relays the last one to be hit is spared."""
        stage_of = dict(zip(self.names, _stages(), strict=True))
        found: list[list[Crash]] = []
        for fates in self.fates:
            hit = sorted((when, name) for name, (chance, when) in fates.items() if chance < rate)
            left = Counter(stage_of.values())
            found.append([])
            for when, name in hit:
                if left[stage_of[name]] > 1:
                    left[stage_of[name]] -= 1
                    found[-1].append(Crash(name, when))
        return found


def _stages() -> list[int]:
    return [stage for stage, size in enumerate(GROUPS) for _ in range(size)]


def draw(seed: int, iterations: int) -> Draw:
    """Machines and fates of a seed; fates of further iterations change nothing before them."""
    chance = random.Random(f"churn {seed}")
    table = named_network("gcp12")
    cities = [node.location for node in table.nodes]
    nodes: list[Node] = []
    used: Counter[str] = Counter()
    for stage in _stages():
        city = chance.choice(cities)
        used[city] += 1
        slow, slots = SPREAD ** chance.uniform(-1, 1), chance.randint(1, 3)
        if stage == 0:
            slow, slots = 1.0, PER_ORIGIN
        name = f"{city}-{used[city]}"
        nodes.append(Node(name=name, location=city, layer_sample_s=LAYER_SAMPLE_S * slow, slots=slots))
    places = {node.location for node in nodes}
    links = {key: link for key, link in table.links.items() if places.issuperset(key.split("->"))}
    profile = msgspec.structs.replace(table, name=f"churn-{seed}", nodes=tuple(nodes), links=links)
    relays = [node.name for node in nodes[GROUPS[0] :]]
    fates = tuple({name: (chance.random(), chance.random()) for name in relays} for _ in range(iterations))
    return Draw(seed=seed, profile=profile, fates=fates)


def recipe_of(draw: Draw, size: Size, contender: Contender) -> Recipe:
    """The run: one iteration to come together, then those that count."""
    nodes = draw.profile.nodes
    fastest = LAYER_SAMPLE_S / SPREAD
    flops = size.context * size.config.layer_flops(size.context)[1] / fastest  # of a peer of speed 1
    return Recipe(
        name="churn",
        seed=draw.seed,
        model=Model(depth=size.config.layers, context=size.context),
        train=Train(
            steps=len(draw.fates) + 1,
            microbatches=PER_ORIGIN * GROUPS[0],
            microbatch_size=size.samples,
            planner=contender.planner,
            repair=contender.repair,
            checkpoint_every=0,
            evaluate_every=0,
            evaluate_batches=0,
            patience_s=3600.0,
        ),
        swarm=Swarm(
            layout="ring",
            groups=GROUPS,
            names=draw.names,
            speeds=tuple(min(1.0, fastest / node.layer_sample_s) for node in nodes),
            slots=tuple(node.slots for node in nodes),
            flops=flops,
        ),
        network=network_of(draw.profile),
    )


def network_of(profile: Profile) -> Network:
    """The profile's links; the lead lives beside the first data peer."""
    nodes = profile.nodes
    network = to_network(profile, [node.name for node in nodes])
    seat = nodes[0]
    near = {
        f"lead->{node.name}": profile.local if node is seat else profile.link(seat.name, node.name) for node in nodes
    }
    return Network(default=Link(), links={**network.links, **near})


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One committed iteration, in seconds; those of computing are of forwards, losses and backwards on all machines.

    Attributes:
        seconds: from commit to commit.
        mixing_s: of that, after the last backward.
        useful_s: computing of each visit of the committed paths, once.
        died_s: what peers lost in this iteration had computed in it: gone with them, whatever the method.
        repeated_s: what the living computed beyond the useful.
        reopened_s: forwards that other peers did again for microbatches still under way at a lost peer.
        lost: names.
        spans: everything that was computed, lost work too; nodes by their number in the draw.
    """

    seconds: float
    mixing_s: float
    useful_s: float
    died_s: float
    repeated_s: float
    reopened_s: float
    lost: tuple[str, ...]
    spans: tuple[Span, ...]


def run(
    draw: Draw, size: Size, contender: Contender, *, rate: float = 0.0, undisturbed_s: float = 0.0
) -> list[Iteration]:
    """Run a contender on a draw.

    Args:
        rate: of crashes, per relay and iteration.
        undisturbed_s: the contender's iteration without crashes.
    """
    recipe = recipe_of(draw, size, contender)
    crashes = draw.crashes(rate)

    def at_commit(lead: Lead, step: int) -> None:
        for crash in crashes[step] if step < len(crashes) else ():
            lead.world.spawn(_strike(lead, crash, undisturbed_s), "crash")

    found = rehearse(recipe, size.config, at_commit=at_commit, diary=True, free_states=True)
    return accounts(found, recipe, size)


async def _strike(lead: Lead, crash: Crash, iteration_s: float) -> None:
    """Kill a relay at its time, unless it is the last living one of its stage."""
    await lead.world.sleep(crash.fraction * iteration_s)
    stage = lead.roster.home[crash.name]
    others = [peer for peer in lead.roster.holders(stage) if lead.roster.name_of(peer) != crash.name]
    if others:
        with suppress(KeyError):  # it was struck in the iteration before and has not been started again
            lead.world.disturb(crash.name, "kill")


def accounts(found: Rehearsal, recipe: Recipe, size: Size) -> list[Iteration]:
    """What each iteration but the first took."""
    costs = Costs(recipe, size)
    iterations: list[Iteration] = []
    begin, lost = 0.0, dict[PeerId, str]()
    for entry in found.entries:
        receipt = entry.receipt
        if receipt.op == "peer.lost":
            gone = receipt.read(Gone)
            lost[PeerId(gone.peer)] = gone.name
        elif receipt.op == "train.commit":
            if receipt.step:
                done = [one for one in found.computations if begin <= one.start < receipt.ended and _known(one)]
                iterations.append(_iteration(costs, receipt.read(Committed), done, lost, (begin, receipt.ended)))
            begin, lost = receipt.ended, {}
    return iterations


class Costs:
    """Seconds of computations, by peer's name."""

    def __init__(self, recipe: Recipe, size: Size) -> None:
        cut = cut_stages(size.config, recipe)
        self.stages = recipe.swarm.peers
        self.nodes = {name: index for index, name in enumerate(self.stages)}
        self._flops = [stage_flops(size.config, *part, recipe) for part in cut]
        self._rate = {name: recipe.swarm.flops * recipe.swarm.speed(index) for name, index in self.nodes.items()}

    def forward_s(self, name: str) -> float:
        """One forward."""
        return self._flops[self.stages[name]][0] / self._rate[name]

    def visit_s(self, name: str) -> float:
        """Forward and backward, at an origin the loss too."""
        return 3 * self.forward_s(name) + self._flops[self.stages[name]][1] / self._rate[name]


def _known(one: Computed) -> bool:
    """Whether this is a microbatch's work (and not the optimizer's)."""
    return isinstance(one.work, partial)


def _phase(one: Computed) -> tuple[Phase, int]:
    work = cast("partial[Any]", one.work)
    return cast(Phase, work.func.__name__), work.args[0]


def _iteration(
    costs: Costs, facts: Committed, done: Sequence[Computed], lost: Mapping[PeerId, str], when: tuple[float, float]
) -> Iteration:
    begin, end = when
    died = sum(one.end - one.start for one in done if one.peer in lost)
    useful = sum(costs.visit_s(name) for path in facts.paths for name in path)
    heirs = {(m, costs.stages[name]): name for m, path in enumerate(facts.paths) for name in path}
    reopened = 0.0
    for peer, name in lost.items():
        whole = {"forward": costs.forward_s(name), "backward": 2 * costs.forward_s(name)}
        had = {_phase(one) for one in done if one.peer == peer and one.end - one.start > 0.999 * whole[_phase(one)[0]]}
        under_way = [m for phase, m in had if phase == "forward" and ("backward", m) not in had]
        reopened += sum(costs.forward_s(heirs[m, costs.stages[name]]) for m in under_way)
    return Iteration(
        seconds=end - begin,
        mixing_s=end - max(one.end for one in done),
        useful_s=useful,
        died_s=died,
        repeated_s=sum(one.end - one.start for one in done) - died - useful,
        reopened_s=reopened,
        lost=tuple(lost.values()),
        spans=tuple(Span(costs.nodes[one.name], *_phase(one), one.start - begin, one.end - begin) for one in done),
    )
