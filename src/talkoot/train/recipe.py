"""A run as data: everything that a training run is, in one typed tree that TOML files and flags fill in."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT, build, read_plain
from talkoot.plan.steps import Route
from talkoot.world.faults import Fault
from talkoot.world.links import Network
from talkoot.world.sim.simulation import PEER_FLOPS

UNUSABLE = "the recipe cannot be used"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a recipe; unknown keys are refused with the nearest valid one."""


class Data(_Section, frozen=True, kw_only=True):
    """Where the text comes from.

    Attributes:
        source: ``bundled:shakespeare``, a file, a folder, or ``datasets:NAME`` (see ``talkoot.data``).
        column: the text column of JSONL, Parquet and datasets sources.
        held_out: share of the tokens, from the end, that training never sees.
        tokenizer: ``bytes``, ``bpe:SIZE`` (trained on the text), or a folder or file with a ``tokenizer.json``.
    """

    source: str = "bundled:shakespeare"
    column: str = "text"
    held_out: float = 0.05
    tokenizer: str = "bpe:1024"


class Model(_Section, frozen=True, kw_only=True):
    """What is trained.

    Attributes:
        depth: the one dial for a new model; everything else derives from it.
        load: a Hugging Face folder to start from instead.
        context: tokens per training sequence.
        dtype: ``bfloat16`` computes under autocast; weights, gradients and the optimizer stay in float32.
        device: ``auto`` takes CUDA, then MPS, then the CPU.
        compile: run layers through ``torch.compile``.
    """

    depth: int = 4
    load: str | None = None
    context: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    compile: bool = False


class Train(_Section, frozen=True, kw_only=True):
    """How it is trained.

    Attributes:
        steps: optimizer steps.
        microbatches, microbatch_size: sequences per step = their product; each microbatch takes its own path.
        learning_rate, schedule, warmup, decay, final_rate: peak rate; ``cosine`` or ``constant-decay`` (constant, then
            linear over the last ``decay`` share of the steps); warm-up steps; last rate as a share of the peak.
        weight_decay, beta1, beta2, epsilon: AdamW's; decay applies to matrices only.
        clip: limit of the global gradient norm; 0 = none.
        planner, mixing, recovery: methods by name; recovery rungs in the order in which they are tried.
        visits, full_every: in a ring, stages that a microbatch visits (0 = all), and every how many steps one is
            done with all stages (0 = never).
        replan_at: plan the routes anew when a peer computes slower or faster than assumed by more than this share of
            its speed; 0 = never.
        repair: what happens to microbatches on the way when a peer is lost within a step, by name.
        checkpoint_every, keep_checkpoints: in steps; 0 = only at the end.
        evaluate_every, evaluate_batches: held-out evaluation; 0 = only at the end.
        patience_s: seconds without any progress after which the run stops with a diagnosis.
    """

    steps: int = 300
    microbatches: int = 8
    microbatch_size: int = 4
    learning_rate: float = 3e-3
    schedule: str = "cosine"
    warmup: int = 20
    decay: float = 0.2
    final_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0
    planner: str = "straight"
    mixing: str = "average"
    recovery: tuple[str, ...] = ("replica", "checkpoint")
    visits: int = 0
    full_every: int = 0
    replan_at: float = 0.0
    repair: str = "repair"
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    evaluate_every: int = 100
    evaluate_batches: int = 8
    patience_s: float = 300.0


class Joiner(_Section, frozen=True, kw_only=True):
    """A peer that comes later and is given a stage where it helps, or waits until it does.

    Attributes:
        name: unique.
        step: when it comes, in committed steps.
        speed, slots: as for the others.
    """

    name: str
    step: int = 0
    speed: float = 1.0
    slots: int = 0


class Swarm(_Section, frozen=True, kw_only=True):
    """Who trains it.

    Attributes:
        stages, replicas: the pipeline's length and the number of peers that hold each stage.
        layout: ``line``: the last stage computes the loss; ``ring``: the first one, to which every path returns.
        groups: peers of each stage, where stages have unlike numbers of them; it replaces stages and replicas.
        names, speeds: per peer, stage by stage; names are trees where none are given, missing speeds are 1.
        slots: how many microbatches a peer of a ring can hold at once, for all or per peer; 0 = any number.
        flops: floating-point operations per second of a peer of speed 1 in the simulated world.
        emulate: in the real world, delay messages like the network section's links and computations like ``flops``.
        joiners: peers that come later.
        respawn: start a replacement when a peer is lost.
        threads: torch threads per peer.
        host: address that peers listen on; anything but loopback is encrypted.
    """

    stages: int = 2
    replicas: int = 2
    layout: Literal["line", "ring"] = "line"
    groups: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    slots: int | tuple[int, ...] = 0
    flops: float = PEER_FLOPS
    emulate: bool = False
    joiners: tuple[Joiner, ...] = ()
    respawn: bool = True
    threads: int = 1
    host: str = "127.0.0.1"

    def speed(self, index: int) -> float:
        """Speed of the peer with that index."""
        return self.speeds[index] if index < len(self.speeds) else 1.0

    def slots_of(self, index: int) -> int:
        """Microbatches that the peer with that index can hold at once; 0 = any number."""
        return self.slots if isinstance(self.slots, int) else self.slots[index]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of peers of each stage."""
        return self.groups or (self.replicas,) * self.stages

    @property
    def num_stages(self) -> int:
        """The pipeline's length."""
        return len(self.sizes)

    @property
    def peers(self) -> dict[str, int]:
        """Every peer's name and stage, stage by stage."""
        stages = [stage for stage, size in enumerate(self.sizes) for _ in range(size)]
        names = self.names or tuple(peer_names(len(stages)))
        return dict(zip(names, stages, strict=False))


class Recipe(_Section, frozen=True, kw_only=True):
    """A whole run."""

    name: str = "run"
    seed: int = 0
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    swarm: Swarm = Swarm()
    network: Network = Network()
    routes: tuple[Route, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        train, swarm = self.train, self.swarm
        positive = {
            "train.steps": train.steps,
            "train.microbatches": train.microbatches,
            "train.microbatch_size": train.microbatch_size,
            "swarm.stages": swarm.stages,
            "swarm.replicas": swarm.replicas,
            "swarm.threads": swarm.threads,
            "model.depth": self.model.depth,
            "model.context": self.model.context,
            "train.keep_checkpoints": train.keep_checkpoints,
        }
        for key, value in positive.items():
            if value < 1:
                raise _bad(key, f"it is {value}, it must be at least 1")
        for key, value, fits, rule in _ranges(self):
            if not fits:  # NaN fits nowhere
                raise _bad(key, f"it is {value}, it must be {rule}")
        if max(swarm.sizes) > train.microbatches and swarm.layout == "line":
            raise _bad("swarm.replicas", f"{max(swarm.sizes)} replicas share {train.microbatches} microbatches")
        _check_swarm(self)
        if any(not 0 < speed <= 1 for speed in swarm.speeds):
            raise _bad("swarm.speeds", f"{list(swarm.speeds)}: each speed is in (0, 1], 1 = unhindered")
        known = {*swarm.peers, *(joiner.name for joiner in swarm.joiners)}
        for fault in self.faults:
            if fault.peer not in known:
                raise _bad("faults.peer", f"there is no peer {fault.peer!r}; {nearest(fault.peer, known)}")
            if fault.phase not in PHASES:
                raise _bad("faults.phase", f"there is no phase {fault.phase!r}; {nearest(fault.phase, PHASES)}")
            if not 0 <= fault.seconds < math.inf:
                raise _bad("faults.seconds", f"it is {fault.seconds}, it must be at least 0")
        kind, _, index = self.model.device.partition(":")
        if kind not in DEVICES or (index and not index.isdigit()):
            raise _bad("model.device", f"there is no device {self.model.device!r}; {nearest(kind, DEVICES)}")


def _check_swarm(recipe: Recipe) -> None:
    """Refuse layouts and routes that do not fit together."""
    swarm, train = recipe.swarm, recipe.train
    count = sum(swarm.sizes)
    if any(size < 1 for size in swarm.sizes):
        raise _bad("swarm.groups", f"{list(swarm.groups)}: every stage needs a peer")
    if swarm.names and (len(set(swarm.names)) != count or len(swarm.names) != count):
        raise _bad("swarm.names", f"{len(set(swarm.names))} different names for {count} peers")
    if not isinstance(swarm.slots, int) and len(swarm.slots) != count:
        raise _bad("swarm.slots", f"{len(swarm.slots)} figures for {count} peers")
    names = [*swarm.names, *(joiner.name for joiner in swarm.joiners)]
    if any(not name or name != "".join(name.split()) or "->" in name or name == "lead" for name in names):
        raise _bad("swarm.names", 'a name has no blanks and no "->" in it, and "lead" is taken')
    everybody = [*swarm.peers, *(joiner.name for joiner in swarm.joiners)]
    if len(set(everybody)) != len(everybody):
        raise _bad("swarm.joiners", "two peers have the same name")
    for joiner in swarm.joiners:
        if joiner.step < 0 or not 0 < joiner.speed <= 1 or joiner.slots < 0:
            raise _bad("swarm.joiners", f"{joiner.name}: step and slots are at least 0, the speed is in (0, 1]")
    if swarm.layout == "line" and (train.visits not in (0, swarm.num_stages) or recipe.routes):
        raise _bad("train.visits", "only in a ring can stages be skipped", 'set swarm.layout = "ring"')
    if train.visits > swarm.num_stages or train.visits < 0:
        raise _bad("train.visits", f"{train.visits} of {swarm.num_stages} stages cannot be visited")
    for index, route in enumerate(recipe.routes):
        stages = [swarm.peers.get(name) for name in route.peers]
        if None in stages:
            strange = route.peers[stages.index(None)]
            raise _bad(f"routes[{index}]", f"there is no peer {strange!r}; {nearest(strange, swarm.peers)}")
        if stages[:1] != [0] or len(set(stages)) != len(stages) or route.count < 0:
            raise _bad(f"routes[{index}]", f"it visits stages {stages}: the first once, then distinct others")
    total = sum(route.count for route in recipe.routes)
    if recipe.routes and total != train.microbatches:
        raise _bad("routes", f"they carry {total} microbatches, train.microbatches is {train.microbatches}")


def _ranges(recipe: Recipe) -> Iterator[tuple[str, float, bool, str]]:
    """(key, value, whether it is permitted, what is permitted) of the numbers that are not counts."""
    train = recipe.train
    yield "seed", recipe.seed, -(2**63) <= recipe.seed < 2**63, "a 64-bit integer"
    for name in ("learning_rate", "epsilon", "patience_s"):
        value = getattr(train, name)
        yield f"train.{name}", value, 0 < value < math.inf, "above 0"
    for name in ("weight_decay", "clip", "warmup", "final_rate", "replan_at"):
        value = getattr(train, name)
        yield f"train.{name}", value, 0 <= value < math.inf, "at least 0"
    for name in ("beta1", "beta2"):
        value = getattr(train, name)
        yield f"train.{name}", value, 0 <= value < 1, "in [0, 1)"
    for name in ("visits", "full_every"):
        value = getattr(train, name)
        yield f"train.{name}", value, value >= 0, "at least 0"
    slots = recipe.swarm.slots
    for value in (slots,) if isinstance(slots, int) else slots:
        yield "swarm.slots", value, value >= 0, "at least 0"
    yield "swarm.flops", recipe.swarm.flops, 0 < recipe.swarm.flops < math.inf, "above 0"
    yield "train.decay", train.decay, 0 <= train.decay <= 1, "a share of the steps, in [0, 1]"
    for name in ("checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_batches"):
        value = getattr(train, name)
        yield f"train.{name}", value, value >= 0, "at least 0"


DEVICES = ("auto", "cpu", "cuda", "mps")
PHASES = ("begin", "forward", "loss", "backward", "mix", "prepare", "commit")
TREES = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel", "ivy", "juniper", "kauri", "larch")


def peer_names(count: int) -> list[str]:
    """Names for ``count`` peers: alder, birch, ... larch, alder2, ..."""
    return [TREES[i % len(TREES)] + (str(i // len(TREES) + 1) if i >= len(TREES) else "") for i in range(count)]


def load_recipe(path: Path | None, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a TOML recipe and apply ``section.key=value`` overrides (values in TOML syntax; bare words are text).

    Raises:
        TalkootError: unreadable file, broken TOML, an unknown key or a wrong type.
    """
    tree = {} if path is None else read_plain(path, UNUSABLE)
    for override in overrides:
        _override(tree, override)
    return build_recipe(tree, "the command line" if path is None else str(path))


def build_recipe(tree: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain data; see :func:`load_recipe`."""
    return build(tree, Recipe, what=UNUSABLE, where=where)


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise _bad(f"--set {text}", "it is not of the form section.key=value", "write --set train.steps=500")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *sections, leaf = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise _bad(f"--set {text}", f"{section!r} is a value, not a section")
    tree[leaf] = parsed


def _bad(where: str, why: str, next: str = CORRECT) -> TalkootError:
    return TalkootError(UNUSABLE, where=where, why=why, next=next)
