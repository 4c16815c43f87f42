"""A run as data: everything that a training run is, in one typed tree that TOML files and flags fill in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT, build, read_overridden
from talkoot.plan.steps import Route
from talkoot.run.section import LIMIT
from talkoot.train.sections import (
    Data,
    Joiner,
    Mixing,
    Model,
    Recovery,
    Section,
    Swarm,
    Train,
    needs_keepers,
    peer_names,
)
from talkoot.world.faults import Fault
from talkoot.world.links import Network

UNUSABLE = "the recipe cannot be used"
# What a schedule, or a list of names, is made of before anything else could object.
MOST = {"swarm.stages": 4096, "swarm.replicas": 4096, "swarm.threads": 1024, "train.microbatches": 2**16}


class Recipe(Section, frozen=True, kw_only=True):
    """A whole run."""

    name: str = "run"
    seed: int = 0
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    mixing: Mixing = Mixing()
    recovery: Recovery = Recovery()
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
            if not 1 <= value <= MOST.get(key, LIMIT):
                limit = f"from 1 to {MOST[key]}" if key in MOST else "at least 1"
                raise _bad(key, f"it is {value}, it must be {limit}")
        for key, value, fits, rule in _ranges(self):
            if not fits:  # NaN fits nowhere
                raise _bad(key, f"it is {value}, it must be {rule}")
        if max(swarm.sizes) > train.microbatches and swarm.layout == "line":
            raise _bad("swarm.replicas", f"{max(swarm.sizes)} replicas share {train.microbatches} microbatches")
        _check_swarm(self)
        if any(not 0 < speed <= 1 for speed in swarm.speeds):
            raise _bad("swarm.speeds", f"{list(swarm.speeds)}: each speed is in (0, 1], 1 = unhindered")
        check_faults(self.faults, swarm)
        kind, _, index = self.model.device.partition(":")
        if kind not in DEVICES or (index and not index.isdigit()):
            raise _bad("model.device", f"there is no device {self.model.device!r}; {nearest(kind, DEVICES)}")


def check_faults(faults: Sequence[Fault], swarm: Swarm, where: str = "faults", what: str = UNUSABLE) -> None:
    """Refuse faults that could never strike, naming the entry.

    Args:
        where, what: how the errors name the list, and their first sentence.
    """
    known = {*swarm.peers, *(joiner.name for joiner in swarm.joiners)}
    for index, fault in enumerate(faults):
        for key, why in _wrong_with(fault, known):
            raise _bad(f"{where}[{index}].{key}", why, what=what)


def _wrong_with(fault: Fault, known: set[str]) -> Iterator[tuple[str, str]]:
    """(Key, what is wrong with it) of each mistake in a fault."""
    if fault.peers and (fault.peer or fault.kind != "partition"):
        yield "peers", "a group is for a partition, and stands instead of peer"
    allowed = known | {LEAD} if fault.kind == "disk_full" else known
    for name in fault.victims:
        if name == LEAD and name not in allowed:
            yield "peer", f"the {LEAD} can have a full disk, and no {fault.kind}"
        elif name not in allowed:
            yield "peers" if fault.peers else "peer", f"there is no peer {name!r}; {nearest(name, allowed)}"
    if (fault.at_s is None) == (not fault.phase and fault.step is None):
        yield "at_s", "a fault strikes either at a step and a phase, or at_s seconds after the run's start"
    elif fault.at_s is None and (fault.step is None or fault.step < 0):
        yield "step", f"it is {fault.step}, it must be at least 0"
    elif fault.at_s is None and fault.phase not in (phases := LEADS_PHASES if fault.peer == LEAD else PHASES):
        yield "phase", f"there is no phase {fault.phase!r}; {nearest(fault.phase, phases)}"
    for key, value in (("seconds", fault.seconds), ("at_s", fault.at_s or 0.0)):
        if not 0 <= value < math.inf:
            yield key, f"it is {value}, it must be at least 0"


def _check_swarm(recipe: Recipe) -> None:
    """Refuse layouts and routes that do not fit together."""
    swarm, train = recipe.swarm, recipe.train
    count = sum(swarm.sizes)
    if any(size < 1 for size in swarm.sizes):
        raise _bad("swarm.groups", f"{list(swarm.groups)}: every stage needs a peer")
    if swarm.cut and len(swarm.cut) != swarm.num_stages:
        raise _bad("swarm.cut", f"{len(swarm.cut)} figures for {swarm.num_stages} stages")
    if min(swarm.cut[1:], default=1) < 1 or min(swarm.cut, default=1) < (0 if swarm.layout == "ring" else 1):
        raise _bad("swarm.cut", f"{list(swarm.cut)}: every stage needs a block, but for the first one of a ring")
    if swarm.names and (len(set(swarm.names)) != count or len(swarm.names) != count):
        raise _bad("swarm.names", f"{len(set(swarm.names))} different names for {count} peers")
    if not isinstance(swarm.slots, int) and len(swarm.slots) != count:
        raise _bad("swarm.slots", f"{len(swarm.slots)} figures for {count} peers")
    names = [*swarm.names, *(joiner.name for joiner in swarm.joiners)]
    if any(not name or name != "".join(name.split()) or "->" in name or _is_taken(name) for name in names):
        raise _bad("swarm.names", 'a name has no blanks and no "->" in it, and "lead" and "standby" are taken')
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


def _is_taken(name: str) -> bool:
    return name == LEAD or name.startswith("standby")  # a later standby has a number


def _ranges(recipe: Recipe) -> Iterator[tuple[str, object, bool, str]]:
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
    yield "swarm.standbys", recipe.swarm.standbys, recipe.swarm.standbys in (0, 1), "0 or 1"
    yield "swarm.flops", recipe.swarm.flops, 0 < recipe.swarm.flops < math.inf, "above 0"
    recovery = recipe.recovery
    for name in ("bump", "watchdog_s"):
        value = getattr(recovery, name)
        yield f"recovery.{name}", value, 0 < value < math.inf, "above 0"
    rate = recovery.failures_per_hour
    yield "recovery.failures_per_hour", rate, 0 <= rate < math.inf, "at least 0"
    for name in ("copies", "refresh_every"):
        value = getattr(recovery, name)
        yield f"recovery.{name}", value, value >= 1, "at least 1"
    ladder, most = recovery.ladder, recipe.swarm.num_stages - 1
    yield "recovery.ladder", list(ladder), len(set(ladder)) == len(ladder), "made of different rungs"
    fits = recovery.copies <= most or not needs_keepers(recovery)
    yield "recovery.copies", recovery.copies, fits, f"at most {most}: one keeper in each other stage"
    yield "recovery.omega_power", recovery.omega_power, recovery.omega_power in (0, 1, 2), "0, 1 or 2"
    yield "recovery.bump_decay", recovery.bump_decay, 0 <= recovery.bump_decay <= 1, "in [0, 1]"
    for stage in recovery.guarded:
        yield (
            "recovery.guarded",
            stage,
            0 <= stage < recipe.swarm.num_stages,
            f"a stage below {recipe.swarm.num_stages}",
        )
    yield "train.decay", train.decay, 0 <= train.decay <= 1, "a share of the steps, in [0, 1]"
    for name in ("checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_batches"):
        value = getattr(train, name)
        yield f"train.{name}", value, value >= 0, "at least 0"


DEVICES = ("auto", "cpu", "cuda", "mps")
LEAD = "lead"
# In the order in which a peer that takes over a seat in the middle of a run gets to them.
PHASES = ("assign", "save", "begin", "forward", "loss", "backward", "mix", "prepare", "commit", "idle", "give")
LEADS_PHASES = ("begin", "commit", "save")


def load_recipe(path: Path | None, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a TOML recipe and apply ``section.key=value`` overrides (values in TOML syntax; bare words are text).

    Raises:
        TalkootError: unreadable file, broken TOML, an unknown key or a wrong type.
    """
    return build_recipe(read_overridden(path, overrides, UNUSABLE), "the command line" if path is None else str(path))


def build_recipe(tree: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain data; see :func:`load_recipe`."""
    return build(tree, Recipe, what=UNUSABLE, where=where)


def _bad(where: str, why: str, next: str = CORRECT, what: str = UNUSABLE) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=next)


__all__ = [
    "LEAD",
    "PHASES",
    "UNUSABLE",
    "Data",
    "Joiner",
    "Mixing",
    "Model",
    "Recipe",
    "Recovery",
    "Section",
    "Swarm",
    "Train",
    "build_recipe",
    "check_faults",
    "load_recipe",
    "peer_names",
]
